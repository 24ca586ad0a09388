//! Two memories, a server over loopback, a proxy that damages what passes, and a driver that stands in for the two machines.
#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod by_hand;
pub(crate) mod device;
pub(crate) mod memory;
pub(crate) mod proxy;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_handoff::{HandoffKey, InstanceId, RequestId};
use baton_kv::{BlockMemory, BlockPool, BlockTable, KvDtype, KvLayout};
use baton_transfer::{
    Bulk, Grant, Progress, Receiver, ReceiverEvent, Receivers, Sender, SenderConfig, SenderEvent, TokenSpan,
    Transport, bulk_endpoint, bulk_server_builder, kv_stream_server, sender,
};
use tonic::transport::Channel;
use tonic::transport::server::TcpIncoming;

pub(crate) use memory::{Sink, Source};

/// Long enough for a loaded machine, short enough for a test that hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A small generator whose seed is printed by the tests that use it.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn range(&mut self, range: std::ops::Range<usize>) -> usize {
        range.start + (self.next() % (range.end - range.start) as u64) as usize
    }
}

pub(crate) fn layout(num_layers: usize, num_kv_heads: usize, head_dim: usize, block_size: usize) -> KvLayout {
    KvLayout {
        model_digest: [1; 32],
        num_layers,
        num_kv_heads,
        head_dim,
        block_size,
        dtype: KvDtype::F16,
        arrangement: "canonical".into(),
        numerics_id: "test".into(),
    }
}

pub(crate) fn key(n: u8) -> HandoffKey {
    HandoffKey { request: RequestId([n; 16]), group: 0, attempt: 0 }
}

pub(crate) fn instance(n: u8) -> InstanceId {
    InstanceId([n; 16])
}

/// A decode worker's bulk side.
pub(crate) struct Destination {
    pub(crate) address: SocketAddr,
    pub(crate) receivers: Receivers,
    pub(crate) memory: Arc<Sink>,
    pub(crate) pool: BlockPool,
}

impl Destination {
    /// One whose blocks are on a device that others' devices reach.
    pub(crate) async fn on_device(transport: Transport, layout: &KvLayout, num_blocks: usize) -> Self {
        let seen = Arc::new(device::OnDevice::new(Arc::new(Sink::new(layout, num_blocks))));
        Self::over(transport, &seen, num_blocks).await
    }

    pub(crate) async fn over(
        transport: Transport,
        seen: &Arc<device::OnDevice<Sink>>,
        num_blocks: usize,
    ) -> Self {
        Self::serve(transport, Arc::clone(seen) as _, Arc::clone(&seen.memory), num_blocks).await
    }

    pub(crate) async fn start(layout: &KvLayout, num_blocks: usize) -> Self {
        Self::start_over(Transport::Auto, layout, num_blocks).await
    }

    pub(crate) async fn start_over(transport: Transport, layout: &KvLayout, num_blocks: usize) -> Self {
        let memory = Arc::new(Sink::new(layout, num_blocks));
        Self::serve(transport, Arc::clone(&memory) as _, memory, num_blocks).await
    }

    async fn serve(
        transport: Transport,
        seen: Arc<dyn BlockMemory>,
        memory: Arc<Sink>,
        num_blocks: usize,
    ) -> Self {
        let receivers = Receivers::new(seen, 4).with_transport(transport);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = kv_stream_server(receivers.clone());
        tokio::spawn(
            bulk_server_builder()
                .add_service(service)
                .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true))),
        );
        Self { address, receivers, memory, pool: BlockPool::new(num_blocks) }
    }

    /// Reserves the span's blocks in an order that is not the arena's.
    pub(crate) fn reserve(&self, span: TokenSpan, rng: &mut Rng) -> BlockTable {
        scattered_table(&self.pool, self.memory.layout.blocks_for(span.prompt_tokens), rng)
    }

    pub(crate) fn grant(&self, key: HandoffKey, span: TokenSpan, table: &BlockTable) -> Receiver {
        let lease = table.write_lease(span.skip_tokens / self.memory.layout.block_size).unwrap();
        self.receivers.grant(Grant { key, span, lease }).unwrap()
    }

    pub(crate) fn channel(&self) -> Channel {
        channel(self.address)
    }

    pub(crate) fn shared(&self) -> Bulk {
        Bulk::over_shared_memory(self.channel())
    }
}

pub(crate) fn channel(address: SocketAddr) -> Channel {
    bulk_endpoint(&address.to_string()).unwrap().connect_lazy()
}

/// A block table whose blocks are neither adjacent nor in order.
pub(crate) fn scattered_table(pool: &BlockPool, num_blocks: usize, rng: &mut Rng) -> BlockTable {
    let free = pool.counts().free;
    let mut blocks = pool.allocate(free).unwrap();
    let mut table = BlockTable::new();
    for _ in 0..num_blocks {
        let at = rng.range(0..blocks.len());
        table.extend(vec![blocks.swap_remove(at)]);
    }
    table
}

