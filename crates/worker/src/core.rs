//! What every service of a worker shares.

use std::sync::{Arc, OnceLock};

use baton_handoff::InstanceId;
use baton_kv::{BlockMemory, BlockPool, KvLayout};
use baton_proto::v1::Role;
use baton_telemetry::metrics::WorkerMetrics;
use baton_telemetry::trace::Tracing;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tonic::Status;

use crate::links::LinkRates;
use crate::state::{Lifecycle, State};
use crate::steps::StepHandle;
use crate::{Clock, WorkerConfig};

/// One worker process, as its services see it.
pub struct Core {
    /// What it does.
    pub role: Role,
    /// Who it is.
    pub instance: InstanceId,
    /// Its options.
    pub config: WorkerConfig,
    /// Its time.
    pub clock: Clock,
    /// Where it is in its life.
    pub lifecycle: Lifecycle,
    /// What it counts.
    pub metrics: WorkerMetrics,
    /// Where its spans go.
    pub tracing: Tracing,
    /// How fast KV moves from here to others.
    pub links: LinkRates,
    /// The thread for KV in bulk.
    pub bulk: Handle,
    pub(crate) loaded: OnceLock<Loaded>,
    pub(crate) num_legs: watch::Sender<usize>,
    /// Turns true when streams without an end of their own are to end.
    pub(crate) closing: watch::Sender<bool>,
}

/// What exists once the model is loaded.
pub struct Loaded {
    /// The step loop.
    pub steps: StepHandle,
    /// The blocks.
    pub pool: BlockPool,
    /// Their memory.
    pub memory: Arc<dyn BlockMemory>,
    /// Name the model gives itself.
    pub model: String,
    /// Bounds of a request.
    pub limits: RequestLimits,
}

impl Loaded {
    /// How this worker lays out KV.
    pub fn layout(&self) -> &KvLayout {
        self.memory.layout()
    }
}

/// Bounds that a request is checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// Tokens of prompt and output together.
    pub context: usize,
    /// Tokens that all blocks together hold.
    pub pool_tokens: usize,
    /// Token ids are below this.
    pub vocab: usize,
}

/// A leg that this worker serves; draining waits until all are dropped.
pub struct Leg {
    num_legs: watch::Sender<usize>,
}

impl Drop for Leg {
    fn drop(&mut self) {
        self.num_legs.send_modify(|count| *count -= 1);
    }
}

impl Core {
    /// What is loaded, or why nothing is.
    ///
    /// # Errors
    /// `UNAVAILABLE` while the model loads and after the worker failed.
    pub fn loaded(&self) -> Result<&Loaded, Status> {
        match (self.loaded.get(), self.lifecycle.get()) {
            (_, State::Failed(reason)) => Err(Status::unavailable(format!("this worker failed: {reason}"))),
            (Some(loaded), State::Ready | State::Draining) => Ok(loaded),
            _ => Err(Status::unavailable("this worker still loads its model")),
        }
    }

    /// Takes in a new leg.
    ///
    /// # Errors
    /// `UNAVAILABLE` unless the worker is ready.
    pub fn accept(&self) -> Result<(&Loaded, Leg), Status> {
        let loaded = self.loaded()?;
        // Counted before the state is looked at: a drain that begins meanwhile waits for this leg.
        self.num_legs.send_modify(|count| *count += 1);
        let leg = Leg { num_legs: self.num_legs.clone() };
        match self.lifecycle.is_ready() {
            true => Ok((loaded, leg)),
            false => Err(Status::unavailable("this worker is draining and takes no new requests")),
        }
    }

    /// Waits until no leg is served.
    pub(crate) async fn quiet(&self) {
        let _ = self.num_legs.subscribe().wait_for(|count| *count == 0).await;
    }
}
