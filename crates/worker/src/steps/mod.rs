//! The step loop: one thread that owns scheduler and engine, and how everyone else talks to it.
//!
//! A submission is a group of sequences, mostly of one: they share the prompt's blocks, and have one handle.
//! Commands go in over a bounded channel, events of a sequence come out over a bounded channel of its own. A cancel
//! needs no room in any channel: dropping a [`Sequence`] raises a flag that the loop sees within a layer.

mod boundaries;
mod cache_feed;
mod cost_fit;
mod group;
mod handle;
mod ledger;
mod message;
mod profile;
mod rates;
mod run;
mod stall;
mod stats;
mod thread;
mod tracer;
mod yielding;

#[cfg(test)]
mod tests;

pub use cache_feed::CacheView;
pub use handle::{Sequence, StepHandle, Submission};
pub use ledger::{AvoidedStall, prefill_seconds};
pub use message::{LayerSink, Load, SequenceEvent, Stamped, refusal_cause};
pub use profile::{KindProfile, StepKind};
pub(crate) use rates::DecayingRatio;
pub use rates::StepRates;
pub use stall::{Owner, Stall};
pub use stats::RunStats;
pub use thread::{Built, StepThread, StepThreadOptions};
