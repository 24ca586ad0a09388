//! A worker whose side of the wire is scripted. It lives on a runtime of its own, so that it can be killed.

mod cache;
mod decode;
mod script;
mod service;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::decode_server::DecodeServer;
use baton_proto::v1::prefill_server::PrefillServer;
use baton_proto::v1::worker_server::WorkerServer;
use baton_telemetry::trace::CallContext;
use bytes::Bytes;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tonic::metadata::MetadataMap;
use tonic::transport::server::TcpIncoming;

use cache::FakeCache;
pub(crate) use script::{ReceiverFails, Script};
use service::Service;

/// End of sequence of the built-in model.
pub(crate) const EOS: u32 = 257;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Prefill,
    Decode,
}

struct State {
    kind: Kind,
    script: Arc<Script>,
    description: Mutex<v1::WorkerDescription>,
    status: watch::Sender<v1::WorkerStatus>,
    /// While set, the status stream is silent.
    mute: watch::Sender<bool>,
    /// While set, the stream of every new leg ends without a word.
    broken: AtomicBool,
    prefills: Mutex<Vec<v1::PrefillRequest>>,
    decodes: Mutex<Vec<v1::DecodeRequest>>,
    redirects: Mutex<Vec<v1::RedirectRequest>>,
    /// Sequences that are not wanted any more, by handoff.
    stops: Mutex<Vec<(Bytes, u32)>>,
    /// Traces that it was told to keep.
    kept: Mutex<Vec<Bytes>>,
    /// What legs said of the trace they belong to.
    contexts: Mutex<Vec<CallContext>>,
    cache: FakeCache,
    num_open: AtomicUsize,
    num_cancelled: AtomicUsize,
}

impl State {
    fn instance(&self) -> Bytes {
        self.description.lock().expect("unpoisoned").instance_id.clone()
    }

    fn hear(&self, metadata: &MetadataMap) {
        let read = |name: &str| metadata.get(name).map(|value| value.as_bytes());
        self.contexts.lock().expect("unpoisoned").extend(CallContext::read(read));
    }

    fn is_stopped(&self, handoff: &Bytes, sequence: u32) -> bool {
        let stop = (handoff.clone(), sequence);
        self.stops.lock().expect("unpoisoned").contains(&stop)
    }
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
            broken: AtomicBool::new(false),
            prefills: Mutex::default(),
            decodes: Mutex::default(),
            redirects: Mutex::default(),
            stops: Mutex::default(),
            kept: Mutex::default(),
            contexts: Mutex::default(),
            cache: FakeCache::default(),
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
        self.state.instance()
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

    /// From now on the stream of every new leg ends without a word, or no longer does.
    pub(crate) fn set_broken(&self, broken: bool) {
        self.state.broken.store(broken, Ordering::SeqCst);
    }

    pub(crate) fn prefills(&self) -> Vec<v1::PrefillRequest> {
        self.state.prefills.lock().expect("unpoisoned").clone()
    }

    pub(crate) fn decodes(&self) -> Vec<v1::DecodeRequest> {
        self.state.decodes.lock().expect("unpoisoned").clone()
    }

    pub(crate) fn redirects(&self) -> Vec<v1::RedirectRequest> {
        self.state.redirects.lock().expect("unpoisoned").clone()
    }

    /// Sequences that the router stopped.
    pub(crate) fn stops(&self) -> Vec<u32> {
        self.state.stops.lock().expect("unpoisoned").iter().map(|(_, sequence)| *sequence).collect()
    }

    /// Traces that it was told to keep.
    pub(crate) fn kept(&self) -> Vec<Bytes> {
        self.state.kept.lock().expect("unpoisoned").clone()
    }

    /// What legs said of the trace they belong to.
    pub(crate) fn contexts(&self) -> Vec<CallContext> {
        self.state.contexts.lock().expect("unpoisoned").clone()
    }

    /// Blocks enter its prefix cache.
    pub(crate) fn store(&self, hashes: &[[u8; 16]]) {
        self.state.cache.store(&self.instance(), hashes);
    }

    /// Blocks enter its prefix cache, and the message that says so gets lost.
    pub(crate) fn store_unheard(&self, hashes: &[[u8; 16]]) {
        self.state.cache.lose(hashes);
    }

    /// How often its cache stream was opened.
    pub(crate) fn num_cache_streams(&self) -> usize {
        self.state.cache.num_opened()
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
