//! The step loop: one thread that owns scheduler and engine, and how everyone else talks to it.
//!
//! Commands go in over a bounded channel, events of a sequence come out over a bounded channel of its own. A cancel
//! needs no room in any channel: dropping a [`Sequence`] raises a flag that the loop sees within a layer.

mod handle;
mod message;
mod run;
mod thread;

#[cfg(test)]
mod tests;

pub use handle::{Sequence, StepHandle, Submission};
pub use message::{LayerSink, Load, SequenceEvent, Stamped, refusal_cause};
pub use thread::{Built, StepThread, StepThreadOptions};
