//! Owns an engine that computes nothing and takes the time a roofline says: simulated KV contents, pseudo tokens that depend on every
//! token and every KV slot before them, and the predicted time of a step.
//!
//! Must never know a clock (it predicts time, it does not spend it), a thread, a socket or randomness.

pub mod catalog;
mod engine;
mod hash;
mod memory;
mod roofline;

pub use engine::{TimingConfig, TimingEngine};
pub use hash::{pseudo_token, pseudo_tokens};
pub use memory::FingerprintMemory;
pub use roofline::{ModelShape, Roofline, StepWork};

#[cfg(test)]
mod tests;
