//! A real Jaeger, built from the Go module in `tests/jaeger`, and its HTTP API, the one that its page asks.

mod backends;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

pub use backends::Backends;

use crate::cluster::free_port;
use crate::go::Program;
use crate::spans::{Kind, Link, Search, Span, Trace};
use crate::{Process, client, eventually};

/// The longest wait until it answers, and for what it was sent.
const BOUND: Duration = Duration::from_secs(30);

/// A running Jaeger that keeps traces in memory; dropping it ends it.
pub struct Jaeger {
    _process: Process,
    query: SocketAddr,
    otlp: SocketAddr,
}

impl Jaeger {
    /// Starts one in the network namespace of the calling thread, its files in `dir`; `None` as [`Program::path_or_skip`].
    ///
    /// # Panics
    /// When it does not answer within 30 s.
    pub async fn start(dir: &Path) -> Option<Self> {
        let binary = Program::Jaeger.path_or_skip()?;
        let [query, query_grpc, otlp] =
            [(); 3].map(|()| SocketAddr::from((Ipv4Addr::LOCALHOST, free_port())));
        let config = dir.join("jaeger.json");
        std::fs::write(&config, configuration(query, query_grpc, otlp).to_string())
            .expect("the folder is writable");
        let args = ["--config".to_owned(), config.display().to_string()];
        let process = Process::start_program(&binary, "jaeger", dir, &args);
        let jaeger = Self { _process: process, query, otlp };
        eventually("Jaeger answers", BOUND, async || jaeger.get("/api/services").await).await;
        Some(jaeger)
    }

    /// `OTEL_EXPORTER_OTLP_ENDPOINT` for gRPC.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.otlp)
    }

    /// What a search finds now.
    ///
    /// # Errors
    /// It can't be asked, or refuses.
    pub async fn search(&self, search: Search<'_>) -> Result<Vec<Trace>, String> {
        let mut path = format!("/api/traces?limit=200&lookback=1h&service={}", escape(search.service));
        if !search.operation.is_empty() {
            path.push_str(&format!("&operation={}", escape(search.operation)));
        }
        if !search.tags.is_empty() {
            let tags: serde_json::Map<String, Value> =
                search.tags.iter().map(|&(key, value)| (key.to_owned(), json!(value))).collect();
            path.push_str(&format!("&tags={}", escape(&Value::Object(tags).to_string())));
        }
        if !search.min_duration.is_zero() {
            path.push_str(&format!("&minDuration={}us", search.min_duration.as_micros()));
        }
        let found = self.get(&path).await?;
        Ok(found["data"].as_array().into_iter().flatten().map(read_trace).collect())
    }

    async fn get(&self, path: &str) -> Result<Value, String> {
        let answer = client::request(self.query, "GET", path, None).await?;
        if answer.status.is_success() {
            Ok(answer.json())
        } else {
            Err(format!("{}: {}", answer.status, answer.text()))
        }
    }
}

fn configuration(query: SocketAddr, query_grpc: SocketAddr, otlp: SocketAddr) -> Value {
    json!({
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query"],
            "pipelines": {
                "traces": { "receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"] },
            },
            "telemetry": { "metrics": { "level": "none" }, "logs": { "level": "info" } },
        },
        "extensions": {
            "jaeger_query": {
                "storage": { "traces": "in_memory" },
                "http": { "endpoint": query.to_string() },
                "grpc": { "endpoint": query_grpc.to_string() },
            },
            "jaeger_storage": { "backends": { "in_memory": { "memory": { "max_traces": 10_000 } } } },
        },
        "receivers": { "otlp": { "protocols": { "grpc": { "endpoint": otlp.to_string() } } } },
        "exporters": { "jaeger_storage_exporter": { "trace_storage": "in_memory" } },
    })
}

/// For a query string: everything but letters, digits and a few signs as `%XX`.
fn escape(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// A trace as `/api/traces` tells it.
fn read_trace(trace: &Value) -> Trace {
    let spans = trace["spans"].as_array().into_iter().flatten();
    Trace::new(spans.map(|span| read_span(span, &trace["processes"])).collect())
}

fn read_span(span: &Value, processes: &Value) -> Span {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let micros = |name: &str| span[name].as_u64().unwrap_or_else(|| panic!("no {name}: {span}"));
    let process = &processes[span["processID"].as_str().unwrap_or_default()];
    let mut resource = tags(&process["tags"]);
    resource.insert("service.name".into(), process["serviceName"].clone());
    let mut attributes = tags(&span["tags"]);
    let kind = attributes.remove("span.kind");
    // Jaeger tells links as references too: what points into another trace, or is no parent, is one.
    let references: Vec<&Value> = span["references"].as_array().into_iter().flatten().collect();
    let (parents, links): (Vec<&Value>, Vec<&Value>) = references
        .into_iter()
        .partition(|to| to["refType"] == "CHILD_OF" && to["traceID"] == span["traceID"]);
    Span {
        trace_id: text(&span["traceID"]),
        span_id: text(&span["spanID"]),
        parent_id: parents.first().map(|parent| text(&parent["spanID"])),
        name: text(&span["operationName"]),
        kind: match kind.as_ref().and_then(Value::as_str) {
            Some("internal") | None => Kind::Internal,
            Some("server") => Kind::Server,
            Some("client") => Kind::Client,
            Some("producer") => Kind::Producer,
            Some("consumer") => Kind::Consumer,
            Some(_) => Kind::Unspecified,
        },
        start_ns: micros("startTime") * 1000,
        end_ns: (micros("startTime") + micros("duration")) * 1000,
        is_error: attributes.get("error").is_some_and(|error| error == true),
        links: links
            .iter()
            .map(|to| Link { trace_id: text(&to["traceID"]), span_id: text(&to["spanID"]) })
            .collect(),
        attributes,
        resource,
    }
}

fn tags(tags: &Value) -> std::collections::BTreeMap<String, Value> {
    let tags = tags.as_array().into_iter().flatten();
    tags.filter_map(|tag| Some((tag["key"].as_str()?.to_owned(), tag["value"].clone()))).collect()
}
