//! Which request a line belongs to: ids are kept beside the span and found by any line inside it.

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record, Span};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::names;

/// The span around everything done for one request in this process; lines inside it carry both ids.
///
/// `request_id` and `trace_id` are hexadecimal; an empty one is left out of the lines.
pub fn request_span(request_id: &str, trace_id: &str) -> Span {
    tracing::error_span!("request", request_id, trace_id)
}

/// Ids of the request around a line.
#[derive(Clone, Debug, Default)]
pub(super) struct Ids {
    pub(super) request: String,
    pub(super) trace: String,
}

impl Visit for Ids {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            names::REQUEST_ID => value.clone_into(&mut self.request),
            names::TRACE_ID => value.clone_into(&mut self.trace),
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        match field.name() {
            names::REQUEST_ID => self.request = format!("{value:?}"),
            names::TRACE_ID => self.trace = format!("{value:?}"),
            _ => {}
        }
    }
}

/// Keeps the ids beside every span that has them.
pub(super) struct RequestIds;

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for RequestIds {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut ids = Ids::default();
        attributes.record(&mut ids);
        if ids.request.is_empty() && ids.trace.is_empty() {
            return;
        }
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(ids);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut extensions = span.extensions_mut();
        if let Some(ids) = extensions.get_mut::<Ids>() {
            values.record(ids);
        }
    }
}
