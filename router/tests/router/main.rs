//! The router over real HTTP and gRPC on loopback, with workers whose side of the wire is scripted.

mod bad_input;
mod chat;
mod client;
mod completion;
mod door;
mod fake;
mod faults;
mod fleet;
mod harness;
mod http_edges;
mod rpc;
