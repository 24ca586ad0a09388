//! The `Prefill` service.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use baton_handoff::{Cause, HandoffKey, InstanceId, Registry, RegistryLimits, Time, Timers};
use baton_proto::v1;
use baton_telemetry::log::request_span;
use baton_transfer::{Identity, Peers, PeersConfig};
use baton_worker::{Core, LegRequest, Loaded, WireLeg};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::Instrument;

use crate::leg::{Leg, Order};
use crate::link::Target;

/// Decode workers connected at one time, at most.
const MAX_PEERS: usize = 64;

/// Longest address of a decode worker: a host name of 253 characters and a port.
const MAX_ADDRESS_BYTES: usize = 260;

/// A leg sends three messages at most, so that sending never waits.
const EVENT_BUFFER: usize = 4;

pub(crate) struct PrefillService {
    core: Arc<Core>,
    shared: Arc<Shared>,
}

/// What the service and its legs share.
pub(crate) struct Shared {
    registry: Mutex<Registry>,
    peers: OnceLock<Arc<Peers>>,
    pub(crate) timers: Timers,
}

impl Shared {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        // The registry is whole between calls.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the key; `cause` answers whoever asks for it later.
    pub(crate) fn finish(&self, key: HandoffKey, cause: Cause, now: Time) {
        self.registry().finish(key, cause, now);
    }

    fn peers(&self, core: &Core, loaded: &Loaded) -> Arc<Peers> {
        let connect = || {
            let identity = Identity { instance: core.instance, layout: loaded.layout().clone() };
            Arc::new(Peers::new(PeersConfig {
                identity,
                max_peers: MAX_PEERS,
                bulk_runtime: core.bulk.clone(),
            }))
        };
        Arc::clone(self.peers.get_or_init(connect))
    }
}

impl PrefillService {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        let timers = Timers::default();
        let registry = Mutex::new(Registry::new(core.instance, RegistryLimits::default(), &timers));
        Self { core, shared: Arc::new(Shared { registry, peers: OnceLock::new(), timers }) }
    }
}

#[tonic::async_trait]
impl v1::prefill_server::Prefill for PrefillService {
    type PrefillStream = ReceiverStream<Result<v1::PrefillEvent, Status>>;

    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let (loaded, guard) = self.core.accept()?;
        let v1::PrefillRequest { key, prompt, sampling, stopping, destination, num_generated } =
            request.into_inner();
        let wire = WireLeg { key, prompt, sampling, stopping, num_generated };
        let leg = LegRequest::check(wire, &loaded.limits)?;
        let key = leg.key;
        let target = target(destination, leg.max_new_tokens)?;
        let now = self.core.clock.now();
        self.shared.registry().open(key, now).map_err(|cause| refused(key, cause))?;
        let (events, receiver) = mpsc::channel(EVENT_BUFFER);
        let order = Order {
            core: Arc::clone(&self.core),
            shared: Arc::clone(&self.shared),
            peers: self.shared.peers(&self.core, loaded),
            request: leg,
            target,
            events,
        };
        let span = request_span(&key.request.to_string(), "");
        let task = async move {
            Leg::run(order).await;
            drop(guard);
        };
        tokio::spawn(task.instrument(span));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

fn refused(key: HandoffKey, cause: Cause) -> Status {
    match cause {
        Cause::Duplicate => Status::already_exists(format!("key {key} is live here, or was lately")),
        other => Status::aborted(format!("key {key}: {other}")),
    }
}

/// Where the KV goes; `None` when one token is asked for, which needs no decode worker.
fn target(destination: Option<v1::Destination>, max_new_tokens: u32) -> Result<Option<Target>, Status> {
    if max_new_tokens == 1 {
        return Ok(None);
    }
    let Some(v1::Destination { address, instance_id }) = destination else {
        let what = format!(
            "destination is missing, and stopping.max_new_tokens is {max_new_tokens}: without it only 1 can be had"
        );
        return Err(Status::invalid_argument(what));
    };
    if address.is_empty() || address.len() > MAX_ADDRESS_BYTES {
        let what =
            format!("destination.address has {} bytes, it must have 1 to {MAX_ADDRESS_BYTES}", address.len());
        return Err(Status::invalid_argument(what));
    }
    let instance = InstanceId::from_slice(&instance_id).ok_or_else(|| {
        Status::invalid_argument(format!(
            "destination.instance_id has {} bytes, it must have 16",
            instance_id.len()
        ))
    })?;
    Ok(Some(Target { address, instance }))
}
