//! Room for the next token, and who gives up blocks for it.
//!
//! Progress: in any pool that admission accepts, the oldest sequence that computes always goes on.
//!
//! * A prefilling one has all its blocks, and the oldest one's chunk is planned first.
//! * A running one needs at most one block a step, for growth or for a copy. Of the sequences behind it, prefilling, running or
//!   receiving, it may take from all, protected or not; each turn of the loop takes one, and first those that free a block. When none is
//!   left, nobody behind shares a block with it, so it may write the one it wanted to copy. For growth, all blocks are then its
//!   own, free, evictable, draining or held by older ones that receive, and its own need is at most `total`, by feasibility.
//!   Draining ends when leases end, receiving by the handoff's timers; then there is room, or what was received is the oldest.
//!
//! So the oldest ends, and the next one is the oldest. What waits in line is admitted at the latest when nothing holds blocks any
//! more: then whatever is feasible fits. Few pass it meanwhile, and for a bounded time.

use baton_kv::{BlockTable, Replacement};

use crate::event::Event;
use crate::plan::{BlockCopy, SequenceId};
use crate::scheduler::Scheduler;
use crate::sequence::{Origin, Sequence, Stage, Wait};

impl Scheduler {
    /// Makes sure that the newest token of a running sequence has a slot that it may write: a block of its own, copied if
    /// others share it. Preempts sequences behind it when the pool is empty. False when there is no slot in this step.
    pub(crate) fn make_room(&mut self, id: SequenceId) -> bool {
        loop {
            let Some(sequence) = self.sequences.get_mut(&id) else { return false };
            let Stage::Running { table, .. } = &mut sequence.stage else { return false };
            let nth = (sequence.tokens.len() - 1) / self.config.block_size;
            // The last of several holders takes the block back and copies nothing.
            if table.is_writable(nth) {
                return true;
            }
            if let Some(block) = self.pool.allocate_one() {
                match table.ids().get(nth) {
                    Some(&from) => {
                        self.plan.copies.push(BlockCopy { from, to: block.id() });
                        table.replace(nth, Replacement::Owned(block));
                    }
                    None => table.push(block),
                }
                return true;
            }
            self.make_free(1);
            if self.pool.counts().free == 0 && !self.preempt_for(id) {
                return false;
            }
        }
    }

    /// Takes the blocks of one sequence for another. False when that has to wait; it may have lost its own.
    fn preempt_for(&mut self, id: SequenceId) -> bool {
        // A block that a lease still pins comes later; nobody else needs to go for it in this step.
        if self.promised > 0 {
            self.promised -= 1;
            return false;
        }
        let draining = self.pool.counts().draining;
        if let Some(victim) = self.victim(id) {
            self.preempt(victim);
            // Leases end on other threads, so there may be fewer than before.
            self.promised = self.pool.counts().draining.saturating_sub(draining);
            return true;
        }
        // Nobody behind it has anything to give: it steps aside for the older ones, unless it is the oldest and waits for leases.
        if !self.is_oldest(id) && !is_kept(&self.sequences[&id]) {
            self.preempt(id);
        }
        false
    }

    /// Whether it is the oldest of those that compute.
    fn is_oldest(&self, id: SequenceId) -> bool {
        let computes = |id: &&SequenceId| !matches!(self.sequences[id].stage, Stage::Receiving { .. });
        self.active.iter().find(computes) == Some(&id)
    }

    /// Who gives up its blocks for `id`: the last by rank that frees one, else the last. Those that just came back are
    /// left alone by all but the oldest.
    fn victim(&self, id: SequenceId) -> Option<SequenceId> {
        let (rank, oldest) = (self.sequences[&id].rank, self.is_oldest(id));
        let behind = self.active.iter().rev().map(|id| &self.sequences[id]).take_while(|s| s.rank > rank);
        let candidates = behind.filter(|s| oldest || !is_kept(s));
        let frees = |s: &&Sequence| s.table().is_some_and(BlockTable::frees_any);
        candidates.clone().find(frees).or_else(|| candidates.clone().next()).map(|s| s.id)
    }

    /// Takes all blocks of a sequence. What came from a prefill worker leaves, to be resumed through one; what was computed here waits here
    /// and is computed again from its tokens. Whoever makes room ranks before its victims, and rows are planned by rank, so no row
    /// of the current plan is a victim's.
    fn preempt(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let gone = sequence.origin == Origin::Remote;
        let ids = std::iter::once(id).chain(sequence.siblings.iter().map(|sibling| sibling.id));
        self.events.extend(ids.map(|id| Event::Preempted { id, gone }));
        let table = sequence.table_mut().map(std::mem::take);
        if gone {
            self.remove(id);
        } else {
            sequence.stage = Stage::Waiting(Wait::Queued);
            sequence.preempted = true;
            self.active.retain(|&other| other != id);
            self.line_up(id);
        }
        if let Some(mut table) = table {
            // A sibling before it may copy from its block in this very step: one that waited for a lease while this one's younger
            // siblings got blocks.
            self.copied.extend(self.plan.copies.iter().filter_map(|copy| table.keep(copy.from)));
        }
        self.growth.preempted();
        self.preempted_since_step = true;
        self.num_preemptions += 1;
    }
}

/// Whether it came back from preemption a short while ago.
fn is_kept(sequence: &Sequence) -> bool {
    sequence.tokens.len() < sequence.kept_until
}
