//! Leases: access to blocks off the step thread. A lease pins its blocks: they are not allocated again
//! before it is dropped, whatever happened to the sequence that held them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::pool::Shared;

struct Pins {
    ids: Vec<u32>,
    shared: Option<Arc<Shared>>,
}

impl Pins {
    fn new(pool: Option<&Arc<Shared>>, ids: &[u32]) -> Self {
        if let Some(pool) = pool {
            pool.pin(ids);
        }
        Self { ids: ids.to_vec(), shared: pool.cloned() }
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.unpin(&self.ids);
        }
    }
}

/// The right to read blocks that are complete: a sender's view of a sequence. Clones are one lease, which ends with the last of them.
#[derive(Clone)]
pub struct ReadLease {
    pins: Arc<Pins>,
}

impl ReadLease {
    /// Pins blocks that the caller holds, in the order of the sequence's block table.
    pub(crate) fn new(pool: Option<&Arc<Shared>>, ids: &[u32]) -> Self {
        Self { pins: Arc::new(Pins::new(pool, ids)) }
    }

    /// Arena index of the lease's `nth` block.
    pub fn block(&self, nth: usize) -> Option<u32> {
        self.pins.ids.get(nth).copied()
    }

    /// Blocks leased.
    pub fn len(&self) -> usize {
        self.pins.ids.len()
    }

    /// Whether no block is leased.
    pub fn is_empty(&self) -> bool {
        self.pins.ids.is_empty()
    }
}

/// The right to write blocks that nobody reads yet: one receiver's view of a reserved sequence. Not `Clone`.
pub struct WriteLease {
    pins: Pins,
    /// Leading blocks of the sequence that are not leased, since they are here already.
    skip: usize,
    fenced: Arc<AtomicBool>,
}

/// Ends a [`WriteLease`] from outside: writes after it fail, and the blocks return when the writer drops the lease.
#[derive(Clone)]
pub struct Fence {
    fenced: Arc<AtomicBool>,
}

impl Fence {
    /// No write begins after this returns; idempotent.
    pub fn close(&self) {
        self.fenced.store(true, Ordering::SeqCst);
    }
}

impl WriteLease {
    /// Pins writable blocks that the caller holds: `ids` are those of the sequence's block table from the `skip`th on.
    pub(crate) fn new(pool: Option<&Arc<Shared>>, ids: &[u32], skip: usize) -> Self {
        Self { pins: Pins::new(pool, ids), skip, fenced: Arc::new(AtomicBool::new(false)) }
    }

    /// The handle that ends this lease.
    pub fn fence(&self) -> Fence {
        Fence { fenced: Arc::clone(&self.fenced) }
    }

    /// Whether the lease was ended.
    pub fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::SeqCst)
    }

    /// Arena index of the sequence's `nth` block; `None` for the skipped ones and beyond the last.
    pub fn block(&self, nth: usize) -> Option<u32> {
        self.pins.ids.get(nth.checked_sub(self.skip)?).copied()
    }

    /// Leading blocks of the sequence that may not be written, since they are here already.
    pub const fn skip(&self) -> usize {
        self.skip
    }

    /// Blocks of the sequence, the skipped ones included.
    pub fn len(&self) -> usize {
        self.skip + self.pins.ids.len()
    }

    /// Whether no block may be written.
    pub fn is_empty(&self) -> bool {
        self.pins.ids.is_empty()
    }
}

impl std::fmt::Debug for ReadLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReadLease({:?})", self.pins.ids)
    }
}

impl std::fmt::Debug for WriteLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WriteLease({:?}, fenced: {})", self.pins.ids, self.is_fenced())
    }
}
