//! What a leg measured, for the decode worker, for placement and for the metrics.

use baton_proto::v1;
use baton_proto::v1::source_message::Message;

use crate::leg::Leg;
use crate::times::micros;

impl Leg {
    /// Stops sending; what the sender measured stays.
    pub(crate) fn drop_sender(&mut self) {
        if let Some(sender) = self.sender.take() {
            self.spans.sent(sender.first_frame_at(), sender.credit_wait());
        }
    }

    /// Adds what this worker measured to what the machine says.
    pub(crate) fn with_measures(&mut self, mut message: v1::SourceMessage) -> v1::SourceMessage {
        match &mut message.message {
            Some(Message::Notice(notice)) => {
                let offered_at = self.link.offered_at().map(|at| self.core.clock.at(at));
                let since =
                    self.sampled_at.zip(offered_at).map(|(sampled, offered)| sampled.saturating_sub(offered));
                notice.since_offer_us = since.map_or(0, micros);
            }
            Some(Message::Commit(commit)) => {
                let learnt = self.core.loaded().ok().and_then(|loaded| loaded.steps.step_cost_now());
                commit.step_cost = learnt.map(|(cost, residual)| v1::StepCost {
                    fixed_s: cost.fixed_s,
                    per_token_s: cost.per_token_s,
                    per_context_token_s: cost.per_context_token_s,
                    residual,
                });
                self.spans.committing();
            }
            _ => {}
        }
        message
    }

    /// Counts how long the prompt waited.
    pub(crate) fn count_queue(&self) {
        let seconds = self.spans.queued().as_secs_f64();
        match self.spans.server() {
            Some(trace) => self.core.metrics.queue.observe_traced(seconds, &trace),
            None => self.core.metrics.queue.observe(seconds),
        }
    }

    /// The decode worker has every byte.
    pub(crate) fn measure_link(&mut self) {
        let Some(target) = &self.target else { return };
        let (bytes, outstanding) = std::mem::take(&mut self.outstanding).delivered(self.core.clock.now());
        self.core.links.observe(target.instance, bytes, outstanding);
    }
}
