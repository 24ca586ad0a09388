//! The prefill worker's side of one handoff.

use std::collections::VecDeque;

use crate::flow::Flow;
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
    /// Blocks given back, `Abort` is out.
    Aborting { end: SourceEnd, give_up_at: Time },
    /// Over.
    Ended,
}

/// The prefill worker's side of one handoff: facts in, actions out.
///
/// Order: offer, grant, compute and send, commit, committed. Blocks are released only once the destination has committed,
/// or after [`SourceAction::Fence`]: only this side's sender reads them, so a fenced transfer is a dead one.
#[derive(Debug)]
pub struct Source {
    config: SourceConfig,
    stage: Stage,
    actions: VecDeque<SourceAction>,
    ignored: u64,
}

impl Source {
    /// A source whose prompt was just queued.
    pub fn new(config: SourceConfig) -> Self {
        Self { config, stage: Stage::Queued, actions: VecDeque::new(), ignored: 0 }
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

    /// The handoff.
    pub const fn key(&self) -> HandoffKey {
        self.config.key
    }

    /// Takes in what happened.
    pub fn handle(&mut self, now: Time, fact: SourceFact) {
        match fact {
            SourceFact::NearHead => self.near_head(now),
            SourceFact::Received(message) => self.received(now, message),
            SourceFact::Encoded { bytes } => self.encoded(now, bytes),
            SourceFact::Sampled { first, finish, bytes, frames } => {
                self.sampled(now, Commit { first_token: first, finish, bytes, frames });
            }
            SourceFact::Sent { bytes } => self.sent(now, bytes),
            SourceFact::Resent => self.resent(now),
            SourceFact::ControlLost => self.control_lost(),
            SourceFact::BulkLost => self.bulk_lost(now),
            SourceFact::Cancelled(cause) => self.cancelled(now, cause),
            SourceFact::Tick => self.tick(now),
        }
    }

    fn near_head(&mut self, now: Time) {
        match self.stage {
            Stage::Queued => {
                let SourceConfig { key, source, destination, prompt_tokens, timers } = self.config;
                self.send(SourceMessage::Offer { key, source, destination, prompt_tokens });
                self.stage = Stage::Offered { answer_by: now + timers.answer };
            }
            Stage::Offered { .. }
            | Stage::Computing(_)
            | Stage::Draining(..)
            | Stage::Committing(_)
            | Stage::Aborting { .. }
            | Stage::Ended => self.ignored += 1,
        }
    }

    fn received(&mut self, now: Time, message: DestinationMessage) {
        match message {
            DestinationMessage::Grant { skip_tokens, credit } => self.granted(now, skip_tokens, credit),
            DestinationMessage::Busy { .. } => self.refused(Cause::Busy),
            DestinationMessage::Gone(cause) => self.gone(cause),
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
            | Stage::Ended => self.ignored += 1,
        }
    }

    /// `Busy` is an answer to the offer only.
    fn refused(&mut self, cause: Cause) {
        match self.stage {
            Stage::Offered { .. } => self.release_and_end(SourceEnd::Failed(cause)),
            Stage::Aborting { end, .. } => self.end(end),
            Stage::Queued
            | Stage::Computing(_)
            | Stage::Draining(..)
            | Stage::Committing(_)
            | Stage::Ended => {
                self.ignored += 1;
            }
        }
    }

    fn gone(&mut self, cause: Cause) {
        let end = if cause == Cause::NotNeeded { SourceEnd::NotNeeded } else { SourceEnd::Failed(cause) };
        match self.stage {
            Stage::Offered { .. } => self.release_and_end(end),
            Stage::Computing(_) | Stage::Draining(..) | Stage::Committing(_) => {
                self.actions.push_back(SourceAction::Fence);
                self.release_and_end(end);
            }
            Stage::Aborting { end, .. } => self.end(end),
            Stage::Queued | Stage::Ended => self.ignored += 1,
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
            | Stage::Ended => false,
        };
        if self.is_news(news) {
            self.transmit();
        }
    }

    fn sampled(&mut self, now: Time, commit: Commit) {
        match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Computing(flow) if commit.finish.is_some() => {
                self.stage = Stage::Computing(flow);
                self.abort_with(now, Cause::NotNeeded, SourceEnd::NotNeeded);
            }
            Stage::Computing(mut flow) => {
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
            | Stage::Ended) => {
                self.stage = stage;
                self.ignored += 1;
            }
        }
    }

    fn credited(&mut self, now: Time, offset: u64) {
        let news = match &mut self.stage {
            // In `Committing` all is sent already, but the destination still works: that is progress.
            Stage::Computing(flow) | Stage::Draining(flow, _) | Stage::Committing(flow) => {
                flow.credit(now, offset)
            }
            Stage::Queued | Stage::Offered { .. } | Stage::Aborting { .. } | Stage::Ended => false,
        };
        if self.is_news(news) {
            self.transmit();
        }
    }

