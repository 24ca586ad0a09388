//! How long bytes of a transfer were under way, on this worker's clock.
//!
//! Bytes count as under way from when they are computed to when the transport took them, which it does late when the link is slow
//! or the decode worker gives no credit; and, at the end, until the decode worker has them all. In between, what the transport took and the
//! decode worker does not have yet is not seen from here: a link that is faster than the computation looks faster than it is.

use std::time::Duration;

use baton_handoff::Time;

/// Marks of one transfer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outstanding {
    computed: u64,
    sent: u64,
    /// Since when bytes wait for the transport.
    since: Option<Time>,
    last_sent: Option<Time>,
    total: Duration,
}

impl Outstanding {
    /// Every byte below this offset is computed.
    pub(crate) fn computed(&mut self, now: Time, bytes: u64) {
        self.computed = self.computed.max(bytes);
        if self.computed > self.sent {
            self.since.get_or_insert(now);
        }
    }

    /// The transport took every byte below this offset.
    pub(crate) fn sent(&mut self, now: Time, bytes: u64) {
        self.sent = self.sent.max(bytes);
        self.last_sent = Some(now);
        if self.sent >= self.computed {
            self.stop(now);
        }
    }

    /// The decode worker has all. Returns the bytes and how long some were under way.
    pub(crate) fn delivered(mut self, now: Time) -> (u64, Duration) {
        if self.since.is_none() {
            self.since = self.last_sent;
        }
        self.stop(now);
        (self.computed, self.total)
    }

    fn stop(&mut self, now: Time) {
        if let Some(since) = self.since.take() {
            self.total += now.saturating_sub(since);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Time {
        Duration::from_millis(n)
    }

    #[test]
    fn time_without_bytes_does_not_count_and_the_way_of_the_last_one_does() {
        let mut marks = Outstanding::default();
        marks.computed(ms(10), 100);
        marks.computed(ms(12), 200);
        marks.sent(ms(13), 150);
        marks.sent(ms(15), 200);
        // Nothing is computed for a while.
        marks.computed(ms(50), 300);
        marks.sent(ms(51), 300);
        assert_eq!(marks.delivered(ms(58)), (300, ms(5 + 1 + 7)));
    }

    #[test]
    fn bytes_that_wait_to_the_end_count_once() {
        let mut marks = Outstanding::default();
        marks.computed(ms(10), 100);
        marks.sent(ms(12), 50);
        assert_eq!(marks.delivered(ms(20)), (100, ms(10)));
        assert_eq!(Outstanding::default().delivered(ms(20)), (0, ms(0)));
    }
}
