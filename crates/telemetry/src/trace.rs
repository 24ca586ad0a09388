//! Spans: what a request did in this process, and where that goes.
//!
//! A [`Recorder`] gathers the finished spans of one request. When it is dropped they go to the exporter's queue if the trace is
//! sampled or was marked to be kept; else they wait, bounded, for a router to decide. Exporting happens on a thread of its own.
//! Every queue here is bounded, and what does not fit is dropped and counted: nothing of this waits, and nothing of it fails a request.

mod chunks;
mod config;
mod context;
mod export;
mod file;
mod otlp;
mod recorder;
mod span;
mod tracing;
mod waiting;
mod wall;

pub use chunks::Chunks;
pub use config::{Collector, Ignored, Protocol, TracingConfig, TracingOptions};

pub use context::{CallContext, SPANS, TRACEPARENT, TraceContext, new_span_id, new_trace_id};
pub use export::{Service, TracingGuard};
pub use recorder::{MAX_SPANS, Recorder};
pub use span::{APART, Span, SpanKind, Value, after};
pub use tracing::{Finished, Sampler, SpanCounts, Tracing};