    fn sent(&mut self, now: Time, bytes: u64) {
        let news = match &mut self.stage {
            // In `Committing` after a reopening: the transport works through the rest again.
            Stage::Computing(flow) | Stage::Draining(flow, _) | Stage::Committing(flow) => {
                flow.sent(now, bytes)
            }
            Stage::Queued | Stage::Offered { .. } | Stage::Aborting { .. } | Stage::Ended => false,
        };
        if self.is_news(news) {
            self.commit_when_sent(now);
        }
    }

    fn asked_to_resend(&mut self, now: Time, frame: u64) {
        match &mut self.stage {
            Stage::Computing(flow) | Stage::Draining(flow, _) | Stage::Committing(flow) => {
                match flow.want_resend(now, frame) {
                    Ok(Some(frame)) => self.actions.push_back(SourceAction::Resend { frame }),
                    Ok(None) => {}
                    Err(_) => self.ignored += 1,
                }
            }
            Stage::Queued | Stage::Offered { .. } | Stage::Aborting { .. } | Stage::Ended => {
                self.ignored += 1
            }
        }
    }

    fn resent(&mut self, now: Time) {
        match &mut self.stage {
            Stage::Computing(flow) | Stage::Draining(flow, _) | Stage::Committing(flow) => {
                match flow.resent(now) {
                    Ok(Some(frame)) => self.actions.push_back(SourceAction::Resend { frame }),
                    Ok(None) => {}
                    Err(_) => self.ignored += 1,
                }
            }
            Stage::Queued | Stage::Offered { .. } | Stage::Aborting { .. } | Stage::Ended => {
                self.ignored += 1
            }
        }
    }

    fn committed(&mut self, now: Time) {
        match self.stage {
            Stage::Committing(_) => {
                self.actions.push_back(SourceAction::Fence);
                self.release_and_end(SourceEnd::Committed);
            }
            // The commit crossed our abort; blocks are released already.
            Stage::Aborting { .. } => self.end(SourceEnd::Committed),
            // It can't have verified what was not sent.
            Stage::Computing(_) | Stage::Draining(..) => self.abort(now, Cause::Protocol),
            Stage::Queued | Stage::Offered { .. } | Stage::Ended => self.ignored += 1,
        }
    }

    fn abort_acknowledged(&mut self, now: Time, committed: bool) {
        match self.stage {
            Stage::Aborting { end, .. } => self.end(if committed { SourceEnd::Committed } else { end }),
            // An answer to a question that was not asked.
            Stage::Offered { .. } | Stage::Computing(_) | Stage::Draining(..) | Stage::Committing(_) => {
                self.abort(now, Cause::Protocol);
            }
            Stage::Queued | Stage::Ended => self.ignored += 1,
        }
    }

    fn control_lost(&mut self) {
        match self.stage {
            Stage::Offered { .. } => self.release_and_end(SourceEnd::Failed(Cause::PeerLost)),
            Stage::Computing(_) | Stage::Draining(..) | Stage::Committing(_) => {
                self.actions.push_back(SourceAction::Fence);
                self.release_and_end(SourceEnd::Failed(Cause::PeerLost));
            }
            // The destination takes a lost control stream for an abort, so nothing is open any more.
            Stage::Aborting { end, .. } => self.end(end),
            Stage::Queued | Stage::Ended => self.ignored += 1,
        }
    }

    fn bulk_lost(&mut self, now: Time) {
        match &mut self.stage {
            Stage::Computing(flow) | Stage::Draining(flow, _) | Stage::Committing(flow) => {
                match flow.reopen(now) {
                    Some(from) => {
                        self.actions.push_back(SourceAction::Reopen { from });
                        self.transmit();
                    }
                    None => self.abort(now, Cause::PeerLost),
                }
            }
            Stage::Queued | Stage::Offered { .. } | Stage::Aborting { .. } | Stage::Ended => {
                self.ignored += 1
            }
        }
    }

    fn cancelled(&mut self, now: Time, cause: Cause) {
        match self.stage {
            Stage::Queued => self.release_and_end(SourceEnd::Failed(cause)),
            Stage::Offered { .. } | Stage::Computing(_) | Stage::Draining(..) | Stage::Committing(_) => {
                self.abort(now, cause);
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
            Stage::Aborting { end, .. } => self.end(end),
            Stage::Queued | Stage::Ended => {}
        }
    }

    fn is_news(&mut self, news: bool) -> bool {
        self.ignored += u64::from(!news);
        news
    }

    fn transmit(&mut self) {
        if let Stage::Computing(flow) | Stage::Draining(flow, _) | Stage::Committing(flow) = &mut self.stage
            && let Some(up_to) = flow.transmit()
        {
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
        self.abort_with(now, cause, SourceEnd::Failed(cause));
    }

    fn abort_with(&mut self, now: Time, cause: Cause, end: SourceEnd) {
        // Before a grant no sender exists.
        if matches!(self.stage, Stage::Computing(_) | Stage::Draining(..) | Stage::Committing(_)) {
            self.actions.push_back(SourceAction::Fence);
        }
        self.actions.push_back(SourceAction::Release);
        self.send(SourceMessage::Abort(cause));
        self.stage = Stage::Aborting { end, give_up_at: now + self.config.timers.abort };
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
