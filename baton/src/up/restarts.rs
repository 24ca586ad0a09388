//! Whether a process that died is started again, and when.

use std::time::Duration;

/// Pause before the first restart; doubled at each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A process that lived this long has shown that it works: the pauses begin anew.
const STABLE: Duration = Duration::from_secs(60);
/// So many deaths within [`WINDOW`] of a process that was never ready end the attempt.
const MAX_EARLY_DEATHS: usize = 5;
const WINDOW: Duration = Duration::from_secs(60);

/// What happens after a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Start it again after this pause.
    Again(Duration),
    /// It never became ready and keeps dying.
    GiveUp,
}

/// The history of one process. Times are since any fixed moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Restarts {
    deaths: Vec<Duration>,
    pause: Option<Duration>,
    was_ready: bool,
}

impl Restarts {
    /// It became ready.
    pub(super) fn ready(&mut self) {
        self.was_ready = true;
    }

    /// Whether it ever was.
    pub(super) fn was_ready(&self) -> bool {
        self.was_ready
    }

    /// It died at `now` after it had lived for `lived`.
    pub(super) fn died(&mut self, now: Duration, lived: Duration) -> Verdict {
        self.deaths.retain(|death| now.saturating_sub(*death) < WINDOW);
        self.deaths.push(now);
        if !self.was_ready && self.deaths.len() >= MAX_EARLY_DEATHS {
            return Verdict::GiveUp;
        }
        let pause = match self.pause {
            Some(pause) if lived < STABLE => (pause * 2).min(LONGEST_PAUSE),
            _ => FIRST_PAUSE,
        };
        self.pause = Some(pause);
        Verdict::Again(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn pauses_double_to_their_bound_and_begin_anew_after_a_stable_minute() {
        let mut restarts = Restarts::default();
        restarts.ready();
        let pauses: Vec<Verdict> = (0..7).map(|n| restarts.died(s(n * 20), s(1))).collect();
        let expected = [500, 1000, 2000, 4000, 8000, 10_000, 10_000];
        assert_eq!(pauses, expected.map(|ms| Verdict::Again(Duration::from_millis(ms))));
        assert_eq!(restarts.died(s(1000), s(61)), Verdict::Again(FIRST_PAUSE));
    }

    #[test]
    fn five_deaths_in_a_minute_before_it_was_ready_are_enough() {
        let mut restarts = Restarts::default();
        for n in 0..4 {
            assert!(matches!(restarts.died(s(n), s(0)), Verdict::Again(_)));
        }
        assert_eq!(restarts.died(s(4), s(0)), Verdict::GiveUp);
        let mut slow = Restarts::default();
        assert!((0..20).all(|n| matches!(slow.died(s(n * 20), s(15)), Verdict::Again(_))));
    }

    #[test]
    fn one_that_was_ready_is_never_given_up() {
        let mut restarts = Restarts::default();
        restarts.ready();
        assert!((0..50).all(|n| matches!(restarts.died(s(n), s(0)), Verdict::Again(_))));
    }
}
