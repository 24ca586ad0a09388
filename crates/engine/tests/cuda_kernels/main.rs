//! The CUDA kernels of `cuda/kernels`, compiled by g++ behind the shim of `cuda/shim`, against references in f64; the same tests run on a card
//! with `BATON_KERNELS=card`. Memory that nothing has written is NaN, block tables are shuffled, lengths ragged.

mod attention;
mod blocks;
mod card;
mod device;
mod element;
mod faults;
mod int8;
mod library;
mod rates;
mod rings;
mod rows;
mod sampling;
mod toolchain;

#[path = "../support/mod.rs"]
mod support;
