//! Numbers that look random and are the same for the same seed, in as many sequences as one likes.

/// SplitMix64 (Steele, Lea and Flood, 2014): one 64-bit state, one output a step.
#[derive(Debug, Clone)]
pub struct Random(u64);

const CENTURY_S: f64 = 3.2e9;

impl Random {
    /// One of `2^64` independent-looking sequences of a seed.
    pub fn new(seed: u64, sequence: u64) -> Self {
        let mut random = Self(seed ^ 0x6261_746f_6e00_0000);
        let base = random.next_u64();
        Self(base ^ sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0.0..1.0`.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `low..=high`.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        let span = u64::from(high.saturating_sub(low)) + 1;
        // The bias of a remainder over 2^64 is far below anything a load test could notice.
        low + (self.next_u64() % span) as u32
    }

    /// Time to the next arrival of a Poisson process of `rate` arrivals a second, in seconds; at most a century, so that it
    /// fits every type of time.
    pub fn exponential(&mut self, rate: f64) -> f64 {
        (-(1.0 - self.unit()).ln() / rate).min(CENTURY_S)
    }

    /// Log-normal with this mean; `sigma` is the standard deviation of its logarithm. By Box and Muller.
    pub fn log_normal(&mut self, mean: f64, sigma: f64) -> f64 {
        let (radius, angle) = ((-2.0 * (1.0 - self.unit()).ln()).sqrt(), std::f64::consts::TAU * self.unit());
        let normal = radius * angle.cos();
        mean * (sigma * normal - sigma * sigma / 2.0).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_are_splitmix64s() {
        // Reference values for state 0.
        let mut random = Random(0);
        assert_eq!(random.next_u64(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(random.next_u64(), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn equal_seeds_repeat_and_sequences_differ() {
        let draw = |seed, sequence| {
            let mut random = Random::new(seed, sequence);
            (0..8).map(|_| random.next_u64()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
    }

    #[test]
    fn gaps_average_to_the_rate_and_ranges_reach_their_ends() {
        let mut random = Random::new(7, 0);
        let mean = (0..20_000).map(|_| random.exponential(4.0)).sum::<f64>() / 20_000.0;
        assert!((mean - 0.25).abs() < 0.01, "{mean}");
        let drawn: Vec<u32> = (0..1000).map(|_| random.between(3, 6)).collect();
        assert_eq!((drawn.iter().min(), drawn.iter().max()), (Some(&3), Some(&6)));
        assert_eq!(random.between(5, 5), 5);
        assert!(random.exponential(1e-300) <= CENTURY_S);
        let drawn: Vec<f64> = (0..40_000).map(|_| random.log_normal(300.0, 1.0)).collect();
        let mean = drawn.iter().sum::<f64>() / 40_000.0;
        let above = drawn.iter().filter(|value| **value > 300.0 * (-0.5_f64).exp()).count();
        assert!((mean - 300.0).abs() < 15.0, "{mean}");
        assert!((19_500..20_500).contains(&above), "{above} of 40,000 are above the median");
    }
}
