//! Who may take blocks now. One formula, from the design:
//!
//! * feasible: the blocks of `min(prompt + max_tokens, context)` tokens `<= total`, where a group shares the full blocks of its prompt
//!   and has the rest n times;
//! * admit: need of the prompt + estimated growth of all sequences with blocks `<= free + cached - one block per running sequence`. A
//!   group's need includes its other sequences' copies of the partly filled block and their growth.
//!
//! The line is served by rank. When its head does not fit, some behind it may pass, boundedly.

use crate::Time;
use crate::config::Refusal;
use crate::event::Event;
use crate::plan::SequenceId;
use crate::scheduler::Scheduler;
use crate::sequence::{NewSequence, Origin, Sequence, Stage, Wait};

/// Sequences that may pass one blocked head; so many behind it are looked at.
const MAX_PASSED: u32 = 16;
/// How long a blocked head may be passed.
const PASS_TIME: Time = Time::from_secs(2);
/// Who comes back from preemption leaves one block in this many free, and makes so many tokens before it may have to go again.
const WATERMARK: usize = 10;
const KEPT_TOKENS: usize = 64;

/// What all sequences with blocks hold and are expected to take.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    sequences: usize,
    /// Of them running, now or when their prompt is done.
    running: usize,
    /// Blocks.
    growth: usize,
    /// Blocks that receive KV.
    receiving: usize,
}

impl Scheduler {
    /// Largest number of tokens (prompt and output) of one sequence that can ever be accepted.
    pub fn max_tokens(&self) -> usize {
        (self.pool.counts().total * self.config.block_size).min(self.config.context)
    }

    pub(crate) fn check_feasible(&self, new: &NewSequence) -> Result<(), Refusal> {
        let (prompt, block_size) = (new.prompt.len(), self.config.block_size);
        let num_sequences = 1 + new.siblings.len();
        // At least one token must be generated, and it needs a position in the context.
        let least = prompt + 1;
        if least > self.config.context {
            return Err(Refusal::TooLarge { needed_tokens: least, max_tokens: self.max_tokens() });
        }
        let total = self.pool.counts().total;
        let (needed_tokens, max_blocks) = match new.origin {
            Origin::Prefill => (prompt, total),
            Origin::Local | Origin::Remote => {
                let shared = (prompt / block_size).min(total);
                let needed = (prompt + new.max_new_tokens as usize).min(self.config.context);
                (needed, shared + (total - shared) / num_sequences)
            }
        };
        if needed_tokens.div_ceil(block_size) > max_blocks {
            let max_tokens = (max_blocks * block_size).min(self.config.context);
            return Err(Refusal::TooLarge { needed_tokens, max_tokens });
        }
        // All of a group wait together, and run together where they run.
        let max_num_seqs = match new.origin {
            Origin::Prefill => self.config.max_queue,
            Origin::Local | Origin::Remote => self.config.max_queue.min(self.config.max_num_seqs),
        };
        if num_sequences > max_num_seqs {
            return Err(Refusal::TooMany { num_sequences, max_num_seqs });
        }
        Ok(())
    }

    /// Admits from the line while the formula allows: reserves blocks for remote sequences, opens local ones.
    pub(crate) fn admit(&mut self) {
        let Some(front) = self.line.front() else { return };
        if self.sequences[front].origin == Origin::Prefill {
            return;
        }
        let mut load = self.load();
        let mut nth = 0;
        while let Some(&id) = self.line.get(nth) {
            if self.admit_one(id, &mut load) {
                self.line.remove(nth);
                if nth > 0 {
                    self.head_passed();
                }
            } else {
                nth += 1;
            }
            if nth > 0 && (nth > MAX_PASSED as usize || !self.may_pass_head()) {
                return;
            }
        }
    }

    /// Whether others may still pass the head of the line, which is blocked.
    fn may_pass_head(&mut self) -> bool {
        let now = self.now;
        let Some(head) = self.line.front().and_then(|id| self.sequences.get_mut(id)) else { return false };
        let since = *head.head_since.get_or_insert(now);
        head.num_passed < MAX_PASSED && now.saturating_sub(since) < PASS_TIME
    }

    fn head_passed(&mut self) {
        if let Some(head) = self.line.front().and_then(|id| self.sequences.get_mut(id)) {
            head.num_passed += 1;
        }
    }

    fn load(&self) -> Load {
        let mut load = Load::default();
        for sequence in self.sequences.values() {
            match &sequence.stage {
                Stage::Waiting(_) => continue,
                Stage::Receiving { table } => load.receiving += table.len(),
                Stage::Running { .. } | Stage::Prefilling { .. } => load.running += sequence.num_sequences(),
                Stage::Held { .. } => {}
            }
            load.sequences += sequence.num_sequences();
            load.growth += sequence.num_sequences() * self.growth_blocks(sequence);
        }
        load
    }

    /// Blocks by which each of a group's sequences is expected to grow.
    fn growth_blocks(&self, sequence: &Sequence) -> usize {
        self.growth.of(sequence.tokens_left()).div_ceil(self.config.block_size)
    }

    /// Admits one sequence if the formula allows, and adds it to `load`.
    fn admit_one(&mut self, id: SequenceId, load: &mut Load) -> bool {
        let sequence = &self.sequences[&id];
        let remote = matches!(sequence.stage, Stage::Waiting(Wait::Reserving));
        let num = sequence.num_sequences();
        let growth = self.growth_blocks(sequence);
        let copies = usize::from(!sequence.tokens.len().is_multiple_of(self.config.block_size));
        let counts = self.pool.counts();
        let available = counts.free + counts.cached;
        // Alone, whatever is feasible is admitted: nothing else could grow.
        let alone = load.sequences == 0;
        let kept = if alone { 0 } else { load.growth + load.running + (num - 1) * (growth + copies) };
        // Before the prompt is looked up, which costs more.
        if (!alone && load.sequences + num > self.config.max_num_seqs) || kept > available {
            return false;
        }
        let low = if alone || !sequence.preempted { 0 } else { counts.total.div_ceil(WATERMARK) };
        let found = self.find_blocks(id);
        let need = found.need();
        let share = (self.config.max_receiving_share * counts.total as f32) as usize;
        let beyond_share = remote && load.receiving > 0 && load.receiving + need > share;
        if beyond_share || need + kept.max(low) > available {
            return false;
        }
        let Some(table) = self.take_blocks(id, &found) else { return false };
        load.sequences += num;
        load.growth += num * growth;
        if remote {
            load.receiving += table.len();
        } else {
            load.running += num;
        }
        self.place(id, table, remote);
        true
    }

    fn place(&mut self, id: SequenceId, mut table: baton_kv::BlockTable, remote: bool) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let skip_tokens = sequence.num_hits * self.config.block_size;
        let to_come = sequence.reserved_tokens();
        let num_blocks = to_come.div_ceil(self.config.block_size) + 1;
        table.reserve(num_blocks);
        sequence.tokens.reserve(to_come);
        if sequence.use_cache {
            sequence.hashes.reserve(num_blocks);
        }
        (sequence.head_since, sequence.num_passed) = (None, 0);
        if std::mem::take(&mut sequence.preempted) {
            sequence.kept_until = sequence.tokens.len() + KEPT_TOKENS;
        }
        if remote {
            // What was allocated beyond the hits is all owned.
            let Some(lease) = table.write_lease(sequence.num_hits) else { return };
            self.events.push(Event::Reserved { id, lease, skip_tokens });
            sequence.stage = Stage::Receiving { table };
        } else {
            sequence.stage = Stage::Prefilling { table, computed: skip_tokens };
        }
        self.activate(id);
    }
}
