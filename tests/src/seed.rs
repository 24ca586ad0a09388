//! Random numbers whose seed is printed.

use std::hash::{BuildHasher, RandomState};

/// SplitMix64 (Steele, Lea, Flood 2014).
pub struct Random {
    state: u64,
}

impl Random {
    /// From `BATON_SEED`, else a new seed; prints which.
    pub fn from_env(test: &str) -> Self {
        let seed = std::env::var("BATON_SEED")
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or_else(|| RandomState::new().hash_one(test));
        eprintln!("{test}: BATON_SEED={seed}");
        Self { state: seed }
    }

    /// From a seed that another one drew.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number in `range`, which must not be empty.
    pub fn within(&mut self, range: std::ops::Range<usize>) -> usize {
        range.start + (self.next_u64() % (range.end - range.start).max(1) as u64) as usize
    }

    /// A prompt of printable bytes' ids for `builtin:tiny`.
    pub fn tiny_prompt(&mut self, num_tokens: usize) -> Vec<u32> {
        (0..num_tokens).map(|_| self.within(0x20..0x7f) as u32).collect()
    }
}
