//! What became of spans.

use prometheus_client::registry::Registry;

use super::gauges::{Sample, Scraped, SourceSlot};
use crate::trace::Tracing;

/// Slots for the counts that [`Tracing`] keeps; nothing is shown before a process says that it traces.
#[derive(Clone)]
pub(super) struct SpanMetrics {
    exported: SourceSlot,
    dropped: SourceSlot,
    failed: SourceSlot,
}

impl SpanMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let mut counter = |name, help| {
            let (collector, slot) = Scraped::counter(name, help);
            registry.register_collector(Box::new(collector));
            slot
        };
        Self {
            exported: counter("baton_spans_exported", "Spans that a collector or a file took."),
            dropped: counter("baton_spans_dropped", "Spans that were not exported, by reason."),
            failed: counter("baton_span_exports_failed", "Exports of several spans each that failed."),
        }
    }

    pub(super) fn read(&self, tracing: &Tracing) {
        if !tracing.is_on() {
            return;
        }
        let of = |tracing: &Tracing| tracing.clone();
        let tracing_exported = of(tracing);
        self.exported.set(move || vec![Sample::new(Vec::new(), tracing_exported.counts().exported)]);
        let tracing_failed = of(tracing);
        self.failed.set(move || vec![Sample::new(Vec::new(), tracing_failed.counts().failed_exports)]);
        let tracing = of(tracing);
        self.dropped.set(move || {
            let counts = tracing.counts();
            [
                ("queue_full", counts.dropped_queue_full),
                ("not_kept", counts.dropped_not_kept),
                ("store_full", counts.dropped_store_full),
                ("over_limit", counts.dropped_over_limit),
                ("export_failed", counts.dropped_export_failed),
                ("shut_down", counts.dropped_shut_down),
            ]
            .map(|(reason, num)| Sample::new(vec![("reason", reason)], num))
            .into()
        });
    }
}
