//! Waiting for something that is usually near: a short spin, then sleep.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Rounds of spinning before sleep; about 50 microseconds. The members of a step meet within a few, and the next step
/// often follows at once; an idle team sleeps.
const SPINS: u32 = 1_000;

/// A place to wait for a condition that another thread makes true.
pub(crate) struct Parking {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Parking {
    pub(crate) const fn new() -> Parking {
        Parking { sleepers: AtomicUsize::new(0), lock: Mutex::new(()), wake: Condvar::new() }
    }

    /// Returns once `done()` is true. It must become so by a sequentially consistent store that is followed by
    /// [`Self::wake_all`], and must read that store with the same ordering.
    pub(crate) fn wait_until(&self, done: impl Fn() -> bool) {
        for _ in 0..SPINS {
            if done() {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !done() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes all who wait, to look at their conditions again.
    pub(crate) fn wake_all(&self) {
        // A sleeper counts itself before its last look at the condition, and the condition was made true before
        // this load: one of the two sees the other. Taking the lock waits for a sleeper that is about to sleep.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn whoever_sleeps_is_woken() {
        let (parking, ready) = (Parking::new(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| parking.wait_until(|| ready.load(Ordering::SeqCst)));
            }
            while parking.sleepers.load(Ordering::SeqCst) < 3 {
                std::thread::yield_now();
            }
            ready.store(true, Ordering::SeqCst);
            parking.wake_all();
        });
        assert_eq!(parking.sleepers.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn no_wake_is_lost_between_spinning_and_sleeping() {
        let (parking, turn) = (Parking::new(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for own in 0..2 {
                let (parking, turn) = (&parking, &turn);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        parking.wait_until(|| turn.load(Ordering::SeqCst) % 2 == own);
                        turn.fetch_add(1, Ordering::SeqCst);
                        parking.wake_all();
                    }
                });
            }
        });
        assert_eq!(turn.load(Ordering::SeqCst), 40_000);
    }
}
