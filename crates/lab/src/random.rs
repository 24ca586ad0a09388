//! Random numbers by seed, so that a demonstration is the same everywhere.

use std::ops::RangeInclusive;

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Each number of the range is as likely as any other.
    pub(crate) fn between(&mut self, range: RangeInclusive<usize>) -> usize {
        range.start() + (self.next() % (range.end() - range.start() + 1) as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        from.get((self.next() % from.len().max(1) as u64) as usize).copied()
    }

    /// The time to the next of events that come independently, `mean` apart on average: so that they arrive as a Poisson process.
    pub(crate) fn gap(&mut self, mean: f64) -> f64 {
        let uniform = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        -(1.0 - uniform).ln() * mean
    }

    /// `len` token ids that no demonstration uses as a stop token.
    pub(crate) fn tokens(&mut self, len: usize) -> Vec<u32> {
        (0..len).map(|_| 1 + (self.next() % 30_000) as u32).collect()
    }
}

/// The least of the values that a share `q` of them does not exceed; 0 of none.
pub(crate) fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let nth = (q * sorted.len() as f64).ceil() as usize;
    sorted.get(nth.max(1) - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_stay_in_their_ranges_and_follow_from_the_seed() {
        let (mut one, mut other) = (Random::new(3), Random::new(3));
        let draws: Vec<usize> = (0..1_000).map(|_| one.between(5..=9)).collect();
        assert!(draws.iter().all(|n| (5..=9).contains(n)) && (5..=9).all(|n| draws.contains(&n)));
        assert!(draws.iter().all(|n| *n == other.between(5..=9)));
        let mean = (0..10_000).map(|_| one.gap(2.0)).sum::<f64>() / 10_000.0;
        assert!((1.9..2.1).contains(&mean), "{mean}");
        assert!(one.tokens(1_000).iter().all(|token| *token > 0));
        assert_eq!(one.pick::<u8>(&[]), None);
    }

    #[test]
    fn quantiles_are_values_that_occur() {
        let values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|q| quantile(&values, q)), [1.0, 100.0, 198.0, 200.0]);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
