//! The `Worker` service: who this worker is and how it does.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use baton_kv::KvLayout;
use baton_proto::{PROTOCOL_VERSION, v1};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::Core;
use crate::cache_stream::{self, MAX_CACHE_WATCHERS};
use crate::state::State;
use crate::steps::Load;

/// Longest silence of a status stream.
pub const HEARTBEAT: Duration = Duration::from_millis(500);

/// Shortest time between two messages of a status stream.
const SPACING: Duration = Duration::from_millis(10);

/// Status streams at once, at most.
pub const MAX_WATCHERS: usize = 64;

/// Traces of one KeepTraces call, at most.
const MAX_KEPT_TRACES: usize = 256;

/// Messages that the reader of a stream may be behind, at most; the stream waits then, and numbers stay without a gap.
const WATCH_BUFFER: usize = 4;

pub(crate) struct WorkerService {
    core: Arc<Core>,
    to_wire: fn(&KvLayout) -> v1::KvLayout,
    watchers: Arc<Semaphore>,
    cache_watchers: Arc<Semaphore>,
}

impl WorkerService {
    pub(crate) fn new(core: Arc<Core>, to_wire: fn(&KvLayout) -> v1::KvLayout) -> Self {
        Self {
            core,
            to_wire,
            watchers: Arc::new(Semaphore::new(MAX_WATCHERS)),
            cache_watchers: Arc::new(Semaphore::new(MAX_CACHE_WATCHERS)),
        }
    }
}

#[tonic::async_trait]
impl v1::worker_server::Worker for WorkerService {
    async fn describe(
        &self,
        _request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::WorkerDescription>, Status> {
        let core = &self.core;
        let mut description = v1::WorkerDescription {
            instance_id: core.instance.0.to_vec().into(),
            role: core.role.into(),
            model: core.config.model.clone(),
            protocol_version: PROTOCOL_VERSION,
            ..Default::default()
        };
        if let Some(loaded) = core.loaded.get() {
            description.layout = Some((self.to_wire)(loaded.layout()));
            description.model.clone_from(&loaded.model);
            description.context = saturate(loaded.limits.context);
            description.num_blocks = saturate(loaded.pool.counts().total);
        }
        Ok(Response::new(description))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::WorkerStatus, Status>> + Send>>;

    async fn watch(
        &self,
        _request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let Ok(permit) = Arc::clone(&self.watchers).try_acquire_owned() else {
            let limit = format!("this worker has {MAX_WATCHERS} status streams, which is the limit");
            return Err(Status::resource_exhausted(limit));
        };
        let (sender, receiver) = mpsc::channel(WATCH_BUFFER);
        let core = Arc::clone(&self.core);
        tokio::spawn(async move {
            watch(&core, &sender).await;
            drop(permit);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    type WatchCacheStream = ReceiverStream<Result<v1::CacheUpdate, Status>>;

    async fn watch_cache(
        &self,
        _request: Request<v1::WatchCacheRequest>,
    ) -> Result<Response<Self::WatchCacheStream>, Status> {
        self.core.loaded()?;
        let Ok(permit) = Arc::clone(&self.cache_watchers).try_acquire_owned() else {
            let limit = format!("this worker has {MAX_CACHE_WATCHERS} cache streams, which is the limit");
            return Err(Status::resource_exhausted(limit));
        };
        let (sender, receiver) = mpsc::channel(WATCH_BUFFER);
        let core = Arc::clone(&self.core);
        tokio::spawn(async move {
            cache_stream::run(&core, sender).await;
            drop(permit);
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn keep_traces(
        &self,
        request: Request<v1::KeepTracesRequest>,
    ) -> Result<Response<v1::KeepTracesResponse>, Status> {
        self.core.tracing.keep(&trace_ids(&request.into_inner().trace_ids)?);
        Ok(Response::new(v1::KeepTracesResponse {}))
    }
}

/// Checks what a router wants kept.
fn trace_ids<T: AsRef<[u8]>>(wire: &[T]) -> Result<Vec<[u8; 16]>, Status> {
    if wire.len() > MAX_KEPT_TRACES {
        let what = format!("trace_ids has {} entries, the limit is {MAX_KEPT_TRACES}", wire.len());
        return Err(Status::invalid_argument(what));
    }
    let check = |(at, id): (usize, &T)| {
        let id = id.as_ref();
        let what = || format!("trace_ids[{at}] has {} bytes, it must have 16", id.len());
        <[u8; 16]>::try_from(id).map_err(|_| Status::invalid_argument(what()))
    };
    wire.iter().enumerate().map(check).collect()
}

async fn watch(core: &Core, sender: &mpsc::Sender<Result<v1::WorkerStatus, Status>>) {
    let mut state = core.lifecycle.watch();
    let mut closing = core.closing.subscribe();
    let mut load = None;
    let mut sequence = 0;
    loop {
        load = load.or_else(|| core.loaded.get().map(|loaded| loaded.steps.load()));
        let now = load.as_mut().map(|load| *load.borrow_and_update()).unwrap_or_default();
        state.mark_unchanged();
        sequence += 1;
        if sender.send(Ok(status(core, now, sequence))).await.is_err() {
            return;
        }
        tokio::time::sleep(SPACING).await;
        let load_changed = async {
            match &mut load {
                Some(load) => {
                    // An ended loop changes nothing any more.
                    if load.changed().await.is_err() {
                        std::future::pending::<()>().await;
                    }
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = closing.wait_for(|closing| *closing) => return,
            () = sender.closed() => return,
            _ = state.changed() => {}
            () = load_changed => {}
            () = tokio::time::sleep(HEARTBEAT - SPACING) => {}
        }
    }
}

fn status(core: &Core, load: Load, sequence: u64) -> v1::WorkerStatus {
    use v1::worker_status::State as Wire;
    let state = match core.lifecycle.get() {
        State::Loading => Wire::Loading,
        State::Ready => Wire::Ready,
        State::Draining => Wire::Draining,
        State::Failed(_) => Wire::Failed,
    };
    let mut status = v1::WorkerStatus {
        instance_id: core.instance.0.to_vec().into(),
        sequence,
        state: state.into(),
        idle: true,
        ..Default::default()
    };
    if let Some(loaded) = core.loaded.get() {
        let (counts, blocks) = (load.counts, loaded.pool.counts());
        let running = if core.role == v1::Role::Prefill { counts.prefilling } else { counts.running };
        status.progress = loaded.steps.progress();
        status.idle = load.idle;
        status.num_waiting = saturate(counts.waiting);
        status.num_running = saturate(running);
        status.free_blocks = saturate(blocks.free);
        status.cached_blocks = saturate(blocks.cached);
        status.total_blocks = saturate(blocks.total);
        status.queued_tokens = load.queued_tokens;
        let rates = loaded.steps.rates();
        status.prefill_tokens_per_s = rates.prefill_tokens_per_s();
        status.decode_step_ms = rates.decode_step_ms();
        status.links = core.links.to_wire();
    }
    status
}

fn saturate(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
