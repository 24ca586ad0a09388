//! What a scheduler does, seen from outside.

mod admission;
mod caching;
mod parts;
mod preemption;
mod prompts;
mod queue;
mod random;
mod sharing;
mod support;
