//! Percentiles of everything that was measured: exact, from all samples.

use serde::Serialize;

/// Samples of one quantity, in milliseconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Samples(Vec<f64>);

impl Samples {
    pub(super) fn push(&mut self, sample_ms: f64) {
        self.0.push(sample_ms);
    }

    pub(super) fn extend(&mut self, samples_ms: impl IntoIterator<Item = f64>) {
        self.0.extend(samples_ms);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// For each share, 0 to 1, the nearest-rank quantile; nothing without samples.
    pub(super) fn shares(&self, shares: &[f64]) -> Vec<(f64, f64)> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let quantile = |share: &f64| {
            let rank = (share * sorted.len() as f64).ceil().max(1.0) as usize;
            sorted.get(rank - 1).map(|sample| (*share, *sample))
        };
        shares.iter().filter_map(quantile).collect()
    }

    /// `None` without samples.
    pub(super) fn summary(&self) -> Option<Summary> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let max = *sorted.last()?;
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        let p = |percent| nearest_rank(&sorted, percent).unwrap_or(max);
        Some(Summary { p50: p(50), p90: p(90), p99: p(99), max, mean, count: sorted.len() as u64 })
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<T: IntoIterator<Item = f64>>(samples_ms: T) -> Self {
        Self(samples_ms.into_iter().collect())
    }
}

/// The nearest-rank percentile: the smallest sample such that at least `percent` of a hundred are not above it.
fn nearest_rank(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// What is reported of one quantity; milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Summary {
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
    pub(super) mean: f64,
    /// How many samples.
    pub(super) count: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(samples: &[f64]) -> Summary {
        let mut all = Samples::default();
        all.extend(samples.iter().copied());
        all.summary().unwrap()
    }

    #[test]
    fn percentiles_are_the_nearest_rank_in_any_order() {
        let mut samples: Vec<f64> = (1..=100).map(f64::from).collect();
        samples.reverse();
        let summary = summary(&samples);
        assert_eq!((summary.p50, summary.p90, summary.p99, summary.max), (50.0, 90.0, 99.0, 100.0));
        assert_eq!((summary.mean, summary.count), (50.5, 100));
    }

    #[test]
    fn few_samples_have_percentiles_too() {
        let one = summary(&[3.0]);
        assert_eq!((one.p50, one.p99, one.max), (3.0, 3.0, 3.0));
        let three = summary(&[1.0, 2.0, 9.0]);
        assert_eq!((three.p50, three.p90, three.p99), (2.0, 9.0, 9.0));
        assert_eq!(Samples::default().summary(), None);
        assert_eq!(Samples::default().shares(&[0.5]), []);
        let ten: Samples = (1..=10).rev().map(f64::from).collect();
        assert_eq!(ten.shares(&[0.0, 0.5, 0.91, 1.0]), [(0.0, 1.0), (0.5, 5.0), (0.91, 10.0), (1.0, 10.0)]);
    }
}
