//! Sequences and the prefix cache: what is found there, and what is added.

use baton_kv::{BlockTable, Inserted, Replacement};

use crate::plan::SequenceId;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// A table for all tokens of a waiting sequence: cached blocks first, then allocated ones, evicting where needed. Also says
    /// how many are cached. `may` decides by the number of blocks to allocate. `None` when it says no, or when there is no room.
    pub(crate) fn take_blocks(
        &mut self,
        id: SequenceId,
        may: impl Fn(&Self, usize) -> bool,
    ) -> Option<(BlockTable, usize)> {
        let sequence = self.sequences.get(&id)?;
        let num_tokens = sequence.tokens.len();
        // The last token's logits are needed, here or at the source: its block is never taken from the cache.
        let usable = (num_tokens - 1) / self.config.block_size;
        let hits = match &mut self.cache {
            Some(cache) => cache.lookup(&sequence.hashes[..usable.min(sequence.hashes.len())]),
            None => Vec::new(),
        };
        let num_hits = hits.len();
        let need = num_tokens.div_ceil(self.config.block_size) - num_hits;
        let mut table = BlockTable::new();
        table.extend_shared(hits);
        if !may(self, need) {
            return None;
        }
        self.make_free(need);
        table.extend(self.pool.allocate(need)?);
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.num_cached = num_hits;
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
