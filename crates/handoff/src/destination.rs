//! The decode worker's side of one handoff.

use std::collections::VecDeque;

use crate::receipt::{Damage, Receipt};
use crate::{
    Cause, Commit, DestinationAction, DestinationEnd, DestinationFact, DestinationMessage, HandoffKey,
    InstanceId, SourceMessage, Time, Timers,
};

/// What a destination is created with, once its Decode leg is here.
#[derive(Clone, Copy, Debug)]
pub struct DestinationConfig {
    /// The handoff.
    pub key: HandoffKey,
    /// This worker.
    pub instance: InstanceId,
    /// Tokens of the leg's prompt; the offer must say the same.
    pub prompt_tokens: u32,
    /// Bytes that may be outstanding: granted and not yet verified; at least one frame.
    pub credit_window: u64,
    /// Bounds of all waits.
    pub timers: Timers,
}

#[derive(Debug)]
enum Stage {
    /// The leg waits for an offer; it holds nothing.
    Waiting,
    /// Offered: the scheduler is to reserve.
    Reserving { answer_by: Time },
    /// Granted: bytes arrive.
    Receiving(Receipt),
    /// Every byte and the commit are here; the writer is ending.
    Committing { commit: Commit, give_up_at: Time },
    /// Over well.
    Committed,
    /// Fenced: the writer is ending, then the blocks return.
    Closing { cause: Cause, give_up_at: Time },
    /// Over badly.
    Ended,
}

/// The decode worker's side of one handoff: facts in, actions out.
///
/// Blocks are freed, and a sequence runs, only after the writer has ended: nobody else can write into them then.
#[derive(Debug)]
pub struct Destination {
    config: DestinationConfig,
    stage: Stage,
    actions: VecDeque<DestinationAction>,
    ignored: u64,
}

