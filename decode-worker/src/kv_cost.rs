//! What a transfer cost, on this worker's monotonic clock.
//!
//! t_f: first frame received. t_c: notice that prefill is done. t_s: first step boundary at or after t_c at which the
//! sequence would have run had all bytes been here. t_v: last frame verified. Then
//! exposed = max(0, t_v - t_s), total = t_v - min(t_f, t_s), hidden = total - exposed, decode queue = t_s - t_c.

use baton_handoff::Time;
use baton_proto::v1;

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
}

impl Marks {
    /// `started` stands in for a boundary that was never told: the sequence could not run before it did.
    pub(crate) fn cost(&self, started: Time) -> Cost {
        let boundary = self.boundary.unwrap_or(started);
        let decode_queue = self.noticed.map_or(Time::ZERO, |noticed| boundary.saturating_sub(noticed));
        let (Some(first), Some(verified)) = (self.first_frame, self.verified) else {
            return Cost { decode_queue, ..Cost::default() };
        };
        Cost {
            total: verified.saturating_sub(first.min(boundary)),
            exposed: verified.saturating_sub(boundary),
            decode_queue,
        }
    }

    pub(crate) fn to_wire(self, cost: &Cost) -> v1::KvCost {
        v1::KvCost {
            bytes: self.bytes,
            frames: self.frames,
            total_us: micros(cost.total),
            exposed_us: micros(cost.exposed),
            wire_us: micros(self.wire),
            decode_queue_us: micros(cost.decode_queue),
        }
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

    #[test]
    fn a_transfer_that_ends_before_the_boundary_is_hidden() {
        let cost = marks(10, 100, 110, 90).cost(ms(110));
        assert_eq!(cost, Cost { total: ms(80), exposed: ms(0), decode_queue: ms(10) });
    }

    #[test]
    fn what_comes_after_the_boundary_is_exposed() {
        let cost = marks(10, 100, 105, 145).cost(ms(150));
        assert_eq!(cost, Cost { total: ms(135), exposed: ms(40), decode_queue: ms(5) });
    }

    #[test]
    fn a_transfer_that_only_begins_after_the_boundary_is_exposed_from_there() {
        // The wait before the first frame counts: the sequence could have run.
        let cost = marks(120, 100, 105, 145).cost(ms(150));
        assert_eq!(cost, Cost { total: ms(40), exposed: ms(40), decode_queue: ms(5) });
    }

    #[test]
    fn without_bytes_there_is_no_cost() {
        let cost = Marks { noticed: Some(ms(7)), ..Marks::default() }.cost(ms(9));
        assert_eq!(cost, Cost { total: ms(0), exposed: ms(0), decode_queue: ms(2) });
    }
}
