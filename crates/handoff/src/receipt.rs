//! The destination's account of a transfer: what was granted, what is verified, what was damaged.

use crate::flow::MAX_RESENDS;
use crate::{Commit, Time, Timers};

/// What follows a damaged frame.
#[derive(Debug)]
pub(crate) enum Damage {
    /// Ask for it once more.
    Resend,
    /// It was damaged before, or too many were.
    Fatal,
}

#[derive(Debug)]
pub(crate) struct Receipt {
    bytes: u64,
    window: u64,
    credit: u64,
    verified: u64,
    damaged: Vec<u64>,
    noticed: bool,
    commit: Option<Commit>,
    reopened: bool,
    writer_ended: bool,
    moved_at: Time,
}

impl Receipt {
    pub(crate) fn new(now: Time, bytes: u64, window: u64) -> Self {
        let window = window.max(1);
        Self {
            bytes,
            window,
            credit: window.min(bytes),
            verified: 0,
            damaged: Vec::new(),
            noticed: false,
            commit: None,
            reopened: false,
            writer_ended: false,
            moved_at: now,
        }
    }

    /// The grant has its own, longer bound: the source may have others to compute first.
    pub(crate) fn deadline(&self, timers: &Timers) -> Time {
        let unused = self.verified == 0 && !self.noticed && self.commit.is_none();
        self.moved_at + if unused { timers.grant } else { timers.progress }
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) const fn credit(&self) -> u64 {
        self.credit
    }

    pub(crate) const fn is_whole(&self) -> bool {
        self.verified == self.bytes
    }

    /// `false`: nothing new.
    pub(crate) fn verify(&mut self, now: Time, bytes: u64) -> bool {
        if bytes <= self.verified {
            return false;
        }
        self.verified = bytes;
        self.moved_at = now;
        true
    }

    /// The credit to announce: in steps of a quarter window, so that a frame doesn't cost a message, and the last one.
    pub(crate) fn new_credit(&mut self) -> Option<u64> {
        let offset = self.verified.saturating_add(self.window).min(self.bytes);
        let grown = offset - self.credit;
        let due = grown > 0 && (grown >= self.window.div_ceil(4) || offset == self.bytes);
        due.then(|| {
            self.credit = offset;
            offset
        })
    }

    pub(crate) fn damaged(&mut self, now: Time, frame: u64) -> Damage {
        if self.damaged.contains(&frame) || self.damaged.len() >= MAX_RESENDS {
            return Damage::Fatal;
        }
        self.damaged.push(frame);
        self.moved_at = now;
        Damage::Resend
    }

    /// `false`: a repeated notice.
    pub(crate) fn notice(&mut self, now: Time) -> bool {
        if self.noticed {
            return false;
        }
        self.noticed = true;
        self.moved_at = now;
        true
    }

    /// `false`: a repeated commit.
    pub(crate) fn commit(&mut self, now: Time, commit: Commit) -> bool {
        if self.commit.is_some() {
            return false;
        }
        self.commit = Some(commit);
        self.moved_at = now;
        true
    }

    /// The commit, once every byte is verified too.
    pub(crate) fn complete(&self) -> Option<Commit> {
        if self.is_whole() { self.commit.clone() } else { None }
    }

    /// `true` the first time the bulk stream breaks.
    pub(crate) fn may_reopen(&mut self, now: Time) -> bool {
        self.moved_at = now;
        !std::mem::replace(&mut self.reopened, true)
    }

    pub(crate) const fn set_writer_ended(&mut self) {
        self.writer_ended = true;
    }

    pub(crate) const fn has_writer_ended(&self) -> bool {
        self.writer_ended
    }
}
