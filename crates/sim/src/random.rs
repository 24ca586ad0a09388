//! Random numbers by seed.

use std::ops::RangeInclusive;
use std::time::Duration;

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn between(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.next() % (range.end() - range.start() + 1)
    }

    pub(crate) fn index(&mut self, len: usize) -> usize {
        (self.next() % len.max(1) as u64) as usize
    }

    /// True `per_mille` times out of a thousand.
    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.next() % 1_000 < per_mille
    }

    pub(crate) fn micros(&mut self, range: RangeInclusive<u64>) -> Duration {
        Duration::from_nanos(self.between(range.start() * 1_000..=range.end() * 1_000))
    }

    pub(crate) fn millis(&mut self, range: RangeInclusive<u64>) -> Duration {
        self.micros(range.start() * 1_000..=range.end() * 1_000)
    }

    pub(crate) fn id(&mut self) -> [u8; 16] {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.next().to_le_bytes());
        id[8..].copy_from_slice(&self.next().to_le_bytes());
        id
    }
}
