//! Owns the CPU engine: the memory of KV blocks ([`Arena`]), packed weights, kernels, the thread team, the forward pass
//! and sampling; together [`CpuEngine`], an implementation of `scheduler`'s `Engine`. And the same for CUDA devices: [`CudaEngine`],
//! [`CudaArena`].
//!
//! Must never know a socket, a request, text, or what runs next. Tensors stop here: a plan comes in, tokens
//! (or logits) go out, and blocks are reached from outside as bytes through leases alone.
//!
//! The rule that everything here serves: a row's logits are the same bits however the work was cut. See
//! `kernels` for what that asks of each kernel.

mod arena;
mod barrier;
mod batch;
mod config;
mod cuda;
mod decoder;
mod engine;
mod error;
mod kernels;
mod limits;
mod parking;
mod region;
mod rope;
mod sampler;
mod scratch;
mod source;
mod team;
mod weights;

pub use arena::Arena;
pub use config::{CpuEngineConfig, EnginePlan, MemoryNeeded, Precision, Quantize};
pub use cuda::{
    CudaArena, CudaDevice, CudaEngine, CudaEngineConfig, CudaFound, CudaPlan, CudaRates, cuda_free_bytes,
    cuda_rates,
};
pub use engine::CpuEngine;
pub use error::EngineBuildError;
pub use kernels::Isa;
pub use limits::{TokenCost, int8_macs_per_s, read_bytes_per_s};
pub use source::WeightSource;
