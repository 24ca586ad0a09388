//! Which traces are exported.

use std::collections::{BTreeMap, BTreeSet};

use baton_telemetry::names;
use serde_json::Value;

use super::gather::{spans, trace_id};

/// Traces that are asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Every one.
    All,
    /// By id.
    These(BTreeSet<String>),
}

impl Wanted {
    pub(super) fn contains(&self, trace_id: &str) -> bool {
        match self {
            Self::All => true,
            Self::These(ids) => ids.contains(trace_id),
        }
    }
}

/// The requests that a set of files tells of: spans that carry a request's id.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// By trace: how long its request took, in nanoseconds, and the ids it is known by.
    by_trace: BTreeMap<String, (u64, Vec<String>)>,
}

impl Requests {
    pub(super) fn add(&mut self, batch: &Value) {
        for span in spans(batch) {
            let ids: Vec<String> = [names::BATON_REQUEST_ID, names::CLIENT_REQUEST_ID]
                .into_iter()
                .filter_map(|key| text(span, key))
                .map(str::to_owned)
                .collect();
            let Some(trace) = trace_id(span).filter(|_| !ids.is_empty()) else { continue };
            let known = self.by_trace.entry(trace.to_owned()).or_default();
            known.0 = known.0.max(duration(span));
            known.1.extend(ids);
        }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.by_trace.len()
    }

    /// The traces of requests known by this id; a client may have used it twice.
    pub(super) fn with_id(&self, id: &str) -> BTreeSet<String> {
        let found = self.by_trace.iter().filter(|(_, (_, ids))| ids.iter().any(|known| known == id));
        found.map(|(trace, _)| trace.clone()).collect()
    }

    /// The traces of the `num` requests that took longest.
    pub(super) fn slowest(&self, num: usize) -> BTreeSet<String> {
        let mut all: Vec<(u64, &String)> =
            self.by_trace.iter().map(|(trace, (took, _))| (*took, trace)).collect();
        all.sort_unstable_by(|a, b| b.cmp(a));
        all.into_iter().take(num).map(|(_, trace)| trace.clone()).collect()
    }
}

/// A string attribute of a span.
fn text<'a>(span: &'a Value, key: &str) -> Option<&'a str> {
    let attributes = span.get("attributes")?.as_array()?;
    let found = attributes.iter().find(|attribute| attribute["key"] == key)?;
    found["value"]["stringValue"].as_str()
}

/// In nanoseconds; 0 for a span that does not say.
fn duration(span: &Value) -> u64 {
    // OTLP JSON writes 64-bit numbers as strings, and allows numbers.
    let nanos = |key: &str| -> Option<u64> {
        let value = span.get(key)?;
        value.as_u64().or_else(|| value.as_str()?.parse().ok())
    };
    match (nanos("startTimeUnixNano"), nanos("endTimeUnixNano")) {
        (Some(start), Some(end)) => end.saturating_sub(start),
        _ => 0,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// A batch with one span: its trace (a digit), its span id, how long it took, and its request's ids.
    pub(in super::super) fn batch(
        service: &str,
        trace: char,
        span: &str,
        took: u64,
        ids: &[(&str, &str)],
    ) -> Value {
        let attributes: Vec<Value> =
            ids.iter().map(|(key, id)| json!({"key": key, "value": {"stringValue": id}})).collect();
        json!({
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]},
            "scopeSpans": [{"scope": {"name": "baton"}, "spans": [{
                "traceId": trace.to_string().repeat(32), "spanId": span, "name": "x",
                "startTimeUnixNano": "1000", "endTimeUnixNano": (1000 + took).to_string(),
                "attributes": attributes,
            }]}],
        })
    }

    #[test]
    fn requests_are_found_by_either_id_and_by_how_long_they_took() {
        let mut requests = Requests::default();
        let own = names::BATON_REQUEST_ID;
        requests.add(&batch("r", 'a', "01", 50, &[(own, "1f"), (names::CLIENT_REQUEST_ID, "mine")]));
        requests.add(&batch("r", 'b', "02", 90, &[(own, "2f")]));
        requests.add(&batch("r", 'c', "03", 70, &[(own, "3f")]));
        // A step's trace is long and no request.
        requests.add(&batch("d", 'd', "04", 900, &[]));
        let traces = |ids: &str| ids.chars().map(|id| id.to_string().repeat(32)).collect::<BTreeSet<_>>();
        assert_eq!(requests.len(), 3);
        assert_eq!(requests.with_id("mine"), traces("a"));
        assert_eq!(requests.with_id("2f"), traces("b"));
        assert_eq!(requests.with_id("nobody"), traces(""));
        assert_eq!(requests.slowest(2), traces("bc"));
        assert_eq!(requests.slowest(9), traces("abc"));
    }

    #[test]
    fn numbers_are_read_as_numbers_too() {
        assert_eq!(duration(&json!({"startTimeUnixNano": 5, "endTimeUnixNano": "9"})), 4);
        assert_eq!(duration(&json!({"startTimeUnixNano": 5})), 0);
        assert_eq!(duration(&json!({"startTimeUnixNano": 9, "endTimeUnixNano": 5})), 0);
    }
}
