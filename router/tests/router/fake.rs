//! A worker whose side of the wire is scripted. It lives on a runtime of its own, so that it can be killed.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::decode_server::{Decode, DecodeServer};
use baton_proto::v1::prefill_server::{Prefill, PrefillServer};
use baton_proto::v1::worker_server::{Worker, WorkerServer};
use bytes::Bytes;
use futures::Stream;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// End of sequence of the built-in model.
pub(crate) const EOS: u32 = 257;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Prefill,
    Decode,
}

/// What a worker answers; the token of index `i` is `answer[i]`, and end of sequence follows (or, if it is
/// ignored, the answer again).
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) answer: Vec<u32>,
    /// Between tokens.
    pub(crate) pace: Duration,
    /// Tokens of one message.
    pub(crate) tokens_per_message: usize,
    /// The prefill leg says nothing, ever.
    pub(crate) prefill_hangs: bool,
    /// The decode leg says nothing after the token of this index.
    pub(crate) decode_hangs_after: Option<u32>,
    /// The decode leg's stream ends without a last word before the token of this index, once in a cluster.
    pub(crate) decode_breaks_before: Option<u32>,
    /// Every leg is refused so.
    pub(crate) refuses: Option<v1::Cause>,
    /// What the workers of one cluster know of each other.
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Legs whose first token was sampled: nothing is committed before.
    sampled: watch::Sender<Vec<Bytes>>,
    num_broken: AtomicUsize,
}

impl Shared {
    fn name(key: &v1::HandoffKey) -> Bytes {
        [key.request.as_ref(), &key.attempt.to_be_bytes()].concat().into()
    }

    fn commit(&self, key: &v1::HandoffKey) {
        self.sampled.send_modify(|sampled| sampled.push(Self::name(key)));
    }

    async fn committed(&self, key: &v1::HandoffKey) {
        let name = Self::name(key);
        let mut sampled = self.sampled.subscribe();
        let _ = sampled.wait_for(|sampled| sampled.contains(&name)).await;
    }
}

impl Script {
    pub(crate) fn says(text: &str) -> Self {
        Self {
            answer: text.bytes().map(u32::from).collect(),
            pace: Duration::ZERO,
            tokens_per_message: 1,
            prefill_hangs: false,
            decode_hangs_after: None,
            decode_breaks_before: None,
            refuses: None,
            shared: Arc::default(),
        }
    }

    fn token(&self, index: u32, stopping: &v1::Stopping) -> u32 {
        let index = index as usize;
        match self.answer.get(index) {
            Some(token) => *token,
            None if stopping.stop_token_ids.contains(&EOS) => EOS,
            None => self.answer[index % self.answer.len()],
        }
    }
}

struct State {
    kind: Kind,
    script: Arc<Script>,
    description: Mutex<v1::WorkerDescription>,
    status: watch::Sender<v1::WorkerStatus>,
    /// While set, the status stream is silent.
    mute: watch::Sender<bool>,
    prefills: Mutex<Vec<v1::PrefillRequest>>,
    decodes: Mutex<Vec<v1::DecodeRequest>>,
    num_open: AtomicUsize,
    num_cancelled: AtomicUsize,
}

pub(crate) struct FakeWorker {
    address: SocketAddr,
    state: Arc<State>,
    runtime: Option<Runtime>,
}

/// How the built-in model's KV could be laid out.
pub(crate) fn layout() -> v1::KvLayout {
    let model = baton_model::Model::tiny();
    v1::KvLayout {
        model_digest: Bytes::copy_from_slice(&model.digest),
        num_layers: 4,
        num_kv_heads: 2,
        head_dim: 16,
        block_size: 16,
        dtype: "f16".to_owned(),
        arrangement: "scripted".to_owned(),
        numerics_id: "scripted".to_owned(),
    }
}

impl FakeWorker {
    pub(crate) fn start(kind: Kind, script: Arc<Script>) -> Self {
        Self::start_at("127.0.0.1:0".parse().expect("address"), kind, script, v1::worker_status::State::Ready)
    }

