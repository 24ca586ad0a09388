//! Owns what a router decides: who enters (door), where a request runs (placement), and one request over its legs
//! (order of tokens, retry, resume, fencing, cancel).
//!
//! Must never know a socket, text, a clock or randomness: facts go in with `now`, actions come out; which streams and
//! buffers lie behind them is the router's affair.

mod attempt;
mod door;
mod facts;
mod placement;
mod request;
mod retry;

pub use baton_handoff::Time;
pub use door::{Door, DoorLimits, Entry, Shed};
pub use facts::{DecodeFact, Legs, Placed, PrefillFact, RequestAction, RequestEnd, RequestFact};
pub use placement::{Mode, Need, PlaceError, Placement, Policy, Role, WorkerState, WorkerView, place};
pub use request::{Request, RequestConfig};
pub use retry::{RetryLimits, Verdict};
