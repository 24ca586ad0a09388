//! Where the members of a team wait for each other.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::parking::Parking;

/// A member of the team panicked; nothing that the team computes can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

/// Reusable by the same number of members.
pub(crate) struct Barrier {
    num_members: usize,
    arrived: AtomicUsize,
    /// Counts completed meetings.
    round: AtomicUsize,
    broken: AtomicBool,
    parking: Parking,
}

impl Barrier {
    pub(crate) const fn new(num_members: usize) -> Barrier {
        Barrier {
            num_members,
            arrived: AtomicUsize::new(0),
            round: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            parking: Parking::new(),
        }
    }

    /// Returns when all members have called it; what each wrote before is then visible to all.
    ///
    /// # Errors
    /// [`Broken`] once [`Self::break_up`] was called, now and ever after.
    pub(crate) fn wait(&self) -> Result<(), Broken> {
        if self.num_members == 1 {
            return self.state();
        }
        let round = self.round.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.num_members {
            self.arrived.store(0, Ordering::Relaxed);
            self.round.store(round.wrapping_add(1), Ordering::SeqCst);
            self.parking.wake_all();
            return self.state();
        }
        self.parking
            .wait_until(|| self.round.load(Ordering::SeqCst) != round || self.broken.load(Ordering::SeqCst));
        self.state()
    }

    /// Ends all waiting, for good.
    pub(crate) fn break_up(&self) {
        self.broken.store(true, Ordering::SeqCst);
        self.parking.wake_all();
    }

    /// Whether the barrier was broken up.
    pub(crate) fn state(&self) -> Result<(), Broken> {
        if self.broken.load(Ordering::SeqCst) { Err(Broken) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_member_passes_before_all_have_come() {
        const ROUNDS: usize = 2_000;
        let barrier = Barrier::new(3);
        let counters: [AtomicUsize; 3] = Default::default();
        std::thread::scope(|scope| {
            for own in &counters {
                let (barrier, counters) = (&barrier, &counters);
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        own.store(round, Ordering::Relaxed);
                        barrier.wait().unwrap();
                        for counter in counters {
                            let seen = counter.load(Ordering::Relaxed);
                            assert!(seen >= round, "a member was at {seen} in round {round}");
                        }
                        barrier.wait().unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn breaking_up_ends_the_wait_of_those_who_came() {
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| barrier.wait());
            while barrier.arrived.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            barrier.break_up();
            assert_eq!(waiting.join().unwrap(), Err(Broken));
        });
        assert_eq!(barrier.wait(), Err(Broken));
    }
}
