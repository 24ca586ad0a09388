//! The CUDA engine. The only place that knows CUDA: nothing of it is called before [`CudaFound`] saw its libraries, so one binary serves
//! machines with and without a card.
//!
//! `cuda/ABI.md` beside this crate's sources is the contract with the kernels; their numerics follow from it.

mod arena;
mod capture;
mod config;
mod copies;
mod drawn;
mod driver;
mod engine;
mod forward;
mod graphs;
mod int8;
mod ipc;
mod kernels;
mod linear;
mod mover;
mod padded;
mod probe;
mod products;
mod rates;
mod rings;
mod scratch;
mod tables;
mod weights;

pub use arena::CudaArena;
pub use config::{CudaEngineConfig, CudaPlan};
pub use engine::CudaEngine;
pub use probe::{CudaDevice, CudaFound, cuda_free_bytes};
pub use rates::{CudaRates, cuda_rates};
