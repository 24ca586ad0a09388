//! Which (layer, block) pairs are verified, and up to which offset without a gap.

use std::collections::BTreeMap;
use std::ops::Range;

/// Gaps that damaged frames may leave at one time; more is a broken wire.
const MAX_GAPS: usize = 64;

pub(crate) struct Coverage {
    num_blocks: usize,
    bits: Vec<u64>,
    missing: usize,
    contiguous: u64,
    /// Verified ranges beyond the first gap, by start.
    islands: BTreeMap<u64, u64>,
}

/// How much of a frame was verified before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Covered {
    Nothing,
    Everything,
    Part,
}

/// More gaps than are kept.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooManyGaps;

impl Coverage {
    pub(crate) fn new(num_layers: usize, num_blocks: usize) -> Self {
        let missing = num_layers * num_blocks;
        Self {
            num_blocks,
            bits: vec![0; missing.div_ceil(64)],
            missing,
            contiguous: 0,
            islands: BTreeMap::new(),
        }
    }

    /// Whether every (layer, block) is verified.
    pub(crate) const fn is_whole(&self) -> bool {
        self.missing == 0
    }

    /// Verified bytes from offset 0 on.
    pub(crate) const fn contiguous(&self) -> u64 {
        self.contiguous
    }

    /// `layer` and `blocks` were checked against the handoff's bounds.
    pub(crate) fn covered(&self, layer: usize, blocks: Range<usize>) -> Covered {
        let num_blocks = blocks.len();
        match blocks.filter(|block| self.get(layer * self.num_blocks + block)).count() {
            0 => Covered::Nothing,
            n if n == num_blocks => Covered::Everything,
            _ => Covered::Part,
        }
    }

    /// Notes a verified frame that covered nothing before.
    pub(crate) fn cover(
        &mut self,
        layer: usize,
        blocks: Range<usize>,
        bytes: Range<u64>,
    ) -> Result<(), TooManyGaps> {
        for block in blocks {
            let bit = layer * self.num_blocks + block;
            if let Some(word) = self.bits.get_mut(bit / 64)
                && *word >> (bit % 64) & 1 == 0
            {
                *word |= 1 << (bit % 64);
                self.missing -= 1;
            }
        }
        if bytes.start != self.contiguous {
            self.islands.insert(bytes.start, bytes.end);
            return if self.islands.len() > MAX_GAPS { Err(TooManyGaps) } else { Ok(()) };
        }
        self.contiguous = bytes.end;
        while let Some(end) = self.islands.remove(&self.contiguous) {
            self.contiguous = end;
        }
        Ok(())
    }

    fn get(&self, bit: usize) -> bool {
        self.bits.get(bit / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_hold_the_offset_back_until_they_are_filled() {
        let mut coverage = Coverage::new(2, 3);
        assert_eq!(coverage.cover(0, 0..2, 0..20), Ok(()));
        assert_eq!(coverage.cover(1, 0..3, 30..60), Ok(()));
        assert_eq!((coverage.contiguous(), coverage.is_whole()), (20, false));
        assert_eq!(coverage.covered(0, 1..3), Covered::Part);
        assert_eq!(coverage.covered(1, 0..3), Covered::Everything);
        assert_eq!(coverage.covered(0, 2..3), Covered::Nothing);
        assert_eq!(coverage.cover(0, 2..3, 20..30), Ok(()));
        assert_eq!((coverage.contiguous(), coverage.is_whole()), (60, true));
    }

    #[test]
    fn gaps_are_bounded() {
        let mut coverage = Coverage::new(1, 1000);
        let results: Vec<_> =
            (1..200).map(|i| coverage.cover(0, i..i + 1, i as u64 * 2..i as u64 * 2 + 1)).collect();
        assert_eq!(results.iter().filter(|r| r.is_ok()).count(), MAX_GAPS);
    }
}
