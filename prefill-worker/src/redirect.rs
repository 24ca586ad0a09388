//! Sending held KV to another decode worker than it was meant for.

use baton_handoff::{Cause, HandoffKey, SourceFact};
use baton_proto::v1;
use baton_proto::v1::prefill_event::Event as Wire;
use baton_transfer::{Progress, SentTotals, wire};
use tokio::sync::oneshot;

use crate::leg::Leg;
use crate::link::{Link, Target};
use crate::outstanding::Outstanding;

/// What a router asks of a leg.
pub(crate) struct Redirect {
    /// The leg's from now on.
    pub(crate) key: HandoffKey,
    pub(crate) target: Target,
    /// [`Cause::NotFound`] when nothing is held.
    pub(crate) answer: oneshot::Sender<Result<(), Cause>>,
}

impl Leg {
    /// The handoff failed; the blocks stay.
    pub(crate) async fn hold(&mut self, cause: Cause) {
        self.link = Link::Closed;
        self.core.metrics.handoff_ended(cause.name());
        self.drop_sender();
        self.spans.handed_off(self.totals, Some(cause.name()));
        self.is_counted = true;
        let detail = std::mem::take(&mut self.detail);
        tracing::info!(cause = cause.name(), %detail, "the handoff failed, its blocks are held");
        let attempt = self.machine.key().attempt;
        let v1::Failed { cause, detail } = wire::encode_failed(cause, &detail);
        self.tell(Wire::HandoffFailed(v1::HandoffFailed { attempt, cause, detail })).await;
    }

    pub(crate) fn redirect(&mut self, redirect: Redirect) {
        let Redirect { key, target, answer } = redirect;
        let moved = if self.machine.can_redirect() && self.lease.is_some() {
            self.shared.rename(self.machine.key(), key, self.core.clock.now())
        } else {
            Err(Cause::NotFound)
        };
        if moved.is_ok() {
            tracing::info!(%key, destination = %target.address, "held blocks go to another decode worker");
            let destination = target.instance;
            self.target = Some(target);
            self.spans.renamed(key);
            self.is_counted = false;
            self.fact(SourceFact::Redirected { key, destination });
        }
        // A router that does not wait for the answer hears of it from the legs.
        let _ = answer.send(moved);
    }

    /// Sends the computed prompt anew, as far as the new destination needs it.
    pub(crate) fn send_held(&mut self) {
        self.sender_ended = false;
        self.num_sent = 0;
        self.totals = SentTotals::default();
        self.outstanding = Outstanding::default();
        // The fenced sender may still be listening to the old one.
        self.progress = Progress::new();
        self.progress.tokens_done(self.prompt_tokens);
        if let Some(lease) = self.lease.clone() {
            self.start_sender(lease);
        }
        self.commit();
    }
}