    pub(crate) fn start_at(
        at: SocketAddr,
        kind: Kind,
        script: Arc<Script>,
        state: v1::worker_status::State,
    ) -> Self {
        let mut id = [0; 16];
        getrandom::fill(&mut id).expect("randomness");
        let id = Bytes::copy_from_slice(&id);
        let role = match kind {
            Kind::Prefill => v1::Role::Prefill,
            Kind::Decode => v1::Role::Decode,
        };
        let description = v1::WorkerDescription {
            instance_id: id.clone(),
            role: role.into(),
            layout: (state != v1::worker_status::State::Loading).then(layout),
            model: "builtin:tiny".to_owned(),
            context: 131_072,
            num_blocks: 8192,
            protocol_version: baton_proto::PROTOCOL_VERSION,
        };
        let status = v1::WorkerStatus {
            instance_id: id,
            state: state.into(),
            idle: true,
            free_blocks: 8192,
            total_blocks: 8192,
            ..v1::WorkerStatus::default()
        };
        let state = Arc::new(State {
            kind,
            script,
            description: Mutex::new(description),
            status: watch::Sender::new(status),
            mute: watch::Sender::new(false),
            prefills: Mutex::default(),
            decodes: Mutex::default(),
            num_open: AtomicUsize::new(0),
            num_cancelled: AtomicUsize::new(0),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("runtime");
        let guard = runtime.enter();
        // A killed worker's port is free a moment later.
        let bind = || {
            (0..400).find_map(|_| {
                std::net::TcpListener::bind(at).ok().or_else(|| {
                    std::thread::sleep(Duration::from_millis(5));
                    None
                })
            })
        };
        let listener = bind().expect("bound");
        listener.set_nonblocking(true).expect("non-blocking");
        let address = listener.local_addr().expect("address");
        let listener = tokio::net::TcpListener::from_std(listener).expect("listener");
        drop(guard);
        let service = Service(Arc::clone(&state));
        runtime.spawn(async move {
            tonic::transport::Server::builder()
                .add_service(WorkerServer::new(service.clone()))
                .add_service(PrefillServer::new(service.clone()))
                .add_service(DecodeServer::new(service))
                .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)))
                .await
        });
        Self { address, state, runtime: Some(runtime) }
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn socket(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn instance(&self) -> Bytes {
        self.state.description.lock().expect("unpoisoned").instance_id.clone()
    }

    /// As `kill -9` does: every connection breaks, nothing is said.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    pub(crate) fn set_state(&self, state: v1::worker_status::State) {
        if state == v1::worker_status::State::Ready {
            self.state.description.lock().expect("unpoisoned").layout.get_or_insert_with(layout);
        }
        self.state.status.send_modify(|status| status.state = state.into());
    }

    pub(crate) fn set_status(&self, change: impl FnOnce(&mut v1::WorkerStatus)) {
        self.state.status.send_modify(change);
    }

    pub(crate) fn describe(&self, change: impl FnOnce(&mut v1::WorkerDescription)) {
        change(&mut self.state.description.lock().expect("unpoisoned"));
    }

    /// Heartbeats stop, connections stay.
    pub(crate) fn mute(&self) {
        self.state.mute.send_replace(true);
    }

    pub(crate) fn prefills(&self) -> Vec<v1::PrefillRequest> {
        self.state.prefills.lock().expect("unpoisoned").clone()
    }

    pub(crate) fn decodes(&self) -> Vec<v1::DecodeRequest> {
        self.state.decodes.lock().expect("unpoisoned").clone()
    }

    pub(crate) fn num_legs(&self) -> usize {
        self.prefills().len() + self.decodes().len()
    }

    pub(crate) fn num_open(&self) -> usize {
        self.state.num_open.load(Ordering::SeqCst)
    }

    pub(crate) fn num_cancelled(&self) -> usize {
        self.state.num_cancelled.load(Ordering::SeqCst)
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Clone)]
struct Service(Arc<State>);

