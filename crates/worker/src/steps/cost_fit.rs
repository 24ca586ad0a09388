//! What a step takes, learnt from the steps that ran.

use std::array;

use baton_scheduler::{StepCost, StepPlan};

use super::rates::DecayingRatio;

/// What a step still weighs after one more: about the last hundred count.
const KEEP: f64 = 0.99;

/// What a step still weighs among the last ones after one more: about ten count, as many as a long prompt has.
const KEEP_RECENT: f64 = 0.9;

/// Steps before the first answer, and between two.
const EVERY: u32 = 16;

/// Weight of "no cost at all", beside the steps seen: decides where they do not tell apart what costs. A step's own cost weighs most: of
/// chunks that are all of one length, the time is their tokens'.
const RIDGE: Features = [1e-3, 1e-6, 1e-6];

/// 1, new tokens, context: see [`StepCost`].
pub(super) type Features = [f64; 3];

/// A running least-squares fit of [`StepCost`].
#[derive(Debug, Default)]
pub(super) struct CostFit {
    squares: LeastSquares,
    num_steps: u32,
    /// The last answer, and how far it was off since.
    last: Option<StepCost>,
    off: DecayingRatio,
    /// Features and seconds of the last ten steps or so, summed.
    recent: Features,
    recent_seconds: f64,
}

impl CostFit {
    /// A step was computed to its end. Every [`EVERY`] steps says what was learnt.
    pub(super) fn observe(&mut self, plan: &StepPlan, seconds: f64) -> Option<StepCost> {
        let features = features(plan);
        if let Some(last) = self.last
            && seconds > 0.0
        {
            self.off.add((expected(&last, &features) - seconds).abs() / seconds, 1.0);
        }
        for (sum, feature) in self.recent.iter_mut().zip(features) {
            *sum = KEEP_RECENT * *sum + feature;
        }
        self.recent_seconds = KEEP_RECENT * self.recent_seconds + seconds;
        self.squares.fade(KEEP);
        self.squares.add(&features, seconds, 1.0);
        self.num_steps = self.num_steps.wrapping_add(1);
        if !self.num_steps.is_multiple_of(EVERY) {
            return None;
        }
        self.last = Some(self.squares.fit());
        self.last
    }

    /// Mean of |expected - measured| / measured over recent steps; 0 before any was expected.
    pub(super) fn residual(&self) -> f64 {
        self.off.get()
    }

    /// By what factor the last steps took longer than the fit expects of them, long ones weighing more; 1 before there is a fit. What else
    /// uses this machine's memory and cores changes from one step to the next, and the fit remembers a hundred.
    pub(super) fn level(&self) -> f64 {
        let expected = self.last.map_or(0.0, |last| expected(&last, &self.recent));
        if expected > 0.0 { self.recent_seconds / expected } else { 1.0 }
    }
}

/// Seconds that a cost expects of a step.
pub(super) const fn expected(cost: &StepCost, [one, tokens, context]: &Features) -> f64 {
    cost.fixed_s * *one + cost.per_token_s * *tokens + cost.per_context_token_s * *context
}

/// The normal equations of a [`StepCost`].
#[derive(Debug, Default)]
pub(super) struct LeastSquares {
    /// Weighted sums over steps of the products of features, and of features and seconds.
    products: [Features; 3],
    seconds: Features,
}

impl LeastSquares {
    /// All steps so far weigh `keep` times as much.
    pub(super) fn fade(&mut self, keep: f64) {
        self.products.as_flattened_mut().iter_mut().chain(&mut self.seconds).for_each(|sum| *sum *= keep);
    }

    /// Another step.
    pub(super) fn add(&mut self, features: &Features, seconds: f64, weight: f64) {
        for (row, one) in features.iter().enumerate() {
            for (column, other) in features.iter().enumerate() {
                self.products[row][column] += weight * one * other;
            }
            self.seconds[row] += weight * one * seconds;
        }
    }

