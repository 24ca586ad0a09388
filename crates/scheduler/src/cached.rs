//! Sequences and the prefix cache: what is found there, and what is added.

use baton_kv::{BlockHash, BlockTable, CacheChanges, Inserted, Replacement};

use crate::plan::SequenceId;
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;

/// What giving a sequence blocks for all its tokens takes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Found {
    /// Leading blocks that the prefix cache has.
    pub(crate) num_hits: usize,
    /// Those of them that nobody uses, so that they stop being evictable.
    pub(crate) num_idle: usize,
    /// Blocks to allocate.
    pub(crate) num_new: usize,
}

impl Found {
    /// Blocks that stop being available.
    pub(crate) const fn need(&self) -> usize {
        self.num_new + self.num_idle
    }
}

impl Scheduler {
    /// Hashes to look up. The last token's logits are needed, here or at the source: its block is never taken from the cache.
    fn hashes<'a>(&self, sequence: &'a Sequence) -> &'a [BlockHash] {
        let usable = (sequence.tokens.len() - 1) / self.config.block_size;
        &sequence.hashes[..usable.min(sequence.hashes.len())]
    }

    /// Leading blocks that the prefix cache has now.
    pub(crate) fn num_hits(&self, sequence: &Sequence) -> usize {
        self.cache.as_ref().map_or(0, |cache| cache.peek(self.hashes(sequence)))
    }

    /// What [`Scheduler::take_blocks`] would take. Touches nothing: holding hits and giving them back would wake the shell, which would
    /// plan again, and so on for as long as the sequence waits.
    pub(crate) fn find_blocks(&self, id: SequenceId) -> Found {
        let Some(sequence) = self.sequences.get(&id) else { return Found::default() };
        let (num_hits, num_idle) =
            self.cache.as_ref().map_or((0, 0), |cache| cache.peek_idle(self.hashes(sequence)));
        let num_new = sequence.tokens.len().div_ceil(self.config.block_size) - num_hits;
        Found { num_hits, num_idle, num_new }
    }

    /// A table for all tokens of a waiting sequence: cached blocks first, then allocated ones, evicting where
    /// needed. `None` when there is no room; nothing was touched then.
    pub(crate) fn take_blocks(&mut self, id: SequenceId, found: &Found) -> Option<BlockTable> {
        let counts = self.pool.counts();
        if found.need() > counts.free + counts.cached {
            return None;
        }
        let hashes = self.hashes(self.sequences.get(&id)?);
        let hits = self.cache.as_mut().map_or_else(Vec::new, |cache| cache.lookup(hashes));
        let mut table = BlockTable::new();
        table.extend_shared(hits);
        self.make_free(found.num_new);
        table.extend(self.pool.allocate(found.num_new)?);
        let sequence = self.sequences.get_mut(&id)?;
        (sequence.num_cached, sequence.num_hits) = (found.num_hits, found.num_hits);
        Some(table)
    }

    /// Evicts so that `need` blocks are free, as far as idle ones reach.
    pub(crate) fn make_free(&mut self, need: usize) {
        let free = self.pool.counts().free;
        if let Some(cache) = &mut self.cache
            && free < need
        {
            cache.evict(need - free);
        }
    }

    /// Adds the full blocks of a sequence that are computed and not yet known to the prefix cache.
    pub(crate) fn remember(&mut self, id: SequenceId) {
        let (Some(cache), Some(sequence)) = (&mut self.cache, self.sequences.get_mut(&id)) else { return };
        let num_full = sequence.num_computed() / self.config.block_size;
        if !sequence.use_cache || num_full <= sequence.num_cached {
            return;
        }
        while sequence.hashes.len() < num_full {
            let nth = sequence.hashes.len();
            let parent = sequence.hashes.last().copied().unwrap_or(cache.root());
            let start = nth * self.config.block_size;
            sequence.hashes.push(parent.next(&sequence.tokens[start..start + self.config.block_size]));
        }
        for nth in sequence.num_cached..num_full {
            let parent = nth.checked_sub(1).map_or(cache.root(), |before| sequence.hashes[before]);
            let hash = sequence.hashes[nth];
            let Some(block) = sequence.table_mut().and_then(|table| table.share(nth)) else { return };
            match cache.insert(parent, hash, &block) {
                Inserted::New => {}
                Inserted::Existing(known) => {
                    if let Some(table) = sequence.table_mut() {
                        table.replace(nth, Replacement::Shared(known));
                    }
                }
                Inserted::Orphan => return,
            }
            sequence.num_cached = nth + 1;
        }
    }

    /// Whether changes of the prefix cache are collected for [`Scheduler::drain_cache_changes`]: only while somebody reads. The
    /// reader takes a snapshot after turning it on. At most 65,536 changes are kept, see [`CacheChanges::overflowed`].
    pub fn set_report_cache(&mut self, on: bool) {
        if let Some(cache) = &mut self.cache {
            cache.set_report(on);
        }
    }

    /// Appends what the prefix cache learned and forgot since the last call to `into`.
    pub fn drain_cache_changes(&mut self, into: &mut CacheChanges) {
        if let Some(cache) = &mut self.cache {
            cache.drain_changes(into);
        }
    }

    /// Hashes of all blocks that the prefix cache knows: the snapshot that changes continue.
    pub fn cached_hashes(&self) -> Vec<BlockHash> {
        self.cache.as_ref().map_or_else(Vec::new, baton_kv::PrefixCache::known)
    }
}
