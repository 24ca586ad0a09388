//! Step plans: which tokens the next step computes, and what its output changes.

use crate::Time;
use crate::cost::StepLoad;
use crate::engine::{Sampled, StepOutput};
use crate::event::Event;
use crate::fork::Draw;
use crate::plan::{PlanRow, RowSampling, SequenceId, StepPlan};
use crate::scheduler::Scheduler;
use crate::sequence::{Finish, Origin, Stage};

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
        self.plan_chunks(&mut load, now);
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

    /// One row for each running sequence, by rank.
    fn plan_decode_rows(&mut self, load: &mut StepLoad) {
        // Prompts keep one block of the budget, so that many decoding sequences can't starve a local prefill.
        let prefilling =
            self.active.iter().any(|id| matches!(self.sequences[id].stage, Stage::Prefilling { .. }));
        let kept = if prefilling { self.config.block_size } else { 0 };
        let max_rows = self.config.max_step_tokens.saturating_sub(kept);
        let mut nth = 0;
        while let Some(&id) = self.active.get(nth) {
            if self.plan.rows.len() >= max_rows {
                return;
            }
            if self.make_room(id)
                && let Some(sequence) = self.sequences.get(&id)
                && let Stage::Running { table } = &sequence.stage
            {
                let position = sequence.tokens.len() - 1;
                let newest = &sequence.tokens[position..];
                let sampling = sequence.row_sampling(sequence.sequence);
                self.plan.push(id, position, newest, table.ids(), &[sampling]);
                load.add(position, 1);
            }
            // Preemption takes from behind this one, or this one.
            nth += usize::from(self.active.get(nth) == Some(&id));
        }
    }

    /// Prefill chunks, the most urgent first, on a decode worker by rank. A chunk ends on a block boundary or at the prompt's end.
    fn plan_chunks(&mut self, load: &mut StepLoad, now: Time) {
        let num_decoding = self.plan.rows.len();
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
        for (nth, &(_, id)) in order.iter().enumerate() {
            let sequence = &self.sequences[&id];
            let Stage::Prefilling { table, computed } = &sequence.stage else { continue };
            let position = *computed;
            let behind = order[nth + 1..].iter().map(|(_, id)| &self.sequences[id]);
            let gives_way = || behind.map(|s| self.tokens_to_compute(s)).any(|rest| rest <= budget / 2);
            let rest = sequence.tokens.len() - position;
            let most = self.chunk(load, position, rest, budget, gives_way);
            let (end, last) = chunk_end(position, sequence.tokens.len(), most, self.config.block_size);
            if end == position {
                continue;
            }
            let samplings: Vec<RowSampling> = if last { sequence.samplings().collect() } else { Vec::new() };
            self.plan.push(id, position, &sequence.tokens[position..end], table.ids(), &samplings);
            load.add(position, end - position);
            load.num_chunks += 1;
            budget -= end - position;
        }
        self.order = order;
    }

    /// Tokens of a prompt from `position` on for which the step has tokens and time left. If not all `rest` of them fit it takes half,
    /// where it `gives_way` to one behind that can end in the other half: so a giant that is first by its age can't keep
    /// a short one from its first token. The first prompt may always go on by a block.
    fn chunk(
        &self,
        load: &StepLoad,
        position: usize,
        rest: usize,
        budget: usize,
        gives_way: impl FnOnce() -> bool,
    ) -> usize {
        let is_first = load.num_chunks == 0;
        let within = |share: usize| {
            let Some(cost) = &self.config.step_cost else { return budget / share };
            let spent_s = cost.seconds(load);
            let left_s = (self.config.max_step_ms / 1e3 - spent_s).max(0.0);
            cost.tokens_within(spent_s + left_s / share as f64, load, position, budget / share)
        };
        let mut most = within(1);
        // Who gets no block has nothing to give, and looks at nobody: there may be hundreds of open prompts.
        if (self.config.block_size..rest).contains(&most) && gives_way() {
            most = within(2);
        }
        if is_first { most.max(budget.min(self.config.block_size)) } else { most }
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
