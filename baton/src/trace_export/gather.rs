//! Putting batches together: one entry a process, each span once.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::select::Wanted;

/// The wanted spans so far.
#[derive(Debug)]
pub(super) struct Gathered {
    wanted: Wanted,
    /// Spans by resource, which is a process, and by scope; the keys are their own JSON.
    processes: BTreeMap<String, BTreeMap<String, Vec<Value>>>,
    seen: BTreeSet<(String, String)>,
    traces: BTreeSet<String>,
}

impl Gathered {
    pub(super) fn new(wanted: Wanted) -> Self {
        Self { wanted, processes: BTreeMap::new(), seen: BTreeSet::new(), traces: BTreeSet::new() }
    }

    /// Takes what is wanted of a batch.
    pub(super) fn add(&mut self, mut batch: Value) {
        let scopes = match batch.get_mut("scopeSpans").map(Value::take) {
            Some(Value::Array(scopes)) => scopes,
            _ => return,
        };
        let process = key(&without(batch, "scopeSpans"));
        for mut scope in scopes {
            let Some(Value::Array(spans)) = scope.get_mut("spans").map(Value::take) else { continue };
            let scope = key(&without(scope, "spans"));
            for span in spans {
                let Some(trace) = trace_id(&span).filter(|trace| self.wanted.contains(trace)) else {
                    continue;
                };
                let id = span["spanId"].as_str().unwrap_or_default().to_owned();
                if !self.seen.insert((trace.to_owned(), id)) {
                    continue;
                }
                self.traces.insert(trace.to_owned());
                let scopes = self.processes.entry(process.clone()).or_default();
                scopes.entry(scope.clone()).or_default().push(span);
            }
        }
    }

    pub(super) fn num_spans(&self) -> usize {
        self.seen.len()
    }

    pub(super) fn num_traces(&self) -> usize {
        self.traces.len()
    }

    /// One OTLP JSON document.
    pub(super) fn document(self) -> Value {
        let processes = self.processes.into_iter().map(|(process, scopes)| {
            let scopes = scopes.into_iter().map(|(scope, spans)| with(&scope, "spans", spans));
            with(&process, "scopeSpans", scopes.collect())
        });
        json!({"resourceSpans": processes.collect::<Vec<Value>>()})
    }
}

/// The spans of a batch.
pub(super) fn spans(batch: &Value) -> impl Iterator<Item = &Value> {
    let scopes = batch.get("scopeSpans").and_then(Value::as_array).into_iter().flatten();
    scopes.filter_map(|scope| scope.get("spans")?.as_array()).flatten()
}

/// A span's trace.
pub(super) fn trace_id(span: &Value) -> Option<&str> {
    span.get("traceId")?.as_str()
}

fn without(value: Value, name: &str) -> Map<String, Value> {
    match value {
        Value::Object(mut object) => {
            object.remove(name);
            object
        }
        _ => Map::new(),
    }
}

fn key(object: &Map<String, Value>) -> String {
    // Objects with string keys always serialise.
    serde_json::to_string(object).unwrap_or_default()
}

fn with(key: &str, name: &str, values: Vec<Value>) -> Value {
    let mut object: Map<String, Value> = serde_json::from_str(key).unwrap_or_default();
    object.insert(name.to_owned(), Value::Array(values));
    Value::Object(object)
}

#[cfg(test)]
mod tests {
    use super::super::select::tests::batch;
    use super::*;

    #[test]
    fn batches_of_one_process_become_one_entry_and_each_span_stays_once() {
        let mut gathered = Gathered::new(Wanted::All);
        gathered.add(batch("router", 'a', "01", 5, &[]));
        gathered.add(batch("decode", 'a', "02", 5, &[]));
        gathered.add(batch("router", 'b', "01", 5, &[]));
        gathered.add(batch("router", 'b', "01", 5, &[]));
        gathered.add(serde_json::json!({"nothing": 1}));
        assert_eq!((gathered.num_spans(), gathered.num_traces()), (3, 2));
        let document = gathered.document();
        let processes = document["resourceSpans"].as_array().unwrap();
        assert_eq!(processes.len(), 2);
        let names: Vec<&Value> =
            processes.iter().map(|one| &one["resource"]["attributes"][0]["value"]["stringValue"]).collect();
        assert_eq!(names, ["decode", "router"]);
        assert_eq!(processes[1]["scopeSpans"][0]["spans"].as_array().unwrap().len(), 2);
        assert_eq!(processes[1]["scopeSpans"][0]["scope"]["name"], "baton");
        assert_eq!(spans(&processes[0]).count(), 1);
    }

    #[test]
    fn only_what_is_wanted_stays() {
        let wanted = Wanted::These([String::from("b").repeat(32)].into());
        let mut gathered = Gathered::new(wanted);
        gathered.add(batch("router", 'a', "01", 5, &[]));
        gathered.add(batch("router", 'b', "02", 5, &[]));
        assert_eq!((gathered.num_spans(), gathered.num_traces()), (1, 1));
    }
}
