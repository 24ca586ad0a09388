//! Owns the handoff of a sequence group's KV from a prefill worker (source) to a decode worker (destination):
//! keys, messages, the closed enum of causes, and both sides' state machines.
//!
//! Must never know a socket, a clock or randomness: facts go in with `now`, actions come out.

mod cause;
mod destination;
mod facts;
mod flow;
mod key;
mod message;
mod receipt;
mod registry;
mod source;
mod timers;

pub use cause::Cause;
pub use destination::{Destination, DestinationConfig};
pub use facts::{DestinationAction, DestinationEnd, DestinationFact, SourceAction, SourceEnd, SourceFact};
pub use key::{HandoffKey, InstanceId, RequestId};
pub use message::{
    Commit, DestinationMessage, FinishReason, FirstToken, MAX_SEQUENCES, SampledToken, SourceMessage,
};
pub use registry::{Match, Offer, Registry, RegistryLimits};
pub use source::{Source, SourceConfig};
pub use timers::{TimerOwner, TimerRow, Timers};

/// Monotonic time of one process; never compared between processes.
pub type Time = std::time::Duration;
