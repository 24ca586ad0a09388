//! The router: HTTP and gRPC faces for clients, tokenizing, and carrying out what `baton_dispatch` decides.
//!
//! Owns: the addresses clients speak to, every check of what they send, the fleet view, and one task for each request
//! that opens its legs on workers, turns tokens to text and hands them on.
//!
//! Must never know: an engine, a block, or how KV moves. A router holds nothing that another router would miss.

mod accept;
mod api_error;
mod app;
mod ask;
mod config;
mod deadline;
mod error;
mod fleet;
mod gate;
mod keep;
mod labels;
mod listen;
mod prompt;
mod request;
mod rpc;
mod serve;
mod served;
mod slo;
mod web;

pub use config::{PlacementConfig, RouterConfig, SloConfig};
pub use error::RouterError;
pub use serve::{Router, Running, run};
