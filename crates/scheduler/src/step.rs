//! Step plans: which tokens the next step computes, and what its output changes.

use baton_kv::BlockTable;

use crate::Time;
use crate::engine::StepOutput;
use crate::event::Event;
use crate::plan::{Logits, SequenceId, StepPlan};
use crate::scheduler::Scheduler;
use crate::sequence::{Finish, Origin, Sequence, Stage, Wait};

impl Scheduler {
    /// Decides the next step: decode rows first, then prefill chunks under the budget. An empty plan means that nothing can be
    /// computed now. Call [`Scheduler::apply`] with the engine's output before the next plan.
    pub fn plan(&mut self, now: Time) -> &StepPlan {
        self.plan.clear();
        self.preempted_since_step = false;
        self.admit();
        self.open_prompts(now);
        let num_decoding = self.plan_decode_rows();
        self.plan_chunks(num_decoding, now);
        &self.plan
    }

    /// The plan that was made last.
    pub fn current_plan(&self) -> &StepPlan {
        &self.plan
    }

    /// Prefill: opens granted prompts, the most urgent first, while there is room for all of a prompt's blocks.
    fn open_prompts(&mut self, now: Time) {
        loop {
            let open = self.active.len();
            let with_blocks = self.sequences.values().filter(|s| s.holds_blocks()).count();
            if open >= self.config.max_open_prompts || with_blocks >= self.config.max_num_seqs {
                return;
            }
            let granted = |s: &&Sequence| matches!(s.stage, Stage::Waiting(Wait::Granted));
            let line = self.line.iter().filter_map(|id| self.sequences.get(id));
            let Some(id) = line
                .filter(granted)
                .min_by(|a, b| self.urgency(a, now).total_cmp(&self.urgency(b, now)))
                .map(|s| s.id)
            else {
                return;
            };
            let Some((table, num_hits)) = self.open(id) else { return };
            let cached_tokens = num_hits * self.config.block_size;
            self.events.push(Event::Opened { id, lease: table.read_lease(), cached_tokens });
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.stage = Stage::Prefilling { table, computed: cached_tokens };
            }
            self.activate(id);
            self.offer_near_head(now);
        }
    }

    /// One row for each running sequence, oldest first. Returns their number.
    fn plan_decode_rows(&mut self) -> usize {
        let mut num_rows = 0;
        let mut nth = 0;
        // Prompts keep one block of the budget, so that many decoding sequences can't starve a local prefill.
        let prefilling =
            self.active.iter().any(|id| matches!(self.sequences[id].stage, Stage::Prefilling { .. }));
        let kept = if prefilling { self.config.block_size } else { 0 };
        let max_rows = self.config.max_step_tokens.saturating_sub(kept);
        // Preemption shortens `active` from its young end while this walks from its old end.
        while nth < self.active.len() && num_rows < max_rows {
            let id = self.active[nth];
            nth += 1;
            if !matches!(self.sequences[&id].stage, Stage::Running { .. }) || !self.make_room(id) {
                continue;
            }
            let sequence = &self.sequences[&id];
            if let Stage::Running { table } = &sequence.stage {
                let position = sequence.tokens.len() - 1;
                let newest = &sequence.tokens[position..];
                self.plan.push(id, position, newest, table.ids(), Logits::Last(sequence.row_sampling()));
                num_rows += 1;
            }
        }
        num_rows
    }

    /// Makes sure that the newest token of a running sequence has a slot, preempting younger sequences when the pool is empty. False
    /// when there is no slot in this step.
    fn make_room(&mut self, id: SequenceId) -> bool {
        loop {
            let Some(sequence) = self.sequences.get_mut(&id) else { return false };
            let Stage::Running { table } = &mut sequence.stage else { return false };
            if table.len() * self.config.block_size >= sequence.tokens.len() {
                return true;
            }
            if let Some(blocks) = self.pool.allocate(1) {
                table.extend(blocks);
                return true;
            }
            self.make_free(1);
            if self.pool.counts().free > 0 {
                continue;
            }
            match self.active.last() {
                Some(&youngest) if youngest != id => self.preempt(youngest),
                // The youngest can't take from older ones; it steps aside, unless it is alone and waits for leases to end.
                Some(_) if self.active.len() > 1 => {
                    self.preempt(id);
                    return false;
                }
                _ => return false,
            }
        }
    }

    /// Takes all blocks of a sequence; it waits at the head of the line and is computed again from its tokens.
    fn preempt(&mut self, id: SequenceId) {
        self.active.retain(|&other| other != id);
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.stage = Stage::Waiting(Wait::Queued);
        // Its KV can't come from the source any more: it is computed here.
        sequence.origin = Origin::Local;
        let age = sequence.age;
        let at = self.line.partition_point(|other| self.sequences[other].age < age);
        self.line.insert(at, id);
        self.growth.preempted();
        self.preempted_since_step = true;
        self.num_preemptions += 1;
        self.events.push(Event::Preempted { id });
    }

    /// Prefill chunks, the most urgent first. A chunk ends on a block boundary or at the prompt's end.
    fn plan_chunks(&mut self, num_decoding: usize, now: Time) {
        let mut budget = self.config.max_step_tokens.saturating_sub(num_decoding);
        if num_decoding > 0 {
            budget = budget.min(self.config.local_prefill_tokens);
        }
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        for id in &self.active {
            let sequence = &self.sequences[id];
            if matches!(sequence.stage, Stage::Prefilling { .. }) {
                order.push((self.urgency(sequence, now), *id));
            }
        }
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        for &(_, id) in &order {
            let sequence = &self.sequences[&id];
            let Stage::Prefilling { table, computed } = &sequence.stage else { continue };
            let (end, last) = chunk_end(*computed, sequence.tokens.len(), budget, self.config.block_size);
            if end == *computed {
                continue;
            }
            let logits = if last { Logits::Last(sequence.row_sampling()) } else { Logits::None };
            self.plan.push(id, *computed, &sequence.tokens[*computed..end], table.ids(), logits);
            budget -= end - *computed;
        }
        self.order = order;
    }

    /// Takes in what the engine computed for the current plan. A stopped step changes nothing.
    pub fn apply(&mut self, output: &StepOutput, now: Time) {
        if output.stopped {
            return;
        }
        if !self.preempted_since_step {
            self.growth.step();
        }
        let plan = std::mem::take(&mut self.plan);
        let mut sampled = output.sampled.iter().peekable();
        for (nth, row) in plan.rows.iter().enumerate() {
            let drawn = sampled.next_if(|s| s.row as usize == nth).map(|s| (s.token, s.logprob));
            self.apply_row(row.id, row.position + row.tokens.len(), drawn);
        }
        self.plan = plan;
        self.plan.clear();
        self.offer_near_head(now);
    }

    fn apply_row(&mut self, id: SequenceId, end: usize, drawn: Option<(u32, f32)>) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if let Stage::Prefilling { computed, .. } = &mut sequence.stage {
            self.num_prompt_tokens_computed += (end - *computed) as u64;
            *computed = end;
            self.events.push(Event::Computed { id, num_tokens: end });
        }
        let Some((token, logprob)) = drawn else { return self.remember(id) };
        if let Stage::Prefilling { table, .. } = &mut sequence.stage {
            let table = std::mem::take(table);
            self.prompt_done(id, table);
        }
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let finish = sequence.push(token);
        let index = sequence.newest_index();
        self.remember(id);
        if finish.is_some() {
            self.finish(id);
        }
        self.events.push(Event::Token { id, token, logprob, index, finish });
    }

    fn prompt_done(&mut self, id: SequenceId, table: BlockTable) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if sequence.origin == Origin::Prefill {
            sequence.stage = Stage::Held { table };
            self.active.retain(|&other| other != id);
            return;
        }
        sequence.stage = Stage::Running { table };
        if !std::mem::replace(&mut sequence.started, true) {
            let cached_tokens = sequence.num_hits * self.config.block_size;
            self.events.push(Event::Started { id, cached_tokens });
        }
    }

    fn finish(&mut self, id: SequenceId) {
        if let Some(sequence) = self.forget(id)
            && sequence.origin != Origin::Prefill
        {
            self.growth.observe(sequence.tokens.len() - sequence.prompt_len);
        }
    }
}

/// Where the next chunk ends, and whether that is the end of the tokens.
fn chunk_end(computed: usize, len: usize, budget: usize, block_size: usize) -> (usize, bool) {
    if len - computed <= budget {
        return (len, true);
    }
    let end = (computed + budget) / block_size * block_size;
    (end.max(computed), false)
}

impl Finish {
    /// A stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}
