//! Rows in parts: how a long row joins short ones without stretching their steps.
//!
//! A step takes as long as all its rows together, so a sequence with a long context stretches every gap of those beside it, from its first token on, and one that
//! wants few tokens does nothing else. So the first tokens of such a newcomer are computed a few layers a step: its own gaps are
//! longer, for a bounded number of tokens, and those of others grow by [`crate::SchedulerConfig::max_step_growth`] at most.

use std::ops::Range;

use crate::cost::{StepCost, StepLoad};
use crate::plan::{RowPart, SequenceId};
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, Stage};

/// Tokens of a newcomer that may be computed in parts.
const EASED_TOKENS: usize = 16;
/// Steps that a token may take.
const MAX_PARTS: usize = 8;
/// Newcomers that take turns. With more of them, long rows are what steps are made of.
const MAX_IN_TURN: usize = 2;

/// A newcomer's row, before it is settled how much of it a step computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Newcomer {
    id: SequenceId,
    position: usize,
    /// Of the row, by earlier steps.
    layers_done: usize,
    /// Tokens it may still get in parts.
    eased_left: usize,
}

impl Newcomer {
    pub(crate) const fn position(&self) -> usize {
        self.position
    }
}

impl Sequence {
    /// Its first token, which is drawn and about to be added, and those after it may be computed in parts.
    pub(crate) fn ease_in(&mut self, is_wanted: bool) {
        self.eased_until = if is_wanted { self.tokens.len() + 1 + EASED_TOKENS } else { 0 };
    }

    /// Its next row, if that may be computed in parts.
    pub(crate) fn as_newcomer(&self) -> Option<Newcomer> {
        let Stage::Running { layers_done, .. } = self.stage else { return None };
        let eased_left = self.eased_until.saturating_sub(self.tokens.len());
        (eased_left > 0).then(|| Newcomer {
            id: self.id,
            position: self.tokens.len() - 1,
            layers_done,
            eased_left,
        })
    }
}

impl Scheduler {
    /// Adds the rows of newcomers to a step of `load`, all but one that is to be its last row: that one and its layers are returned. Of those that
    /// would stretch the step too far only one has its turn.
    pub(crate) fn plan_newcomers(&mut self, load: &mut StepLoad) -> Option<(Newcomer, Range<usize>)> {
        let mut newcomers = std::mem::take(&mut self.newcomers);
        let (cost, beside) = (self.config.step_cost, *load);
        let (growth, num_layers) = (self.config.max_step_growth, self.config.num_layers);
        let within = |newcomer: &Newcomer| {
            let cost = cost.as_ref().filter(|_| !beside.is_empty())?;
            layers_within(cost, &beside, newcomer.position, (growth, num_layers))
        };
        let num_long = newcomers.iter().filter(|newcomer| within(newcomer).is_some()).count();
        let takes_turns = num_long <= MAX_IN_TURN;
        let is_long = |newcomer: &Newcomer| takes_turns && within(newcomer).is_some();
        // A row that was begun is ended first; else whoever had the fewest turns goes on, by rank if that is several.
        let in_turn = newcomers.iter().find(|newcomer| newcomer.layers_done > 0).copied().or_else(|| {
            newcomers
                .iter()
                .filter(|newcomer| is_long(newcomer))
                .rev()
                .max_by_key(|it| it.eased_left)
                .copied()
        });
        for newcomer in newcomers.drain(..) {
            let has_turn = in_turn.is_some_and(|last| last.id == newcomer.id);
            if !has_turn && !is_long(&newcomer) {
                self.plan_decode_row(newcomer.id, load);
            }
        }
        self.newcomers = newcomers;
        in_turn.map(|last| {
            let num = within(&last).filter(|_| takes_turns).unwrap_or(num_layers);
            (last, last.layers_done..num_layers.min(last.layers_done + num))
        })
    }

    /// Appends what was left out by [`Scheduler::plan_newcomers`]; nothing may follow.
    pub(crate) fn plan_part(&mut self, newcomer: &Newcomer, layers: Range<usize>) {
        let Some(sequence) = self.sequences.get(&newcomer.id) else { return };
        let (Some(table), Some(&token)) = (sequence.table(), sequence.tokens.last()) else { return };
        let sampling = sequence.row_sampling(sequence.sequence);
        let part = RowPart { layers, num_layers: self.config.num_layers };
        self.plan.push_part((newcomer.id, newcomer.position), token, table.ids(), part, sampling);
    }

    /// A part was computed. The engine keeps one row: another one, whose sequence had no room for its token since, begins anew.
    pub(crate) fn apply_part(&mut self, id: SequenceId, part: &RowPart) {
        let begun = if part.is_last() { None } else { Some(id) };
        if let Some(other) = std::mem::replace(&mut self.begun, begun).filter(|&other| other != id)
            && let Some(Sequence { stage: Stage::Running { layers_done, .. }, .. }) =
                self.sequences.get_mut(&other)
        {
            *layers_done = 0;
        }
        if let Some(sequence) = self.sequences.get_mut(&id)
            && let Stage::Running { layers_done, .. } = &mut sequence.stage
        {
            *layers_done = if part.is_last() { 0 } else { part.layers.end };
        }
    }
}

/// Layers of a row at `position` whose context makes a step of `beside` at most `growth` of itself longer, the same number in all steps but the last; `None`
/// if that is all of them.
fn layers_within(
    cost: &StepCost,
    beside: &StepLoad,
    position: usize,
    (growth, num_layers): (f64, usize),
) -> Option<usize> {
    // What every row costs is no reason: only a context can be longer than those of others.
    let context_s = cost.per_context_token_s * (position + 1) as f64;
    let most = num_layers as f64 * growth * cost.seconds(beside) / context_s;
    if most.is_nan() || most >= num_layers as f64 {
        return None;
    }
    let parts = num_layers.div_ceil((most as usize).max(num_layers.div_ceil(MAX_PARTS)));
    Some(num_layers.div_ceil(parts)).filter(|&num| num < num_layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_alike_and_as_many_as_the_growth_needs() {
        let cost = StepCost { fixed_s: 4e-3, per_token_s: 0.25e-3, per_context_token_s: 2e-6 };
        let mut beside = StepLoad::default();
        (0..8).for_each(|_| beside.add(249, 1));
        // 4 + 2 + 4 ms, and 3 ms for the context.
        let layers = |growth, num_layers| layers_within(&cost, &beside, 1_499, (growth, num_layers));
        assert_eq!(layers(0.301, 30), None);
        assert_eq!(layers(0.299, 30), Some(15));
        assert_eq!(layers(0.1, 30), Some(10));
        assert_eq!(layers(0.099, 30), Some(8), "8, 8, 8 and 6");
        assert_eq!(layers(0.001, 30), Some(4), "eight steps at most");
        assert_eq!((layers(0.001, 3), layers(0.001, 1)), (Some(1), None));
        assert_eq!(layers(0.0, 30), Some(4));
        assert_eq!(layers(f64::NAN, 30), None);
        // A row of little context is as any other.
        assert_eq!(layers_within(&cost, &beside, 20, (0.01, 30)), None);
    }
}
