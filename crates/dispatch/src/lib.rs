//! Owns what a router decides: who enters (door), where a request runs (placement), which worker gets none (breaker), and one
//! request over its legs (order of tokens, sequence groups, retry, resume, fencing, cancel).
//!
//! Must never know a socket, text, a clock or randomness: facts go in with `now`, actions come out; which streams and
//! buffers lie behind them is the router's affair.

mod able;
mod attempt;
mod breaker;
mod budget;
mod cache_index;
mod cost;
mod door;
mod facts;
mod failure;
mod fleet;
mod group;
mod legs;
mod placement;
mod placer;
mod redirect;
mod request;
mod retry;
mod search;
mod sequence;
mod uniform;

pub use baton_handoff::{InstanceId, Time};
pub use breaker::{Breaker, BreakerLimits};
pub use cache_index::CacheIndex;
pub use door::{Door, DoorLimits, Entry, Shed};
pub use facts::{DecodeFact, Legs, Placed, PrefillFact, RequestAction, RequestEnd, RequestFact};
pub use fleet::{DEFAULT_LINK_BYTES_PER_S, Fleet, LinkView, Links, Role, WorkerState, WorkerView};
pub use placement::{Layout, Mode, Need, PlaceError, Placement, Policy, UnknownPolicy};
pub use placer::Placer;
pub use request::{Request, RequestConfig};
pub use retry::{RetryLimits, Verdict};
