//! The prefill worker's side of one handoff.

use std::collections::VecDeque;

use crate::flow::{Flow, Unexpected};
use crate::{
    Cause, Commit, DestinationMessage, HandoffKey, InstanceId, SourceAction, SourceEnd, SourceFact,
    SourceMessage, Time, Timers,
};

/// What a source is created with.
#[derive(Clone, Copy, Debug)]
pub struct SourceConfig {
    /// The handoff.
    pub key: HandoffKey,
    /// This worker.
    pub source: InstanceId,
    /// Whom the router meant.
    pub destination: InstanceId,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Bounds of all waits.
    pub timers: Timers,
}

#[derive(Debug)]
enum Stage {
    /// In the worker's queue; the destination knows nothing of it.
    Queued,
    /// The offer is out; nothing is computed.
    Offered { answer_by: Time },
    /// Granted: computing and sending.
    Computing(Flow),
    /// Prefill done: the rest is being sent.
    Draining(Flow, Commit),
    /// Everything sent, `Commit` is out.
    Committing(Flow),
    /// `Abort` is out. Blocks are given back unless they may go elsewhere.
    Aborting { then: Then, give_up_at: Time },
    /// The prompt is computed, the handoff failed, the blocks are kept for another destination.
    Held { cause: Cause, until: Time },
    /// Over.
    Ended,
}

/// What follows a handoff that is over.
#[derive(Clone, Copy, Debug)]
enum Then {
    End(SourceEnd),
    Hold(Cause),
}

/// The prefill worker's side of one handoff: facts in, actions out.
///
/// Order: offer, grant, compute and send, commit, committed. A handoff that fails once the prompt is computed, for a cause that another
/// destination may not have, leaves its blocks held: a redirect begins again with the offer. Blocks are released only once the destination has committed,
/// or after [`SourceAction::Fence`]: only this side's sender reads them, so a fenced transfer is a dead one.
#[derive(Debug)]
pub struct Source {
    config: SourceConfig,
    stage: Stage,
    /// The first tokens are sampled: nothing is left to compute.
    computed: bool,
    actions: VecDeque<SourceAction>,
    ignored: u64,
}

