//! Owns what runs next: sequence stages, queues, admission, step plans; and [`Engine`], what a step loop asks
//! of a model executor.
//!
//! Must never know a tensor, a socket, a thread, randomness or a clock: `now` is an argument.

mod admission;
mod cached;
mod check;
mod config;
mod cost;
mod engine;
mod event;
mod fork;
mod growth;
mod parts;
mod plan;
mod preempt;
mod prompts;
mod scheduler;
mod sequence;
mod step;

pub use config::{Refusal, SchedulerConfig};
pub use cost::StepCost;
pub use engine::{Engine, EngineError, Flow, Sampled, StepOutput, StepPoint};
pub use event::{Event, StageCounts};
pub use plan::{BlockCopy, Logits, PlanRow, RowPart, RowSampling, SamplingParams, SequenceId, StepPlan};
pub use scheduler::Scheduler;
pub use sequence::{Finish, FirstToken, NewSequence, Origin};

/// Monotonic time of one process; never compared between processes.
pub type Time = std::time::Duration;
