//! Owns the geometry and the ownership of KV blocks: layout, pool, block tables and leases.
//!
//! Must never know a tensor, a socket, a clock or a thread of its own. Block memory itself lives in an
//! arena elsewhere; this crate says which bytes belong to whom, and [`BlockMemory`] is how others reach them.

mod block;
mod layout;
mod lease;
mod memory;
mod peer;
mod pool;
mod prefix;
mod table;

pub use block::{Block, SharedBlock};
pub use layout::{KvDtype, KvLayout, LayoutMismatch};
pub use lease::{Fence, ReadLease, WriteLease};
pub use memory::{BlockMemory, BlockOrder, BlockRun, BlockSlice, MemoryError};
pub use peer::{PeerCopy, PeerMemory, PeerRing, PeerView, peer_sum};
pub use pool::{BlockPool, FreeHook, PoolCounts};
pub use prefix::{BlockHash, CacheChanges, Inserted, PrefixCache};
pub use table::{BlockTable, Replacement};

#[cfg(test)]
mod tests;

#[cfg(test)]
mod prefix_tests;
