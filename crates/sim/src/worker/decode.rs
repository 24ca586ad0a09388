//! Decode legs: the destination's side of handoffs, and local prefills.

use baton_dispatch::DecodeFact;
use baton_handoff::{
    Cause, Destination, DestinationAction, DestinationConfig, DestinationEnd, DestinationFact,
    DestinationMessage, FinishReason, HandoffKey, Match, Offer, SampledToken, SourceMessage,
};
use baton_kv::WriteLease;
use baton_scheduler::{Event, FirstToken, Origin, SequenceId};

use super::Worker;
use super::leg::{DecodeLeg, Leg, LegSpec, LegStage, StreamUse};
use super::prefill::{finish_reason, refusal_cause};
use super::receiver::{Received, Receiver};
use super::steps::{Command, Outcome};
use crate::context::Context;
use crate::frames::Frame;
use crate::network::{Payload, Side, StreamId};
use crate::queue::WorkerEvent;

impl Worker {
    pub(super) fn open_decode(&mut self, context: &mut Context, stream: StreamId, spec: LegSpec) {
        if self.is_draining() {
            return context.refuse(stream);
        }
        let offer = match self.registry.open(spec.key, context.now) {
            Ok(offer) => offer,
            Err(cause) => {
                let last = Payload::Decode(DecodeFact::Failed(cause));
                return self.close_leg(context, Some(stream), Some(last));
            }
        };
        let (key, local) = (spec.key, spec.local);
        let destination = (!local).then(|| {
            Destination::new(DestinationConfig {
                key,
                instance: self.instance,
                prompt_tokens: spec.prompt.len() as u32,
                credit_window: context.shape.worker.credit_window,
                timers: self.timers,
            })
        });
        context.report.num_local += u64::from(local);
        let (origin, stage) = match local {
            true => (Origin::Local, LegStage::Reserving),
            false => (Origin::Remote, LegStage::BeforeOffer),
        };
        let state = self.new_leg(context.now, spec, stream, stage);
        let sequence = state.spec.sequence(&state.ids, origin);
        let num = state.ids.len();
        let leg = DecodeLeg {
            state,
            destination,
            receiver: None,
            granted: false,
            started: false,
            open: vec![true; num],
            stopped: vec![false; num],
        };
        self.add_leg(context, key, Leg::Decode(Box::new(leg)));
        self.command(context, Command::Submit(Box::new(sequence)));
        if let Some(offer) = offer
            && let Some(control) = self.parked.remove(&key)
        {
            self.offered(context, control, offer);
        }
    }

    fn decode_leg(&mut self, key: HandoffKey) -> Option<&mut DecodeLeg> {
        match self.legs.get_mut(&key) {
            Some(Leg::Decode(leg)) => Some(leg),
            _ => None,
        }
    }

    /// An offer and its leg have met.
    fn offered(&mut self, context: &mut Context, control: StreamId, offer: Offer) {
        let Offer { key, source, destination, prompt_tokens } = offer;
        if let Some(leg) = self.decode_leg(key) {
            leg.state.control = Some(control);
        }
        self.streams.insert(control, (key, StreamUse::Control));
        self.destination_fact(context, key, DestinationFact::Offered { source, destination, prompt_tokens });
    }

    pub(super) fn source_says(&mut self, context: &mut Context, stream: StreamId, message: SourceMessage) {
        if let Some((key, _)) = self.streams.get(&stream).copied() {
            return self.destination_fact(context, key, DestinationFact::Received(message));
        }
        if let Some(machine) = self.lingering.get_mut(&stream) {
            machine.handle(context.now, DestinationFact::Received(message));
            while let Some(DestinationAction::Send(message)) = machine.poll() {
                context.send(stream, Side::Acceptor, Payload::Destination(message));
            }
            return;
        }
        let parked = self.parked.values().any(|parked| *parked == stream);
        let answer = match message {
            SourceMessage::Offer { .. } if parked => return,
            SourceMessage::Offer { .. } if self.is_draining() => DestinationMessage::Gone(Cause::Draining),
            SourceMessage::Offer { key, source, destination, prompt_tokens } => {
                let offer = Offer { key, source, destination, prompt_tokens };
                match self.registry.offer(offer, context.now) {
                    Match::Leg => return self.offered(context, stream, offer),
                    Match::Parked => {
                        self.parked.insert(key, stream);
                        self.due = self.due.into_iter().chain(self.registry.deadline()).min();
                        return;
                    }
                    Match::Gone(cause) => DestinationMessage::Gone(cause),
                }
            }
            SourceMessage::Abort(_) => {
                if let Some(key) = self.parked.iter().find(|(_, s)| **s == stream).map(|(key, _)| *key) {
                    self.parked.remove(&key);
                    self.registry.withdraw(key);
                }
                DestinationMessage::Aborted { committed: false }
            }
            SourceMessage::Notice | SourceMessage::Commit(_) => return,
        };
        context.send(stream, Side::Acceptor, Payload::Destination(answer));
    }

