//! The bulk sender of a handoff.

use std::collections::VecDeque;
use std::time::Duration;

use baton_handoff::HandoffKey;
use baton_kv::ReadLease;
use baton_timing::FingerprintMemory;

use crate::frames::{Cut, Frame, checksum};
use crate::network::StreamId;

/// Reads blocks through its lease, frame by frame, up to a bound.
pub(crate) struct Sender {
    lease: ReadLease,
    cut: Cut,
    /// Broken or not yet opened when `None`.
    pub(crate) stream: Option<StreamId>,
    pub(crate) up_to: u64,
    next: u64,
    pub(crate) resends: VecDeque<u64>,
    /// A push is in the queue.
    pub(crate) scheduled: bool,
    /// Tokens put on the link, and the seconds that it took for them.
    tokens: f64,
    seconds: f64,
}

/// What a push put on the stream.
pub(crate) enum Pushed {
    /// The next frame; every byte below this offset is sent.
    Next(Frame, u64),
    /// A frame once more.
    Again(Frame),
}

impl Sender {
    pub(crate) fn new(lease: ReadLease, cut: Cut) -> Self {
        let resends = VecDeque::new();
        Self {
            lease,
            cut,
            stream: None,
            up_to: 0,
            next: 0,
            resends,
            scheduled: false,
            tokens: 0.0,
            seconds: 0.0,
        }
    }

    /// Tokens of the frame that a push would send, in one layer.
    pub(crate) fn next_tokens(&self) -> usize {
        let index = self.resends.front().copied().unwrap_or(self.next);
        self.cut.place(index).map_or(0, |place| place.num_tokens)
    }

    /// Takes note of how long the link needs for so many tokens.
    pub(crate) fn took(&mut self, tokens: f64, time: Duration) {
        self.tokens += tokens;
        self.seconds += time.as_secs_f64();
    }

    /// How fast the link was; `None` before anything was sent.
    pub(crate) fn tokens_per_s(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.tokens / self.seconds)
    }

    pub(crate) fn reopen(&mut self, from: u64) {
        self.next = self.cut.frame_at(from);
        self.up_to = from;
        self.resends.clear();
        self.stream = None;
    }

    pub(crate) fn has_work(&self) -> bool {
        !self.resends.is_empty() || self.cut.range(self.next).is_some_and(|range| range.end <= self.up_to)
    }

    pub(crate) fn push(&mut self, key: HandoffKey, memory: &FingerprintMemory) -> Option<Pushed> {
        if let Some(index) = self.resends.pop_front() {
            return self.frame(key, index, memory).map(Pushed::Again);
        }
        let end = self.cut.range(self.next)?.end;
        if end > self.up_to {
            return None;
        }
        let frame = self.frame(key, self.next, memory)?;
        self.next += 1;
        Some(Pushed::Next(frame, end))
    }

    fn frame(&self, key: HandoffKey, index: u64, memory: &FingerprintMemory) -> Option<Frame> {
        let place = self.cut.place(index)?;
        let payload = match self.cut.empty {
            true => Vec::new(),
            false => memory.read(place.layer, self.lease.block(place.block)?, place.num_tokens)?,
        };
        Some(Frame { key, index, checksum: checksum(&payload), payload })
    }
}
