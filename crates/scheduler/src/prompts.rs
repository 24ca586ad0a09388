//! Prefill: whose prompt is offered, opened and computed next.

use crate::Time;
use crate::event::Event;
use crate::plan::SequenceId;
use crate::scheduler::Scheduler;
use crate::sequence::{Origin, Sequence, Stage, Wait};

impl Scheduler {
    /// Offers the most urgent waiting prompts, up to the lookahead. One that comes later and is more urgent than those that were offered
    /// is offered too, up to twice the lookahead in all: giants that wait for their turn don't keep a short one from its destination.
    pub(crate) fn offer_near_head(&mut self, now: Time) {
        let Some(front) = self.line.front() else { return };
        if self.sequences[front].origin != Origin::Prefill {
            return;
        }
        let ahead = |s: &&Sequence| matches!(s.stage, Stage::Waiting(Wait::Offered | Wait::Granted));
        loop {
            let offered = self.line.iter().map(|id| &self.sequences[id]).filter(ahead);
            let (lookahead, num_offered) = (self.config.lookahead, offered.clone().count());
            if num_offered >= 2 * lookahead {
                return;
            }
            let queued = |s: &Sequence| matches!(s.stage, Stage::Waiting(Wait::Queued));
            let Some(id) = self.most_urgent(queued, now) else { return };
            let urgency = self.urgency(&self.sequences[&id], now);
            let before = |s: &&Sequence| self.urgency(s, now) <= urgency;
            if num_offered >= lookahead && offered.filter(before).count() >= lookahead {
                return;
            }
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.stage = Stage::Waiting(Wait::Offered);
                self.events.push(Event::NearHead { id });
            }
        }
    }

    /// Opens granted prompts, the most urgent first, while there is room for all of a prompt's blocks and the step has tokens for it.
    pub(crate) fn open_prompts(&mut self, now: Time) {
        while !self.line.is_empty() && self.active.len() < self.config.max_open_prompts {
            let with_blocks = self.sequences.len() - self.line.len();
            if with_blocks >= self.config.max_num_seqs {
                return;
            }
            let granted = |s: &Sequence| matches!(s.stage, Stage::Waiting(Wait::Granted));
            let Some(id) = self.most_urgent(granted, now) else { return };
            if !self.would_compute(id, now) {
                return;
            }
            let Some(table) = self.take_blocks(id, &self.find_blocks(id)) else { return };
            self.line.retain(|&other| other != id);
            if let Some(sequence) = self.sequences.get_mut(&id) {
                let cached_tokens = sequence.num_hits * self.config.block_size;
                self.events.push(Event::Opened { id, lease: table.read_lease(), cached_tokens });
                sequence.stage = Stage::Prefilling { table, computed: cached_tokens };
            }
            self.activate(id);
            self.offer_near_head(now);
        }
    }

    /// Whether the next step has tokens for this prompt, when the open ones before it have had theirs: either some are left, or it is so
    /// short that one before it gives way. Opened earlier it would only hold blocks, and a place that a short one may need.
    fn would_compute(&self, id: SequenceId, now: Time) -> bool {
        let sequence = &self.sequences[&id];
        let (budget, urgency) = (self.config.max_step_tokens, self.urgency(sequence, now));
        let open = self.active.iter().map(|id| &self.sequences[id]);
        let before = open.filter(|other| self.urgency(other, now) <= urgency);
        let num_before: usize = before.map(|other| self.tokens_to_compute(other)).sum();
        num_before < budget || self.tokens_to_compute(sequence) <= budget / 2
    }

    fn most_urgent(&self, which: impl Fn(&Sequence) -> bool, now: Time) -> Option<SequenceId> {
        let line = self.line.iter().map(|id| &self.sequences[id]).filter(|s| which(s));
        let by_urgency = line.map(|s| (self.urgency(s, now), s.id));
        by_urgency.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, id)| id)
    }

    /// Tokens to compute minus ageing: the smallest goes first. Age counts as it does for rank: from the acceptance of the request,
    /// moved by its priority.
    pub(crate) fn urgency(&self, sequence: &Sequence, now: Time) -> f64 {
        let age_s = (now.as_micros() as f64 - sequence.rank.us as f64) / 1e6;
        self.tokens_to_compute(sequence) as f64 - age_s * self.config.ageing_tokens_per_s
    }

    /// Tokens that are neither computed nor, before the sequence has blocks, in the prefix cache.
    pub(crate) fn tokens_to_compute(&self, sequence: &Sequence) -> usize {
        let done = match &sequence.stage {
            Stage::Prefilling { computed, .. } => *computed,
            _ => self.num_hits(sequence) * self.config.block_size,
        };
        sequence.tokens.len() - done
    }
}
