//! Step plans: which tokens the next step computes, and what its output changes.

use crate::Time;
use crate::cost::StepLoad;
use crate::engine::{Sampled, StepOutput};
use crate::event::Event;
use crate::fork::Draw;
use crate::plan::{PlanRow, RowSampling, SequenceId, StepPlan};
use crate::scheduler::Scheduler;
use crate::sequence::{Finish, Origin, Sequence, Stage};

impl Scheduler {
    /// Decides the next step: decode rows first, then prefill chunks under the budgets of tokens and time. An empty plan means that
    /// nothing can be computed now. What is not empty must be executed, and [`Scheduler::apply`] called with the engine's output,
    /// before the next plan.
    pub fn plan(&mut self, now: Time) -> &StepPlan {
        self.now = now;
        self.plan.clear();
        self.step_over();
        self.preempted_since_step = false;
        self.promised = 0;
        self.admit();
        self.open_prompts(now);
        let mut load = StepLoad::default();
        self.plan_decode_rows(&mut load);
        let part = self.plan_newcomers(&mut load);
        if let Some((newcomer, layers)) = &part {
            load.add_part(newcomer.position(), layers.len() as f64 / self.config.num_layers as f64);
        }
        self.plan_chunks(&mut load, usize::from(part.is_some()), now);
        if let Some((newcomer, layers)) = part {
            self.plan_part(&newcomer, layers);
        }
        &self.plan
    }

    /// The plan that was made last, and that no output was applied for.
    pub fn current_plan(&self) -> &StepPlan {
        &self.plan
    }

    /// What only the step still needed returns.
    fn step_over(&mut self) {
        self.retired.clear();
        self.copied.clear();
    }

    /// One row for each running sequence, by rank. Newcomers are only gathered, once they have room.
    fn plan_decode_rows(&mut self, load: &mut StepLoad) {
        // Prompts keep one block of the budget, so that many decoding sequences can't starve a local prefill.
        let prefilling =
            self.active.iter().any(|id| matches!(self.sequences[id].stage, Stage::Prefilling { .. }));
        let kept = if prefilling { self.config.block_size } else { 0 };
        let max_rows = self.config.max_step_tokens.saturating_sub(kept);
        self.newcomers.clear();
        let mut nth = 0;
        while let Some(&id) = self.active.get(nth) {
            if self.plan.rows.len() + self.newcomers.len() >= max_rows {
                return;
            }
            if self.make_room(id) {
                match self.sequences.get(&id).and_then(Sequence::as_newcomer) {
                    Some(newcomer) => self.newcomers.push(newcomer),
                    None => self.plan_decode_row(id, load),
                }
            }
            // Preemption takes from behind this one, or this one.
            nth += usize::from(self.active.get(nth) == Some(&id));
        }
    }

    /// The row of a running sequence that has room for its newest token.
    pub(crate) fn plan_decode_row(&mut self, id: SequenceId, load: &mut StepLoad) {
        let Some(sequence) = self.sequences.get(&id) else { return };
        let Stage::Running { table, .. } = &sequence.stage else { return };
        let position = sequence.tokens.len() - 1;
        let newest = &sequence.tokens[position..];
        let sampling = sequence.row_sampling(sequence.sequence);
        self.plan.push(id, position, newest, table.ids(), &[sampling]);
        load.add(position, 1);
    }

    /// Prefill chunks, the most urgent first, on a decode worker by rank. A chunk ends on a block boundary or at the prompt's end.
    fn plan_chunks(&mut self, load: &mut StepLoad, num_parts: usize, now: Time) {
        let num_decoding = self.plan.rows.len() + num_parts;
        let mut budget = self.config.max_step_tokens.saturating_sub(num_decoding);
        if num_decoding > 0 {
            budget = budget.min(self.config.local_prefill_tokens);
        }
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        for id in &self.active {
            let sequence = &self.sequences[id];
            if matches!(sequence.stage, Stage::Prefilling { .. }) {
                // Beside decoding the oldest goes first, so that it goes on whatever comes.
                let prefill = sequence.origin == Origin::Prefill;
                let key = if prefill { self.urgency(sequence, now) } else { sequence.rank.us as f64 };
                order.push((key, *id));
            }
        }
        // Stable, and most often sorted already.
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Tokens of prompts that end in this step.
        let mut ending = 0;
        for (nth, &(_, id)) in order.iter().enumerate() {
            let sequence = &self.sequences[&id];
            let Stage::Prefilling { table, computed } = &sequence.stage else { continue };
            let position = *computed;
            let behind = order[nth + 1..].iter().map(|(_, id)| self.tokens_to_compute(&self.sequences[id]));
            // As many of them as can end in half of the step.
            let end_behind =
                || behind.fold(0, |sum, rest| if sum + rest <= budget / 2 { sum + rest } else { sum });
            let rest = sequence.tokens.len() - position;
            let most = self.chunk(load, (position, rest), budget, (ending, end_behind));
            let (end, last) = chunk_end(position, sequence.tokens.len(), most, self.config.block_size);
            if end == position {
                continue;
            }
            ending += if last { end - position } else { 0 };
            let samplings: Vec<RowSampling> = if last { sequence.samplings().collect() } else { Vec::new() };
            self.plan.push(id, position, &sequence.tokens[position..end], table.ids(), &samplings);
            load.add(position, end - position);
            load.num_chunks += 1;
            budget -= end - position;
        }
        self.order = order;
    }

