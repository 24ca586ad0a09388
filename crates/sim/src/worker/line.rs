//! Who waits for blocks on a decode worker, in the order in which they are to be served; and how often the first one is passed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use baton_handoff::Time;
use baton_scheduler::{NewSequence, Origin, SequenceId};

/// One step of priority weighs as much as so much waiting.
const PRIORITY_US: i64 = 5_000_000;

/// A sequence's place among all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    rank_us: i64,
    id: SequenceId,
    /// Whether the scheduler says when it is given blocks; of local ones only the first chunk is heard of, later.
    is_told: bool,
}

impl Rank {
    pub(crate) fn new(now: Time, new: &NewSequence, id: SequenceId) -> Self {
        let us = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
        let rank_us = us(now) - us(new.age) + i64::from(new.priority) * PRIORITY_US;
        Self { rank_us, id, is_told: new.origin == Origin::Remote }
    }
}

/// The line.
#[derive(Debug, Default)]
pub(crate) struct Line {
    ranks: BTreeMap<SequenceId, Rank>,
    waiting: BTreeSet<Rank>,
    passed: Passed,
}

/// What the first one in the line has to bear.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Passed {
    /// Who were served before it, since it became first.
    pub(crate) num: u32,
    /// When it became first.
    pub(crate) since: Time,
}

impl Line {
    /// A sequence came; it does not wait yet.
    pub(crate) fn know(&mut self, id: SequenceId, rank: Rank) {
        self.ranks.insert(id, rank);
    }

    /// The process stood still until now, and so did the scheduler's clock.
    pub(crate) fn resumed(&mut self, now: Time) {
        self.passed.since = now;
    }

    /// Changes who waits. Another first one starts from zero.
    fn change(&mut self, now: Time, change: impl FnOnce(&mut BTreeSet<Rank>)) {
        let first = self.waiting.first().copied();
        change(&mut self.waiting);
        if self.waiting.first().copied() != first {
            self.passed = Passed { num: 0, since: now };
        }
    }

    /// It waits for blocks, for the first time or again.
    pub(crate) fn wait(&mut self, id: SequenceId, now: Time) {
        if let Some(rank) = self.ranks.get(&id).copied() {
            self.change(now, |waiting| {
                waiting.insert(rank);
            });
        }
    }

    /// It has blocks. Says what the first one has borne so far, when it was passed and surely has none yet.
    pub(crate) fn serve(&mut self, id: SequenceId, now: Time) -> Option<Passed> {
        let rank = self.ranks.get(&id).copied().filter(|rank| self.waiting.contains(rank))?;
        // When a local one was given blocks another one may have been first.
        let passes =
            rank.is_told && self.waiting.first().is_some_and(|first| *first != rank && first.is_told);
        self.change(now, |waiting| {
            waiting.remove(&rank);
        });
        self.passed.num += u32::from(passes);
        passes.then_some(self.passed)
    }

    /// It is gone.
    pub(crate) fn forget(&mut self, id: SequenceId, now: Time) {
        if let Some(rank) = self.ranks.remove(&id) {
            self.change(now, |waiting| {
                waiting.remove(&rank);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_scheduler::SamplingParams;

    use super::*;

    fn new(age_s: u64, priority: i32, origin: Origin) -> NewSequence {
        NewSequence {
            id: SequenceId(0),
            siblings: vec![],
            origin,
            prompt: vec![1],
            sampling: SamplingParams::GREEDY,
            sequence: 0,
            num_generated: 0,
            max_new_tokens: 1,
            stop_tokens: vec![],
            cache: false,
            age: Duration::from_secs(age_s),
            priority,
            preempted: false,
        }
    }

    #[test]
    fn only_those_who_pass_the_first_one_count() {
        let mut line = Line::default();
        let second = Duration::from_secs(1);
        for (n, (age, priority)) in [(3, 0), (2, 0), (9, 2), (0, -1)].into_iter().enumerate() {
            let id = SequenceId(n as u64);
            line.know(id, Rank::new(second * 10, &new(age, priority, Origin::Remote), id));
            line.wait(id, second * 10);
        }
        // In order: 3 (a class earlier), 0, 1, 2.
        let passed = |num, since| Some(Passed { num, since });
        assert_eq!(line.serve(SequenceId(0), second * 11), passed(1, second * 10));
        assert_eq!(line.serve(SequenceId(2), second * 12), passed(2, second * 10));
        assert_eq!(line.serve(SequenceId(2), second * 12), None);
        assert_eq!(line.serve(SequenceId(3), second * 13), None);
        line.wait(SequenceId(2), second * 14);
        assert_eq!(line.serve(SequenceId(2), second * 15), passed(1, second * 13));
        line.wait(SequenceId(0), second * 16);
        line.forget(SequenceId(0), second * 17);
        assert_eq!(line.serve(SequenceId(1), second * 18), None);
    }

    #[test]
    fn a_local_first_one_may_have_its_blocks_already() {
        let mut line = Line::default();
        for (n, origin) in [Origin::Local, Origin::Remote].into_iter().enumerate() {
            let id = SequenceId(n as u64);
            line.know(id, Rank::new(Time::ZERO, &new(0, 0, origin), id));
            line.wait(id, Time::ZERO);
        }
        assert_eq!(line.serve(SequenceId(1), Time::ZERO), None);
    }

    #[test]
    fn a_local_one_heard_of_late_passes_nobody() {
        let mut line = Line::default();
        for (n, origin) in [Origin::Remote, Origin::Local, Origin::Remote].into_iter().enumerate() {
            let id = SequenceId(n as u64);
            line.know(id, Rank::new(Time::ZERO, &new(0, 0, origin), id));
            line.wait(id, Time::ZERO);
        }
        assert_eq!(line.serve(SequenceId(1), Time::ZERO), None);
        let passed = Passed { num: 1, since: Time::ZERO };
        assert_eq!(line.serve(SequenceId(2), Time::ZERO), Some(passed));
    }
}
