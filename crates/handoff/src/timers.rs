//! Every timer of a handoff, in one table.

use std::time::Duration;

/// Who runs a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimerOwner {
    /// The prefill worker's machine.
    Source,
    /// The decode worker's machine.
    Destination,
    /// The decode worker's registry.
    Registry,
}

/// One row of [`Timers::TABLE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimerRow {
    /// Field of [`Timers`].
    pub name: &'static str,
    /// Who runs it.
    pub owner: TimerOwner,
    /// Default.
    pub default: Duration,
    /// What is waited for, and what follows when it passes.
    pub meaning: &'static str,
}

/// How long each wait of a handoff may take.
///
/// A leg that was not offered yet has no timer: only the request's own deadline bounds queueing. A dead peer is noticed by its stream,
/// a stalled one by its heartbeat; `reserve`, `grant` and `progress` are the last resort behind both, so they are
/// longer than any wait that a living but slow worker causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    /// Source: offer sent, no answer.
    pub answer: Duration,
    /// Source: bytes or the commit are with the transport or the destination, and nothing moves.
    pub delivery: Duration,
    /// Source: abort sent, no acknowledgement.
    pub abort: Duration,
    /// Source: the prompt is computed, the handoff failed, and no redirect came, or no answer to its offer.
    pub hold: Duration,
    /// Destination: blocks wanted, the scheduler has not reserved them.
    pub reserve: Duration,
    /// Destination: granted, and not one verified byte.
    pub grant: Duration,
    /// Destination: no further verified byte, notice or commit.
    pub progress: Duration,
    /// Destination: fenced, and the writer has not ended.
    pub writer: Duration,
    /// Registry: an offer whose Decode leg is not here yet.
    pub park: Duration,
}

impl Timers {
    /// The table behind [`Timers::default`].
    pub const TABLE: [TimerRow; 9] = [
        row(
            "answer",
            TimerOwner::Source,
            660_000,
            "offer unanswered: the handoff fails as expired; longer than `reserve`",
        ),
        row(
            "delivery",
            TimerOwner::Source,
            60_000,
            "no credit, no byte taken, no answer to the commit: abort",
        ),
        row(
            "abort",
            TimerOwner::Source,
            2_000,
            "abort unacknowledged: the handoff ends without knowing the other side",
        ),
        row(
            "hold",
            TimerOwner::Source,
            3_000,
            "blocks held after a failed handoff, no redirect, or no answer to its offer: freed",
        ),
        row(
            "reserve",
            TimerOwner::Destination,
            600_000,
            "in line for blocks: answered Busy, the router places again",
        ),
        row(
            "grant",
            TimerOwner::Destination,
            300_000,
            "grant unused: the reservation is given up as expired",
        ),
        row(
            "progress",
            TimerOwner::Destination,
            120_000,
            "transfer stands still: the reservation is given up as expired",
        ),
        row(
            "writer",
            TimerOwner::Destination,
            5_000,
            "writer does not end: ended without it; its lease still pins blocks",
        ),
        row("park", TimerOwner::Registry, 2_000, "no Decode leg came for an offer: answered Gone(NotFound)"),
    ];

    /// How long a finished key is remembered: longer than all timers one after the other.
    pub fn tombstone(&self) -> Duration {
        let Self { answer, delivery, abort, hold, reserve, grant, progress, writer, park } = *self;
        answer + delivery + abort + hold + reserve + grant + progress + writer + park + Duration::from_secs(1)
    }

    /// The value of each row of [`Timers::TABLE`], in its order.
    pub fn values(&self) -> [Duration; 9] {
        let Self { answer, delivery, abort, hold, reserve, grant, progress, writer, park } = *self;
        [answer, delivery, abort, hold, reserve, grant, progress, writer, park]
    }
}

const fn row(name: &'static str, owner: TimerOwner, default_ms: u64, meaning: &'static str) -> TimerRow {
    TimerRow { name, owner, default: Duration::from_millis(default_ms), meaning }
}

impl Default for Timers {
    fn default() -> Self {
        let [answer, delivery, abort, hold, reserve, grant, progress, writer, park] =
            Self::TABLE.map(|row| row.default);
        Self { answer, delivery, abort, hold, reserve, grant, progress, writer, park }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_and_the_defaults_agree() {
        let timers = Timers::default();
        assert_eq!(timers.values(), Timers::TABLE.map(|row| row.default));
        assert_eq!(timers.abort, Duration::from_secs(2));
        assert_eq!(timers.grant, Duration::from_secs(300));
        assert!(timers.answer > timers.reserve, "Busy must come before the source gives up");
    }

    #[test]
    fn a_tombstone_outlives_every_timer_together() {
        let timers = Timers::default();
        assert!(timers.tombstone() > timers.values().iter().sum::<Duration>());
    }
}