    /// No part of a cost is below zero: a part that would be is left out, and the others are fitted without it.
    pub(super) fn fit(&self) -> StepCost {
        let mut used = [true; 3];
        loop {
            let cost = self.solve(used);
            let least = (0..3).min_by(|&a, &b| cost[a].total_cmp(&cost[b])).filter(|&at| cost[at] < 0.0);
            match least {
                Some(at) => used[at] = false,
                None => {
                    let [fixed_s, per_token_s, per_context_token_s] = cost;
                    return StepCost { fixed_s, per_token_s, per_context_token_s };
                }
            }
        }
    }

    /// Gaussian elimination on the normal equations; the matrix is symmetric and, with the ridge, positive definite, so no pivot is
    /// looked for.
    fn solve(&self, used: [bool; 3]) -> Features {
        let is_used = |at: usize| used[at] && self.products[at][at] > 0.0;
        let cell = |row: usize, column: usize| match (is_used(row) && is_used(column), row == column) {
            (true, false) => self.products[row][column],
            (true, true) => self.products[row][row] * (1.0 + RIDGE[row]),
            (false, diagonal) => f64::from(u8::from(diagonal)),
        };
        let mut a: [Features; 3] = array::from_fn(|row| array::from_fn(|column| cell(row, column)));
        let mut b: Features = array::from_fn(|row| if is_used(row) { self.seconds[row] } else { 0.0 });
        for at in 0..3 {
            let pivot = a[at];
            for below in at + 1..3 {
                let factor = a[below][at] / pivot[at];
                for (cell, above) in a[below].iter_mut().zip(pivot).skip(at) {
                    *cell -= factor * above;
                }
                b[below] -= factor * b[at];
            }
        }
        let mut cost = [0.0; 3];
        for at in (0..3).rev() {
            let known: f64 = (at + 1..3).map(|column| a[at][column] * cost[column]).sum();
            cost[at] = (b[at] - known) / a[at][at];
        }
        cost
    }
}

/// The features of a plan's step.
pub(super) fn features(plan: &StepPlan) -> Features {
    let (tokens, context) = plan.load();
    [1.0, tokens, context]
}

#[cfg(test)]
mod tests {
    use baton_scheduler::SequenceId;

    use super::*;

    const TRUTH: StepCost = StepCost { fixed_s: 2e-3, per_token_s: 7e-4, per_context_token_s: 3e-8 };

    fn plan(rows: &[(usize, usize)]) -> StepPlan {
        let mut plan = StepPlan::default();
        for (id, &(position, num_tokens)) in rows.iter().enumerate() {
            plan.push(SequenceId(id as u64), position, &vec![1; num_tokens], &[0], &[]);
        }
        plan
    }

    fn seconds(plan: &StepPlan, cost: &StepCost) -> f64 {
        expected(cost, &features(plan))
    }

    #[test]
    fn a_fit_finds_what_steps_cost_and_follows_a_change() {
        let mut fit = CostFit::default();
        let mut last = None;
        let mut run = |cost: &StepCost, num: usize| {
            for n in 0..num {
                let plan = plan(&[(n * 97 % 5000, 1), (n * 512 % 20_000, 1 + n * 37 % 512)]);
                // Up to 5 % more or less, as clocks and caches have it.
                let noise = 0.95 + 0.1 * (n * 7 % 11) as f64 / 10.0;
                last = fit.observe(&plan, noise * seconds(&plan, cost)).or(last);
            }
            last.unwrap()
        };
        let near = |found: f64, truth: f64| (found / truth - 1.0).abs() < 0.15;
        let cost = run(&TRUTH, 200);
        assert!(near(cost.per_token_s, TRUTH.per_token_s), "{cost:?}");
        assert!(near(cost.per_context_token_s, TRUTH.per_context_token_s), "{cost:?}");
        let slow = StepCost { per_token_s: 2.0 * TRUTH.per_token_s, ..TRUTH };
        let cost = run(&slow, 800);
        assert!(near(cost.per_token_s, slow.per_token_s), "{cost:?}");
    }

