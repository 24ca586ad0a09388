//! The spans of one request in this process.

use std::sync::Arc;

use super::tracing::Shared;
use super::{Span, TraceContext, new_span_id};

/// Spans of one recorder, at most; more are dropped and counted.
pub const MAX_SPANS: usize = 128;

/// Gathers finished spans; dropping it hands them on. One of a process without tracing holds nothing and does nothing.
#[derive(Default)]
pub struct Recorder(Option<Inner>);

struct Inner {
    shared: Arc<Shared>,
    trace: TraceContext,
    spans: Vec<Span>,
    kept: bool,
}

impl Recorder {
    pub(super) fn new(shared: Arc<Shared>, trace: TraceContext) -> Self {
        Self(Some(Inner { shared, trace, spans: Vec::new(), kept: false }))
    }

    /// Whether spans go anywhere: without, callers spare themselves making them.
    pub const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The trace and the span that called; of a recorder that is off, an invalid one of zeros.
    pub fn trace(&self) -> TraceContext {
        let off = TraceContext { trace_id: [0; 16], span_id: [0; 8], sampled: false };
        self.0.as_ref().map_or(off, |inner| inner.trace)
    }

    /// An id for a span that is not finished yet; zeros when nobody will see it.
    pub fn draw_id(&self) -> [u8; 8] {
        if self.is_on() { new_span_id() } else { [0; 8] }
    }

    /// The trace as of this span of it; `None` when nothing is recorded.
    pub fn context_of(&self, span_id: [u8; 8]) -> Option<TraceContext> {
        self.0.as_ref().map(|inner| TraceContext { span_id, ..inner.trace })
    }

    /// Whether the spans are exported without anybody asking for it later.
    pub fn is_sampled(&self) -> bool {
        self.0.as_ref().is_some_and(|inner| inner.trace.sampled || inner.kept)
    }

    /// Adds a finished span.
    pub fn record(&mut self, span: Span) {
        let Some(inner) = &mut self.0 else { return };
        if inner.spans.len() < MAX_SPANS {
            inner.spans.push(span);
        } else {
            inner.shared.counts().over_limit(1);
        }
    }

    /// Has the spans exported although the trace is not sampled.
    pub fn keep(&mut self) {
        if let Some(inner) = &mut self.0 {
            inner.kept = true;
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let Some(Inner { shared, trace, spans, kept }) = self.0.take() else { return };
        shared.finish(trace, spans, kept);
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let num_spans = self.0.as_ref().map(|inner| inner.spans.len());
        f.debug_struct("Recorder").field("num_spans", &num_spans).finish()
    }
}