impl Destination {
    /// A destination whose Decode leg was just opened.
    pub fn new(config: DestinationConfig) -> Self {
        Self { config, stage: Stage::Waiting, actions: VecDeque::new(), ignored: 0 }
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<DestinationAction> {
        self.actions.pop_front()
    }

    /// When to call [`Destination::handle`] with [`DestinationFact::Tick`] if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        match &self.stage {
            Stage::Reserving { answer_by } => Some(*answer_by),
            Stage::Receiving(receipt) => Some(receipt.deadline(&self.config.timers)),
            Stage::Committing { give_up_at, .. } | Stage::Closing { give_up_at, .. } => Some(*give_up_at),
            Stage::Waiting | Stage::Committed | Stage::Ended => None,
        }
    }

    /// Facts that came too late, too early or twice, and changed nothing.
    pub const fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Whether [`DestinationAction::End`] was emitted.
    pub const fn is_ended(&self) -> bool {
        matches!(self.stage, Stage::Committed | Stage::Ended)
    }

    /// The handoff.
    pub const fn key(&self) -> HandoffKey {
        self.config.key
    }

    /// Takes in what happened.
    pub fn handle(&mut self, now: Time, fact: DestinationFact) {
        match fact {
            DestinationFact::Offered { source: _, destination, prompt_tokens } => {
                self.offered(now, destination, prompt_tokens);
            }
            DestinationFact::Reserved { skip_tokens, bytes } => self.reserved(now, skip_tokens, bytes),
            DestinationFact::NoRoom => self.no_room(),
            DestinationFact::Verified { bytes } => self.verified(now, bytes),
            DestinationFact::Corrupt { frame } => self.corrupt(now, frame),
            DestinationFact::Received(message) => self.received(now, message),
            DestinationFact::ControlLost => self.control_lost(now),
            DestinationFact::BulkLost => self.bulk_lost(now),
            DestinationFact::WriterEnded => self.writer_ended(now),
            DestinationFact::Cancelled(cause) => self.cancelled(now, cause),
            DestinationFact::Tick => self.tick(now),
        }
    }

    fn received(&mut self, now: Time, message: SourceMessage) {
        match message {
            SourceMessage::Offer { key: _, source: _, destination, prompt_tokens } => {
                self.offered(now, destination, prompt_tokens);
            }
            SourceMessage::Notice => self.noticed(now),
            SourceMessage::Commit(commit) => self.commit(now, commit),
            SourceMessage::Abort(cause) => self.aborted(now, cause),
        }
    }

    fn offered(&mut self, now: Time, destination: InstanceId, prompt_tokens: u32) {
        match self.stage {
            Stage::Waiting if destination != self.config.instance => {
                self.send(DestinationMessage::Gone(Cause::WrongInstance));
                self.ignored += 1;
            }
            Stage::Waiting if prompt_tokens != self.config.prompt_tokens => self.refuse(Cause::Protocol),
            Stage::Waiting => {
                self.stage = Stage::Reserving { answer_by: now + self.config.timers.reserve };
                self.actions.push_back(DestinationAction::Reserve);
            }
            Stage::Reserving { .. }
            | Stage::Receiving(_)
            | Stage::Committing { .. }
            | Stage::Committed
            | Stage::Closing { .. }
            | Stage::Ended => self.ignored += 1,
        }
    }

    fn reserved(&mut self, now: Time, skip_tokens: u32, bytes: u64) {
        match self.stage {
            Stage::Reserving { .. } => {
                let receipt = Receipt::new(now, bytes, self.config.credit_window);
                self.send(DestinationMessage::Grant { skip_tokens, credit: receipt.credit() });
                self.stage = Stage::Receiving(receipt);
            }
            Stage::Waiting
            | Stage::Receiving(_)
            | Stage::Committing { .. }
            | Stage::Committed
            | Stage::Closing { .. }
            | Stage::Ended => self.ignored += 1,
        }
    }

    fn no_room(&mut self) {
        match self.stage {
            Stage::Reserving { .. } => self.answer_busy(),
            Stage::Waiting
            | Stage::Receiving(_)
            | Stage::Committing { .. }
            | Stage::Committed
            | Stage::Closing { .. }
            | Stage::Ended => self.ignored += 1,
        }
    }

    fn verified(&mut self, now: Time, bytes: u64) {
        let news = match &mut self.stage {
            Stage::Receiving(receipt) if bytes > receipt.bytes() => return self.close(now, Cause::Protocol),
            Stage::Receiving(receipt) => receipt.verify(now, bytes),
            Stage::Waiting
            | Stage::Reserving { .. }
            | Stage::Committing { .. }
            | Stage::Committed
            | Stage::Closing { .. }
            | Stage::Ended => false,
        };
        if self.is_news(news) {
            self.grant_more();
            self.commit_when_whole(now);
        }
    }

    fn corrupt(&mut self, now: Time, frame: u64) {
        match &mut self.stage {
            Stage::Receiving(receipt) => match receipt.damaged(now, frame) {
                Damage::Resend => self.send(DestinationMessage::Resend(frame)),
                Damage::Fatal => self.close(now, Cause::Corrupt),
            },
            // After the last byte is verified a damaged duplicate changes nothing.
            Stage::Waiting
            | Stage::Reserving { .. }
            | Stage::Committing { .. }
            | Stage::Committed
            | Stage::Closing { .. }
            | Stage::Ended => self.ignored += 1,
        }
    }

    fn noticed(&mut self, now: Time) {
        let news = match &mut self.stage {
            Stage::Receiving(receipt) => receipt.notice(now),
            Stage::Waiting
            | Stage::Reserving { .. }
            | Stage::Committing { .. }
            | Stage::Committed
            | Stage::Closing { .. }
            | Stage::Ended => false,
        };
        self.is_news(news);
    }

    fn commit(&mut self, now: Time, commit: Commit) {
        let news = match &mut self.stage {
            Stage::Receiving(receipt) if commit.bytes != receipt.bytes() || !commit.is_well_formed() => {
                return self.close(now, Cause::Protocol);
            }
            Stage::Receiving(_) if commit.is_finished() => return self.close(now, Cause::NotNeeded),
            Stage::Receiving(receipt) => receipt.commit(now, commit),
            Stage::Waiting
            | Stage::Reserving { .. }
            | Stage::Committing { .. }
            | Stage::Committed
            | Stage::Closing { .. }
            | Stage::Ended => false,
        };
        if self.is_news(news) {
            self.commit_when_whole(now);
        }
    }

    /// The source gives up. It always gets an answer, so that it can end.
    fn aborted(&mut self, now: Time, cause: Cause) {
        let committed = matches!(self.stage, Stage::Committed);
        self.send(DestinationMessage::Aborted { committed });
        match self.stage {
            Stage::Waiting | Stage::Reserving { .. } => self.free_and_end(cause),
            Stage::Receiving(_) => self.fence(now, cause),
            // Not committed yet, so the abort wins; the fence is out already.
            Stage::Committing { give_up_at, .. } => self.stage = Stage::Closing { cause, give_up_at },
            Stage::Committed | Stage::Closing { .. } | Stage::Ended => self.ignored += 1,
        }
    }

    fn control_lost(&mut self, now: Time) {
        match self.stage {
            Stage::Reserving { .. } => self.free_and_end(Cause::PeerLost),
            Stage::Receiving(_) => self.fence(now, Cause::PeerLost),
            // Everything is here, or everything is said: what becomes of the source does not matter any more.
            Stage::Committing { .. } | Stage::Committed | Stage::Closing { .. } | Stage::Ended => {}
            Stage::Waiting => self.ignored += 1,
        }
    }

    fn bulk_lost(&mut self, now: Time) {
        match &mut self.stage {
            // With every byte verified the stream has done its work.
            Stage::Receiving(receipt) if receipt.is_whole() => {}
            Stage::Receiving(receipt) => {
                if !receipt.may_reopen(now) {
                    self.close(now, Cause::PeerLost);
                }
            }
            Stage::Waiting
            | Stage::Reserving { .. }
            | Stage::Committing { .. }
            | Stage::Committed
            | Stage::Closing { .. }
            | Stage::Ended => self.ignored += 1,
        }
    }

    fn writer_ended(&mut self, now: Time) {
        match &mut self.stage {
            Stage::Receiving(receipt) if receipt.is_whole() => receipt.set_writer_ended(),
            // It ended without a fence and with bytes missing: they can't arrive any more.
            Stage::Receiving(_) => {
                self.close(now, Cause::PeerLost);
                self.writer_ended(now);
            }
            Stage::Committing { commit, .. } => {
                let commit = commit.clone();
                self.run(commit);
            }
            Stage::Closing { cause, .. } => {
                let cause = *cause;
                self.free_and_end(cause);
            }
            Stage::Waiting | Stage::Reserving { .. } | Stage::Committed | Stage::Ended => self.ignored += 1,
        }
    }

    fn cancelled(&mut self, now: Time, cause: Cause) {
        match self.stage {
            Stage::Waiting => self.free_and_end(cause),
            Stage::Reserving { .. } => self.refuse(cause),
            Stage::Receiving(_) => self.close(now, cause),
            // Cancel wins over a commit that is not done.
            Stage::Committing { give_up_at, .. } => {
                self.send(DestinationMessage::Gone(cause));
                self.stage = Stage::Closing { cause, give_up_at };
            }
            // A running sequence is cancelled in the scheduler.
            Stage::Committed | Stage::Closing { .. } | Stage::Ended => self.ignored += 1,
        }
    }

    fn tick(&mut self, now: Time) {
        // A tick ahead of its time is no fact, so it is not counted as ignored either.
        if self.deadline().is_none_or(|at| at > now) {
            return;
        }
        match self.stage {
            Stage::Reserving { .. } => self.answer_busy(),
            Stage::Receiving(_) => self.close(now, Cause::Expired),
            // A writer that doesn't end is this worker's fault; its lease keeps the blocks out of use.
            Stage::Committing { .. } => {
                self.send(DestinationMessage::Gone(Cause::Expired));
                self.free_and_end(Cause::Expired);
            }
            Stage::Closing { cause, .. } => self.free_and_end(cause),
            Stage::Waiting | Stage::Committed | Stage::Ended => {}
        }
    }

    fn is_news(&mut self, news: bool) -> bool {
        self.ignored += u64::from(!news);
        news
    }

    fn grant_more(&mut self) {
        if let Stage::Receiving(receipt) = &mut self.stage
            && let Some(offset) = receipt.new_credit()
        {
            self.send(DestinationMessage::Credit(offset));
        }
    }

    fn commit_when_whole(&mut self, now: Time) {
        let Stage::Receiving(receipt) = &self.stage else { return };
        let Some(commit) = receipt.complete() else { return };
        if receipt.has_writer_ended() {
            return self.run(commit);
        }
        self.actions.push_back(DestinationAction::Fence);
        self.stage = Stage::Committing { commit, give_up_at: now + self.config.timers.writer };
    }

    fn run(&mut self, commit: Commit) {
        self.stage = Stage::Committed;
        self.actions.push_back(DestinationAction::Run(commit));
        self.send(DestinationMessage::Committed);
        self.actions.push_back(DestinationAction::End(DestinationEnd::Committed));
    }

    fn answer_busy(&mut self) {
        let retry_after_ms = u64::try_from(self.config.timers.park.as_millis()).unwrap_or(u64::MAX);
        self.send(DestinationMessage::Busy { retry_after_ms });
        self.free_and_end(Cause::Busy);
    }

    /// Nothing is reserved: says why and ends.
    fn refuse(&mut self, cause: Cause) {
        self.send(DestinationMessage::Gone(cause));
        self.free_and_end(cause);
    }

    /// Says why, and closes a reservation.
    fn close(&mut self, now: Time, cause: Cause) {
        self.send(DestinationMessage::Gone(cause));
        self.fence(now, cause);
    }

    /// Closes a reservation: the writer is stopped first.
    fn fence(&mut self, now: Time, cause: Cause) {
        let gone = matches!(&self.stage, Stage::Receiving(receipt) if receipt.has_writer_ended());
        if gone {
            return self.free_and_end(cause);
        }
        self.actions.push_back(DestinationAction::Fence);
        self.stage = Stage::Closing { cause, give_up_at: now + self.config.timers.writer };
    }

    fn free_and_end(&mut self, cause: Cause) {
        self.stage = Stage::Ended;
        self.actions.push_back(DestinationAction::Free);
        self.actions.push_back(DestinationAction::End(DestinationEnd::Failed(cause)));
    }

    fn send(&mut self, message: DestinationMessage) {
        self.actions.push_back(DestinationAction::Send(message));
    }
}
