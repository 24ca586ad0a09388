//! Prefill legs: the source's side of handoffs.

use baton_dispatch::PrefillFact;
use baton_handoff::{
    Cause, DestinationMessage, FinishReason, HandoffKey, SampledToken, Source, SourceAction, SourceConfig,
    SourceEnd, SourceFact, SourceMessage,
};
use baton_scheduler::{Event, Finish, Origin, Refusal};

use super::Worker;
use super::leg::{Leg, LegSpec, PrefillLeg, StreamUse};
use super::sender::{Pushed, Sender};
use super::steps::{Command, NUM_LAYERS, Outcome};
use crate::context::Context;
use crate::frames::Cut;
use crate::network::{Node, Payload, Side, StreamId};
use crate::queue::WorkerEvent;

pub(super) const fn refusal_cause(refusal: &Refusal) -> Cause {
    match refusal {
        Refusal::TooLarge { .. } => Cause::TooLarge,
        Refusal::QueueFull { .. } => Cause::Busy,
        Refusal::Duplicate | Refusal::Empty => Cause::Protocol,
    }
}

pub(super) const fn finish_reason(finish: Finish) -> FinishReason {
    match finish {
        Finish::Stop => FinishReason::Stop,
        Finish::Length => FinishReason::Length,
    }
}

impl Worker {
    pub(super) fn open_prefill(&mut self, context: &mut Context, stream: StreamId, spec: LegSpec) {
        if let Err(cause) = self.registry.open(spec.key, context.now) {
            return self.close_leg(context, Some(stream), Some(Payload::Prefill(PrefillFact::Failed(cause))));
        }
        let key = spec.key;
        let id = self.new_sequence(key);
        self.streams.insert(stream, (key, StreamUse::Router));
        let source = spec.destination.map(|(_, destination)| {
            Source::new(SourceConfig {
                key,
                source: self.instance,
                destination,
                prompt_tokens: spec.prompt.len() as u32,
                timers: self.timers,
            })
        });
        let sequence = spec.sequence(id, Origin::Prefill, context.shape.cache);
        let stream = Some(stream);
        let leg =
            PrefillLeg { spec, id, stream, source, control: None, skip_tokens: 0, lease: None, sender: None };
        self.legs.insert(key, Leg::Prefill(leg));
        self.command(context, Command::Submit(Box::new(sequence)));
    }

    fn prefill_leg(&mut self, key: HandoffKey) -> Option<&mut PrefillLeg> {
        match self.legs.get_mut(&key) {
            Some(Leg::Prefill(leg)) => Some(leg),
            _ => None,
        }
    }

    pub(super) fn prefill_outcome(&mut self, context: &mut Context, key: HandoffKey, outcome: Outcome) {
        match outcome {
            Outcome::Refused(_, refusal) => self.prefill_refused(context, key, refusal_cause(&refusal)),
            Outcome::NoRoom(_) => context.violate(|| "a prefill worker was asked to reserve".into()),
            Outcome::Event(event) => match event {
                Event::NearHead { .. } => self.source_fact(context, key, SourceFact::NearHead),
                Event::Opened { lease, cached_tokens, .. } => {
                    if let Some(leg) = self.prefill_leg(key) {
                        leg.lease = Some(lease);
                    }
                    self.computed(context, key, cached_tokens);
                }
                Event::Computed { num_tokens, .. } => self.computed(context, key, num_tokens),
                Event::Token { token, logprob, index, finish, .. } => {
                    let first = SampledToken { id: token, logprob, index };
                    self.sampled(context, key, first, finish.map(finish_reason));
                }
                Event::Reserved { .. } | Event::Started { .. } | Event::Preempted { .. } => {
                    context.violate(|| "a prefill worker decodes".into());
                }
            },
        }
    }

    fn prefill_refused(&mut self, context: &mut Context, key: HandoffKey, cause: Cause) {
        match self.prefill_leg(key) {
            Some(leg) if leg.source.is_some() => self.source_fact(context, key, SourceFact::Cancelled(cause)),
            Some(_) => self.end_prefill(context, key, Some(PrefillFact::Failed(cause)), cause),
            None => {}
        }
    }

    fn cut(leg: &PrefillLeg, block_size: usize) -> Cut {
        let prompt_tokens = leg.spec.prompt.len();
        Cut { prompt_tokens, skip_tokens: leg.skip_tokens, block_size, num_layers: NUM_LAYERS }
    }

