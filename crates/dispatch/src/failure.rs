//! What follows a failed attempt: nothing, a resume, another attempt of the group, a group for each sequence, or the end.

use std::ops::Range;

use baton_handoff::{Cause, InstanceId};

use crate::budget::Spent;
use crate::group::{Group, Stage};
use crate::{Request, RequestEnd, Time, Verdict};

/// Why an attempt ended, and which worker is to blame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    cause: Cause,
    blamed: InstanceId,
    verdict: Verdict,
}

impl Failure {
    pub(crate) const fn of(cause: Cause, blamed: InstanceId) -> Self {
        Self { cause, blamed, verdict: Verdict::of(cause) }
    }

    /// The worker's stream broke.
    pub(crate) const fn lost(blamed: InstanceId) -> Self {
        Self { cause: Cause::PeerLost, blamed, verdict: Verdict::WorkerLost }
    }
}

impl Request {
    pub(crate) fn attempt_failed(&mut self, now: Time, at: usize, failure: Failure) {
        self.finish_complete(at);
        if self.groups[at].is_over() {
            return;
        }
        let Failure { cause, blamed, verdict } = failure;
        match verdict {
            Verdict::Ignore => self.ignored += 1,
            Verdict::GiveUp => self.close_and_end(RequestEnd::Failed { cause, retry_after_ms: None }),
            Verdict::Resume if self.is_held(at, cause, blamed) => {
                self.groups[at].preempted = true;
                self.place_decode(at);
            }
            Verdict::Resume => {
                for to in self.regroup(at) {
                    self.groups[to].preempted = true;
                    self.place(to);
                }
            }
            Verdict::MoveOn => self.move_on(now, at, cause, blamed),
            Verdict::WorkerLost => match self.budget.lose(blamed) {
                Ok(()) => self.retry(now, at, cause, blamed),
                Err(Spent) => self.close_and_end(RequestEnd::Failed { cause, retry_after_ms: None }),
            },
            // After a delivered token nothing can be shed: it is a resume like any other.
            Verdict::PlaceAgain if self.num_delivered() == 0 => self.place_again(now, at, cause, blamed),
            Verdict::Retry | Verdict::PlaceAgain => self.retry(now, at, cause, blamed),
        }
    }

    /// A running sequence gave up its blocks: it goes on elsewhere at once, the others stay where they are.
    pub(crate) fn sequence_preempted(&mut self, at: usize, sequence: u32) {
        self.finish_if_complete(sequence);
        if self.groups[at].num_sequences > 1 && self.owns(at, sequence) {
            let to = self.split_off(sequence, true);
            self.settle(at);
            return self.place(to);
        }
        self.settle(at);
        if !self.groups[at].is_over() && self.owns(at, sequence) {
            self.close(at);
            self.groups[at].preempted = true;
            self.place(at);
        }
    }

    fn retry(&mut self, now: Time, at: usize, cause: Cause, blamed: InstanceId) {
        let nth = self.groups[at].live().map_or(0, |live| live.nth);
        match self.budget.retry(blamed, nth) {
            Ok(_) if self.is_held(at, cause, blamed) => {
                // Also when the prefill worker was charged, because the two don't hear each other.
                if let Some(decode) = self.groups[at].live().map(|live| live.placed.decode) {
                    self.budget.shun(decode);
                }
                self.place_decode(at);
            }
            Ok(before) => {
                for to in self.regroup(at) {
                    self.back_off(now, to, before);
                }
            }
            Err(Spent) => self.fail(cause),
        }
    }

    fn move_on(&mut self, now: Time, at: usize, cause: Cause, blamed: InstanceId) {
        let nth = self.groups[at].live().map_or(0, |live| live.nth);
        if !self.budget.leave(blamed, nth) {
            return self.retry(now, at, cause, blamed);
        }
        if self.is_held(at, cause, blamed) {
            return self.place_decode(at);
        }
        for to in self.regroup(at) {
            self.place(to);
        }
    }

    fn place_again(&mut self, now: Time, at: usize, cause: Cause, blamed: InstanceId) {
        match self.budget.place_again(Some(blamed)) {
            Ok(before) => {
                for to in self.regroup(at) {
                    self.back_off(now, to, before);
                }
            }
            Err(Spent) => self.fail(cause),
        }
    }

    /// The budget is used up: a client that got nothing may come again.
    fn fail(&mut self, cause: Cause) {
        let nothing = self.num_delivered() == 0;
        let retry_after_ms = nothing.then_some(self.config.limits.retry_after_ms);
        self.close_and_end(RequestEnd::Failed { cause, retry_after_ms });
    }

    /// Finishes the group's sequences that need nothing more though their last word is missing.
    fn finish_complete(&mut self, at: usize) {
        for sequence in self.groups[at].sequences() {
            if self.owns(at, sequence) {
                self.finish_if_complete(sequence);
            }
        }
        self.settle(at);
    }

    fn finish_if_complete(&mut self, sequence: u32) {
        let (stop_tokens, max) = (&self.config.stop_tokens, self.config.max_new_tokens);
        if let Some(reason) = self.sequences[sequence as usize].complete(stop_tokens, max) {
            self.finish(sequence, reason);
        }
    }

    /// Closes a group's legs. Answers in which groups its sequences go on: the same one, or once any of them got further than the others' start,
    /// one for each.
    pub(crate) fn regroup(&mut self, at: usize) -> Range<usize> {
        self.close(at);
        let untouched =
            |sequence| self.owns(at, sequence) && self.sequences[sequence as usize].delivered == 0;
        let group = &self.groups[at];
        if group.num_sequences == 1 || group.sequences().all(untouched) {
            return at..at + 1;
        }
        let (sequences, preempted) = (group.sequences(), group.preempted);
        let from = self.groups.len();
        for sequence in sequences {
            if self.owns(at, sequence) {
                self.split_off(sequence, preempted);
            }
        }
        self.groups[at].stage = Stage::Over;
        from..self.groups.len()
    }

    /// From here on the sequence is a group of its own.
    fn split_off(&mut self, sequence: u32, preempted: bool) -> usize {
        let group = Group::of_one(sequence, preempted);
        self.sequences[sequence as usize].group = group.number;
        self.groups.push(group);
        self.groups.len() - 1
    }
}
