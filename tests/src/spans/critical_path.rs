//! The critical path of a trace by the rule of Jaeger's page, so that a test can say what a person will see there in black.
//!
//! From a span the walk goes to the child that ends last; from where that one began, to the child of the parent that ended strictly
//! before, and so on. Children are cut to their parents first. A consumer below a producer blocks nobody: it is left out, with all below it.

use std::collections::BTreeMap;

use super::{Kind, Span, Trace};

/// A part of the critical path: that of `span` between two times.
#[derive(Debug, Clone, Copy)]
pub struct Section<'a> {
    /// Whose part it is.
    pub span: &'a Span,
    /// Nanoseconds since 1970.
    pub start_ns: u64,
    /// Nanoseconds since 1970.
    pub end_ns: u64,
}

/// What of a span lies inside its parent.
#[derive(Clone, Copy)]
struct Cut<'a> {
    span: &'a Span,
    start_ns: u64,
    end_ns: u64,
}

/// The critical path below the trace's root, latest section first.
///
/// # Panics
/// As [`Trace::root`].
pub fn critical_path(trace: &Trace) -> Vec<Section<'_>> {
    let root = trace.root();
    let mut cuts = BTreeMap::new();
    cut(trace, Cut { span: root, start_ns: root.start_ns, end_ns: root.end_ns }, &mut cuts);
    let mut path = Vec::new();
    let (mut at, mut until) = (cuts[root.span_id.as_str()], None);
    loop {
        let end_ns = until.unwrap_or(at.end_ns);
        let children = trace.children(at.span).filter_map(|child| cuts.get(child.span_id.as_str()));
        let last = children
            .filter(|child| until.is_none_or(|until| child.end_ns < until))
            .max_by_key(|child| child.end_ns);
        let start_ns = last.map_or(at.start_ns, |last| last.end_ns);
        if start_ns != end_ns {
            path.push(Section { span: at.span, start_ns, end_ns });
        }
        (at, until) = match last {
            Some(last) => (*last, None),
            None => match trace.parent(at.span) {
                Some(parent) => (cuts[parent.span_id.as_str()], Some(at.start_ns)),
                None => return path,
            },
        };
    }
}

/// Cuts what lies below `parent` to it, and leaves out what does not touch it or does not block it.
fn cut<'a>(trace: &'a Trace, parent: Cut<'a>, cuts: &mut BTreeMap<&'a str, Cut<'a>>) {
    cuts.insert(&parent.span.span_id, parent);
    for span in trace.children(parent.span) {
        let blocks = !(parent.span.kind == Kind::Producer && span.kind == Kind::Consumer);
        let (start_ns, end_ns) = (span.start_ns.max(parent.start_ns), span.end_ns.min(parent.end_ns));
        let touches = span.start_ns < parent.end_ns
            && (span.end_ns > parent.start_ns || span.start_ns >= parent.start_ns);
        if blocks && touches {
            cut(trace, Cut { span, start_ns, end_ns }, cuts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::span;
    use super::*;

    fn path(spans: Vec<Span>) -> Vec<(String, u64, u64)> {
        let trace = Trace::new(spans);
        let ms = |section: &Section| {
            (section.span.name.clone(), section.start_ns / 1_000_000, section.end_ns / 1_000_000)
        };
        critical_path(&trace).iter().map(ms).collect()
    }

    fn sections(of: &[(&str, u64, u64)]) -> Vec<(String, u64, u64)> {
        of.iter().map(|&(name, start, end)| (name.to_owned(), start, end)).collect()
    }

    #[test]
    fn it_goes_from_the_child_that_ends_last_to_what_ended_before_that_began() {
        let spans = vec![
            span("root", "", Kind::Server, 0..100),
            span("early", "root", Kind::Internal, 10..30),
            span("beside", "root", Kind::Internal, 20..60),
            span("last", "root", Kind::Internal, 40..90),
            span("inner", "last", Kind::Internal, 50..80),
        ];
        let wanted = [
            ("root", 90, 100),
            ("last", 80, 90),
            ("inner", 50, 80),
            ("last", 40, 50),
            ("root", 30, 40),
            ("early", 10, 30),
            ("root", 0, 10),
        ];
        assert_eq!(path(spans), sections(&wanted));
    }

    #[test]
    fn who_touches_does_not_come_before_and_a_consumer_blocks_no_producer() {
        let spans = vec![
            span("root", "", Kind::Server, 0..100),
            span("touches", "root", Kind::Internal, 0..40),
            span("send", "root", Kind::Producer, 40..60),
            span("recv", "send", Kind::Consumer, 45..200),
            span("below", "recv", Kind::Internal, 46..50),
        ];
        assert_eq!(path(spans), sections(&[("root", 60, 100), ("send", 40, 60), ("root", 0, 40)]));
    }

    #[test]
    fn children_are_cut_to_their_parent_and_those_outside_it_left_out() {
        let spans = vec![
            span("root", "", Kind::Server, 10..100),
            span("over", "root", Kind::Internal, 60..120),
            span("under", "root", Kind::Internal, 0..50),
            span("before", "root", Kind::Internal, 0..10),
            span("after", "root", Kind::Internal, 100..110),
        ];
        assert_eq!(path(spans), sections(&[("over", 60, 100), ("root", 50, 60), ("under", 10, 50)]));
    }
}
