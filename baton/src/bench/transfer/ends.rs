//! A prefill worker's and a decode worker's side of a transfer, without engines: block memory, sender, receiver.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_engine::Arena;
use baton_handoff::{HandoffKey, RequestId};
use baton_kv::{BlockMemory, BlockPool, BlockTable, KvDtype, KvLayout};
use baton_transfer::{
    Bulk, Grant, Progress, Receiver, ReceiverEvent, Receivers, Sender, SenderConfig, SenderEvent, TokenSpan,
    Transport, bulk_endpoint, bulk_server_builder, kv_stream_server,
};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::{oneshot, watch};
use tonic::transport::server::TcpIncoming;

use super::Sample;
use crate::bench::process::thread_cpu_s;
use crate::exit::Failure;

/// A transfer that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Both ends. The sender's work is done on the thread that calls.
pub(super) struct Ends {
    span: TokenSpan,
    source: Side,
    progress: Progress,
    sending: Runtime,
    destination: Side,
    receivers: Receivers,
    receiving: Handle,
    grpc: Bulk,
    shm: Bulk,
    num_transfers: u8,
    /// Dropped first of the two: the thread ends then.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Blocks of one worker.
struct Side {
    memory: Arc<Arena>,
    table: BlockTable,
}

impl Side {
    fn new(layout: &KvLayout, num_blocks: usize) -> Result<Self, Failure> {
        let arena =
            Arena::new(layout.clone(), num_blocks).map_err(|error| Failure::Memory(error.to_string()))?;
        let mut table = BlockTable::new();
        table.extend(BlockPool::new(num_blocks).allocate(num_blocks).unwrap_or_default());
        Ok(Self { memory: Arc::new(arena), table })
    }

    /// Bytes that are not all alike.
    fn fill(&self) -> Result<(), Failure> {
        let layout = self.memory.layout().clone();
        let lease = self.table.write_lease(0).ok_or_else(|| unexpected("blocks that are shared"))?;
        let mut block: Vec<u8> = (0..layout.block_layer_bytes()).map(|at| (at * 31 % 251) as u8).collect();
        for layer in 0..layout.num_layers {
            for nth in 0..self.table.len() {
                block[0] = block[0].wrapping_add(1);
                self.memory.write(&lease, layer, nth, &block).map_err(unexpected)?;
            }
        }
        Ok(())
    }
}

fn unexpected(error: impl std::fmt::Display) -> Failure {
    Failure::Unexpected(error.to_string())
}

fn runtime() -> Result<Runtime, Failure> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(unexpected)
}

/// The default model's.
fn layout() -> KvLayout {
    KvLayout {
        model_digest: [0; 32],
        num_layers: 30,
        num_kv_heads: 3,
        head_dim: 64,
        block_size: 16,
        dtype: KvDtype::F16,
        arrangement: "bench".to_owned(),
        numerics_id: "bench".to_owned(),
    }
}