    fn computed(&mut self, context: &mut Context, key: HandoffKey, num_tokens: usize) {
        let block_size = context.shape.block_size;
        let Some(leg) = self.prefill_leg(key) else { return };
        let prompt_tokens = leg.spec.prompt.len();
        // The last tokens go with `Sampled`.
        if leg.source.is_none() || num_tokens >= prompt_tokens {
            return;
        }
        let bytes = Self::cut(leg, block_size).encoded(num_tokens);
        if bytes > 0 {
            self.source_fact(context, key, SourceFact::Encoded { bytes });
        }
    }

    fn sampled(
        &mut self,
        context: &mut Context,
        key: HandoffKey,
        first: SampledToken,
        finish: Option<FinishReason>,
    ) {
        let block_size = context.shape.block_size;
        let Some(leg) = self.prefill_leg(key) else { return };
        let (stream, has_source) = (leg.stream, leg.source.is_some());
        let cut = Self::cut(leg, block_size);
        if let Some(stream) = stream {
            let event = PrefillFact::FirstToken { token: first, finish };
            context.send(stream, Side::Acceptor, Payload::Prefill(event));
        }
        if has_source {
            let fact = SourceFact::Sampled { first, finish, bytes: cut.bytes(), frames: cut.num_frames() };
            return self.source_fact(context, key, fact);
        }
        self.end_prefill(context, key, None, Cause::Duplicate);
    }

    pub(super) fn prefill_cancelled(&mut self, context: &mut Context, key: HandoffKey) {
        match self.prefill_leg(key) {
            Some(leg) if leg.source.is_some() => {
                self.source_fact(context, key, SourceFact::Cancelled(Cause::Cancelled));
            }
            Some(leg) => {
                let id = leg.id;
                self.command(context, Command::Drop(id));
                self.end_prefill(context, key, None, Cause::Cancelled);
            }
            None => {}
        }
    }

    pub(super) fn destination_says(
        &mut self,
        context: &mut Context,
        stream: StreamId,
        message: DestinationMessage,
    ) {
        if let Some((key, StreamUse::Control)) = self.streams.get(&stream).copied() {
            self.source_fact(context, key, SourceFact::Received(message));
        }
    }

    pub(super) fn source_control_lost(&mut self, context: &mut Context, key: HandoffKey) {
        if let Some(leg) = self.prefill_leg(key) {
            leg.control = None;
        }
        self.source_fact(context, key, SourceFact::ControlLost);
    }

    pub(super) fn source_bulk_lost(&mut self, context: &mut Context, key: HandoffKey, stream: StreamId) {
        let Some(sender) = self.prefill_leg(key).and_then(|leg| leg.sender.as_mut()) else { return };
        if sender.stream == Some(stream) {
            sender.stream = None;
            self.source_fact(context, key, SourceFact::BulkLost);
        }
    }

    pub(super) fn source_fact(&mut self, context: &mut Context, key: HandoffKey, fact: SourceFact) {
        context.note(|| format!("worker {} source {key}: {fact:?}", self.index));
        let now = context.now;
        let Some(source) = self.prefill_leg(key).and_then(|leg| leg.source.as_mut()) else { return };
        source.handle(now, fact);
        let actions: Vec<SourceAction> = std::iter::from_fn(|| source.poll()).collect();
        for action in actions {
            self.source_action(context, key, action);
        }
    }

