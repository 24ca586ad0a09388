//! Owns whole clusters in virtual time: routers, prefill and decode workers and the network between them, made of the very crates
//! that serve (dispatch, handoff, scheduler, kv) over a [`baton_timing::TimingEngine`]; and the rules that must hold whatever fails.
//!
//! Must never know a real clock, thread, socket or random source: a run is a function of its configuration, so a seed is a bug report.

mod arrivals;
mod check;
mod config;
mod context;
pub mod device;
mod durations;
mod faults;
mod fidelity;
mod frames;
mod graph;
mod ids;
mod load;
mod measured;
mod network;
mod pages;
mod queue;
mod random;
mod report;
mod router;
mod scale;
mod serve;
mod shape;
mod status;
mod waits;
mod warm;
mod worker;
pub mod workload;
mod world;

pub use baton_dispatch::{DoorLimits, Layout, Policy};
pub use config::{Faults, SimConfig};
pub use device::Device;
pub use durations::Durations;
pub use measured::{Measured, MeasuredKind, MeasuredSteps};
pub use report::{Report, Violation};
pub use scale::{REQUESTS_PER_S, scaled};
pub use serve::{ServeConfig, Served, serve};
pub use shape::{Load, Shape, WorkerShape};

/// Runs one cluster until every request has ended and every timer has passed.
///
/// # Errors
/// The first rule that broke; its text ends with the command that repeats it.
pub fn run(config: &SimConfig) -> Result<Report, Violation> {
    match world::World::new(config, false).run() {
        Ok(report) => Ok(report),
        // The same again, this time with a trace: a run is cheap and deterministic, formatting is not.
        Err(violation) => Err(world::World::new(config, true).run().err().unwrap_or(violation)),
    }
}

/// Runs `runs` drawn clusters with the seeds from `first_seed` on, and adds their reports up. After each run `each` is told the sum so far.
///
/// # Errors
/// As [`run`], for the first seed that fails.
pub fn run_many(
    first_seed: u64,
    runs: u64,
    faults: Faults,
    mut each: impl FnMut(&Report),
) -> Result<Report, Violation> {
    let mut total = Report::default();
    for nth in 0..runs {
        let seed = first_seed.wrapping_add(nth);
        total.add(&run(&SimConfig { seed, faults, shape: None })?);
        each(&total);
    }
    Ok(total)
}
