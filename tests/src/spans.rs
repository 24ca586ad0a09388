//! Spans as values, whoever told them: where each stands in its trace, and what a trace says as a whole.

mod caller;
mod critical_path;
mod search;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::Value;

pub use caller::Caller;
pub use critical_path::{Section, critical_path};
pub use search::Search;

/// What a span is to the one it was called by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Not said.
    Unspecified,
    /// Work inside a process.
    Internal,
    /// Answers a call.
    Server,
    /// Makes a call.
    Client,
    /// Sends what somebody takes later.
    Producer,
    /// Takes what somebody sent.
    Consumer,
}

/// Another span that a span names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// 32 hexadecimal digits.
    pub trace_id: String,
    /// 16 hexadecimal digits.
    pub span_id: String,
}

/// One span.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// 32 hexadecimal digits.
    pub trace_id: String,
    /// 16 hexadecimal digits.
    pub span_id: String,
    /// The id of its parent, which may be in no trace that was told.
    pub parent_id: Option<String>,
    /// Operation.
    pub name: String,
    /// Kind.
    pub kind: Kind,
    /// Nanoseconds since 1970.
    pub start_ns: u64,
    /// Nanoseconds since 1970.
    pub end_ns: u64,
    /// Attributes.
    pub attributes: BTreeMap<String, Value>,
    /// Links.
    pub links: Vec<Link>,
    /// Whether its status is an error.
    pub is_error: bool,
    /// What the process said of itself: `service.name` and more.
    pub resource: BTreeMap<String, Value>,
}

impl Span {
    /// How long it took.
    pub fn duration(&self) -> Duration {
        Duration::from_nanos(self.end_ns.saturating_sub(self.start_ns))
    }

    /// How long it took, in milliseconds.
    pub fn ms(&self) -> f64 {
        self.duration().as_secs_f64() * 1e3
    }

    /// `service.name`; "" when there is none.
    pub fn service(&self) -> &str {
        self.resource.get("service.name").and_then(Value::as_str).unwrap_or_default()
    }

    /// An attribute; null when it has none of this name.
    pub fn attribute(&self, name: &str) -> &Value {
        self.attributes.get(name).unwrap_or(&Value::Null)
    }

    /// An attribute that must be text.
    ///
    /// # Panics
    /// When it is none.
    pub fn text(&self, name: &str) -> &str {
        self.attribute(name).as_str().unwrap_or_else(|| panic!("{name} is no text: {self:#?}"))
    }

    /// An attribute that must be a number.
    ///
    /// # Panics
    /// When it is none.
    pub fn number(&self, name: &str) -> f64 {
        self.attribute(name).as_f64().unwrap_or_else(|| panic!("{name} is no number: {self:#?}"))
    }
}

/// The spans of one trace, in the order in which they began.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// The spans.
    pub spans: Vec<Span>,
}

impl Trace {
    /// Of spans that share a trace id; one that was told twice counts once.
    pub fn new(mut spans: Vec<Span>) -> Self {
        let mut seen = BTreeSet::new();
        spans.retain(|span| seen.insert(span.span_id.clone()));
        spans.sort_by_key(|span| (span.start_ns, std::cmp::Reverse(span.end_ns)));
        Self { spans }
    }

    /// Every trace in `spans`, by its id.
    pub fn split(spans: Vec<Span>) -> BTreeMap<String, Self> {
        let mut by_id: BTreeMap<String, Vec<Span>> = BTreeMap::new();
        for span in spans {
            by_id.entry(span.trace_id.clone()).or_default().push(span);
        }
        by_id.into_iter().map(|(id, spans)| (id, Self::new(spans))).collect()
    }

    /// The span with this id.
    pub fn by_id(&self, span_id: &str) -> Option<&Span> {
        self.spans.iter().find(|span| span.span_id == span_id)
    }

    /// The parent, if this trace has it.
    pub fn parent(&self, span: &Span) -> Option<&Span> {
        self.by_id(span.parent_id.as_deref()?)
    }

    /// Spans without a parent here.
    pub fn roots(&self) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(|span| self.parent(span).is_none())
    }

    /// The one span without a parent here.
    ///
    /// # Panics
    /// When there is none, or another.
    pub fn root(&self) -> &Span {
        let mut roots = self.roots();
        match (roots.next(), roots.next()) {
            (Some(root), None) => root,
            _ => panic!("not one root:\n{self}"),
        }
    }

    /// All spans of this name.
    pub fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Span> {
        self.spans.iter().filter(move |span| span.name == name)
    }

    /// The one span of this name and kind.
    ///
    /// # Panics
    /// When there is none, or another.
    pub fn one(&self, name: &str, kind: Kind) -> &Span {
        let mut found = self.spans.iter().filter(|span| span.name == name && span.kind == kind);
        match (found.next(), found.next()) {
            (Some(span), None) => span,
            (first, _) => {
                panic!("{} {kind:?} '{name}':\n{self}", if first.is_some() { "several" } else { "no" })
            }
        }
    }

    /// The spans whose parent this one is.
    pub fn children<'a>(&'a self, span: &'a Span) -> impl Iterator<Item = &'a Span> {
        self.spans.iter().filter(|child| child.parent_id.as_deref() == Some(span.span_id.as_str()))
    }

    fn print(&self, out: &mut String, span: &Span, depth: usize, zero_ns: u64) {
        let ms = |ns: u64| (ns as f64 - zero_ns as f64) / 1e6;
        let _ = writeln!(
            out,
            "{:10.3} {:10.3} {:indent$}{} [{:?}, {}] {}",
            ms(span.start_ns),
            span.ms(),
            "",
            span.name,
            span.kind,
            span.service(),
            serde_json::to_string(&span.attributes).unwrap_or_default(),
            indent = 2 * depth
        );
        for child in self.children(span) {
            self.print(out, child, depth + 1, zero_ns);
        }
    }
}

/// As a tree: start and duration in milliseconds, name, kind, service, attributes.
impl std::fmt::Display for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = String::new();
        let zero_ns = self.spans.iter().map(|span| span.start_ns).min().unwrap_or(0);
        for root in self.roots() {
            self.print(&mut out, root, 0, zero_ns);
        }
        f.write_str(&out)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A span of milliseconds.
    pub(crate) fn span(id: &str, parent: &str, kind: Kind, ms: std::ops::Range<u64>) -> Span {
        Span {
            trace_id: "0".repeat(32),
            span_id: id.to_owned(),
            parent_id: (!parent.is_empty()).then(|| parent.to_owned()),
            name: id.to_owned(),
            kind,
            start_ns: ms.start * 1_000_000,
            end_ns: ms.end * 1_000_000,
            attributes: BTreeMap::new(),
            links: Vec::new(),
            is_error: false,
            resource: BTreeMap::new(),
        }
    }

    #[test]
    fn a_trace_knows_who_is_whose_child_and_counts_a_repeated_span_once() {
        let root = span("root", "caller", Kind::Server, 0..10);
        let child = span("child", "root", Kind::Internal, 2..4);
        let trace = Trace::new(vec![child.clone(), root.clone(), child.clone()]);
        assert_eq!(trace.spans, [root.clone(), child.clone()]);
        assert_eq!(trace.root(), &root);
        assert_eq!(trace.children(&root).collect::<Vec<_>>(), [&child]);
        assert_eq!(trace.parent(&child), Some(&root));
        assert!(std::panic::catch_unwind(|| trace.one("child", Kind::Server).ms()).is_err());
        let other = Span { trace_id: "1".repeat(32), ..root };
        assert_eq!(Trace::split(vec![other, child]).len(), 2);
    }
}
