//! Owns what both kinds of worker share: options and limits of the machine, the step loop that owns scheduler and
//! engine, threads, identity, the `Worker` service with its status and cache streams, health, metrics, and draining.
//!
//! Must never know what a handoff is for, how KV is framed, or which role it serves beyond its name: the role crates bring their
//! services and drive the machines.

mod cache_stream;
mod clock;
mod config;
mod core;
mod cpus;
mod device;
mod error;
mod identity;
mod limits;
mod links;
mod load;
mod memory_plan;
mod pace;
mod requests;
mod server;
mod service;
mod size;
mod state;
mod steps;
mod threads;

pub use cache_stream::MAX_CACHE_WATCHERS;
pub use clock::Clock;
pub use config::WorkerConfig;
pub use core::{Core, Leg, Loaded, RequestLimits};
pub use cpus::{CpuList, Turns};
pub use device::{DeviceName, PlannedEngine};
pub use error::WorkerError;
pub use identity::new_instance_id;
pub use limits::{cpu_quota, memory_available_bytes, memory_limit_bytes};
pub use links::{LinkRates, MAX_LINKS};
pub use load::Scheduling;
pub use memory_plan::{DEFAULT_SHARE, DEFAULT_TOKENS_PER_SEQUENCE, MemoryNeed, MemoryPlan};
pub use requests::{LegRequest, MAX_PRIORITY, MAX_STOP_TOKENS, WireLeg};
pub use server::{Running, Setup, start};
pub use service::{HEARTBEAT, MAX_WATCHERS};
pub use size::ByteSize;
pub use state::{Lifecycle, State};
pub use steps::{
    AvoidedStall, Built, CacheView, KindProfile, LayerSink, Load, Owner, RunStats, Sequence, SequenceEvent,
    Stall, Stamped, StepHandle, StepKind, StepRates, StepThread, StepThreadOptions, Submission,
    prefill_seconds, refusal_cause,
};
pub use threads::Niceness;
