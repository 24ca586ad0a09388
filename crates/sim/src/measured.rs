//! What real workers' steps were measured to take, in place of a roofline.

use baton_scheduler::{StepCost, StepPlan};

use crate::random::Random;

/// What every worker's steps were measured to take.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Of each worker, prefill workers first; when there are more workers than entries they go around.
    pub workers: Vec<MeasuredSteps>,
}

/// One worker's steps.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredSteps {
    /// What its scheduler expects of a step when it cuts chunks.
    pub planned: StepCost,
    /// What steps take by kind, the one with the fewest prompt tokens first; at least one.
    pub kinds: Vec<MeasuredKind>,
}

/// Steps of one kind. One takes its cost, times a ratio that is drawn for each.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredKind {
    /// Steps with so many prompt tokens and more, up to where the next kind begins.
    pub from_prompt_tokens: usize,
    /// What one is expected to take.
    pub cost: StepCost,
    /// Shares of steps from 0 to 1, ascending, and how many times its cost these take at most; straight lines between them. Empty: all take their cost.
    pub ratios: Vec<(f64, f64)>,
}

/// A step is never longer or shorter by more than this, whatever was measured.
const LEAST_RATIO: f64 = 1e-3;
const MOST_RATIO: f64 = 1e3;

impl Measured {
    pub(crate) fn worker(&self, worker: usize) -> Option<&MeasuredSteps> {
        self.workers.get(worker.checked_rem(self.workers.len())?)
    }
}

impl MeasuredSteps {
    /// The kind of a plan's step. A row of one token costs what a decoding one does, whatever it belongs to.
    pub(crate) fn kind(&self, plan: &StepPlan) -> Option<&MeasuredKind> {
        let prompts = plan.rows.iter().map(|row| row.tokens.len()).filter(|tokens| *tokens > 1);
        let prompt_tokens: usize = prompts.sum();
        let reached = self.kinds.iter().rev().find(|kind| kind.from_prompt_tokens <= prompt_tokens);
        reached.or(self.kinds.first())
    }
}

impl MeasuredKind {
    /// How many times its cost a step takes.
    pub(crate) fn draw(&self, random: &mut Random) -> f64 {
        let unit = random.next() as f64 / u64::MAX as f64;
        self.ratio(unit).clamp(LEAST_RATIO, MOST_RATIO)
    }

    /// How many times its cost a share of the steps takes at most.
    fn ratio(&self, share: f64) -> f64 {
        let above = self.ratios.partition_point(|(at, _)| *at < share);
        match (above.checked_sub(1).and_then(|below| self.ratios.get(below)), self.ratios.get(above)) {
            (Some((from, low)), Some((to, high))) => low + (high - low) * (share - from) / (to - from),
            (Some((_, ratio)), None) | (None, Some((_, ratio))) => *ratio,
            (None, None) => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_scheduler::SequenceId;

    use super::*;

    const COST: StepCost = StepCost { fixed_s: 1.0, per_token_s: 0.0, per_context_token_s: 0.0 };

    fn kind(from_prompt_tokens: usize, ratios: &[(f64, f64)]) -> MeasuredKind {
        MeasuredKind { from_prompt_tokens, cost: COST, ratios: ratios.to_vec() }
    }

    #[test]
    fn ratios_have_the_quantiles_that_were_measured() {
        let kind = kind(0, &[(0.0, 0.8), (0.5, 1.0), (0.9, 1.1), (0.99, 1.4), (1.0, 3.0)]);
        let mut random = Random::new(1);
        let mut drawn: Vec<f64> = (0..100_000).map(|_| kind.draw(&mut random)).collect();
        drawn.sort_unstable_by(f64::total_cmp);
        for (at, ratio) in
            [(0, 0.8), (25_000, 0.9), (50_000, 1.0), (90_000, 1.1), (99_000, 1.4), (99_500, 2.2)]
        {
            assert!((drawn[at] / ratio - 1.0).abs() < 0.03, "{at}: {}", drawn[at]);
        }
        assert_eq!(kind.ratio(0.9), 1.1);
        let none = self::kind(0, &[]);
        assert!((0..100).all(|_| none.draw(&mut random) == 1.0));
        assert_eq!(self::kind(0, &[(0.5, 1e9)]).draw(&mut random), MOST_RATIO);
    }

    #[test]
    fn a_step_is_of_the_last_kind_whose_tokens_it_reaches() {
        let steps = MeasuredSteps { planned: COST, kinds: vec![kind(1, &[]), kind(64, &[])] };
        let of = |rows: &[usize]| {
            let mut plan = StepPlan::default();
            for (id, num_tokens) in rows.iter().enumerate() {
                plan.push(SequenceId(id as u64), 0, &vec![1; *num_tokens], &[0], &[]);
            }
            steps.kind(&plan).unwrap().from_prompt_tokens
        };
        assert_eq!([of(&[1, 16]), of(&[63, 1]), of(&[32, 32]), of(&[2_048])], [1, 1, 64, 64]);
        // None was seen that only decoded: the nearest.
        assert_eq!(of(&[1, 1]), 1);
    }
}
