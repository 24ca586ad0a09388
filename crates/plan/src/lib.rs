//! Owns sizing: the fewest prefill and decode workers that keep an objective under a load, beside colocated workers with their best chunk, by a
//! queueing model; and the simulator as its judge.
//!
//! The model, with `R` requests a second, `L` prompt tokens, `O` output tokens, `x` prefill and `y` decode workers, and steps that take what
//! [`baton_timing::Roofline`] says:
//! * Prefill (`queue.rs`): Poisson arrivals, each to the worker with the fewest uncomputed tokens, which serves whole steps in order of
//!   arrival, as many prompts in one as fit its budget: M/D/x with batches. There is no closed form for that, so the waiting times are computed
//!   by recursion over 12,000 arrivals, always the same ones, which come close to the exact mean and 99th percentile of M/D/1. TTFT = wait for a grant + wait + steps of the prompt.
//! * Decode (`decode.rs`): a step with `b` sequences of `L + O / 2` tokens takes `T(b)`; a sequence needs `O - 1` steps. Steps share the device
//!   among sequences, so that with `N` of them over all workers `P(N)` is proportional to the product over `k = 1..N` of `R (O - 1) T(k / y) / k` (processor sharing
//!   whose rate depends on the load; it does not depend on how lengths are distributed). Little's law is its mean: `N = R (O - 1) T`. ITL is `T(N / y)`, weighted by tokens.
//! * The gap between the first and the second token has, beside a step, what is left of the running step and of the transfer. Layers are sent while later
//!   ones compute; what a link has not sent when the prompt is computed is exposed.
//! * Colocated (`colocated.rs`, `step_loop.rs`): workers whose steps carry a chunk beside whoever decodes, followed step by step over the same arrivals, each placed as a router
//!   places it; whether they keep up at all says a fixed point of Little's law.
//!
//! What it leaves out: prefix caches, prompts of different lengths, preemption, requests that fail, and that several senders share one decode worker's link.
//!
//! Must never know a clock, a socket or randomness: a plan is a function of its input.

mod colocated;
mod decode;
mod input;
mod judge;
mod queue;
mod search;
mod sensitivity;
mod spread;
mod step_loop;
mod steps;

pub use colocated::CHUNKS;
pub use input::{PlanError, PlanInput, Slo, device, model};
pub use judge::{Judged, judge, shape};
pub use search::{Cluster, Figures, Plan, figures, plan};
pub use sensitivity::{Change, sensitivity};
