//! Decode workers: how many sequences are there at once, and what that makes of the gaps between tokens.

use crate::PlanInput;
use crate::steps::{MAX_NUM_SEQS, Steps};

/// States below this probability, beside the most probable one, are left out.
const NEGLIGIBLE: f64 = 1e-12;
/// Share of the time in which a worker may be full.
const FULL: f64 = 0.01;

/// Values with weights; the weights need not add up to 1.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mixture(Vec<(f64, f64)>);

impl Mixture {
    pub(crate) fn add(&mut self, value: f64, weight: f64) {
        self.0.push((value, weight));
    }

    /// All of another one, which weigh `weight` together.
    pub(crate) fn add_all(&mut self, other: &Self, weight: f64) {
        let sum: f64 = other.0.iter().map(|(_, weight)| weight).sum();
        if sum > 0.0 {
            self.0.extend(other.0.iter().map(|(value, part)| (*value, part * weight / sum)));
        }
    }

    /// The values that shares of `q` (0 to 1) of the weight do not exceed.
    pub(crate) fn quantiles<const N: usize>(mut self, q: [f64; N]) -> [f64; N] {
        self.0.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let all: f64 = self.0.iter().map(|(_, weight)| weight).sum();
        q.map(|q| {
            let mut below = 0.0;
            let found = self.0.iter().find(|(_, weight)| {
                below += weight;
                below >= q * all
            });
            found.or(self.0.last()).map_or(f64::INFINITY, |(value, _)| *value)
        })
    }
}

/// A steady state.
#[derive(Clone, Debug)]
pub(crate) struct Batches {
    /// Mean sequences that decode on a worker.
    pub(crate) mean: f64,
    /// Seconds of a step, weighted by the tokens that come of it.
    pub(crate) steps: Mixture,
}

/// Sequences that one worker can decode at once: by memory, and by its configuration.
pub(crate) fn most_sequences(input: &PlanInput) -> u32 {
    let tokens = f64::from(input.input_tokens) + f64::from(input.output_tokens);
    ((input.kv_tokens() / tokens) as u32).min(MAX_NUM_SEQS)
}

/// `y` workers that share the sequences evenly. `None`: they can't keep up, or are full too often.
///
/// `P(N)` is proportional to the product over `k = 1..N` of `rate (O - 1) T(max(1, k / y)) / k`.
pub(crate) fn batches(input: &PlanInput, steps: &Steps, num_workers: u32) -> Option<Batches> {
    let workers = f64::from(num_workers);
    let most = f64::from(most_sequences(input)) * workers;
    let offered = input.rate * (f64::from(input.output_tokens) - 1.0);
    let step_s = |n: f64| steps.decode((n / workers).max(1.0));
    // In logarithms, since products of hundreds of factors leave every range.
    let (mut log, mut logs) = (0.0, vec![0.0]);
    let (mut highest, mut n) = (0.0_f64, 1.0);
    while n <= most {
        log += (offered * step_s(n) / n).ln();
        logs.push(log);
        highest = highest.max(log);
        if log < highest + NEGLIGIBLE.ln() {
            break;
        }
        n += 1.0;
    }
    let weights: Vec<f64> = logs.iter().map(|log| (log - highest).exp()).collect();
    let all: f64 = weights.iter().sum();
    let is_cut = n > most;
    if is_cut && weights.last().copied().unwrap_or(1.0) / all > FULL / workers.max(1.0) {
        return None;
    }
    let mut batches = Batches { mean: 0.0, steps: Mixture::default() };
    for (n, weight) in weights.iter().enumerate().skip(1) {
        let n = n as f64;
        batches.mean += n * weight / all / workers;
        batches.steps.add(step_s(n), n * weight / step_s(n));
    }
    Some(batches)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::tests::input;

    #[test]
    fn the_mean_is_what_littles_law_says() {
        for (rate, num_workers) in [(5.0, 1), (40.0, 2), (100.0, 4)] {
            let input = PlanInput { rate, ..input() };
            let steps = Steps::new(&input);
            let batches = batches(&input, &steps, num_workers).unwrap();
            // The fixed point of N = R (O - 1) T(N / y), on the way from below.
            let mut mean = 1.0;
            for _ in 0..200 {
                mean = rate / f64::from(num_workers) * 127.0 * steps.decode(mean);
            }
            assert!((batches.mean / mean - 1.0).abs() < 0.03, "{} {mean}", batches.mean);
            let [p50, p99] = batches.steps.quantiles([0.5, 0.99]);
            assert!((p50 / steps.decode(mean) - 1.0).abs() < 0.02 && p99 > p50, "{p50} {p99}");
        }
    }

    /// Where every step takes the same, sequences come and go independently: Poisson.
    #[test]
    fn without_influence_of_the_batch_the_number_is_poissons() {
        let mut input = PlanInput { rate: 4.0, input_tokens: 1, output_tokens: 101, ..input() };
        input.model.shape.kv_token_bytes = 1;
        input.device.peak_flops_per_s = 1e20;
        let steps = Steps::new(&input);
        let batches = batches(&input, &steps, 1).unwrap();
        let expected = 4.0 * 100.0 * steps.decode(1.0);
        assert!((batches.mean / expected - 1.0).abs() < 1e-3, "{} {expected}", batches.mean);
    }

    #[test]
    fn a_worker_that_is_full_too_often_is_not_enough() {
        let input = PlanInput { rate: 10_000.0, ..input() };
        let steps = Steps::new(&input);
        assert!(batches(&input, &steps, 1).is_none());
        assert!(batches(&input, &steps, 200).is_some());
        assert_eq!(most_sequences(&input), 256);
        assert_eq!(most_sequences(&PlanInput { input_tokens: 84_000, output_tokens: 500, ..input }), 10);
    }

    #[test]
    fn a_mixture_has_the_quantiles_of_its_weights() {
        let mut rare = Mixture::default();
        rare.add(9.0, 1.0);
        rare.add(7.0, 1.0);
        let mut all = Mixture::default();
        all.add(1.0, 98.0);
        all.add_all(&rare, 2.0);
        assert_eq!(all.quantiles([0.5, 0.98, 0.985, 0.99, 0.995, 1.0]), [1.0, 1.0, 7.0, 7.0, 9.0, 9.0]);
        assert_eq!(Mixture::default().quantiles([0.5]), [f64::INFINITY]);
    }
}
