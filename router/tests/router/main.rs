//! The router over real HTTP and gRPC on loopback, with workers whose side of the wire is scripted.

mod bad_input;
mod breaker;
mod chat;
mod choices;
mod client;
mod completion;
mod deadline;
mod door;
mod fake;
mod faults;
mod fleet;
mod harness;
mod http_edges;
mod keep;
mod log;
mod placement;
mod preemption;
mod redirect;
mod retraced;
mod rpc;
mod spans;
mod traced;
