//! Prefill legs: the source's side of handoffs.

use baton_dispatch::PrefillFact;
use baton_handoff::{
    Cause, DestinationMessage, FinishReason, FirstToken, HandoffKey, SampledToken, Source, SourceAction,
    SourceConfig, SourceEnd, SourceFact, SourceMessage,
};
use baton_scheduler::{Event, Finish, Origin, Refusal};

use super::Worker;
use super::leg::{Leg, LegSpec, LegStage, PrefillLeg, StreamUse};
use super::sender::{Pushed, Sender};
use super::steps::{Command, Outcome};
use crate::context::Context;
use crate::frames::Cut;
use crate::network::{Node, Payload, Side, StreamId};
use crate::queue::WorkerEvent;

pub(super) const fn refusal_cause(refusal: &Refusal) -> Cause {
    match refusal {
        Refusal::TooLarge { .. } | Refusal::TooMany { .. } => Cause::TooLarge,
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
        if self.is_draining() {
            return context.refuse(stream);
        }
        if let Err(cause) = self.registry.open(spec.key, context.now) {
            return self.close_leg(context, Some(stream), Some(Payload::Prefill(PrefillFact::Failed(cause))));
        }
        let key = spec.key;
        let source = spec.destination.map(|(_, destination)| {
            Source::new(SourceConfig {
                key,
                source: self.instance,
                destination,
                prompt_tokens: spec.prompt.len() as u32,
                timers: self.timers,
            })
        });
        // Without a destination nobody is asked for room.
        let stage = if source.is_some() { LegStage::Queued } else { LegStage::Granted };
        let state = self.new_leg(context.now, spec, stream, stage);
        let sequence = state.spec.sequence(&state.ids, Origin::Prefill);
        let (skip_tokens, lease, held, sender, first) = (0, None, None, None, Vec::new());
        let leg = PrefillLeg { state, source, skip_tokens, lease, held, sender, first };
        self.add_leg(context, key, Leg::Prefill(Box::new(leg)));
        self.command(context, Command::Submit(Box::new(sequence)));
    }

    pub(super) fn prefill_leg(&mut self, key: HandoffKey) -> Option<&mut PrefillLeg> {
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
                    context.report.num_cached_tokens += cached_tokens as u64;
                    self.set_stage(context, key, LegStage::Computing);
                    if let Some(leg) = self.prefill_leg(key) {
                        leg.held = leg.source.is_some().then(|| lease.clone());
                        leg.lease = Some(lease);
                    }
                    self.computed(context, key, cached_tokens);
                }
                Event::Computed { num_tokens, .. } => self.computed(context, key, num_tokens),
                Event::Token { id, token, logprob, index, finish } => {
                    let Some(leg) = self.prefill_leg(key) else { return };
                    let sequence = leg.state.spec.first_sequence + leg.state.nth(id) as u32;
                    let token = SampledToken { id: token, logprob, index };
                    leg.first.push(FirstToken { sequence, token, finish: finish.map(finish_reason) });
                    if leg.first.len() == leg.state.ids.len() {
                        self.sampled(context, key);
                    }
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

    /// How the leg's KV is sent.
    pub(super) fn cut(context: &Context, leg: &PrefillLeg) -> Cut {
        context.cut(leg.state.spec.prompt.len(), leg.skip_tokens)
    }

    pub(super) fn computed(&mut self, context: &mut Context, key: HandoffKey, num_tokens: usize) {
        self.moved(context, key);
        let Some(leg) = self.prefill_leg(key) else { return };
        let prompt_tokens = leg.state.spec.prompt.len();
        // The last tokens go with `Sampled`.
        if leg.source.is_none() || num_tokens >= prompt_tokens {
            return;
        }
        let bytes = Self::cut(context, leg).encoded(num_tokens);
        if bytes > 0 {
            self.source_fact(context, key, SourceFact::Encoded { bytes });
        }
    }

    /// Every sequence has its first token.
    fn sampled(&mut self, context: &mut Context, key: HandoffKey) {
        self.set_stage(context, key, LegStage::Holding);
        let Some(leg) = self.prefill_leg(key) else { return };
        let first = leg.first.clone();
        let (stream, has_source) = (leg.state.stream, leg.source.is_some());
        let cut = Self::cut(context, leg);
        if let Some(stream) = stream {
            let event = PrefillFact::FirstTokens(first.clone());
            context.send(stream, Side::Acceptor, Payload::Prefill(event));
        }
        if has_source {
            let fact = SourceFact::Sampled { first, bytes: cut.bytes(), frames: cut.num_frames() };
            return self.source_fact(context, key, fact);
        }
        self.end_prefill(context, key, None, Cause::Duplicate);
    }

    pub(super) fn prefill_cancelled(&mut self, context: &mut Context, key: HandoffKey) {
        match self.prefill_leg(key) {
            Some(leg) if leg.source.is_some() => {
                self.source_fact(context, key, SourceFact::Cancelled(Cause::Cancelled));
            }
            Some(_) => {
                self.drop_all(context, key);
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
            leg.state.control = None;
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
        self.note_deadline(key);
        for action in actions {
            self.source_action(context, key, action);
        }
    }

    fn source_action(&mut self, context: &mut Context, key: HandoffKey, action: SourceAction) {
        context.note(|| format!("worker {} source {key} -> {action:?}", self.index));
        let Some(leg) = self.prefill_leg(key) else { return };
        match action {
            SourceAction::Send(message) => {
                if matches!(message, SourceMessage::Offer { .. }) {
                    let stage = if leg.first.is_empty() { LegStage::Offered } else { LegStage::Held };
                    self.set_stage(context, key, stage);
                }
                self.tell_destination(context, key, message);
            }
            SourceAction::Compute { skip_tokens } => {
                leg.skip_tokens = skip_tokens as usize;
                if !leg.first.is_empty() {
                    return self.send_held(context, key);
                }
                let id = leg.state.head();
                self.set_stage(context, key, LegStage::Granted);
                self.command(context, Command::Grant(id));
            }
            SourceAction::Transmit { up_to } => {
                let cut = Self::cut(context, leg);
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
            SourceAction::Fence => self.fence(context, key),
            SourceAction::Hold(cause) => self.hold(context, key, cause),
            SourceAction::Release => {
                (leg.lease, leg.held) = (None, None);
                let id = leg.state.head();
                self.set_stage(context, key, LegStage::Ending);
                self.command(context, Command::Drop(id));
            }
            SourceAction::End(end) => self.source_ended(context, key, end),
        }
    }

    /// Ends the sender.
    pub(super) fn fence(&mut self, context: &mut Context, key: HandoffKey) {
        self.measure_link(context, key);
        let Some(leg) = self.prefill_leg(key) else { return };
        let stream = leg.sender.take().and_then(|sender| sender.stream);
        leg.lease = None;
        if let Some(stream) = stream {
            self.streams.remove(&stream);
            context.close(stream, Side::Opener);
        }
    }

    fn tell_destination(&mut self, context: &mut Context, key: HandoffKey, message: SourceMessage) {
        let node = self.node();
        let Some(leg) = self.prefill_leg(key) else { return };
        if matches!(message, SourceMessage::Offer { .. })
            && let Some((worker, _)) = leg.state.spec.destination
        {
            let stream = context.open(node, Node::Worker(worker));
            leg.state.control = Some(stream);
            self.streams.insert(stream, (key, StreamUse::Control));
        }
        if let Some(stream) = self.prefill_leg(key).and_then(|leg| leg.state.control) {
            context.send(stream, Side::Opener, Payload::Source(message));
        }
    }

    /// The next frame leaves when the link has taken it and all before it.
    fn schedule_push(&mut self, context: &mut Context, key: HandoffKey) {
        let (node, me, free_at) = (self.node(), self.me(), self.link_free_at);
        let Some(leg) = self.prefill_leg(key) else { return };
        let Some((worker, _)) = leg.state.spec.destination else { return };
        let Some(sender) = &mut leg.sender else { return };
        if !sender.has_work() || (sender.scheduled && sender.stream.is_some()) {
            return;
        }
        sender.scheduled = true;
        let stream = *sender.stream.get_or_insert_with(|| context.open(node, Node::Worker(worker)));
        let tokens = sender.next_tokens() as f64 / context.fidelity.wire_layers() as f64;
        let leaves = free_at.max(context.now) + context.shape.device.wire_time(tokens);
        sender.took(tokens, leaves - context.now);
        self.link_free_at = leaves;
        self.streams.insert(stream, (key, StreamUse::Bulk));
        context.worker(leaves - context.now, me, WorkerEvent::Push(key, stream));
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
        self.moved(context, key);
        self.source_fact(context, key, fact);
        self.schedule_push(context, key);
    }

    /// What the link was worth to a handoff.
    fn measure_link(&mut self, context: &Context, key: HandoffKey) {
        let Some(leg) = self.prefill_leg(key) else { return };
        let destination = leg.state.spec.destination;
        let rate = leg.sender.as_ref().and_then(Sender::tokens_per_s);
        if let (Some((_, instance)), Some(rate)) = (destination, rate) {
            let bytes_per_s = rate * context.shape.device.model.kv_token_bytes as f64;
            self.publisher.measured(instance, bytes_per_s);
        }
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

    pub(super) fn end_prefill(
        &mut self,
        context: &mut Context,
        key: HandoffKey,
        last: Option<PrefillFact>,
        cause: Cause,
    ) {
        self.moved(context, key);
        let Some(Leg::Prefill(leg)) = self.end_leg(context, key) else { return };
        if leg.sender.is_some() {
            context.violate(|| format!("{key} ended with a live sender"));
        }
        context.report.num_ignored += leg.source.as_ref().map_or(0, Source::ignored);
        self.registry.finish(key, cause, context.now);
        if let Some(control) = leg.state.control {
            self.streams.remove(&control);
            context.close(control, Side::Opener);
        }
        self.close_leg(context, leg.state.stream, last.map(Payload::Prefill));
    }
}
