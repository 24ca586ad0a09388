//! A sequence's block table.

use std::sync::Arc;

use crate::block::{Block, SharedBlock};
use crate::lease::{ReadLease, WriteLease};
use crate::pool::Shared;

/// One place of a table.
#[derive(Debug)]
enum Entry {
    Owned(Block),
    Shared(SharedBlock),
}

impl Entry {
    fn id(&self) -> u32 {
        match self {
            Self::Owned(block) => block.id(),
            Self::Shared(block) => block.id(),
        }
    }

    fn pool(&self) -> &Arc<Shared> {
        match self {
            Self::Owned(block) => &block.0.shared,
            Self::Shared(block) => block.pool(),
        }
    }

    /// Ends the handle; its unit of the block is given back by the table, with those of its other blocks.
    fn leave(self) {
        match self {
            Self::Owned(block) => block.leave(),
            Self::Shared(block) => block.leave(),
        }
    }
}

/// The blocks of one sequence in token order, with their arena indices beside them for step plans.
#[derive(Debug, Default)]
pub struct BlockTable {
    entries: Vec<Entry>,
    ids: Vec<u32>,
}

impl BlockTable {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the memory for `additional` more blocks, so that appending them allocates nothing.
    pub fn reserve(&mut self, additional: usize) {
        self.entries.reserve(additional);
        self.ids.reserve(additional);
    }

    /// Appends one writable block.
    pub fn push(&mut self, block: Block) {
        self.ids.push(block.id());
        self.entries.push(Entry::Owned(block));
    }

    /// Appends writable blocks.
    pub fn extend(&mut self, blocks: Vec<Block>) {
        self.ids.extend(blocks.iter().map(Block::id));
        self.entries.extend(blocks.into_iter().map(Entry::Owned));
    }

    /// Appends read-only blocks.
    pub fn extend_shared(&mut self, blocks: Vec<SharedBlock>) {
        self.ids.extend(blocks.iter().map(SharedBlock::id));
        self.entries.extend(blocks.into_iter().map(Entry::Shared));
    }

    /// Arena indices: token `i` lies in `ids()[i / block_size]`, slot `i % block_size`.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Blocks held.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether no block is held.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Blocks that are this table's alone to write.
    pub fn num_owned(&self) -> usize {
        self.entries.iter().filter(|entry| matches!(entry, Entry::Owned(_))).count()
    }

    /// Whether the last block is this table's alone to write.
    pub fn is_last_owned(&self) -> bool {
        matches!(self.entries.last(), Some(Entry::Owned(_)))
    }

    /// Whether giving up this table would free a block, once leases are gone too: it is the only holder of one.
    pub fn frees_any(&self) -> bool {
        self.pool().is_some_and(|pool| pool.any_sole_holder(&self.ids))
    }

    /// A second table over the same blocks, which are read-only in both from here on, with memory for
    /// `additional` more.
    pub fn fork(&mut self, additional: usize) -> Self {
        let mut other = Self::new();
        other.reserve(self.len() + additional);
        for nth in 0..self.len() {
            let Some(block) = self.share(nth) else { break };
            other.ids.push(block.id());
            other.entries.push(Entry::Shared(block));
        }
        other
    }

    /// Of what this table would free, keeps the block with index `id`, by a handle of its own; `None` when the table has no such
    /// block or another holder keeps it anyway.
    pub fn keep(&mut self, id: u32) -> Option<SharedBlock> {
        let nth = self.ids.iter().rposition(|&other| other == id)?;
        let last = self.pool()?.any_sole_holder(&[id]);
        last.then(|| self.share(nth)).flatten()
    }

    /// Makes the `nth` block read-only and returns a second handle to it; `None` beyond the table.
    pub fn share(&mut self, nth: usize) -> Option<SharedBlock> {
        let entry = self.entries.get_mut(nth)?;
        if let Entry::Shared(block) = entry {
            return Some(block.clone());
        }
        // An owned block is moved out of its place by putting its shared form there.
        let Entry::Owned(block) = self.entries.swap_remove(nth) else { return None };
        let block = block.share();
        let second = block.clone();
        self.entries.push(Entry::Shared(block));
        let last = self.entries.len() - 1;
        self.entries.swap(nth, last);
        Some(second)
    }

    /// Whether the `nth` block may be written, taking it back from sharing when this table is its only user.
    pub fn is_writable(&mut self, nth: usize) -> bool {
        match self.entries.get(nth) {
            None => false,
            Some(Entry::Owned(_)) => true,
            Some(Entry::Shared(_)) => self.reclaim(nth),
        }
    }

    fn reclaim(&mut self, nth: usize) -> bool {
        let Entry::Shared(block) = self.entries.swap_remove(nth) else { return false };
        let (entry, owned) = match block.try_own() {
            Ok(block) => (Entry::Owned(block), true),
            Err(block) => (Entry::Shared(block), false),
        };
        self.entries.push(entry);
        let last = self.entries.len() - 1;
        self.entries.swap(nth, last);
        owned
    }

    /// Puts another block in the `nth` place and gives up the one that was there: after a copy, or for
    /// an equal block of the prefix cache.
    pub fn replace(&mut self, nth: usize, block: Replacement) {
        let entry = match block {
            Replacement::Owned(block) => Entry::Owned(block),
            Replacement::Shared(block) => Entry::Shared(block),
        };
        if let (Some(place), Some(id)) = (self.entries.get_mut(nth), self.ids.get_mut(nth)) {
            *id = entry.id();
            *place = entry;
        }
    }

    /// A lease to read all blocks.
    pub fn read_lease(&self) -> ReadLease {
        ReadLease::new(self.pool(), &self.ids)
    }

    /// A lease to write all blocks from the `skip`th on, which must be owned; `None` if one is shared.
    pub fn write_lease(&self, skip: usize) -> Option<WriteLease> {
        let (entries, ids) = (self.entries.get(skip..)?, self.ids.get(skip..)?);
        entries
            .iter()
            .all(|entry| matches!(entry, Entry::Owned(_)))
            .then(|| WriteLease::new(self.pool(), ids, skip))
    }

    fn pool(&self) -> Option<&Arc<Shared>> {
        self.entries.first().map(Entry::pool)
    }

    /// Returns every block to the pool (shared ones when their last holder goes, leased ones once their lease ends), all at once.
    pub fn clear(&mut self) {
        if let Some(pool) = self.pool().cloned() {
            self.entries.drain(..).for_each(Entry::leave);
            pool.release_all(&self.ids);
            self.ids.clear();
        }
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        self.clear();
    }
}

/// What [`BlockTable::replace`] puts in place.
#[derive(Debug)]
pub enum Replacement {
    /// A writable block.
    Owned(Block),
    /// A read-only one.
    Shared(SharedBlock),
}