type Reply<Event> = Pin<Box<dyn Stream<Item = Result<Event, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for Service {
    type WatchStream = Reply<v1::WorkerStatus>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::WorkerDescription>, Status> {
        Ok(Response::new(self.0.description.lock().expect("unpoisoned").clone()))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (sender, receiver) = mpsc::channel(4);
        let (mut status, mute) = (self.0.status.subscribe(), self.0.mute.subscribe());
        tokio::spawn(async move {
            for sequence in 0.. {
                while *mute.borrow() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                let now = v1::WorkerStatus { sequence, ..status.borrow_and_update().clone() };
                if sender.send(Ok(now)).await.is_err() {
                    return;
                }
                let _ = tokio::time::timeout(Duration::from_millis(100), status.changed()).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Counts a leg while its script runs.
struct OpenLeg {
    state: Arc<State>,
    done: bool,
}

impl OpenLeg {
    fn new(state: &Arc<State>) -> Self {
        state.num_open.fetch_add(1, Ordering::SeqCst);
        Self { state: Arc::clone(state), done: false }
    }

    fn finish(mut self) {
        self.done = true;
    }
}

impl Drop for OpenLeg {
    fn drop(&mut self) {
        if !self.done {
            self.state.num_cancelled.fetch_add(1, Ordering::SeqCst);
        }
        self.state.num_open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs a leg's script until the caller drops the stream.
fn leg<Event: Send + 'static, Run: Future<Output = ()> + Send + 'static>(
    state: &Arc<State>,
    script: impl FnOnce(mpsc::Sender<Result<Event, Status>>) -> Run,
) -> Response<Reply<Event>> {
    let (sender, receiver) = mpsc::channel(4);
    let open = OpenLeg::new(state);
    let run = script(sender.clone());
    tokio::spawn(async move {
        tokio::select! {
            () = sender.closed() => {}
            () = run => open.finish(),
        }
    });
    Response::new(Box::pin(ReceiverStream::new(receiver)))
}

fn sampled(id: u32, index: u32) -> v1::SampledToken {
    v1::SampledToken { id, logprob: -1.0, index }
}

fn failed(cause: v1::Cause) -> v1::Failed {
    v1::Failed { cause: cause.into(), detail: "scripted".to_owned() }
}

#[tonic::async_trait]
impl Prefill for Service {
    type PrefillStream = Reply<v1::PrefillEvent>;

    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        use v1::prefill_event::Event;
        assert_eq!(self.0.kind, Kind::Prefill);
        let request = request.into_inner();
        self.0.prefills.lock().expect("unpoisoned").push(request.clone());
        let script = Arc::clone(&self.0.script);
        Ok(leg(&self.0, move |sender| async move {
            let send = |event| sender.send(Ok(v1::PrefillEvent { event: Some(event) }));
            if let Some(cause) = script.refuses {
                let _ = send(Event::Failed(failed(cause))).await;
                return;
            }
            if script.prefill_hangs {
                std::future::pending::<()>().await;
            }
            let stopping = request.stopping.expect("stopping");
            let id = script.token(request.num_generated, &stopping);
            let finish = match id {
                EOS => v1::FinishReason::Stop,
                _ if stopping.max_new_tokens == 1 => v1::FinishReason::Length,
                _ => v1::FinishReason::Unspecified,
            };
            let first = v1::FirstToken {
                token: Some(sampled(id, request.num_generated)),
                finish: finish.into(),
                times: Some(v1::PrefillTimes { num_chunks: 1, ..v1::PrefillTimes::default() }),
            };
            let _ = send(Event::FirstToken(first)).await;
            script.shared.commit(request.key.as_ref().expect("a key"));
            if finish == v1::FinishReason::Unspecified {
                let done = v1::HandoffDone { bytes: 4096, frames: 4, resent_frames: 0 };
                let _ = send(Event::HandoffDone(done)).await;
            }
        }))
    }
}

#[tonic::async_trait]
impl Decode for Service {
    type DecodeStream = Reply<v1::DecodeEvent>;

    async fn decode(
        &self,
        request: Request<v1::DecodeRequest>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        assert_eq!(self.0.kind, Kind::Decode);
        let request = request.into_inner();
        self.0.decodes.lock().expect("unpoisoned").push(request.clone());
        let state = Arc::clone(&self.0);
        Ok(leg(&self.0, move |sender| decode(state, request, sender)))
    }
}

async fn decode(
    state: Arc<State>,
    request: v1::DecodeRequest,
    sender: mpsc::Sender<Result<v1::DecodeEvent, Status>>,
) {
    use v1::decode_event::Event;
    let script = Arc::clone(&state.script);
    let send = |event| sender.send(Ok(v1::DecodeEvent { event: Some(event) }));
    if let Some(cause) = script.refuses {
        let _ = send(Event::Failed(failed(cause))).await;
        return;
    }
    if !request.local {
        script.shared.committed(request.key.as_ref().expect("a key")).await;
    }
    let kv = v1::KvCost { bytes: 4096, frames: 4, total_us: 2500, exposed_us: 500, ..v1::KvCost::default() };
    let kv = (!request.local).then_some(kv);
    let _ = send(Event::Started(v1::Started { kv, cached_tokens: 0, queue_us: 0 })).await;
    let stopping = request.stopping.expect("stopping");
    let first = request.num_generated + u32::from(!request.local);
    let end = request.num_generated + stopping.max_new_tokens;
    let mut batch = Vec::new();
    for index in first..end {
        if script.decode_breaks_before == Some(index)
            && script.shared.num_broken.fetch_add(1, Ordering::SeqCst) == 0
        {
            return;
        }
        let id = script.token(index, &stopping);
        batch.push(sampled(id, index));
        let last = id == EOS || index + 1 == end;
        if batch.len() == script.tokens_per_message || last {
            let tokens = v1::Tokens { tokens: std::mem::take(&mut batch) };
            if send(Event::Tokens(tokens)).await.is_err() {
                return;
            }
        }
        if last {
            let reason = if id == EOS { v1::FinishReason::Stop } else { v1::FinishReason::Length };
            let _ =
                send(Event::Finished(v1::Finished { reason: reason.into(), num_tokens: index + 1 })).await;
            return;
        }
        if script.decode_hangs_after == Some(index) {
            std::future::pending::<()>().await;
        }
        if !script.pace.is_zero() {
            tokio::time::sleep(script.pace).await;
        }
    }
}
