//! Which sequences of a leg still go on, and who wants which of them to end.

use std::sync::atomic::{AtomicU32, Ordering};

use baton_handoff::MAX_SEQUENCES;
use tokio::sync::Notify;

const _: () = assert!(MAX_SEQUENCES <= u32::BITS as usize, "a sequence is a bit of a word");

/// Sequences of one leg, by their numbers within the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbers {
    first: u32,
    bits: u32,
}

impl Numbers {
    /// `num` of them, 1 to [`MAX_SEQUENCES`], that count on from `first`.
    pub(crate) const fn new(first: u32, num: u32) -> Self {
        Self { first, bits: u32::MAX >> (u32::BITS - num) }
    }

    /// Takes one out; whether it was in.
    pub(crate) fn remove(&mut self, sequence: u32) -> bool {
        let bit = sequence.checked_sub(self.first).and_then(|nth| 1u32.checked_shl(nth)).unwrap_or(0);
        let was_in = self.bits & bit != 0;
        self.bits &= !bit;
        was_in
    }

    pub(crate) fn contains(self, sequence: u32) -> bool {
        self.iter().any(|known| known == sequence)
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.bits == 0
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = u32> {
        (0..u32::BITS).filter(move |nth| self.bits >> nth & 1 == 1).map(move |nth| self.first + nth)
    }
}

/// Sequences of one leg that were asked to end. Asking again changes nothing, so nothing queues.
#[derive(Debug)]
pub(crate) struct Stops {
    all: Numbers,
    /// Asked for, and not yet taken by the leg.
    bits: AtomicU32,
    wake: Notify,
}

impl Stops {
    /// Of a leg with `num` sequences that count on from `first`.
    pub(crate) fn new(first: u32, num: u32) -> Self {
        Self { all: Numbers::new(first, num), bits: AtomicU32::new(0), wake: Notify::new() }
    }

    /// Asks for a sequence to end. False when the leg has none with this number.
    pub(crate) fn ask(&self, sequence: u32) -> bool {
        let known = self.all.contains(sequence);
        if known {
            self.bits.fetch_or(1 << (sequence - self.all.first), Ordering::AcqRel);
            self.wake.notify_one();
        }
        known
    }

    /// The numbers that the leg has, for people.
    pub(crate) fn range(&self) -> String {
        let first = self.all.first;
        format!("{first} to {}", first + self.all.bits.count_ones() - 1)
    }

    /// Those asked for since the last call, at least one. Loses nothing when dropped in a `select!`; one caller at a time.
    pub(crate) async fn next(&self) -> Numbers {
        loop {
            let bits = self.bits.swap(0, Ordering::AcqRel);
            if bits != 0 {
                return Numbers { bits, ..self.all };
            }
            self.wake.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_count_on_from_the_first_and_leave_once() {
        let mut open = Numbers::new(3, 2);
        assert_eq!(open.iter().collect::<Vec<_>>(), [3, 4]);
        assert!(!open.remove(2) && !open.remove(5) && !open.remove(99));
        assert!(open.remove(4) && !open.remove(4) && !open.is_empty());
        assert!(open.remove(3) && open.is_empty());
        assert_eq!(Numbers::new(0, 16).iter().count(), 16);
    }

    #[tokio::test]
    async fn asking_twice_is_asking_once() {
        let stops = Stops::new(2, 3);
        assert!(stops.ask(4) && stops.ask(4) && stops.ask(2));
        assert!(!stops.ask(5) && !stops.ask(1));
        assert_eq!(stops.range(), "2 to 4");
        assert_eq!(stops.next().await.iter().collect::<Vec<_>>(), [2, 4]);
        let later = stops.next();
        tokio::pin!(later);
        // The wake-up of the second one asked for above is still there: it must not count as an answer.
        assert!(tokio::time::timeout(std::time::Duration::from_millis(20), &mut later).await.is_err());
        stops.ask(3);
        assert_eq!(later.await.iter().collect::<Vec<_>>(), [3]);
    }
}
