//! Sequences and the prefix cache: what is found there, and what is added.

use baton_kv::{BlockTable, Inserted, Replacement};

use crate::plan::SequenceId;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// A table for all tokens of a waiting sequence: cached blocks first, then allocated ones, evicting where needed. Also says
    /// how many are cached. `may` decides by the number of blocks that stop being available: those to allocate, and
    /// cached ones that nobody uses yet. `None` when it says no, or when there is no room; nothing was touched then.
    pub(crate) fn take_blocks(
        &mut self,
        id: SequenceId,
        may: impl Fn(&Self, usize) -> bool,
    ) -> Option<(BlockTable, usize)> {
        let sequence = self.sequences.get(&id)?;
        let num_tokens = sequence.tokens.len();
        // The last token's logits are needed, here or at the source: its block is never taken from the cache.
        let usable = (num_tokens - 1) / self.config.block_size;
        let hashes = &sequence.hashes[..usable.min(sequence.hashes.len())];
        // Holding hits and giving them back would wake the shell, which would plan again, and so on for as long as the sequence waits.
        let (num_hits, num_idle) = self.cache.as_ref().map_or((0, 0), |cache| cache.peek_idle(hashes));
        let need = num_tokens.div_ceil(self.config.block_size) - num_hits;
        let counts = self.pool.counts();
        if need + num_idle > counts.free + counts.cached || !may(self, need + num_idle) {
            return None;
        }
        let hits = self.cache.as_mut().map_or_else(Vec::new, |cache| cache.lookup(hashes));
        let mut table = BlockTable::new();
        table.extend_shared(hits);
        self.make_free(need);
        table.extend(self.pool.allocate(need)?);
        if let Some(sequence) = self.sequences.get_mut(&id) {
            (sequence.num_cached, sequence.num_hits) = (num_hits, num_hits);
        }
        Some((table, num_hits))
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

    /// Prefill: opens one granted prompt. False when there is no room.
    pub(crate) fn open(&mut self, id: SequenceId) -> Option<(BlockTable, usize)> {
        let (table, num_hits) = self.take_blocks(id, |_, _| true)?;
        self.line.retain(|&other| other != id);
        Some((table, num_hits))
    }
}