impl Ends {
    /// Starts both, for transfers of about `bytes` bytes.
    ///
    /// # Errors
    /// [`Failure::Memory`], [`Failure::Unexpected`].
    pub(super) fn start(bytes: u64) -> Result<Self, Failure> {
        let layout = layout();
        let prompt_tokens = usize::try_from(bytes).map_err(unexpected)?.div_ceil(layout.token_bytes());
        let span = TokenSpan { prompt_tokens, skip_tokens: 0 };
        let num_blocks = layout.blocks_for(prompt_tokens);
        let (source, destination) = (Side::new(&layout, num_blocks)?, Side::new(&layout, num_blocks)?);
        source.fill()?;
        let progress = Progress::new();
        progress.tokens_done(prompt_tokens);
        let receivers = Receivers::new(Arc::clone(&destination.memory) as _, 1);
        let (stop, stopped) = oneshot::channel();
        let (receiving, address, thread) = serve(receivers.clone(), stopped)?;
        let sending = runtime()?;
        let channel = {
            let _entered = sending.enter();
            bulk_endpoint(&address.to_string()).map_err(unexpected)?.connect_lazy()
        };
        Ok(Self {
            span,
            source,
            progress,
            sending,
            destination,
            receivers,
            receiving,
            grpc: channel.clone().into(),
            shm: Bulk::over_shared_memory(channel),
            num_transfers: 0,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Bytes of each transfer.
    pub(super) fn bytes(&self) -> u64 {
        self.span.bytes(self.source.memory.layout())
    }

    /// One handoff's KV, from the first byte offered to the last one verified and acknowledged. `None` when shared memory is
    /// asked for and the system has none.
    ///
    /// # Errors
    /// [`Failure::Unexpected`] when it fails or hangs.
    pub(super) fn transfer(&mut self, transport: Transport) -> Result<Option<Sample>, Failure> {
        let bulk = if transport == Transport::Shm { &self.shm } else { &self.grpc };
        if bulk.transport() != transport {
            return Ok(None);
        }
        self.num_transfers = self.num_transfers.wrapping_add(1);
        let key = HandoffKey { request: RequestId([self.num_transfers; 16]), group: 0, attempt: 0 };
        let lease =
            self.destination.table.write_lease(0).ok_or_else(|| unexpected("blocks that are shared"))?;
        let receiver = self.receivers.grant(Grant { key, span: self.span, lease }).map_err(unexpected)?;
        let window = self.receivers.credit_window();
        let config = SenderConfig {
            key,
            span: self.span,
            lease: self.source.table.read_lease(),
            memory: Arc::clone(&self.source.memory) as _,
            progress: self.progress.clone(),
            channel: bulk.clone(),
            first_credit: window,
            trace: None,
        };
        let (sender, task) = baton_transfer::sender(config).map_err(unexpected)?;
        let receiving = &self.receiving;
        self.sending.block_on(async {
            let cpu = || async { receiving.spawn(async { thread_cpu_s() }).await.map_err(unexpected) };
            let (began, sent, received) = (Instant::now(), thread_cpu_s(), cpu().await?);
            let (told, credit) = watch::channel(window);
            let taken = receiving.spawn(receive(receiver, told, window));
            tokio::spawn(task);
            let done = async {
                send(sender, credit).await?;
                taken.await.map_err(unexpected)?
            };
            tokio::time::timeout(PATIENCE, done).await.map_err(|_| unexpected("the transfer hangs"))??;
            let seconds = began.elapsed().as_secs_f64();
            let (sent, received) = (thread_cpu_s() - sent, cpu().await? - received);
            Ok(Some(Sample { seconds, send_cpu_s: sent, receive_cpu_s: received }))
        })
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It panicked: a transfer has failed, and was told.
            let _ = thread.join();
        }
    }
}

/// Starts the destination's thread.
fn serve(
    receivers: Receivers,
    stopped: oneshot::Receiver<()>,
) -> Result<(Handle, SocketAddr, JoinHandle<()>), Failure> {
    let runtime = runtime()?;
    let handle = runtime.handle().clone();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).map_err(unexpected)?;
    let address = listener.local_addr().map_err(unexpected)?;
    let thread = std::thread::spawn(move || {
        runtime.block_on(async {
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            let mut server = bulk_server_builder();
            let served = server.add_service(kv_stream_server(receivers)).serve_with_incoming(incoming);
            tokio::select! {
                _ = served => {}
                _ = stopped => {}
            }
        });
    });
    Ok((handle, address, thread))
}

/// Grants credit as bytes are verified, up to the end.
async fn receive(mut receiver: Receiver, credit: watch::Sender<u64>, window: u64) -> Result<(), Failure> {
    while let Some(event) = receiver.next().await {
        match event {
            ReceiverEvent::Verified { bytes } => credit.send_modify(|credit| *credit = bytes + window),
            ReceiverEvent::WriterEnded => return Ok(()),
            other => return Err(unexpected(format!("the receiver: {other:?}"))),
        }
    }
    Err(unexpected("the receiver ended"))
}

async fn send(mut sender: Sender, mut credit: watch::Receiver<u64>) -> Result<(), Failure> {
    let mut encoded = 0;
    loop {
        let up_to = *credit.borrow_and_update();
        sender.transmit(up_to.min(encoded));
        let event = tokio::select! {
            event = sender.next() => event,
            Ok(()) = credit.changed() => continue,
        };
        match event {
            Some(SenderEvent::Encoded { bytes }) => encoded = bytes,
            Some(SenderEvent::Sent { .. } | SenderEvent::Resent) => {}
            Some(SenderEvent::Delivered) => return Ok(()),
            other => return Err(unexpected(format!("the sender: {other:?}"))),
        }
    }
}