    #[test]
    fn of_chunks_that_are_all_of_one_length_the_time_is_their_tokens() {
        let mut fit = CostFit::default();
        let chunks: Vec<StepPlan> = (0..4).map(|nth| plan(&[(nth * 512, 512)])).collect();
        let steps = (0..64).map(|n| &chunks[n % 4]);
        let cost = steps.filter_map(|chunk| fit.observe(chunk, seconds(chunk, &TRUTH))).last().unwrap();
        assert!((cost.per_token_s / TRUTH.per_token_s - 1.0).abs() < 0.02, "{cost:?}");
        assert!((cost.per_context_token_s / TRUTH.per_context_token_s - 1.0).abs() < 0.02, "{cost:?}");
    }

    #[test]
    fn the_residual_is_the_mean_of_what_the_fit_was_off() {
        let mut fit = CostFit::default();
        let same = plan(&[(100, 1), (300, 1)]);
        for _ in 0..EVERY {
            fit.observe(&same, 0.01);
        }
        assert_eq!(fit.residual(), 0.0, "nothing was expected yet");
        fit.observe(&same, 0.01);
        assert!(fit.residual() < 0.02, "{}", fit.residual());
        // A tenth off at every second step.
        for n in 0..400 {
            fit.observe(&same, if n % 2 == 0 { 0.009 } else { 0.011 });
        }
        assert!((fit.residual() - 0.1).abs() < 0.02, "{}", fit.residual());
    }

    #[test]
    fn the_level_follows_at_once_when_steps_begin_to_take_longer() {
        let mut fit = CostFit::default();
        let chunks: Vec<StepPlan> = (0..4).map(|nth| plan(&[(nth * 512, 512)])).collect();
        assert_eq!(fit.level(), 1.0);
        for n in 0..200 {
            fit.observe(&chunks[n % 4], seconds(&chunks[n % 4], &TRUTH));
        }
        assert!((fit.level() - 1.0).abs() < 0.03, "{}", fit.level());
        // A prompt of eight chunks, a tenth slower, and short steps between them.
        let short = plan(&[(0, 16)]);
        for n in 0..8 {
            fit.observe(&chunks[n % 4], 1.1 * seconds(&chunks[n % 4], &TRUTH));
            fit.observe(&short, 1.1 * seconds(&short, &TRUTH));
        }
        let cost = fit.squares.fit();
        let of = |cost: &StepCost| chunks.iter().map(|chunk| seconds(chunk, cost)).sum::<f64>();
        let (fitted, now) = (of(&cost) / of(&TRUTH), fit.level() * of(&fit.last.unwrap()) / of(&TRUTH));
        assert!(fitted < 1.03, "the fit follows slowly: {fitted}");
        assert!((1.05..1.11).contains(&now), "{now}");
        // The level is that of the fit it goes with, from the first one on.
        for n in 0..400 {
            fit.observe(&chunks[n % 4], 1.1 * seconds(&chunks[n % 4], &TRUTH));
            let now = fit.level() * of(&fit.last.unwrap()) / of(&TRUTH);
            assert!((1.05..1.11).contains(&now), "{n}: {now}");
        }
    }

    #[test]
    fn steps_that_are_all_alike_are_predicted_and_nothing_is_below_zero() {
        let mut fit = CostFit::default();
        let same = plan(&[(100, 1), (300, 1)]);
        let cost = (0..64).filter_map(|_| fit.observe(&same, 0.01)).last().unwrap();
        assert!((seconds(&same, &cost) - 0.01).abs() < 1e-4, "{cost:?}");
        // A short step that took long, a long one that was quick: a straight fit would go below zero.
        let mut fit = CostFit::default();
        let (short, long) = (plan(&[(0, 1)]), plan(&[(0, 512)]));
        let steps = (0..32).map(|n| if n % 2 == 0 { (&short, 0.05) } else { (&long, 0.01) });
        let cost = steps.filter_map(|(plan, took)| fit.observe(plan, took)).last().unwrap();
        assert!(
            cost.fixed_s >= 0.0 && cost.per_token_s >= 0.0 && cost.per_context_token_s >= 0.0,
            "{cost:?}"
        );
    }
}
