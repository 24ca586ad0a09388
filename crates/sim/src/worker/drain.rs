//! A worker that goes in good order: no new work, what runs may end, the rest ends with a cause that routers resume on.

use std::time::Duration;

use baton_dispatch::{DecodeFact, PrefillFact, WorkerState};
use baton_handoff::{Cause, DestinationFact, HandoffKey, SourceFact};

use super::Worker;
use super::leg::Leg;
use crate::context::Context;

/// What still runs after this ends.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

impl Worker {
    /// Whether it can be told to drain.
    pub(crate) fn can_drain(&self) -> bool {
        self.alive && !self.paused && !self.is_draining()
    }

    /// Takes no new work from here on.
    pub(crate) fn drain(&mut self, context: &mut Context) {
        self.state = WorkerState::Draining;
        self.publish(context);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.state == WorkerState::Draining
    }

    /// Whether nothing runs any more in a process that drains.
    pub(crate) fn is_drained(&self) -> bool {
        self.is_draining() && self.alive && !self.paused && self.legs.is_empty()
    }

    /// Ends every leg that is left.
    pub(crate) fn end_all(&mut self, context: &mut Context) {
        let keys: Vec<HandoffKey> = self.legs.keys().copied().collect();
        for key in keys {
            match self.legs.get(&key) {
                Some(Leg::Prefill(leg)) if leg.source.is_some() => {
                    self.source_fact(context, key, SourceFact::Cancelled(Cause::Draining));
                }
                Some(Leg::Prefill(_)) => {
                    self.drop_all(context, key);
                    self.end_prefill(
                        context,
                        key,
                        Some(PrefillFact::Failed(Cause::Draining)),
                        Cause::Draining,
                    );
                }
                Some(Leg::Decode(leg)) if leg.destination.as_ref().is_some_and(|d| !d.is_ended()) => {
                    self.destination_fact(context, key, DestinationFact::Cancelled(Cause::Draining));
                }
                Some(Leg::Decode(_)) => {
                    self.drop_all(context, key);
                    self.end_decode(context, key, Some(DecodeFact::Failed(Cause::Draining)), Cause::Draining);
                }
                None => {}
            }
        }
        self.settle(context);
    }
}