    fn source_action(&mut self, context: &mut Context, key: HandoffKey, action: SourceAction) {
        context.note(|| format!("worker {} source {key} -> {action:?}", self.index));
        let block_size = context.shape.block_size;
        let Some(leg) = self.prefill_leg(key) else { return };
        match action {
            SourceAction::Send(message) => self.tell_destination(context, key, message),
            SourceAction::Compute { skip_tokens } => {
                leg.skip_tokens = skip_tokens as usize;
                let id = leg.id;
                self.command(context, Command::Grant(id));
            }
            SourceAction::Transmit { up_to } => {
                let cut = Self::cut(leg, block_size);
                if let Some(lease) = leg.lease.take() {
                    leg.sender = Some(Sender::new(lease, cut));
                }
                let Some(sender) = &mut leg.sender else { return };
                sender.up_to = up_to;
                self.schedule_push(context, key);
            }
            SourceAction::Resend { frame } => {
                let Some(sender) = &mut leg.sender else { return };
                sender.resends.push_back(frame);
                self.schedule_push(context, key);
            }
            SourceAction::Reopen { from } => {
                let Some(sender) = &mut leg.sender else { return };
                sender.reopen(from);
            }
            SourceAction::Fence => {
                let stream = leg.sender.take().and_then(|sender| sender.stream);
                leg.lease = None;
                if let Some(stream) = stream {
                    self.streams.remove(&stream);
                    context.close(stream, Side::Opener);
                }
            }
            SourceAction::Release => {
                leg.lease = None;
                let id = leg.id;
                self.command(context, Command::Drop(id));
            }
            SourceAction::End(end) => self.source_ended(context, key, end),
        }
    }

    fn tell_destination(&mut self, context: &mut Context, key: HandoffKey, message: SourceMessage) {
        let node = self.node();
        let Some(leg) = self.prefill_leg(key) else { return };
        if matches!(message, SourceMessage::Offer { .. })
            && let Some((worker, _)) = leg.spec.destination
        {
            let stream = context.open(node, Node::Worker(worker));
            leg.control = Some(stream);
            self.streams.insert(stream, (key, StreamUse::Control));
        }
        if let Some(stream) = self.prefill_leg(key).and_then(|leg| leg.control) {
            context.send(stream, Side::Opener, Payload::Source(message));
        }
    }

    fn schedule_push(&mut self, context: &mut Context, key: HandoffKey) {
        let (node, me) = (self.node(), self.me());
        let Some(leg) = self.prefill_leg(key) else { return };
        let Some((worker, _)) = leg.spec.destination else { return };
        let Some(sender) = &mut leg.sender else { return };
        if !sender.has_work() || (sender.scheduled && sender.stream.is_some()) {
            return;
        }
        sender.scheduled = true;
        let stream = *sender.stream.get_or_insert_with(|| context.open(node, Node::Worker(worker)));
        self.streams.insert(stream, (key, StreamUse::Bulk));
        let after = context.random.micros(20..=300);
        context.worker(after, me, WorkerEvent::Push(key, stream));
    }

    pub(super) fn push(&mut self, context: &mut Context, key: HandoffKey, stream: StreamId) {
        let Some(Leg::Prefill(leg)) = self.legs.get_mut(&key) else { return };
        let Some(sender) = &mut leg.sender else { return };
        if sender.stream != Some(stream) {
            return;
        }
        sender.scheduled = false;
        let fact = match sender.push(key, self.steps.engine().memory()) {
            Some(Pushed::Next(frame, bytes)) => {
                context.send(stream, Side::Opener, Payload::Frame(frame));
                SourceFact::Sent { bytes }
            }
            Some(Pushed::Again(frame)) => {
                context.send(stream, Side::Opener, Payload::Frame(frame));
                SourceFact::Resent
            }
            None => return,
        };
        self.source_fact(context, key, fact);
        self.schedule_push(context, key);
    }

    fn source_ended(&mut self, context: &mut Context, key: HandoffKey, end: SourceEnd) {
        match end {
            SourceEnd::Committed => self.end_prefill(context, key, Some(PrefillFact::Done), Cause::Duplicate),
            SourceEnd::NotNeeded => self.end_prefill(context, key, None, Cause::NotNeeded),
            SourceEnd::Failed(cause) => {
                self.end_prefill(context, key, Some(PrefillFact::Failed(cause)), cause);
            }
        }
    }

    fn end_prefill(
        &mut self,
        context: &mut Context,
        key: HandoffKey,
        last: Option<PrefillFact>,
        cause: Cause,
    ) {
        let Some(Leg::Prefill(leg)) = self.legs.remove(&key) else { return };
        if leg.sender.is_some() {
            context.violate(|| format!("{key} ended with a live sender"));
        }
        context.report.num_ignored += leg.source.as_ref().map_or(0, Source::ignored);
        self.registry.finish(key, cause, context.now);
        self.sequences.remove(&leg.id);
        if let Some(control) = leg.control {
            self.streams.remove(&control);
            context.close(control, Side::Opener);
        }
        self.close_leg(context, leg.stream, last.map(Payload::Prefill));
    }
}
