//! Ends of single sequences of a decode leg.

use baton_dispatch::DecodeFact;
use baton_handoff::{Cause, HandoffKey};

use super::Worker;
use super::leg::{Leg, LegStage};
use super::steps::Command;
use crate::context::Context;

impl Worker {
    /// The Stop call: nothing more of this sequence is wanted. Before the group runs it is only noted, since until the fork there is
    /// but one sequence.
    pub(super) fn stop(&mut self, context: &mut Context, key: HandoffKey, sequence: u32) {
        let Some(Leg::Decode(leg)) = self.legs.get_mut(&key) else { return };
        let Some(nth) = sequence.checked_sub(leg.state.spec.first_sequence).map(|nth| nth as usize) else {
            return;
        };
        if leg.open.get(nth) != Some(&true) {
            return;
        }
        context.report.num_stops += 1;
        leg.stopped[nth] = true;
        if leg.started {
            let id = leg.state.ids[nth];
            self.command(context, Command::Drop(id));
            self.sequence_over(context, key, nth, None);
        } else if leg.open.iter().zip(&leg.stopped).all(|(open, stopped)| !open || *stopped) {
            self.decode_cancelled(context, key, Cause::NotNeeded);
        }
    }

    /// The group runs: those that were stopped before end now.
    pub(super) fn started(&mut self, context: &mut Context, key: HandoffKey) {
        self.set_stage(context, key, LegStage::Running);
        let Some(Leg::Decode(leg)) = self.legs.get_mut(&key) else { return };
        leg.started = true;
        let stopped: Vec<usize> =
            (0..leg.open.len()).filter(|nth| leg.open[*nth] && leg.stopped[*nth]).collect();
        let ids = leg.state.ids.clone();
        self.tell_router(context, key, DecodeFact::Started);
        for nth in stopped {
            self.command(context, Command::Drop(ids[nth]));
            self.sequence_over(context, key, nth, None);
        }
    }

    /// A sequence ended; with the last one the leg does.
    pub(super) fn sequence_over(
        &mut self,
        context: &mut Context,
        key: HandoffKey,
        nth: usize,
        last: Option<DecodeFact>,
    ) {
        let Some(Leg::Decode(leg)) = self.legs.get_mut(&key) else { return };
        if let Some(open) = leg.open.get_mut(nth) {
            *open = false;
        }
        let over = !leg.open.contains(&true);
        if let Some(last) = last {
            self.tell_router(context, key, last);
        }
        if over {
            self.end_decode(context, key, None, Cause::Duplicate);
        }
    }

    /// Gives up every sequence of a leg in the scheduler.
    pub(super) fn drop_all(&mut self, context: &mut Context, key: HandoffKey) {
        let ids = self.legs.get(&key).map(|leg| leg.state().ids.clone()).unwrap_or_default();
        for id in ids {
            self.command(context, Command::Drop(id));
        }
    }
}
