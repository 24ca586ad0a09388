//! When the recent step boundaries were, for questions about the past: a notice on a slow link comes long after what it tells of.

use std::collections::VecDeque;

use baton_scheduler::Time;

/// Boundaries that are remembered: 4 s of steps of a millisecond.
const NUM: usize = 4096;

#[derive(Clone, Copy)]
struct Boundary {
    at: Time,
    /// The loop slept until the next one, and would have woken for work.
    idle: bool,
}

/// The recent boundaries, in order.
pub(super) struct Boundaries {
    recent: VecDeque<Boundary>,
}

impl Boundaries {
    pub(super) fn new() -> Self {
        Self { recent: VecDeque::with_capacity(NUM) }
    }

    /// A boundary is now.
    pub(super) fn push(&mut self, at: Time) {
        if self.recent.len() == NUM {
            self.recent.pop_front();
        }
        self.recent.push_back(Boundary { at, idle: false });
    }

    /// Nothing is computed until the next boundary.
    pub(super) fn sleeps(&mut self) {
        if let Some(last) = self.recent.back_mut() {
            last.idle = true;
        }
    }

    /// The first boundary at or after `time`, seen from the boundary that lasts until `now`. An idle loop has one at any time. Where the
    /// boundaries of then are forgotten, steps were short: `time` itself stands for one.
    pub(super) fn at_or_after(&self, time: Time, now: Time) -> Time {
        let next = self.recent.partition_point(|boundary| boundary.at < time);
        let before = next.checked_sub(1).map(|at| self.recent[at]);
        match (before, self.recent.get(next)) {
            (Some(Boundary { idle: true, .. }) | None, _) => time.min(now),
            (Some(_), Some(boundary)) => boundary.at,
            // The present boundary goes on.
            (Some(_), None) => time.min(now),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const fn ms(n: u64) -> Time {
        Duration::from_millis(n)
    }

    #[test]
    fn a_boundary_of_the_past_is_found() {
        let mut boundaries = Boundaries::new();
        for n in [10, 20, 35] {
            boundaries.push(ms(n));
        }
        let at = |time| boundaries.at_or_after(ms(time), ms(36)).as_millis();
        assert_eq!([at(11), at(20), at(21), at(35)], [20, 20, 35, 35]);
        // It came while commands of this boundary were taken.
        assert_eq!(at(36), 36);
        assert_eq!(at(40), 36, "never in the future");
    }

    #[test]
    fn an_idle_loop_has_a_boundary_at_any_time() {
        let mut boundaries = Boundaries::new();
        boundaries.push(ms(10));
        boundaries.sleeps();
        boundaries.push(ms(50));
        boundaries.push(ms(60));
        let at = |time| boundaries.at_or_after(ms(time), ms(60)).as_millis();
        assert_eq!([at(11), at(49), at(50), at(51)], [11, 49, 50, 60]);
    }

    #[test]
    fn what_is_forgotten_was_at_once() {
        let mut boundaries = Boundaries::new();
        for n in 0..NUM as u64 + 10 {
            boundaries.push(ms(2 * n));
        }
        assert_eq!(boundaries.recent.len(), NUM);
        let now = ms(100_000);
        assert_eq!(boundaries.at_or_after(ms(7), now), ms(7));
        assert_eq!(boundaries.at_or_after(ms(21), now), ms(22));
    }
}