    pub(super) fn decode_outcome(&mut self, context: &mut Context, key: HandoffKey, outcome: Outcome) {
        match outcome {
            Outcome::Refused(_, refusal) => {
                let cause = refusal_cause(&refusal);
                match self.decode_leg(key) {
                    Some(leg) if leg.destination.is_some() => {
                        self.destination_fact(context, key, DestinationFact::Cancelled(cause));
                    }
                    _ => self.end_decode(context, key, Some(DecodeFact::Failed(cause)), cause),
                }
            }
            Outcome::NoRoom(_) => self.destination_fact(context, key, DestinationFact::NoRoom),
            Outcome::Event(event) => match event {
                Event::Reserved { lease, skip_tokens, .. } => self.reserved(context, key, lease, skip_tokens),
                Event::Started { cached_tokens, .. } => {
                    context.report.num_cached_tokens += cached_tokens as u64;
                    self.started(context, key);
                }
                Event::Token { id, token, logprob, index, finish } => {
                    let token = SampledToken { id: token, logprob, index };
                    self.token(context, key, id, token, finish.map(finish_reason));
                }
                Event::Preempted { id, gone } => self.preempted(context, key, id, gone),
                Event::Computed { .. } => self.moved(context, key),
                Event::NearHead { .. } | Event::Opened { .. } => {
                    context.violate(|| "a decode worker offers".into());
                }
            },
        }
    }

    fn token(
        &mut self,
        context: &mut Context,
        key: HandoffKey,
        id: SequenceId,
        token: SampledToken,
        finish: Option<FinishReason>,
    ) {
        self.moved(context, key);
        let Some(leg) = self.decode_leg(key) else { return };
        let nth = leg.state.nth(id);
        if leg.open.get(nth) != Some(&true) {
            return;
        }
        let sequence = leg.state.spec.first_sequence + nth as u32;
        self.tell_router(context, key, DecodeFact::Token { sequence, token });
        if let Some(reason) = finish {
            self.sequence_over(context, key, nth, Some(DecodeFact::Finished { sequence, reason }));
        }
    }

    /// A sequence gave up its blocks. One that is still receiving has a writer, so its machine sees to the rest.
    fn preempted(&mut self, context: &mut Context, key: HandoffKey, id: SequenceId, gone: bool) {
        context.report.num_preemptions += 1;
        let Some(leg) = self.decode_leg(key) else { return };
        if !gone {
            context.report.num_recomputed += 1;
            return;
        }
        if leg.destination.as_ref().is_some_and(|machine| !machine.is_ended()) {
            return self.destination_fact(context, key, DestinationFact::Cancelled(Cause::Preempted));
        }
        if !leg.started {
            self.drop_all(context, key);
            let last = Some(DecodeFact::Failed(Cause::Preempted));
            return self.end_decode(context, key, last, Cause::Preempted);
        }
        let nth = leg.state.nth(id);
        if leg.open.get(nth) == Some(&true) {
            let sequence = leg.state.spec.first_sequence + nth as u32;
            self.sequence_over(context, key, nth, Some(DecodeFact::Preempted { sequence }));
        }
    }

    pub(super) fn tell_router(&mut self, context: &mut Context, key: HandoffKey, event: DecodeFact) {
        if let Some(stream) = self.decode_leg(key).and_then(|leg| leg.state.stream) {
            context.send(stream, Side::Acceptor, Payload::Decode(event));
        }
    }

    fn reserved(&mut self, context: &mut Context, key: HandoffKey, lease: WriteLease, skip_tokens: usize) {
        self.set_stage(context, key, LegStage::Receiving);
        let Some(leg) = self.decode_leg(key) else { return };
        let cut = context.cut(leg.state.spec.prompt.len(), skip_tokens);
        let bytes = cut.bytes();
        leg.receiver = Some(Receiver::new(lease, cut));
        let skip_tokens = skip_tokens as u32;
        self.destination_fact(context, key, DestinationFact::Reserved { skip_tokens, bytes });
        // Not granted: the lease goes at once.
        if let Some(leg) = self.decode_leg(key)
            && !leg.granted
        {
            leg.receiver = None;
        }
    }

    pub(super) fn frame(&mut self, context: &mut Context, stream: StreamId, frame: Frame) {
        let (key, index) = (frame.key, frame.index);
        let Some(Leg::Decode(leg)) = self.legs.get_mut(&key) else { return };
        self.streams.entry(stream).or_insert((key, StreamUse::Bulk));
        let Some(receiver) = &mut leg.receiver else { return };
        match receiver.take(&frame, self.steps.engine_mut().memory_mut()) {
            Received::Verified(bytes) => {
                self.moved(context, key);
                self.destination_fact(context, key, DestinationFact::Verified { bytes });
            }
            Received::Nothing => {}
            Received::Damaged => {
                context.report.num_damaged_frames += 1;
                self.destination_fact(context, key, DestinationFact::Corrupt { frame: index });
            }
            Received::Foreign => context.violate(|| format!("{key}: frame {index} does not fit")),
        }
    }