impl Source {
    /// A source whose prompt was just queued.
    pub fn new(config: SourceConfig) -> Self {
        Self { config, stage: Stage::Queued, computed: false, actions: VecDeque::new(), ignored: 0 }
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<SourceAction> {
        self.actions.pop_front()
    }

    /// When to call [`Source::handle`] with [`SourceFact::Tick`] if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        match &self.stage {
            Stage::Offered { answer_by } => Some(*answer_by),
            Stage::Computing(flow) | Stage::Draining(flow, _) | Stage::Committing(flow) => flow.deadline(),
            Stage::Aborting { give_up_at, .. } => Some(*give_up_at),
            Stage::Held { until, .. } => Some(*until),
            Stage::Queued | Stage::Ended => None,
        }
    }

    /// Facts that came too late, too early or twice, and changed nothing.
    pub const fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Whether [`SourceAction::End`] was emitted.
    pub const fn is_ended(&self) -> bool {
        matches!(self.stage, Stage::Ended)
    }

    /// The handoff; another one after a redirect.
    pub const fn key(&self) -> HandoffKey {
        self.config.key
    }

    /// Whether the prompt is computed and its blocks are here: [`SourceFact::Redirected`] sends them elsewhere, whatever has become of the
    /// handoff under way.
    pub const fn can_redirect(&self) -> bool {
        match self.stage {
            Stage::Draining(..) | Stage::Committing(_) | Stage::Held { .. } => true,
            Stage::Offered { .. } | Stage::Computing(_) => self.computed,
            Stage::Aborting { then, .. } => matches!(then, Then::Hold(_)),
            Stage::Queued | Stage::Ended => false,
        }
    }

    /// Takes in what happened.
    pub fn handle(&mut self, now: Time, fact: SourceFact) {
        match fact {
            SourceFact::NearHead => self.near_head(now),
            SourceFact::Received(message) => self.received(now, message),
            SourceFact::Encoded { bytes } => self.encoded(now, bytes),
            SourceFact::Sampled { first, bytes, frames } => {
                self.sampled(now, Commit { first_tokens: first, bytes, frames });
            }
            SourceFact::Sent { bytes } => self.sent(now, bytes),
            SourceFact::Resent => self.resent(now),
            SourceFact::ControlLost => self.control_lost(now),
            SourceFact::BulkLost => self.bulk_lost(now),
            SourceFact::Redirected { key, destination } => self.redirected(now, key, destination),
            SourceFact::Cancelled(cause) => self.cancelled(now, cause),
            SourceFact::Tick => self.tick(now),
        }
    }

    fn near_head(&mut self, now: Time) {
        match self.stage {
            Stage::Queued => self.offer(now),
            Stage::Offered { .. }
            | Stage::Computing(_)
            | Stage::Draining(..)
            | Stage::Committing(_)
            | Stage::Aborting { .. }
            | Stage::Held { .. }
            | Stage::Ended => self.ignored += 1,
        }
    }

    /// Who holds blocks does not stand in line for others: else two pools could wait for each other.
    fn offer(&mut self, now: Time) {
        let SourceConfig { key, source, destination, prompt_tokens, timers } = self.config;
        self.send(SourceMessage::Offer { key, source, destination, prompt_tokens });
        let wait = if self.computed { timers.hold } else { timers.answer };
        self.stage = Stage::Offered { answer_by: now + wait };
    }

    /// The new offer goes over a control stream of its own; the end of the old one is an abort to whom it led to.
    fn redirected(&mut self, now: Time, key: HandoffKey, destination: InstanceId) {
        if !self.can_redirect() {
            self.ignored += 1;
            return;
        }
        self.fence();
        self.config.key = key;
        self.config.destination = destination;
        self.offer(now);
    }

    fn received(&mut self, now: Time, message: DestinationMessage) {
        match message {
            DestinationMessage::Grant { skip_tokens, credit } => self.granted(now, skip_tokens, credit),
            DestinationMessage::Busy { .. } => self.refused(now, Cause::Busy),
            DestinationMessage::Gone(cause) => self.gone(now, cause),
            DestinationMessage::Credit(offset) => self.credited(now, offset),
            DestinationMessage::Resend(frame) => self.asked_to_resend(now, frame),
            DestinationMessage::Committed => self.committed(now),
            DestinationMessage::Aborted { committed } => self.abort_acknowledged(now, committed),
        }
    }

    fn granted(&mut self, now: Time, skip_tokens: u32, credit: u64) {
        match &self.stage {
            Stage::Offered { .. } if skip_tokens >= self.config.prompt_tokens => {
                self.abort(now, Cause::Protocol)
            }
            Stage::Offered { .. } => {
                self.stage = Stage::Computing(Flow::new(credit, self.config.timers.delivery, now));
                self.actions.push_back(SourceAction::Compute { skip_tokens });
            }
            // A grant is given once; a repeated one brings nothing new.
            Stage::Computing(_)
            | Stage::Draining(..)
            | Stage::Committing(_)
            | Stage::Queued
            | Stage::Aborting { .. }
            | Stage::Held { .. }
            | Stage::Ended => self.ignored += 1,
        }
    }

    /// `Busy` is an answer to the offer only.
    fn refused(&mut self, now: Time, cause: Cause) {
        match self.stage {
            Stage::Offered { .. } => self.fail(now, cause),
            Stage::Aborting { then, .. } => self.follow(now, then),
            Stage::Queued
            | Stage::Computing(_)
            | Stage::Draining(..)
            | Stage::Committing(_)
            | Stage::Held { .. }
            | Stage::Ended => {
                self.ignored += 1;
            }
        }
    }

    fn gone(&mut self, now: Time, cause: Cause) {
        match self.stage {
            Stage::Offered { .. } | Stage::Computing(_) | Stage::Draining(..) | Stage::Committing(_) => {
                if cause == Cause::NotNeeded {
                    self.fence();
                    self.release_and_end(SourceEnd::NotNeeded);
                } else {
                    self.fail(now, cause);
                }
            }
            Stage::Aborting { then, .. } => self.follow(now, then),
            Stage::Queued | Stage::Held { .. } | Stage::Ended => self.ignored += 1,
        }
    }

    fn encoded(&mut self, now: Time, bytes: u64) {
        let news = match &mut self.stage {
            Stage::Computing(flow) => flow.encode(now, bytes),
            Stage::Queued
            | Stage::Offered { .. }
            | Stage::Draining(..)
            | Stage::Committing(_)
            | Stage::Aborting { .. }
            | Stage::Held { .. }
            | Stage::Ended => false,
        };
        if self.is_news(news) {
            self.transmit();
        }
    }

    fn sampled(&mut self, now: Time, commit: Commit) {
        match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Computing(flow) if !commit.is_well_formed() => {
                self.stage = Stage::Computing(flow);
                self.abort(now, Cause::Protocol);
            }
            Stage::Computing(flow) if commit.is_finished() => {
                self.stage = Stage::Computing(flow);
                self.abort_with(now, Cause::NotNeeded, Then::End(SourceEnd::NotNeeded));
            }
            Stage::Computing(mut flow) => {
                self.computed = true;
                flow.encode(now, commit.bytes);
                self.stage = Stage::Draining(flow, commit);
                self.send(SourceMessage::Notice);
                self.transmit();
                self.commit_when_sent(now);
            }
            stage @ (Stage::Queued
            | Stage::Offered { .. }
            | Stage::Draining(..)
            | Stage::Committing(_)
            | Stage::Aborting { .. }
            | Stage::Held { .. }
            | Stage::Ended) => {
                self.stage = stage;
                self.ignored += 1;
            }
        }
    }

    /// The byte stream, while there is one.
    const fn flow(&mut self) -> Option<&mut Flow> {
        match &mut self.stage {
            // In `Committing` all is sent already, but the destination still works, and after a reopening the transport works through
            // the rest again: that is progress.
            Stage::Computing(flow) | Stage::Draining(flow, _) | Stage::Committing(flow) => Some(flow),
            Stage::Queued
            | Stage::Offered { .. }
            | Stage::Aborting { .. }
            | Stage::Held { .. }
            | Stage::Ended => None,
        }
    }

    fn credited(&mut self, now: Time, offset: u64) {
        let news = self.flow().is_some_and(|flow| flow.credit(now, offset));
        if self.is_news(news) {
            self.transmit();
        }
    }

    fn sent(&mut self, now: Time, bytes: u64) {
        let news = self.flow().is_some_and(|flow| flow.sent(now, bytes));
        if self.is_news(news) {
            self.commit_when_sent(now);
        }
    }

    fn asked_to_resend(&mut self, now: Time, frame: u64) {
        let next = self.flow().map(|flow| flow.want_resend(now, frame));
        self.resend(next);
    }

    fn resent(&mut self, now: Time) {
        let next = self.flow().map(|flow| flow.resent(now));
        self.resend(next);
    }

    fn resend(&mut self, next: Option<Result<Option<u64>, Unexpected>>) {
        match next {
            Some(Ok(Some(frame))) => self.actions.push_back(SourceAction::Resend { frame }),
            Some(Ok(None)) => {}
            Some(Err(_)) | None => self.ignored += 1,
        }
    }

    fn committed(&mut self, now: Time) {
        match self.stage {
            Stage::Committing(_) => {
                self.fence();
                self.release_and_end(SourceEnd::Committed);
            }
            // The commit crossed our abort.
            Stage::Aborting { then: Then::Hold(_), .. } => self.release_and_end(SourceEnd::Committed),
            Stage::Aborting { .. } => self.end(SourceEnd::Committed),
            // It can't have verified what was not sent.
            Stage::Computing(_) | Stage::Draining(..) => self.abort(now, Cause::Protocol),
            Stage::Queued | Stage::Offered { .. } | Stage::Held { .. } | Stage::Ended => self.ignored += 1,
        }
    }

    fn abort_acknowledged(&mut self, now: Time, committed: bool) {
        match self.stage {
            Stage::Aborting { .. } if committed => self.committed(now),
            Stage::Aborting { then, .. } => self.follow(now, then),
            // An answer to a question that was not asked.
            Stage::Offered { .. } | Stage::Computing(_) | Stage::Draining(..) | Stage::Committing(_) => {
                self.abort(now, Cause::Protocol);
            }
            Stage::Queued | Stage::Held { .. } | Stage::Ended => self.ignored += 1,
        }
    }

    fn control_lost(&mut self, now: Time) {
        match self.stage {
            Stage::Offered { .. } | Stage::Computing(_) | Stage::Draining(..) | Stage::Committing(_) => {
                self.fail(now, Cause::PeerLost);
            }
            // The destination takes a lost control stream for an abort, so nothing is open any more.
            Stage::Aborting { then, .. } => self.follow(now, then),
            Stage::Queued | Stage::Held { .. } | Stage::Ended => self.ignored += 1,
        }
    }

    fn bulk_lost(&mut self, now: Time) {
        match self.flow().map(|flow| flow.reopen(now)) {
            Some(Some(from)) => {
                self.actions.push_back(SourceAction::Reopen { from });
                self.transmit();
            }
            Some(None) => self.abort(now, Cause::PeerLost),
            None => self.ignored += 1,
        }
    }

    fn cancelled(&mut self, now: Time, cause: Cause) {
        match self.stage {
            Stage::Queued | Stage::Held { .. } => self.release_and_end(SourceEnd::Failed(cause)),
            Stage::Offered { .. } | Stage::Computing(_) | Stage::Draining(..) | Stage::Committing(_) => {
                self.abort_with(now, cause, Then::End(SourceEnd::Failed(cause)));
            }
            Stage::Aborting { then: Then::Hold(_), give_up_at } => {
                self.actions.push_back(SourceAction::Release);
                self.stage = Stage::Aborting { then: Then::End(SourceEnd::Failed(cause)), give_up_at };
            }
            Stage::Aborting { .. } | Stage::Ended => self.ignored += 1,
        }
    }

    fn tick(&mut self, now: Time) {
        // A tick ahead of its time is no fact, so it is not counted as ignored either.
        if self.deadline().is_none_or(|at| at > now) {
            return;
        }
        match self.stage {
            Stage::Offered { .. } | Stage::Computing(_) | Stage::Draining(..) | Stage::Committing(_) => {
                self.abort(now, Cause::Expired);
            }
            Stage::Aborting { then, .. } => self.follow(now, then),
            Stage::Held { cause, .. } => self.release_and_end(SourceEnd::Failed(cause)),
            Stage::Queued | Stage::Ended => {}
        }
    }

    fn is_news(&mut self, news: bool) -> bool {
        self.ignored += u64::from(!news);
        news
    }

    fn transmit(&mut self) {
        if let Some(up_to) = self.flow().and_then(Flow::transmit) {
            self.actions.push_back(SourceAction::Transmit { up_to });
        }
    }

    fn commit_when_sent(&mut self, now: Time) {
        match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Draining(mut flow, commit) if flow.is_all_sent(commit.bytes) => {
                flow.await_answer(now);
                self.stage = Stage::Committing(flow);
                self.send(SourceMessage::Commit(commit));
            }
            stage => self.stage = stage,
        }
    }

    fn abort(&mut self, now: Time, cause: Cause) {
        self.abort_with(now, cause, self.after(cause));
    }

    fn abort_with(&mut self, now: Time, cause: Cause, then: Then) {
        self.fence();
        if let Then::End(_) = then {
            self.actions.push_back(SourceAction::Release);
        }
        self.send(SourceMessage::Abort(cause));
        self.stage = Stage::Aborting { then, give_up_at: now + self.config.timers.abort };
    }

    /// The destination is gone, and nothing need be told to it.
    fn fail(&mut self, now: Time, cause: Cause) {
        self.fence();
        match self.after(cause) {
            Then::End(end) => self.release_and_end(end),
            hold @ Then::Hold(_) => self.follow(now, hold),
        }
    }

    /// What follows a handoff that failed for this cause.
    const fn after(&self, cause: Cause) -> Then {
        if self.computed && cause.is_of_destination() {
            Then::Hold(cause)
        } else {
            Then::End(SourceEnd::Failed(cause))
        }
    }

    /// The handoff is over, and blocks that are not kept are released.
    fn follow(&mut self, now: Time, then: Then) {
        match then {
            Then::End(end) => self.end(end),
            Then::Hold(cause) => {
                self.actions.push_back(SourceAction::Hold(cause));
                self.stage = Stage::Held { cause, until: now + self.config.timers.hold };
            }
        }
    }

    /// Ends the sender, if there is one: not before a grant.
    fn fence(&mut self) {
        if self.flow().is_some() {
            self.actions.push_back(SourceAction::Fence);
        }
    }

    fn release_and_end(&mut self, end: SourceEnd) {
        self.actions.push_back(SourceAction::Release);
        self.end(end);
    }

    fn end(&mut self, end: SourceEnd) {
        self.stage = Stage::Ended;
        self.actions.push_back(SourceAction::End(end));
    }

    fn send(&mut self, message: SourceMessage) {
        self.actions.push_back(SourceAction::Send(message));
    }
}
