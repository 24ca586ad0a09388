//! A handoff fails when the prompt is computed and its KV still lies where it was computed: another decode worker gets it.
//!
//! The failure is charged as ever. What can't be redirected after all starts over, at no further charge.

use baton_handoff::{Cause, HandoffKey, InstanceId};

use crate::attempt::Attempt;
use crate::failure::Failure;
use crate::group::{Group, Stage};
use crate::{Legs, Placed, PrefillFact, Request, RequestAction, Time};

impl Request {
    /// Whether the group's KV is held, by a worker that the failure leaves out: the decode worker is blamed, or lost a prefill worker that is
    /// still heard here.
    pub(crate) fn is_held(&mut self, at: usize, cause: Cause, blamed: InstanceId) -> bool {
        let spares = |live: &Attempt| live.placed.decode == blamed || cause == Cause::PeerLost;
        self.groups[at].live().is_some_and(|live| live.is_held() && spares(live))
    }

    pub(crate) fn redirecting(&self, number: u32) -> Option<usize> {
        let is_it = |group: &Group| group.number == number && matches!(group.stage, Stage::Redirecting(_));
        self.groups.iter().position(is_it)
    }

    /// Closes the Decode leg and asks for another decode worker.
    pub(crate) fn place_decode(&mut self, at: usize) {
        let avoid = self.budget.avoid();
        let group = &mut self.groups[at];
        let Group { number, first_sequence, num_sequences, .. } = *group;
        let live = match std::mem::replace(&mut group.stage, Stage::Placing) {
            Stage::Running(live) => live,
            other => {
                group.stage = other;
                return;
            }
        };
        let Legs { key: HandoffKey { attempt, .. }, num_forced, .. } = live.legs;
        let keep_prefill = live.placed.prefill;
        group.stage = Stage::Redirecting(live);
        self.actions.push_back(RequestAction::CloseDecode { group: number, attempt });
        self.actions.push_back(RequestAction::Place {
            group: number,
            avoid,
            first_sequence,
            num_sequences,
            num_forced,
            keep_prefill,
        });
    }

    /// The next attempt goes on with the KV that is held. A worker that failed this request before is no better place for it.
    pub(crate) fn redirect(&mut self, now: Time, at: usize, placed: Placed) {
        let is_new = !self.budget.avoid().contains(&placed.decode);
        let group = &mut self.groups[at];
        let legs = match &group.stage {
            Stage::Redirecting(live) if is_new && placed.prefill == live.placed.prefill => Legs {
                key: HandoffKey { attempt: group.attempt, ..live.legs.key },
                preempted: group.preempted,
                ..live.legs
            },
            _ => return self.start_over(now, at),
        };
        group.attempt += 1;
        group.stage = Stage::Running(Attempt::redirected(placed, legs, self.budget.open()));
        self.actions.push_back(RequestAction::Redirect(legs));
    }

    /// Another decode worker runs the whole group: what was stopped before it was asked is stopped there too.
    pub(crate) fn stop_finished(&mut self, at: usize) {
        let Some(attempt) = self.groups[at].live().map(|live| live.legs.key.attempt) else { return };
        let group = self.groups[at].number;
        for sequence in self.groups[at].sequences() {
            if !self.owns(at, sequence) {
                self.actions.push_back(RequestAction::StopSequence { group, attempt, sequence });
            }
        }
    }

    /// What the Prefill leg says while another decode worker is looked for.
    pub(crate) fn prefill_held(&mut self, now: Time, group: u32, attempt: u32, event: PrefillFact) {
        let at = self.redirecting(group);
        let held = at.and_then(|at| match &mut self.groups[at].stage {
            Stage::Redirecting(live) if live.legs.key.attempt == attempt => Some((at, live.computes())),
            _ => None,
        });
        match (held, event) {
            // It had been handed off all the same, or was held too long.
            (Some((at, _)), PrefillFact::Done | PrefillFact::Failed(_)) => self.start_over(now, at),
            (Some((at, computes)), PrefillFact::Lost | PrefillFact::Unreachable) => {
                self.attempt_failed(now, at, Failure::lost(computes));
            }
            // The failure that led here, told by the other side too.
            _ => self.ignored += 1,
        }
    }

    /// Another attempt from the beginning, for a failure that is charged already.
    pub(crate) fn start_over(&mut self, now: Time, at: usize) {
        let before = self.budget.num_retries().saturating_sub(1);
        for to in self.regroup(at) {
            if self.groups[to].preempted {
                self.place(to);
            } else {
                self.back_off(now, to, before);
            }
        }
    }
}
