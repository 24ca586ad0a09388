//! The spans of a router, as a collector would get them.

use std::time::Duration;

use baton_telemetry::trace::{Finished, Span, SpanKind, TraceContext, Value};
use tokio::sync::mpsc;

/// What came so far.
pub(crate) struct Spans {
    receiver: mpsc::Receiver<Vec<Finished>>,
}

/// The spans of one trace.
pub(crate) struct Trace {
    pub(crate) id: [u8; 16],
    pub(crate) spans: Vec<Span>,
}

impl Spans {
    pub(crate) fn new(receiver: mpsc::Receiver<Vec<Finished>>) -> Self {
        Self { receiver }
    }

    /// The next request's, with the checks that hold for every one.
    pub(crate) async fn next(&mut self) -> Trace {
        let batch = tokio::time::timeout(Duration::from_secs(10), self.receiver.recv()).await;
        let batch = batch.expect("spans within 10 s").expect("the router lives");
        let id = batch[0].trace_id;
        assert!(batch.iter().all(|finished| finished.trace_id == id), "{batch:#?}");
        let trace = Trace { id, spans: batch.into_iter().map(|finished| finished.span).collect() };
        trace.check();
        trace
    }

    /// Nothing more comes.
    pub(crate) async fn none(&mut self) {
        let more = tokio::time::timeout(Duration::from_millis(300), self.receiver.recv()).await;
        assert!(more.is_err(), "{more:#?}");
    }
}

impl Trace {
    /// One root, which ends last; all others are its children and lie inside.
    fn check(&self) {
        let root = self.root();
        assert_eq!(self.spans.last().map(Span::id), Some(root.id()), "the root is the last to come");
        for span in self.spans.iter().filter(|span| span.id() != root.id()) {
            assert_eq!(span.parent(), Some(root.id()), "{span:#?}");
            assert!(span.start() >= root.start() && span.end() < root.end(), "{span:#?} in {root:#?}");
        }
    }

    pub(crate) fn root(&self) -> &Span {
        let mut roots = self.spans.iter().filter(|span| span.kind() == SpanKind::Server);
        let root = roots.next().expect("a root");
        assert!(roots.next().is_none(), "{:#?}", self.spans);
        root
    }

    /// Names of the spans below the root, by start.
    pub(crate) fn names(&self) -> Vec<&str> {
        let mut below: Vec<&Span> =
            self.spans.iter().filter(|span| span.kind() != SpanKind::Server).collect();
        below.sort_by_key(|span| (span.start(), span.end()));
        below.iter().map(|span| span.name()).collect()
    }

    /// The spans of this name, by start.
    pub(crate) fn named(&self, name: &str) -> Vec<&Span> {
        let mut named: Vec<&Span> = self.spans.iter().filter(|span| span.name() == name).collect();
        named.sort_by_key(|span| span.start());
        named
    }

    pub(crate) fn one(&self, name: &str) -> &Span {
        let named = self.named(name);
        assert_eq!(named.len(), 1, "{name} in {:?}", self.names());
        named[0]
    }

    /// Checks that these follow each other: none touches the one before, and nothing much lies between.
    pub(crate) fn follow(&self, spans: &[&Span]) {
        for pair in spans.windows(2) {
            let (before, next) = (pair[0], pair[1]);
            assert!(next.start() > before.end(), "{next:#?} begins before the end of {before:#?}");
            let gap = next.start() - before.end();
            assert!(gap < Duration::from_millis(20), "{gap:?} between {before:#?} and {next:#?}");
        }
    }

    pub(crate) fn hex(&self) -> String {
        TraceContext { trace_id: self.id, span_id: [1; 8], sampled: true }.trace_id_hex()
    }
}

/// An attribute's text.
pub(crate) fn text<'a>(span: &'a Span, key: &str) -> Option<&'a str> {
    match span.attribute(key) {
        Some(Value::String(text)) => Some(text),
        Some(other) => panic!("{key} is {other:?}"),
        None => None,
    }
}

/// An attribute's number.
pub(crate) fn number(span: &Span, key: &str) -> Option<f64> {
    match span.attribute(key) {
        Some(Value::Int(number)) => Some(*number as f64),
        Some(Value::Float(number)) => Some(*number),
        Some(other) => panic!("{key} is {other:?}"),
        None => None,
    }
}
