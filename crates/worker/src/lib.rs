//! Owns what both kinds of worker share: options and limits of the machine, the step loop that owns scheduler and
//! engine, threads, identity, the `Worker` service with its status stream, health, metrics, and draining.
//!
//! Must never know what a handoff is for, how KV is framed, or which role it serves beyond its name: the role crates bring their
//! services and drive the machines.

mod clock;
mod config;
mod core;
mod cpus;
mod error;
mod identity;
mod limits;
mod load;
mod memory_plan;
mod requests;
mod server;
mod service;
mod size;
mod state;
mod steps;
mod threads;

pub use clock::Clock;
pub use config::WorkerConfig;
pub use core::{Core, Leg, Loaded, RequestLimits};
pub use cpus::CpuList;
pub use error::WorkerError;
pub use identity::new_instance_id;
pub use limits::{cpu_quota, memory_available_bytes, memory_limit_bytes};
pub use load::Scheduling;
pub use memory_plan::{DEFAULT_SHARE, DEFAULT_TOKENS_PER_SEQUENCE, MemoryNeed, MemoryPlan};
pub use requests::{LegRequest, MAX_STOP_TOKENS, WireLeg};
pub use server::{Running, Setup, start};
pub use service::{HEARTBEAT, MAX_WATCHERS};
pub use size::ByteSize;
pub use state::{Lifecycle, State};
pub use steps::{
    Built, LayerSink, Load, Sequence, SequenceEvent, Stamped, StepHandle, StepThread, StepThreadOptions,
    Submission, refusal_cause,
};
pub use threads::Niceness;
