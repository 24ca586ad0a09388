//! Many durations in little memory.

use std::time::Duration;

/// Values below this have a bucket each; above, as many buckets for each doubling, so a quantile is at most 1/64 too large.
const FINE: u64 = 64;

/// A histogram of durations with microseconds as its unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Durations {
    buckets: Vec<u64>,
    num: u64,
    max: Duration,
}

fn bucket(us: u64) -> usize {
    if us < FINE {
        return us as usize;
    }
    let shift = u64::from(us.ilog2()) - 6;
    (FINE + shift * FINE + (us >> shift) - FINE) as usize
}

/// The largest value of a bucket, in microseconds.
const fn top(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < FINE {
        return bucket;
    }
    let shift = (bucket - FINE) / FINE;
    ((FINE + (bucket - FINE) % FINE + 1) << shift) - 1
}

impl Durations {
    pub(crate) fn record(&mut self, value: Duration) {
        let bucket = bucket(u64::try_from(value.as_micros()).unwrap_or(u64::MAX));
        if self.buckets.len() <= bucket {
            self.buckets.resize(bucket + 1, 0);
        }
        self.buckets[bucket] += 1;
        self.num += 1;
        self.max = self.max.max(value);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        if self.buckets.len() < other.buckets.len() {
            self.buckets.resize(other.buckets.len(), 0);
        }
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.num += other.num;
        self.max = self.max.max(other.max);
    }

    /// How many were recorded.
    pub const fn num(&self) -> u64 {
        self.num
    }

    /// The longest one.
    pub const fn max(&self) -> Duration {
        self.max
    }

    /// The duration that a share of `q` (0 to 1) of all recorded ones does not exceed, at most 1/64 too large; zero when there are none.
    pub fn quantile(&self, q: f64) -> Duration {
        let rank = (q * self.num as f64).ceil().max(1.0) as u64;
        let mut below = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            below += count;
            if below >= rank {
                return Duration::from_micros(top(bucket)).min(self.max);
            }
        }
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_and_are_fine_enough() {
        let mut last = 0;
        for us in 0..200_000 {
            let nth = bucket(us);
            assert!(nth == last || nth == last + 1, "{us}");
            assert!(top(nth) >= us && (top(nth) - us) * 64 <= us.max(64), "{us}: {}", top(nth));
            last = nth;
        }
    }

    #[test]
    fn quantiles_of_a_thousand() {
        let mut durations = Durations::default();
        assert_eq!(durations.quantile(0.5), Duration::ZERO);
        for ms in 1..=1_000 {
            durations.record(Duration::from_millis(ms));
        }
        for (q, ms) in [(0.5, 500.0), (0.99, 990.0)] {
            let off = durations.quantile(q).as_secs_f64() * 1e3 / ms;
            assert!((1.0..1.0 + 1.0 / 64.0).contains(&off), "{q}: {off}");
        }
        assert_eq!((durations.quantile(1.0), durations.num()), (Duration::from_secs(1), 1_000));
        let mut sum = durations.clone();
        sum.add(&durations);
        assert_eq!((sum.num(), sum.quantile(0.5)), (2_000, durations.quantile(0.5)));
    }
}
