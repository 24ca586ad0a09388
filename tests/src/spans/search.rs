//! Jaeger's search, so that what a person would type there can be asked of spans held in a test too.

use std::time::Duration;

use super::{Span, Trace};

/// What a person puts into the fields of Jaeger's search: a trace is found when one of its spans has all of it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Search<'a> {
    /// Service.
    pub service: &'a str,
    /// Operation; "" for all.
    pub operation: &'a str,
    /// Tags, equal as text.
    pub tags: &'a [(&'a str, &'a str)],
    /// Min duration; zero for none.
    pub min_duration: Duration,
}

impl Search<'_> {
    /// The traces that this finds, in the order of their ids.
    pub fn among(&self, spans: Vec<Span>) -> Vec<Trace> {
        let traces = Trace::split(spans).into_values();
        traces.filter(|trace| trace.spans.iter().any(|span| self.finds(span))).collect()
    }

    fn finds(&self, span: &Span) -> bool {
        // Jaeger compares text, so a tag that is no text is written out first.
        let written = |key: &str| match span.attribute(key) {
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        span.service() == self.service
            && (self.operation.is_empty() || span.name == self.operation)
            && span.duration() >= self.min_duration
            && self.tags.iter().all(|(key, wanted)| written(key) == **wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, tests::span};
    use super::*;
    use serde_json::json;

    #[test]
    fn one_span_must_have_all_of_it() {
        let mut wait = span("wait", "", Kind::Internal, 0..30);
        wait.resource.insert("service.name".into(), json!("worker"));
        wait.attributes.extend([("stalled".into(), json!(true)), ("cause".into(), json!("copy"))]);
        let found = |search: Search<'_>| search.among(vec![wait.clone()]).len();
        let all = Search {
            service: "worker",
            operation: "wait",
            tags: &[("stalled", "true"), ("cause", "copy")],
            min_duration: Duration::from_millis(30),
        };
        assert_eq!(found(all), 1);
        assert_eq!(found(Search { service: "router", ..all }), 0);
        assert_eq!(found(Search { operation: "run", ..all }), 0);
        assert_eq!(found(Search { tags: &[("cause", "resume")], ..all }), 0);
        assert_eq!(found(Search { tags: &[("other", "copy")], ..all }), 0);
        assert_eq!(found(Search { min_duration: Duration::from_millis(31), ..all }), 0);
    }
}
