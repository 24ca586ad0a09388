//! How closely a run plays its workers: with blocks that have contents, or with time and blocks alone; by a roofline, or by costs that were
//! measured.

use std::time::Duration;

use baton_scheduler::StepCost;

use crate::frames::Cut;
use crate::random::Random;

/// Layers of the pseudo model, where blocks have contents.
const NUM_LAYERS: usize = 2;
/// Blocks of a frame where nothing is in them.
const EMPTY_FRAME_BLOCKS: usize = 16;
/// Where nothing is in them, blocks of a chunk are sent in so many parts while it is computed, as layer after layer is.
pub(crate) const SLICES: u32 = 8;

/// What real workers were measured to take, in place of a roofline.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Of each worker, prefill workers first, what its steps cost.
    pub costs: Vec<StepCost>,
    /// By how much steps of the same work differ.
    pub noise: Noise,
}

/// How long steps of the same work take beside their median: a few quantiles, straight lines between them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Noise {
    /// Nine in ten take at most so many times the median; at least 1. The default, 0, is no noise at all.
    pub p90: f64,
    /// Ninety-nine in a hundred; at least that of [`Noise::p90`].
    pub p99: f64,
    /// All; at least that of [`Noise::p99`].
    pub max: f64,
}

impl Noise {
    /// The factor that a share of `q` (0 to 1) of all steps does not exceed.
    fn quantile(&self, q: f64) -> f64 {
        let points = [
            (0.0, 1.0),
            (0.5, 1.0),
            (0.9, self.p90.max(1.0)),
            (0.99, self.p99.max(1.0)),
            (1.0, self.max.max(1.0)),
        ];
        let at = points.iter().position(|(share, _)| q <= *share).unwrap_or(points.len() - 1).max(1);
        let ((from, low), (to, high)) = (points[at - 1], points[at]);
        low + (high - low) * (q - from) / (to - from)
    }

    /// The mean of all factors: what a mean cost already contains.
    fn mean(&self) -> f64 {
        let [half, p90, p99, max] = [0.5, 0.9, 0.99, 1.0].map(|q| self.quantile(q));
        0.5 + 0.4 * (half + p90) / 2.0 + 0.09 * (p90 + p99) / 2.0 + 0.01 * (p99 + max) / 2.0
    }

    /// How many times its mean cost a step takes.
    pub(crate) fn draw(&self, random: &mut Random) -> f64 {
        let unit = random.next() as f64 / u64::MAX as f64;
        self.quantile(unit) / self.mean()
    }
}

/// What a run plays.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fidelity {
    /// Blocks are empty and tokens depend on nothing but their places, so that a run costs little time and memory. Who holds what, and
    /// when, is the same.
    pub(crate) empty: bool,
    pub(crate) measured: Option<Measured>,
}

impl Fidelity {
    /// Layers of the pseudo model.
    pub(crate) const fn num_layers(&self) -> usize {
        if self.empty { 0 } else { NUM_LAYERS }
    }

    /// Layers that a frame is one of.
    pub(crate) const fn wire_layers(&self) -> usize {
        if self.empty { 1 } else { NUM_LAYERS }
    }

    /// How a prompt's KV is sent.
    pub(crate) const fn cut(&self, prompt_tokens: usize, skip_tokens: usize, block_size: usize) -> Cut {
        let frame_blocks = if self.empty { EMPTY_FRAME_BLOCKS } else { 1 };
        let num_layers = self.wire_layers();
        Cut { prompt_tokens, skip_tokens, block_size, num_layers, frame_blocks, empty: self.empty }
    }

    /// What the steps of a worker cost, if that was measured.
    pub(crate) fn cost(&self, worker: usize) -> Option<StepCost> {
        let costs = &self.measured.as_ref()?.costs;
        costs.get(worker.checked_rem(costs.len())?).copied()
    }

    /// How long a step takes that is expected to take `expected`.
    pub(crate) fn step_time(&self, expected: Duration, random: &mut Random) -> Duration {
        match &self.measured {
            Some(measured) => expected.mul_f64(measured.noise.draw(random)),
            None => expected,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_keeps_the_mean_and_has_the_quantiles_that_were_measured() {
        let noise = Noise { p90: 1.1, p99: 1.4, max: 3.0 };
        let mut random = Random::new(1);
        let mut drawn: Vec<f64> = (0..100_000).map(|_| noise.draw(&mut random)).collect();
        drawn.sort_unstable_by(f64::total_cmp);
        let mean = drawn.iter().sum::<f64>() / 1e5;
        assert!((mean - 1.0).abs() < 0.005, "{mean}");
        for (at, factor) in [(90_000, 1.1), (99_000, 1.4)] {
            assert!((drawn[at] / drawn[50_000] / factor - 1.0).abs() < 0.02, "{at}: {}", drawn[at]);
        }
        let none = Noise::default();
        assert!((0..100).all(|_| none.draw(&mut random) == 1.0));
    }
}