    /// Tokens of a prompt from `position` on for which the step has tokens and time left. If not all `rest` of them fit, and others end in this step, those before it
    /// and those that can `end_behind` it, with so many tokens, it takes as long as they do, and leaves half to those behind: so a giant,
    /// first by its age or filling what is left, keeps no short one from its first token, nor long. The first prompt may always go on by a block.
    fn chunk(
        &self,
        load: &StepLoad,
        (position, rest): (usize, usize),
        budget: usize,
        (ending, end_behind): (usize, impl FnOnce() -> usize),
    ) -> usize {
        let is_first = load.num_chunks == 0;
        let block = self.config.block_size;
        let within = |share: usize, most_s: f64| {
            let Some(cost) = &self.config.step_cost else { return budget / share };
            let spent_s = cost.seconds(load);
            let left_s = (self.config.max_step_ms / 1e3 - spent_s).max(0.0) / share as f64;
            cost.tokens_within(spent_s + left_s.min(most_s), load, position, budget / share)
        };
        let mut most = within(1, f64::INFINITY);
        // Who gets no block has nothing to give, and looks at nobody: there may be hundreds of open prompts.
        if (block..rest).contains(&most) {
            let behind = end_behind();
            if ending + behind > 0 {
                let share = if behind > 0 { 2 } else { 1 };
                // Time counts where it is known, and tokens where it is not.
                let fair = match &self.config.step_cost {
                    Some(cost) => within(share, cost.prompt_seconds(ending + behind)),
                    None => (ending + behind).min(budget / share),
                };
                most = fair.max(block);
            }
        }
        if is_first { most.max(budget.min(block)) } else { most }
    }

    /// Takes in what the engine computed for the current plan. A stopped step changes nothing.
    pub fn apply(&mut self, output: &StepOutput, now: Time) {
        self.now = now;
        // From here on no step is under way, and what ends returns its blocks at once.
        let mut plan = std::mem::take(&mut self.plan);
        self.step_over();
        if !output.stopped {
            if !self.preempted_since_step {
                self.growth.step();
            }
            if let (Some(part), Some(row)) = (&plan.part, plan.rows.last()) {
                self.apply_part(row.id, part);
            }
            let mut sampled = output.sampled.as_slice();
            for (nth, row) in plan.rows.iter().enumerate() {
                let num = sampled.iter().take_while(|s| s.row as usize == nth).count();
                let (drawn, rest) = sampled.split_at(num);
                sampled = rest;
                self.apply_row(row, &plan.samplings, drawn);
            }
        }
        plan.clear();
        self.plan = plan;
        self.offer_near_head(now);
    }

    fn apply_row(&mut self, row: &PlanRow, samplings: &[RowSampling], drawn: &[Sampled]) {
        let id = row.id;
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if let Stage::Prefilling { computed, .. } = &mut sequence.stage {
            let num_tokens = row.position + row.tokens.len();
            self.num_prompt_tokens_computed += (num_tokens - *computed) as u64;
            *computed = num_tokens;
            self.events.push(Event::Computed { id, num_tokens });
            self.remember(id);
            if !drawn.is_empty() {
                let draws: Vec<Draw> = drawn.iter().map(|s| Draw::new(s, samplings)).collect();
                self.begin(id, &draws);
            }
        } else if let Some(&Sampled { token, logprob, .. }) = drawn.first() {
            let index = sequence.next_index();
            let finish = sequence.push(token);
            self.remember(id);
            if finish.is_some() {
                self.finish(id);
            }
            self.events.push(Event::Token { id, token, logprob, index, finish });
        }
    }

    fn finish(&mut self, id: SequenceId) {
        if let Some(sequence) = self.remove(id)
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
