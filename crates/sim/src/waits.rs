//! Every wait is bounded: by its kind.

use std::time::Duration;

use baton_handoff::Timers;

/// What somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// A request: to pass the door.
    Door,
    /// A sequence group: to have legs.
    Placement,
    /// A prefill leg: to come near the head of its queue.
    Queue,
    /// A prefill leg: for its destination's answer.
    Offer,
    /// A prefill leg: granted, for blocks of its own.
    Open,
    /// A prefill leg: to have its prompt computed.
    Compute,
    /// A prefill leg: computed, for the commit or the end of an abort.
    Hold,
    /// A decode leg: for its offer.
    BeforeOffer,
    /// A decode leg: for blocks to receive into, or, when local, to start.
    Reserve,
    /// A decode leg: for the next verified byte or the commit.
    Receive,
    /// A decode leg that runs: for its next token.
    Token,
}

impl Wait {
    pub(crate) const ALL: [Self; 11] = [
        Self::Door,
        Self::Placement,
        Self::Queue,
        Self::Offer,
        Self::Open,
        Self::Compute,
        Self::Hold,
        Self::BeforeOffer,
        Self::Reserve,
        Self::Receive,
        Self::Token,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Door => "door",
            Self::Placement => "placement",
            Self::Queue => "queue",
            Self::Offer => "offer",
            Self::Open => "open",
            Self::Compute => "compute",
            Self::Hold => "hold",
            Self::BeforeOffer => "before_offer",
            Self::Reserve => "reserve",
            Self::Receive => "receive",
            Self::Token => "token",
        }
    }
}

/// What faults add to any wait: pauses and partitions one after the other, and silent losses.
const TROUBLE: Duration = Duration::from_secs(120);

/// A place in a line that only moves when others end: a drawn run is over long before.
pub(crate) const LINE: Duration = Duration::from_secs(600);

/// Longest waits so far, and their limits.
pub(crate) struct Waits {
    limits: [Duration; Wait::ALL.len()],
    longest: [Duration; Wait::ALL.len()],
}

impl Waits {
    /// `line`: for a place in a line.
    pub(crate) fn new(timers: &Timers, line: Duration) -> Self {
        let Timers { answer, delivery, abort, hold, reserve, grant, progress, writer, park } = *timers;
        let limit = |wait| match wait {
            Wait::Door | Wait::Queue => line,
            Wait::Placement => TROUBLE,
            Wait::Offer => answer + abort + TROUBLE,
            Wait::Open | Wait::Compute => grant + progress + abort + TROUBLE,
            Wait::Hold => delivery + abort + hold + TROUBLE,
            // The offer follows when the prompt came near the head of its queue.
            Wait::BeforeOffer => line + park,
            Wait::Reserve => reserve + line,
            Wait::Receive => grant + progress + writer + TROUBLE,
            Wait::Token => line,
        };
        Self { limits: Wait::ALL.map(limit), longest: [Duration::ZERO; Wait::ALL.len()] }
    }

    /// Takes note of a wait of this length; `Some` is the limit that it passes.
    pub(crate) fn take_note(&mut self, wait: Wait, took: Duration) -> Option<Duration> {
        let nth = wait as usize;
        self.longest[nth] = self.longest[nth].max(took);
        (took > self.limits[nth]).then_some(self.limits[nth])
    }

    /// The longest wait of each kind that came up.
    pub(crate) fn longest(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        let of = |wait: Wait| (wait.name(), self.longest[wait as usize]);
        Wait::ALL.into_iter().map(of).filter(|(_, longest)| !longest.is_zero())
    }
}
