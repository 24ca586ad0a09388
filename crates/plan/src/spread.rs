//! Many weighted times in little memory.

/// Buckets of a factor of e: a value is off by one in two thousand at most.
const FINE: f64 = 1_000.0;
/// What is shorter than a microsecond counts as one, in seconds; and what is longer than about 30 years as that.
const LEAST_S: f64 = 1e-6;
const NUM_BUCKETS: usize = 35_000;

/// A histogram of seconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spread {
    buckets: Vec<f64>,
    all: f64,
}

impl Spread {
    pub(crate) fn add(&mut self, seconds: f64, weight: f64) {
        let bucket = ((seconds / LEAST_S).ln() * FINE).max(0.0) as usize;
        let bucket = bucket.min(NUM_BUCKETS);
        if self.buckets.len() <= bucket {
            self.buckets.resize(bucket + 1, 0.0);
        }
        self.buckets[bucket] += weight;
        self.all += weight;
    }

    /// The value that a share of `q` (0 to 1) of the weight does not exceed; infinite when there is none.
    pub(crate) fn quantile(&self, q: f64) -> f64 {
        let mut below = 0.0;
        let found = self.buckets.iter().position(|weight| {
            below += weight;
            *weight > 0.0 && below >= q * self.all
        });
        found.map_or(f64::INFINITY, |bucket| LEAST_S * ((bucket as f64 + 0.5) / FINE).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_weight_and_near() {
        let mut spread = Spread::default();
        assert_eq!(spread.quantile(0.5), f64::INFINITY);
        spread.add(5e-3, 98.0);
        spread.add(20e-3, 1.5);
        spread.add(1.0, 0.5);
        for (q, expected) in [(0.0, 5e-3), (0.5, 5e-3), (0.98, 5e-3), (0.99, 20e-3), (1.0, 1.0)] {
            assert!((spread.quantile(q) / expected - 1.0).abs() < 6e-4, "{q}: {}", spread.quantile(q));
        }
        spread.add(0.0, 1e3);
        spread.add(f64::INFINITY, 1e-9);
        assert!(spread.quantile(0.5) < 1.1e-6);
    }
}