    /// A writer outlives its handoff only when it did not end in time; its lease then keeps the blocks out of use.
    fn free_under(&mut self, context: &mut Context, key: HandoffKey, writer: Option<Receiver>) {
        let Some(writer) = writer else { return };
        let waited = writer.fenced_at().map(|at| context.now.saturating_sub(at));
        if waited.is_none_or(|waited| waited < self.timers.writer) {
            context.violate(|| format!("{key} is freed under a live writer, fenced since {waited:?}"));
        }
        *context.report.faults.entry("late_writer").or_default() += 1;
        self.late_writers.insert(key, writer);
    }

    pub(super) fn writer_ended(&mut self, context: &mut Context, key: HandoffKey) {
        self.late_writers.remove(&key);
        if let Some(leg) = self.decode_leg(key) {
            leg.receiver = None;
            self.destination_fact(context, key, DestinationFact::WriterEnded);
        }
    }

    /// Nobody wants anything of the leg any more.
    pub(super) fn decode_cancelled(&mut self, context: &mut Context, key: HandoffKey, cause: Cause) {
        let Some(leg) = self.decode_leg(key) else { return };
        if leg.destination.as_ref().is_some_and(|machine| !machine.is_ended()) {
            return self.destination_fact(context, key, DestinationFact::Cancelled(cause));
        }
        self.drop_all(context, key);
        self.end_decode(context, key, None, cause);
    }

    pub(super) fn destination_fact(&mut self, context: &mut Context, key: HandoffKey, fact: DestinationFact) {
        context.note(|| format!("worker {} destination {key}: {fact:?}", self.index));
        let now = context.now;
        let Some(machine) = self.decode_leg(key).and_then(|leg| leg.destination.as_mut()) else { return };
        machine.handle(now, fact);
        let actions: Vec<DestinationAction> = std::iter::from_fn(|| machine.poll()).collect();
        self.note_deadline(key);
        for action in actions {
            self.destination_action(context, key, action);
        }
    }

    fn destination_action(&mut self, context: &mut Context, key: HandoffKey, action: DestinationAction) {
        context.note(|| format!("worker {} destination {key} -> {action:?}", self.index));
        let me = self.me();
        let Some(leg) = self.decode_leg(key) else { return };
        let id = leg.state.head();
        match action {
            DestinationAction::Reserve => {
                self.set_stage(context, key, LegStage::Reserving);
                self.command(context, Command::Reserve(id));
            }
            DestinationAction::Send(message) => {
                leg.granted |= matches!(message, DestinationMessage::Grant { .. });
                if let Some(control) = leg.state.control {
                    context.send(control, Side::Acceptor, Payload::Destination(message));
                }
            }
            DestinationAction::Fence => {
                if let Some(receiver) = &mut leg.receiver {
                    receiver.fence(context.now);
                }
                let after = context.writer_lag(self.timers.writer);
                context.worker(after, me, WorkerEvent::WriterEnded(key));
            }
            DestinationAction::Run(commit) => {
                if leg.receiver.is_some() {
                    context.violate(|| format!("{key} runs under a live writer"));
                }
                context.report.num_commits += 1;
                let first = &commit.first_tokens;
                leg.open = first.iter().map(|first| first.finish.is_none()).collect();
                let first = first
                    .iter()
                    .map(|first| FirstToken { token: first.token.id, finished: first.finish.is_some() });
                let first = first.collect();
                self.command(context, Command::Commit(id, first));
            }
            DestinationAction::Free => {
                let late = leg.receiver.take();
                self.free_under(context, key, late);
                self.command(context, Command::Drop(id));
            }
            DestinationAction::End(DestinationEnd::Committed) => {
                // Its router may have left while the writer ended.
                if leg.state.stream.is_none() {
                    self.decode_cancelled(context, key, Cause::Cancelled);
                }
            }
            DestinationAction::End(DestinationEnd::Failed(cause)) => {
                *context.report.failed_handoffs.entry(cause.name()).or_default() += 1;
                self.end_decode(context, key, Some(DecodeFact::Failed(cause)), cause);
            }
        }
    }

    pub(super) fn end_decode(
        &mut self,
        context: &mut Context,
        key: HandoffKey,
        last: Option<DecodeFact>,
        cause: Cause,
    ) {
        self.moved(context, key);
        let Some(Leg::Decode(leg)) = self.end_leg(context, key) else { return };
        if leg.receiver.is_some() {
            context.violate(|| format!("{key} ended with a live writer"));
        }
        self.registry.finish(key, cause, context.now);
        context.report.num_ignored += leg.destination.as_ref().map_or(0, Destination::ignored);
        if let (Some(control), Some(machine)) = (leg.state.control, leg.destination)
            && self.streams.remove(&control).is_some()
        {
            self.lingering.insert(control, machine);
        }
        self.close_leg(context, leg.state.stream, last.map(Payload::Decode));
    }
}
