//! A leg's sequences while they run, as the router and a trace are told of them.

use baton_handoff::{Cause, Time};
use baton_proto::v1;
use baton_worker::{AvoidedStall, RunStats};

use super::Leg;

impl Leg {
    pub(super) async fn started(&mut self, at: Time, cached_tokens: usize, avoided: Option<AvoidedStall>) {
        self.is_started = true;
        let cost = self.marks.cost(at, &self.waits);
        let (metrics, trace) = (&self.core.metrics, self.spans.trace());
        metrics.kv_transfer.observe_traced(cost.total.as_secs_f64(), &trace);
        metrics.kv_exposed.observe_traced(cost.exposed.as_secs_f64(), &trace);
        metrics.kv_hidden.observe_traced(cost.hidden().as_secs_f64(), &trace);
        self.spans.received(&self.marks, None);
        self.spans.run_received(at, &self.marks, &cost);
        let residual = self.step_cost.map_or(0.0, |learnt| learnt.residual);
        let avoided = avoided.map(|AvoidedStall { victims, total_s }| v1::AvoidedStall {
            victims,
            total_us: (total_s * 1e6) as i64,
            residual,
        });
        let started = v1::Started {
            kv: Some(self.marks.to_wire(&cost)),
            cached_tokens: u32::try_from(cached_tokens).unwrap_or(u32::MAX),
            queue_us: 0,
            avoided,
        };
        self.output.started(started).await;
    }

    /// How a sequence ran up to now.
    pub(super) fn stats(&self, sequence: u32) -> RunStats {
        self.sequence.as_ref().map_or_else(RunStats::default, |group| group.stats(sequence))
    }

    /// A sequence ran, if it did, until `at`.
    pub(super) fn end_run(&mut self, sequence: u32, at: Time) {
        let stats = self.stats(sequence);
        self.spans.ran(sequence, at, &stats);
    }

    /// Drops the sequences; whatever still runs ends now.
    pub(super) fn let_go(&mut self) {
        if self.sequence.is_none() {
            return;
        }
        let now = self.core.clock.now();
        for sequence in self.open.iter() {
            self.end_run(sequence, now);
        }
        self.sequence = None;
    }

    /// The leg is over.
    pub(super) fn end_spans(&mut self, cause: Cause) {
        if !self.is_started {
            self.spans.received(&self.marks, Some(cause));
        }
        self.spans.end(self.core.clock.now(), cause);
    }
}
