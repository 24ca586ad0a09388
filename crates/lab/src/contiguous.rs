//! The naive way to hand out KV memory, as a small model beside the pool: one run of slots a sequence, reserved beforehand, first fit.

use std::ops::Range;

/// Memory that is given out in runs.
#[derive(Clone, Debug)]
pub(crate) struct Contiguous {
    /// Free runs, by start, none beside another.
    holes: Vec<Range<usize>>,
}

impl Contiguous {
    pub(crate) fn new(num_slots: usize) -> Self {
        let all = 0..num_slots;
        Self { holes: vec![all] }
    }

    /// The first hole that is long enough gives its beginning.
    pub(crate) fn reserve(&mut self, len: usize) -> Option<Range<usize>> {
        let nth = self.holes.iter().position(|hole| hole.len() >= len)?;
        let hole = self.holes.get_mut(nth)?;
        let run = hole.start..hole.start + len;
        hole.start += len;
        if hole.start == hole.end {
            self.holes.remove(nth);
        }
        Some(run)
    }

    /// Takes a run back and joins it with the holes beside it.
    pub(crate) fn release(&mut self, run: Range<usize>) {
        let nth = self.holes.partition_point(|hole| hole.start < run.start);
        self.holes.insert(nth, run);
        let joins = |holes: &[Range<usize>], nth: usize| match (holes.get(nth), holes.get(nth + 1)) {
            (Some(one), Some(next)) => one.end == next.start,
            _ => false,
        };
        for nth in [Some(nth), nth.checked_sub(1)].into_iter().flatten() {
            if joins(&self.holes, nth) {
                let next = self.holes.remove(nth + 1);
                self.holes[nth].end = next.end;
            }
        }
    }

    /// Slots that nobody has.
    pub(crate) fn free(&self) -> usize {
        self.holes.iter().map(Range::len).sum()
    }

    /// The longest run that could be had.
    pub(crate) fn biggest_hole(&self) -> usize {
        self.holes.iter().map(Range::len).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn what_is_free_in_all_may_fit_nowhere() {
        let mut memory = Contiguous::new(100);
        let runs: Vec<_> = (0..4).filter_map(|_| memory.reserve(25)).collect();
        assert_eq!((runs.len(), memory.free(), memory.reserve(1)), (4, 0, None));
        memory.release(runs[0].clone());
        memory.release(runs[2].clone());
        assert_eq!((memory.free(), memory.biggest_hole(), memory.reserve(30)), (50, 25, None));
        memory.release(runs[1].clone());
        assert_eq!((memory.biggest_hole(), memory.reserve(70)), (75, Some(0..70)));
    }

    #[test]
    fn runs_never_overlap_and_all_come_back() {
        let mut random = Random::new(11);
        let (mut memory, mut runs) = (Contiguous::new(500), Vec::<Range<usize>>::new());
        for _ in 0..5_000 {
            if random.between(0..=2) > 0 {
                if let Some(run) = memory.reserve(random.between(1..=60)) {
                    assert!(runs.iter().all(|other| other.end <= run.start || run.end <= other.start));
                    runs.push(run);
                }
            } else if !runs.is_empty() {
                memory.release(runs.swap_remove(random.between(0..=runs.len() - 1)));
            }
            assert_eq!(memory.free() + runs.iter().map(Range::len).sum::<usize>(), 500);
            assert!(memory.holes.windows(2).all(|pair| pair[0].end < pair[1].start), "{:?}", memory.holes);
        }
        runs.into_iter().for_each(|run| memory.release(run));
        assert_eq!(memory.biggest_hole(), 500);
    }
}
