//! A step that lets others on its CPU go first.
//!
//! Being nicer and having longer turns is not enough: on Linux a thread of the network that is interrupted by another one, with messages left to send, has used a
//! little more than its share by then, so a step whose share is not used up is given a whole turn (until the next tick, up to 4 ms)
//! before it. A step that yields every now and then ends that wait, whatever the system's accounts say.

use std::time::{Duration, Instant};

/// A message may wait for so long at most. A little less than a turn of [`crate::Turns::Yielding`], and yielding takes far less than a
/// thousandth of it.
const EVERY: Duration = Duration::from_micros(600);

/// Yields at points of a step, but not at each of them.
pub(super) struct Yielding {
    /// The last time; `None` for a step that nobody else is to have the CPU of.
    last: Option<Instant>,
}

impl Yielding {
    pub(super) fn new(gives_way: bool) -> Self {
        Self { last: gives_way.then(Instant::now) }
    }

    /// The step is somewhere where it may be left; whether it was left to others.
    pub(super) fn at_point(&mut self) -> bool {
        let due = self.last.is_some_and(|last| last.elapsed() >= EVERY);
        if due {
            std::thread::yield_now();
            // What others took is not the step's.
            self.last = Some(Instant::now());
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_yields_now_and_then_or_never() {
        let (mut gives_way, mut stays) = (Yielding::new(true), Yielding::new(false));
        let start = Instant::now();
        let mut num = 0;
        while start.elapsed() < 20 * EVERY {
            num += u32::from(gives_way.at_point());
            assert!(!stays.at_point());
        }
        assert!((1..=20).contains(&num), "{num}");
    }
}
