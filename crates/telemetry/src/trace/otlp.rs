//! Spans in OpenTelemetry's own terms.

use opentelemetry::trace::{
    Link, SpanContext, SpanId, SpanKind as Kind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::wall::Anchor;
use super::{Finished, Span, SpanKind, TraceContext, Value};
use crate::names::resource;

/// Turns spans of this process into what exporters take.
#[derive(Debug)]
pub(super) struct Converter {
    anchor: Anchor,
    scope: InstrumentationScope,
}

impl Converter {
    pub(super) fn new() -> Self {
        Self { anchor: Anchor::now(), scope: InstrumentationScope::builder(resource::SCOPE).build() }
    }

    pub(super) fn span_data(&self, finished: Finished) -> SpanData {
        let Finished { trace_id, span, .. } = finished;
        let Span { name, kind, id, parent, start, end, attributes, links, failure } = span;
        // What is exported was sampled in effect, whoever decided so.
        let context = TraceContext { trace_id, span_id: id, sampled: true };
        let mut span_links = SpanLinks::default();
        span_links.links = links.into_iter().map(|link| Link::with_context(span_context(link))).collect();
        SpanData {
            span_context: span_context(context),
            parent_span_id: parent.map_or(SpanId::INVALID, SpanId::from_bytes),
            parent_span_is_remote: matches!(kind, SpanKind::Server | SpanKind::Consumer),
            span_kind: match kind {
                SpanKind::Internal => Kind::Internal,
                SpanKind::Server => Kind::Server,
                SpanKind::Client => Kind::Client,
                SpanKind::Producer => Kind::Producer,
                SpanKind::Consumer => Kind::Consumer,
            },
            name,
            start_time: self.anchor.wall(start),
            end_time: self.anchor.wall(end),
            attributes: attributes.into_iter().map(|(key, value)| attribute(key, value)).collect(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: span_links,
            status: failure.map_or(Status::Unset, Status::error),
            instrumentation_scope: self.scope.clone(),
        }
    }
}

fn span_context(context: TraceContext) -> SpanContext {
    let flags = if context.sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    let (trace, span) = (TraceId::from_bytes(context.trace_id), SpanId::from_bytes(context.span_id));
    SpanContext::new(trace, span, flags, false, TraceState::default())
}

fn attribute(key: &'static str, value: Value) -> KeyValue {
    match value {
        Value::String(text) => KeyValue::new(key, text),
        Value::Bool(value) => KeyValue::new(key, value),
        Value::Int(value) => KeyValue::new(key, value),
        Value::Float(value) => KeyValue::new(key, value),
    }
}