/// A prefill worker's side: blocks full of known bytes.
pub(crate) struct Origin {
    pub(crate) memory: Arc<Source>,
    pub(crate) pool: BlockPool,
    pub(crate) table: BlockTable,
    pub(crate) progress: Progress,
}

impl Origin {
    pub(crate) fn new(layout: &KvLayout, span: TokenSpan, rng: &mut Rng) -> Self {
        let num_blocks = layout.blocks_for(span.prompt_tokens);
        let pool = BlockPool::new(num_blocks + 7);
        let table = scattered_table(&pool, num_blocks, rng);
        let memory = Arc::new(Source::random(layout, num_blocks + 7, rng));
        Self { memory, pool, table, progress: Progress::new() }
    }

    pub(crate) fn sender(
        &self,
        key: HandoffKey,
        span: TokenSpan,
        bulk: impl Into<Bulk>,
        first_credit: u64,
    ) -> Sender {
        let (handle, task) = sender(self.config(key, span, bulk, first_credit)).unwrap();
        tokio::spawn(task);
        handle
    }

    pub(crate) fn config(
        &self,
        key: HandoffKey,
        span: TokenSpan,
        bulk: impl Into<Bulk>,
        first_credit: u64,
    ) -> SenderConfig {
        SenderConfig {
            key,
            span,
            lease: self.table.read_lease(),
            memory: Arc::clone(&self.memory) as _,
            progress: self.progress.clone(),
            channel: bulk.into(),
            first_credit,
            trace: None,
        }
    }

    /// What a step loop does: chunks of some blocks, layer by layer, on a thread of its own.
    pub(crate) fn compute(
        &self,
        span: TokenSpan,
        chunk_blocks: Vec<usize>,
        pause: Duration,
    ) -> std::thread::JoinHandle<()> {
        let (progress, layout) = (self.progress.clone(), self.memory.layout.clone());
        std::thread::spawn(move || {
            let mut start = 0;
            for blocks in chunk_blocks.iter().cycle() {
                let end = (start + blocks * layout.block_size).min(span.prompt_tokens);
                for layer in 0..layout.num_layers {
                    std::thread::sleep(pause);
                    progress.layer_done(start..end, layer);
                }
                progress.tokens_done(end);
                start = end;
                if start == span.prompt_tokens {
                    return;
                }
            }
        })
    }
}

/// What the two machines would have decided.
pub(crate) struct Driver {
    pub(crate) window: u64,
    pub(crate) total: u64,
    pub(crate) credit: u64,
    pub(crate) encoded: u64,
    pub(crate) max_ahead: u64,
    pub(crate) verified: u64,
    pub(crate) num_lost: usize,
    pub(crate) resent: u64,
}

/// How a driven transfer ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Delivered,
    SenderEnded(Option<SenderEvent>),
    Failed(String),
}

impl Driver {
    pub(crate) fn new(window: u64, total: u64) -> Self {
        let credit = window.min(total);
        Self { window, total, credit, encoded: 0, max_ahead: 0, verified: 0, num_lost: 0, resent: 0 }
    }

    pub(crate) async fn run(&mut self, sender: &mut Sender, receiver: &mut Receiver) -> Outcome {
        let (mut delivered, mut ended) = (false, false);
        while !(delivered && ended) {
            let step = async {
                tokio::select! {
                    event = sender.next(), if !delivered => Ok(event),
                    event = receiver.next(), if !ended => Err(event),
                }
            };
            match tokio::time::timeout(PATIENCE, step).await.expect("the transfer hangs") {
                Ok(event) => match event {
                    Some(SenderEvent::Encoded { bytes }) => {
                        self.encoded = bytes;
                        sender.transmit(self.credit.min(self.encoded));
                    }
                    Some(SenderEvent::Sent { bytes }) => {
                        assert!(bytes <= self.credit.min(self.encoded), "sent {bytes} of {}", self.credit);
                        self.max_ahead = self.max_ahead.max(bytes.saturating_sub(self.verified));
                    }
                    Some(SenderEvent::Resent) => self.resent += 1,
                    Some(SenderEvent::Lost { .. }) if self.num_lost == 0 => {
                        self.num_lost += 1;
                        sender.reopen(self.credit.saturating_sub(self.window));
                    }
                    Some(SenderEvent::Delivered) => delivered = true,
                    other => return Outcome::SenderEnded(other),
                },
                Err(event) => match event {
                    Some(ReceiverEvent::Verified { bytes }) => {
                        assert!(bytes > self.verified);
                        self.verified = bytes;
                        self.credit = (bytes + self.window).min(self.total);
                        sender.transmit(self.credit.min(self.encoded));
                    }
                    Some(ReceiverEvent::Corrupt { frame }) => sender.resend(frame).unwrap(),
                    Some(ReceiverEvent::Lost { .. }) => {}
                    Some(ReceiverEvent::Failed { detail, .. }) => return Outcome::Failed(detail),
                    Some(ReceiverEvent::WriterEnded) => ended = true,
                    None => unreachable!("WriterEnded came before"),
                },
            }
        }
        assert_eq!(self.verified, self.total);
        Outcome::Delivered
    }
}
