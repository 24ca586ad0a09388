//! Owns the decode worker: its options, its gRPC services, the legs and offers it knows, and one task a leg that drives the
//! destination's machine with what the step loop, the control stream and the receiver of KV tell.
//!
//! Must never know how a token becomes text, how a step is computed, or why a request was placed here.

mod bulk;
mod config;
mod control;
mod directory;
mod group;
mod kv_cost;
mod leg;
mod local;
mod output;
mod service;
mod spans;
mod told;

use std::sync::Arc;

use baton_proto::v1;
use baton_worker::{Niceness, Running, Setup};

pub use baton_worker::WorkerError as DecodeWorkerError;
pub use config::DecodeWorkerConfig;

use bulk::Bulk;
use control::HandoffService;
use directory::Directory;
use service::DecodeService;

/// Taking in KV gives way to the step: sequences that decode must not feel what arrives for others.
const NICENESS: Niceness = Niceness { step: 0, bulk: 5 };

/// Prompt tokens and their sampling parameters: the largest Decode call.
const MAX_REQUEST_BYTES: usize = 16 * 1024 * 1024;

/// Largest message of a control stream.
const MAX_CONTROL_BYTES: usize = 64 * 1024;

/// Starts a decode worker and returns at once; the model loads meanwhile, see [`Running::ready`].
///
/// # Errors
/// [`DecodeWorkerError::Config`], [`DecodeWorkerError::Bind`], [`DecodeWorkerError::System`].
pub fn start(config: DecodeWorkerConfig) -> Result<Running, DecodeWorkerError> {
    // Before anything is bound: --listen is looked at there too.
    config.worker.check()?;
    let bulk = Bulk::bind(config.worker.listen.ip(), config.bulk_port)?;
    let port = bulk.port();
    let setup = Setup {
        role: v1::Role::Decode,
        scheduling: config.scheduling(),
        config: config.worker,
        niceness: NICENESS,
        server: baton_transfer::control_server_builder(),
        layout_to_wire: baton_transfer::wire::encode_layout,
    };
    let mut known = None;
    let running = baton_worker::start(setup, |core| {
        let directory = Arc::clone(known.insert(Arc::new(Directory::new(core.instance))));
        let handoff = HandoffService::new(Arc::clone(core), Arc::clone(&directory), port);
        let handoff = v1::handoff_server::HandoffServer::new(handoff);
        let decode = DecodeService::new(Arc::clone(core), directory);
        let decode = v1::decode_server::DecodeServer::new(decode);
        tonic::service::Routes::new(decode.max_decoding_message_size(MAX_REQUEST_BYTES))
            .add_service(handoff.max_decoding_message_size(MAX_CONTROL_BYTES))
    })?;
    if let Some(directory) = known {
        bulk.serve(running.core(), directory);
    }
    Ok(running)
}

/// Runs a decode worker until `shutdown` is done; then running requests get up to `--drain-timeout`.
///
/// # Errors
/// As [`start`], and why the model could not be loaded or the worker failed.
pub async fn run(
    config: DecodeWorkerConfig,
    shutdown: impl Future<Output = ()>,
) -> Result<(), DecodeWorkerError> {
    start(config)?.until(shutdown).await
}
