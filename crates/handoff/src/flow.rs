//! The source's byte stream: what is computed, what may go, what went.

use std::collections::VecDeque;
use std::time::Duration;

use crate::Time;

/// Frames that one handoff may be asked to send again; more is a broken wire, not a bit flip.
pub(crate) const MAX_RESENDS: usize = 64;

/// Offsets into the handoff's byte stream, and the timer of what is on its way.
#[derive(Debug)]
pub(crate) struct Flow {
    /// First credit: the destination's window, so `credit - window` is verified there.
    window: u64,
    credit: u64,
    encoded: u64,
    transmit: u64,
    sent: u64,
    /// Frames asked for again, in order; the first `num_resent` of them are done.
    resends: VecDeque<u64>,
    num_resent: usize,
    reopened: bool,
    awaits_answer: bool,
    bound: Duration,
    moved_at: Time,
}

/// A resend that was asked for already, or once too often, or a `Resent` without one.
#[derive(Debug)]
pub(crate) struct Unexpected;

impl Flow {
    pub(crate) fn new(credit: u64, bound: Duration, now: Time) -> Self {
        Self {
            window: credit,
            credit,
            encoded: 0,
            transmit: 0,
            sent: 0,
            resends: VecDeque::new(),
            num_resent: 0,
            reopened: false,
            awaits_answer: false,
            bound,
            moved_at: now,
        }
    }

    /// When the wait for transport or destination has lasted too long; `None` while all that is computed is sent.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let waits = self.sent < self.encoded || self.num_resent < self.resends.len() || self.awaits_answer;
        waits.then(|| self.moved_at + self.bound)
    }

    /// `false`: nothing new.
    pub(crate) fn encode(&mut self, now: Time, bytes: u64) -> bool {
        if bytes <= self.encoded {
            return false;
        }
        // The wait begins with the first byte that is there to be sent.
        if self.deadline().is_none() {
            self.moved_at = now;
        }
        self.encoded = bytes;
        true
    }

    /// `false`: an old or repeated credit.
    pub(crate) fn credit(&mut self, now: Time, offset: u64) -> bool {
        if offset <= self.credit {
            return false;
        }
        self.credit = offset;
        self.moved_at = now;
        true
    }

    /// The new bound of what may be sent, if it grew.
    pub(crate) fn transmit(&mut self) -> Option<u64> {
        let up_to = self.credit.min(self.encoded);
        (up_to > self.transmit).then(|| {
            self.transmit = up_to;
            up_to
        })
    }

    /// `false`: an old or repeated report.
    pub(crate) fn sent(&mut self, now: Time, bytes: u64) -> bool {
        let bytes = bytes.min(self.transmit);
        if bytes <= self.sent {
            return false;
        }
        self.sent = bytes;
        self.moved_at = now;
        true
    }

    pub(crate) const fn is_all_sent(&self, total: u64) -> bool {
        self.sent >= total
    }

    pub(crate) fn await_answer(&mut self, now: Time) {
        self.awaits_answer = true;
        self.moved_at = now;
    }

    /// The frame to resend now; `None` while another is on its way, since resends have an allowance of one frame.
    pub(crate) fn want_resend(&mut self, now: Time, frame: u64) -> Result<Option<u64>, Unexpected> {
        if self.resends.contains(&frame) || self.resends.len() >= MAX_RESENDS {
            return Err(Unexpected);
        }
        self.moved_at = now;
        self.resends.push_back(frame);
        Ok((self.num_resent + 1 == self.resends.len()).then_some(frame))
    }

    /// The next frame to resend, if one waits.
    pub(crate) fn resent(&mut self, now: Time) -> Result<Option<u64>, Unexpected> {
        if self.num_resent >= self.resends.len() {
            return Err(Unexpected);
        }
        self.num_resent += 1;
        self.moved_at = now;
        Ok(self.resends.get(self.num_resent).copied())
    }

    /// Where to begin again after the bulk stream broke; `None` the second time.
    pub(crate) fn reopen(&mut self, now: Time) -> Option<u64> {
        if std::mem::replace(&mut self.reopened, true) {
            return None;
        }
        let from = self.credit - self.window;
        self.sent = self.sent.min(from);
        self.transmit = from;
        // What was asked for again lies behind `from` and goes out with the rest.
        self.num_resent = self.resends.len();
        self.moved_at = now;
        Some(from)
    }
}
