//! The `Prefill` service.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use baton_handoff::{Cause, HandoffKey, InstanceId, Registry, RegistryLimits, Time, Timers};
use baton_proto::v1;
use baton_telemetry::log::request_span;
use baton_telemetry::trace::CallContext;
use baton_transfer::{Identity, Peers, PeersConfig, wire};
use baton_worker::{Core, LegRequest, Loaded, WireLeg};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::Instrument;

use crate::leg::{Leg, Order};
use crate::link::Target;
use crate::redirect::Redirect;
use crate::spans::Caller;

/// Decode workers connected at one time, at most.
const MAX_PEERS: usize = 64;

/// Longest address of a decode worker: a host name of 253 characters and a port.
const MAX_ADDRESS_BYTES: usize = 260;

/// A leg sends three messages at most, and one for each handoff that fails and is redirected: sending waits only for a router that reads
/// none of them.
const EVENT_BUFFER: usize = 8;

pub(crate) struct PrefillService {
    core: Arc<Core>,
    shared: Arc<Shared>,
}

/// What the service and its legs share.
pub(crate) struct Shared {
    known: Mutex<Known>,
    peers: OnceLock<Arc<Peers>>,
    pub(crate) timers: Timers,
}

/// Keys, and how their live legs are reached.
struct Known {
    registry: Registry,
    legs: HashMap<HandoffKey, mpsc::Sender<Redirect>>,
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, Known> {
        // It is whole between calls.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, key: HandoffKey, now: Time) -> Result<mpsc::Receiver<Redirect>, Cause> {
        let mut known = self.known();
        known.registry.open(key, now)?;
        let (sender, redirects) = mpsc::channel(1);
        known.legs.insert(key, sender);
        Ok(redirects)
    }

    /// Frees the key; `cause` answers whoever asks for it later.
    pub(crate) fn finish(&self, key: HandoffKey, cause: Cause, now: Time) {
        let mut known = self.known();
        known.registry.finish(key, cause, now);
        known.legs.remove(&key);
    }

    /// The leg with one key goes on under another.
    ///
    /// # Errors
    /// As [`Registry::open`].
    pub(crate) fn rename(&self, from: HandoffKey, to: HandoffKey, now: Time) -> Result<(), Cause> {
        let mut known = self.known();
        known.registry.open(to, now)?;
        known.registry.finish(from, Cause::Cancelled, now);
        if let Some(leg) = known.legs.remove(&from) {
            known.legs.insert(to, leg);
        }
        Ok(())
    }

    fn peers(&self, core: &Core, loaded: &Loaded) -> Arc<Peers> {
        let connect = || {
            let identity = Identity { instance: core.instance, layout: loaded.layout().clone() };
            let config = PeersConfig { identity, max_peers: MAX_PEERS, bulk_runtime: core.bulk.clone() };
            // Other names than those of transports do not pass the command line.
            let transport = core.config.kv_transport.parse().unwrap_or_default();
            let peers = Peers::new(config).with_transport(transport);
            Arc::new(peers.with_memory(Arc::clone(&loaded.memory)))
        };
        Arc::clone(self.peers.get_or_init(connect))
    }
}

impl PrefillService {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        let timers = Timers::default();
        let registry = Registry::new(core.instance, RegistryLimits::default(), &timers);
        let known = Mutex::new(Known { registry, legs: HashMap::new() });
        Self { core, shared: Arc::new(Shared { known, peers: OnceLock::new(), timers }) }
    }
}

#[tonic::async_trait]
impl v1::prefill_server::Prefill for PrefillService {
    type PrefillStream = ReceiverStream<Result<v1::PrefillEvent, Status>>;

    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let called = Instant::now();
        let (loaded, guard) = self.core.accept()?;
        let metadata = request.metadata();
        let context = CallContext::read(|name| metadata.get(name).map(|value| value.as_bytes()));
        let v1::PrefillRequest { key, prompt, sampling, stopping, destination, num_generated, terms } =
            request.into_inner();
        let wire = WireLeg { key, prompt, sampling, stopping, num_generated, terms };
        let leg = LegRequest::check(wire, &loaded.limits)?;
        let key = leg.key;
        let target = target(destination, leg.max_new_tokens)?;
        let now = self.core.clock.now();
        let redirects = self.shared.open(key, now).map_err(|cause| refused(key, cause))?;
        let (events, receiver) = mpsc::channel(EVENT_BUFFER);
        let order = Order {
            core: Arc::clone(&self.core),
            shared: Arc::clone(&self.shared),
            peers: self.shared.peers(&self.core, loaded),
            request: leg,
            caller: Caller { context, called },
            target,
            redirects,
            events,
        };
        let trace = context.map(|context| context.parent.trace_id_hex()).unwrap_or_default();
        let span = request_span(&key.request.to_string(), &trace);
        let task = async move {
            Leg::run(order).await;
            drop(guard);
        };
        tokio::spawn(task.instrument(span));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn redirect(
        &self,
        request: Request<v1::RedirectRequest>,
    ) -> Result<Response<v1::RedirectResponse>, Status> {
        let v1::RedirectRequest { key, new_key, destination } = request.into_inner();
        let (from, to) = (wire::decode_key(key)?, wire::decode_key(new_key)?);
        if (from.request, from.group) != (to.request, to.group) || from.attempt >= to.attempt {
            return Err(Status::invalid_argument(format!(
                "new_key is {to}, it must be a later attempt of {from}"
            )));
        }
        let destination = destination.ok_or_else(|| Status::invalid_argument("destination is missing"))?;
        let target = checked(destination)?;
        let nothing = || Status::not_found(format!("nothing is held under key {from}"));
        let leg = self.shared.known().legs.get(&from).cloned().ok_or_else(nothing)?;
        let (answer, answered) = oneshot::channel();
        // A leg that ends meanwhile drops what it was asked.
        let _ = leg.send(Redirect { key: to, target, answer }).await;
        match answered.await {
            Ok(Ok(())) => Ok(Response::new(v1::RedirectResponse {})),
            Ok(Err(Cause::NotFound)) | Err(_) => Err(nothing()),
            Ok(Err(cause)) => Err(refused(to, cause)),
        }
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
    let Some(destination) = destination else {
        let what = format!(
            "destination is missing, and stopping.max_new_tokens is {max_new_tokens}: without it only 1 can be had"
        );
        return Err(Status::invalid_argument(what));
    };
    checked(destination).map(Some)
}

fn checked(destination: v1::Destination) -> Result<Target, Status> {
    let v1::Destination { address, instance_id } = destination;
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
    Ok(Target { address, instance })
}
