//! The bulk ends: a sender that cuts the byte stream into frames, and a receiver that keeps what it verified.

use baton_handoff::{FinishReason, FirstToken, SampledToken, SourceFact};

pub(crate) const FRAME: u64 = 16;

/// First tokens of a group of `num` sequences; those for which `ends` says so are finished.
pub(crate) fn first_tokens(num: u32, mut ends: impl FnMut(u32) -> bool) -> Vec<FirstToken> {
    let token = |sequence| SampledToken { id: 7 + sequence, logprob: -0.5, index: 0 };
    (0..num)
        .map(|sequence| FirstToken {
            sequence,
            token: token(sequence),
            finish: ends(sequence).then_some(FinishReason::Stop),
        })
        .collect()
}

pub(crate) struct Sender {
    pub(crate) total: u64,
    /// Which bulk stream; frames of an earlier one are lost.
    pub(crate) stream: u32,
    pub(crate) up_to: u64,
    next: u64,
    up: bool,
    pub(crate) fenced: bool,
}

impl Sender {
    pub(crate) fn new(total: u64) -> Self {
        Self { total, stream: 0, up_to: 0, next: 0, up: true, fenced: false }
    }

    /// The next frame and the offset behind it, if the stream lives and the bound allows the whole frame.
    pub(crate) fn push(&mut self, stream: u32) -> Option<(u64, u64)> {
        let end = (self.next * FRAME + FRAME).min(self.total);
        let empty = self.next * FRAME >= self.total;
        if empty || end > self.up_to || !self.up || self.fenced || stream != self.stream {
            return None;
        }
        self.next += 1;
        Some((self.next - 1, end))
    }

    pub(crate) fn resend(&self, _frame: u64) -> Option<u32> {
        (self.up && !self.fenced).then_some(self.stream)
    }

    pub(crate) fn cut(&mut self) {
        self.up = false;
        self.stream += 1;
    }

    pub(crate) fn reopen(&mut self, from: u64) {
        self.up = true;
        self.next = from / FRAME;
        self.up_to = from;
    }

    pub(crate) fn sampled(&self, first: Vec<FirstToken>) -> SourceFact {
        SourceFact::Sampled { first, bytes: self.total, frames: self.total.div_ceil(FRAME) }
    }
}

pub(crate) struct Receiver {
    pub(crate) total: u64,
    frames: Vec<bool>,
    pub(crate) fenced: bool,
    pub(crate) writer_ended: bool,
}

impl Receiver {
    pub(crate) fn new(total: u64) -> Self {
        let num = usize::try_from(total.div_ceil(FRAME)).expect("small");
        Self { total, frames: vec![false; num], fenced: false, writer_ended: false }
    }

    pub(crate) fn may_write(&self) -> bool {
        !self.fenced && !self.writer_ended
    }

    pub(crate) fn write(&mut self, frame: u64) -> u64 {
        self.frames[usize::try_from(frame).expect("small")] = true;
        self.contiguous()
    }

    pub(crate) fn contiguous(&self) -> u64 {
        let num = self.frames.iter().take_while(|have| **have).count() as u64;
        (num * FRAME).min(self.total)
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.contiguous() == self.total
    }
}
