//! Owns the prefill worker: its options, its gRPC service, and one task a handoff that drives the source's machine with what
//! the step loop, the control stream and the sender of KV tell.
//!
//! Must never know how a token becomes text, how a prompt is computed, or which decode worker is best: it computes what it is given
//! and hands it where it is told.

mod config;
mod leg;
mod link;
mod measures;
mod outstanding;
mod redirect;
mod service;
mod sink;
mod spans;
mod times;

use std::sync::Arc;

use baton_proto::v1;
use baton_worker::{Niceness, Running, Setup};

pub use baton_worker::WorkerError as PrefillWorkerError;
pub use config::PrefillWorkerConfig;

use service::PrefillService;

/// Computing gives way to the network here: what is computed is worth nothing until it is sent.
const NICENESS: Niceness = Niceness { step: 5, bulk: 0 };

/// Prompt tokens and their sampling parameters: the largest Prefill call.
const MAX_REQUEST_BYTES: usize = 16 * 1024 * 1024;

/// Starts a prefill worker and returns at once; the model loads meanwhile, see [`Running::ready`].
///
/// # Errors
/// [`PrefillWorkerError::Config`], [`PrefillWorkerError::Bind`], [`PrefillWorkerError::System`].
pub fn start(config: PrefillWorkerConfig) -> Result<Running, PrefillWorkerError> {
    let setup = Setup {
        role: v1::Role::Prefill,
        scheduling: config.scheduling(),
        config: config.worker,
        niceness: NICENESS,
        server: baton_transfer::control_server_builder(),
        layout_to_wire: baton_transfer::wire::encode_layout,
    };
    baton_worker::start(setup, |core| {
        let service = v1::prefill_server::PrefillServer::new(PrefillService::new(Arc::clone(core)));
        tonic::service::Routes::new(service.max_decoding_message_size(MAX_REQUEST_BYTES))
    })
}

/// Runs a prefill worker until `shutdown` is done; then running requests get up to `--drain-timeout`.
///
/// # Errors
/// As [`start`], and why the model could not be loaded or the worker failed.
pub async fn run(
    config: PrefillWorkerConfig,
    shutdown: impl Future<Output = ()>,
) -> Result<(), PrefillWorkerError> {
    start(config)?.until(shutdown).await
}
