//! Prefill legs whose blocks are held, and sent to another decode worker.

use baton_handoff::{Cause, HandoffKey, Source, SourceFact};

use super::Worker;
use super::leg::{Leg, LegStage};
use crate::context::Context;
use crate::network::{Payload, Redirect, Side, StreamId};

impl Worker {
    /// The handoff failed; the blocks stay.
    pub(super) fn hold(&mut self, context: &mut Context, key: HandoffKey, cause: Cause) {
        self.set_stage(context, key, LegStage::Held);
        self.close_control(context, key);
        if let Some(stream) = self.prefill_leg(key).and_then(|leg| leg.state.stream) {
            context.send(stream, Side::Acceptor, Payload::HandoffFailed(key.attempt, cause));
        }
    }

    pub(super) fn redirect(&mut self, context: &mut Context, stream: StreamId, redirect: &Redirect) {
        let Redirect { from, to, destination } = *redirect;
        let leg = self.prefill_leg(from);
        let can = leg.and_then(|leg| leg.source.as_ref()).is_some_and(Source::can_redirect);
        let taken = can && self.registry.open(to, context.now).is_ok();
        if taken {
            context.report.num_redirects += 1;
            self.fence(context, from);
            self.close_control(context, from);
            self.registry.finish(from, Cause::Cancelled, context.now);
            self.rename(context, from, to);
            if let Some(leg) = self.prefill_leg(to) {
                leg.state.spec.destination = Some(destination);
            }
            let destination = destination.1;
            self.source_fact(context, to, SourceFact::Redirected { key: to, destination });
        }
        context.send(stream, Side::Acceptor, Payload::Redirected(taken));
        context.close(stream, Side::Acceptor);
    }

    fn rename(&mut self, context: &mut Context, from: HandoffKey, to: HandoffKey) {
        let Some(mut leg) = self.legs.remove(&from) else { return };
        context.graph.note(from, self.index, (false, false));
        leg.state_mut().spec.key = to;
        self.add_leg(context, to, leg);
        let keys = self.streams.values_mut().map(|(key, _)| key).chain(self.sequences.values_mut());
        for key in keys.filter(|key| **key == from) {
            *key = to;
        }
    }

    /// To the other side an abort, if it was not over.
    fn close_control(&mut self, context: &mut Context, key: HandoffKey) {
        if let Some(control) = self.prefill_leg(key).and_then(|leg| leg.state.control.take()) {
            self.streams.remove(&control);
            context.close(control, Side::Opener);
        }
    }

    /// All is computed: it is sent as far as the new destination needs it.
    pub(super) fn send_held(&mut self, context: &mut Context, key: HandoffKey) {
        self.set_stage(context, key, LegStage::Holding);
        let Some(Leg::Prefill(leg)) = self.legs.get_mut(&key) else { return };
        leg.lease.clone_from(&leg.held);
        let cut = Self::cut(context, leg);
        let first = leg.first.clone();
        let fact = SourceFact::Sampled { first, bytes: cut.bytes(), frames: cut.num_frames() };
        self.source_fact(context, key, fact);
    }
}
