//! Wall time of this process's instants.

use std::time::{Duration, Instant, SystemTime};

/// How often both clocks are read to find a pair that lies close together.
const TRIES: usize = 5;

/// One instant and the wall time at it. All spans of a process go through the same one, so that what they say of each other is what
/// the monotonic clock says, whatever is done to the wall clock meanwhile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Anchor {
    instant: Instant,
    wall: SystemTime,
}

impl Anchor {
    pub(super) fn now() -> Self {
        let read = || {
            let before = Instant::now();
            let wall = SystemTime::now();
            let between = before.elapsed();
            (between, Self { instant: before + between / 2, wall })
        };
        // Whoever was interrupted between the two clocks is off by as much.
        let mut best = read();
        for _ in 1..TRIES {
            let next = read();
            if next.0 < best.0 {
                best = next;
            }
        }
        best.1
    }

    pub(super) fn wall(&self, at: Instant) -> SystemTime {
        let before = self.instant.saturating_duration_since(at);
        if before > Duration::ZERO {
            return self.wall.checked_sub(before).unwrap_or(SystemTime::UNIX_EPOCH);
        }
        self.wall + at.saturating_duration_since(self.instant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_and_after_the_anchor_keep_their_distance() {
        let anchor = Anchor::now();
        let (early, late) =
            (anchor.instant - Duration::from_millis(7), anchor.instant + Duration::from_secs(3));
        let distance = anchor.wall(late).duration_since(anchor.wall(early)).expect("later");
        assert_eq!(distance, Duration::from_millis(3007));
        let now = anchor.wall(Instant::now());
        let off = SystemTime::now().duration_since(now).expect("no jump of the clock");
        assert!(off < Duration::from_millis(50), "{off:?}");
    }
}
