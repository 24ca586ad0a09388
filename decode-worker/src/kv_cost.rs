//! What a transfer cost, on this worker's monotonic clock.
//!
//! t_f: first frame received. t_c: notice that prefill is done. t_s: first step boundary at or after t_c at which the
//! sequence would have run had all bytes been here. t_v: last frame verified. Then
//! exposed = max(0, t_v - t_s), total = t_v - min(t_f, t_s), hidden = total - exposed, decode queue = t_s - t_c.
//!
//! Of the exposed time, *credit* is what the source had bytes and no credit for, *resend* what passed from when a frame failed its checksum
//! until it had come again, and *wire* is the rest.

use baton_handoff::Time;
use baton_proto::v1;

/// Waits that are remembered of one transfer; more of them count as one with the last.
const MAX_WAITS: usize = 64;

/// Marks of one transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    /// t_f.
    pub(crate) first_frame: Option<Time>,
    /// t_c.
    pub(crate) noticed: Option<Time>,
    /// t_s.
    pub(crate) boundary: Option<Time>,
    /// t_v.
    pub(crate) verified: Option<Time>,
    /// Time with bytes outstanding.
    pub(crate) wire: Time,
    /// Verified bytes.
    pub(crate) bytes: u64,
    /// Verified frames.
    pub(crate) frames: u64,
    /// Frames that came a second time.
    pub(crate) duplicate_frames: u64,
}

/// The differences of [`Marks`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) total: Time,
    pub(crate) exposed: Time,
    pub(crate) decode_queue: Time,
    /// Part of `exposed`.
    pub(crate) credit: Time,
    /// Part of `exposed`.
    pub(crate) resend: Time,
}

impl Cost {
    pub(crate) fn hidden(&self) -> Time {
        self.total.saturating_sub(self.exposed)
    }

    /// Part of `exposed`: what is neither of the others.
    pub(crate) fn exposed_wire(&self) -> Time {
        self.exposed.saturating_sub(self.credit + self.resend)
    }
}

impl Marks {
    /// `started` stands in for a boundary that was never told: the sequence could not run before it did.
    pub(crate) fn cost(&self, started: Time, waits: &Waits) -> Cost {
        let boundary = self.boundary.unwrap_or(started);
        let decode_queue = self.noticed.map_or(Time::ZERO, |noticed| boundary.saturating_sub(noticed));
        let (Some(first), Some(verified)) = (self.first_frame, self.verified) else {
            return Cost { decode_queue, ..Cost::default() };
        };
        let exposed = verified.saturating_sub(boundary);
        let credit = waits.credit(boundary).min(exposed);
        let resend = waits.resend((boundary, verified)).min(exposed - credit);
        let total = verified.saturating_sub(first.min(boundary));
        Cost { total, exposed, decode_queue, credit, resend }
    }

    pub(crate) fn to_wire(self, cost: &Cost) -> v1::KvCost {
        v1::KvCost {
            bytes: self.bytes,
            frames: self.frames,
            total_us: micros(cost.total),
            exposed_us: micros(cost.exposed),
            wire_us: micros(self.wire),
            decode_queue_us: micros(cost.decode_queue),
            credit_us: micros(cost.credit),
            resend_us: micros(cost.resend),
        }
    }
}

/// Why bytes were waited for, and when.
#[derive(Clone, Debug, Default)]
pub(crate) struct Waits {
    /// Time without credit in all, whenever a frame came that had waited for some.
    credit: Vec<(Time, Time)>,
    /// From a frame's wrong checksum to its return.
    resends: Vec<(Time, Option<Time>)>,
}

impl Waits {
    /// Frames came at `at`; up to then the source had waited for credit so long in all.
    pub(crate) fn waited_for_credit(&mut self, at: Time, in_all: Time) {
        let is_full = self.credit.len() == MAX_WAITS;
        match self.credit.last_mut() {
            Some((_, known)) if *known >= in_all => {}
            None if in_all.is_zero() => {}
            Some(last) if is_full => *last = (at, in_all),
            _ => self.credit.push((at, in_all)),
        }
    }

    /// A frame failed its checksum.
    pub(crate) fn corrupt(&mut self, at: Time) {
        let is_waiting = self.resends.last().is_some_and(|(_, until)| until.is_none());
        if !is_waiting && self.resends.len() < MAX_WAITS {
            self.resends.push((at, None));
        }
    }

    /// What had been missing is here.
    pub(crate) fn verified(&mut self, at: Time) {
        if let Some((_, until @ None)) = self.resends.last_mut() {
            *until = Some(at);
        }
    }

    /// Time without credit from `from` on. A wait lies just before the frame that tells of it.
    fn credit(&self, from: Time) -> Time {
        let before = std::iter::once(Time::ZERO).chain(self.credit.iter().map(|(_, in_all)| *in_all));
        let waits = self.credit.iter().zip(before);
        waits.map(|(&(at, in_all), before)| (in_all - before).min(at.saturating_sub(from))).sum()
    }

    /// Time within which a frame was missing.
    fn resend(&self, (from, to): (Time, Time)) -> Time {
        let within = |&(since, until): &(Time, Option<Time>)| {
            until.unwrap_or(to).min(to).saturating_sub(since.max(from))
        };
        self.resends.iter().map(within).sum()
    }
}

pub(crate) fn micros(time: Time) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const fn ms(n: u64) -> Time {
        Duration::from_millis(n)
    }

    fn marks(first: u64, noticed: u64, boundary: u64, verified: u64) -> Marks {
        Marks {
            first_frame: Some(ms(first)),
            noticed: Some(ms(noticed)),
            boundary: Some(ms(boundary)),
            verified: Some(ms(verified)),
            ..Marks::default()
        }
    }

    fn plain(marks: Marks, started: u64) -> Cost {
        marks.cost(ms(started), &Waits::default())
    }

    #[test]
    fn a_transfer_that_ends_before_the_boundary_is_hidden() {
        let cost = plain(marks(10, 100, 110, 90), 110);
        assert_eq!(cost, Cost { total: ms(80), decode_queue: ms(10), ..Cost::default() });
        assert_eq!(cost.hidden(), ms(80));
    }

    #[test]
    fn what_comes_after_the_boundary_is_exposed() {
        let cost = plain(marks(10, 100, 105, 145), 150);
        assert_eq!(cost, Cost { total: ms(135), exposed: ms(40), decode_queue: ms(5), ..Cost::default() });
        assert_eq!((cost.hidden(), cost.exposed_wire()), (ms(95), ms(40)));
    }

    #[test]
    fn a_transfer_that_only_begins_after_the_boundary_is_exposed_from_there() {
        // The wait before the first frame counts: the sequence could have run.
        let cost = plain(marks(120, 100, 105, 145), 150);
        assert_eq!(cost, Cost { total: ms(40), exposed: ms(40), decode_queue: ms(5), ..Cost::default() });
    }

    #[test]
    fn without_bytes_there_is_no_cost() {
        let cost = plain(Marks { noticed: Some(ms(7)), ..Marks::default() }, 9);
        assert_eq!(cost, Cost { decode_queue: ms(2), ..Cost::default() });
    }

    #[test]
    fn the_exposed_time_is_split_into_wire_credit_and_resend() {
        let mut waits = Waits::default();
        waits.waited_for_credit(ms(50), ms(0));
        // Before the boundary; half before it; after it, told twice.
        for (at, in_all) in [(90, 20), (110, 30), (130, 35), (131, 35)] {
            waits.waited_for_credit(ms(at), ms(in_all));
        }
        // Over the boundary, and to the end; while one is missing another one fails.
        waits.corrupt(ms(95));
        waits.verified(ms(107));
        waits.verified(ms(108));
        waits.corrupt(ms(140));
        waits.corrupt(ms(141));
        let cost = marks(10, 100, 105, 145).cost(ms(150), &waits);
        assert_eq!((cost.credit, cost.resend, cost.exposed_wire()), (ms(5 + 5), ms(2 + 5), ms(40 - 17)));
        let wire = Marks::default().to_wire(&cost);
        assert_eq!((wire.credit_us, wire.resend_us), (10_000, 7_000));
        // Never more than what was exposed.
        let cost = marks(10, 100, 142, 145).cost(ms(150), &waits);
        assert_eq!((cost.credit, cost.resend, cost.exposed_wire()), (ms(0), ms(3), ms(0)));
    }

    #[test]
    fn of_very_many_waits_the_sum_is_kept() {
        let mut waits = Waits::default();
        for n in 1..=1000 {
            waits.waited_for_credit(ms(10 * n), ms(n));
            waits.corrupt(ms(10 * n));
            waits.verified(ms(10 * n + 1));
        }
        assert_eq!((waits.credit.len(), waits.resends.len()), (MAX_WAITS, MAX_WAITS));
        assert_eq!(waits.credit(ms(0)), ms(1000));
    }
}
