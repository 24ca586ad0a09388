//! What a collector and a file get.

use std::time::{Duration, Instant, SystemTime};

use baton_telemetry::trace::{
    Protocol, Recorder, Sampler, Span, SpanKind, TraceContext, Tracing, new_span_id,
};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1 as wire;

use crate::collector::{self, Received, SERVICE};

const LONG: Duration = Duration::from_secs(5);

fn value(attributes: &[KeyValue], key: &str) -> Option<Value> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.clone().and_then(|AnyValue { value }| value)
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    match value(attributes, key) {
        Some(Value::StringValue(text)) => text,
        other => panic!("{key}: {other:?}"),
    }
}

/// A root and a child that failed.
fn record_two(recorder: &mut Recorder, root: TraceContext, other: TraceContext) {
    let end = Instant::now();
    let start = end - Duration::from_millis(250);
    let child =
        Span::new("kv.send", SpanKind::Producer, Some(root.span_id), start + Duration::from_millis(50), end)
            .with("baton.kv.bytes", 4096_u64)
            .with("baton.kv.transport", "shm")
            .with("baton.exact", true)
            .with("baton.ttft_ms", 1.5)
            .linked(other)
            .failed("lost");
    recorder.record(child);
    let span = Span::new("chat", SpanKind::Server, None, start, end).named("chat tiny".to_owned());
    recorder.record(span.with_id(root.span_id));
}

fn check(resource: &Resource, spans: &[wire::Span], root: TraceContext, other: TraceContext) {
    assert_eq!(text(&resource.attributes, "service.name"), "baton-router");
    assert_eq!(text(&resource.attributes, "service.version"), "1.2.3");
    assert_eq!(text(&resource.attributes, "service.instance.id"), "0badcafe");
    assert_eq!(text(&resource.attributes, "deployment.environment.name"), "test");
    assert!(!text(&resource.attributes, "host.name").is_empty());

    let [child, parent] = spans else { panic!("{spans:?}") };
    assert_eq!((parent.name.as_str(), child.name.as_str()), ("chat tiny", "kv.send"));
    assert!(spans.iter().all(|span| span.trace_id == root.trace_id));
    assert_eq!((parent.span_id.as_slice(), parent.parent_span_id.len()), (root.span_id.as_slice(), 0));
    assert_eq!(child.parent_span_id, root.span_id);
    assert!(child.span_id.len() == 8 && child.span_id != parent.span_id);
    assert_eq!(parent.kind(), wire::span::SpanKind::Server);
    assert_eq!(child.kind(), wire::span::SpanKind::Producer);
    assert_eq!(parent.end_time_unix_nano - parent.start_time_unix_nano, 250_000_000);
    assert_eq!(child.start_time_unix_nano - parent.start_time_unix_nano, 50_000_000);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
    assert!(now.abs_diff(parent.end_time_unix_nano) < 10_000_000_000);

    assert_eq!(value(&child.attributes, "baton.kv.bytes"), Some(Value::IntValue(4096)));
    assert_eq!(value(&child.attributes, "baton.exact"), Some(Value::BoolValue(true)));
    assert_eq!(value(&child.attributes, "baton.ttft_ms"), Some(Value::DoubleValue(1.5)));
    assert_eq!(text(&child.attributes, "baton.kv.transport"), "shm");
    assert_eq!(child.links.len(), 1);
    assert_eq!(
        (child.links[0].trace_id.as_slice(), child.links[0].span_id.as_slice()),
        (&other.trace_id[..], &other.span_id[..])
    );
    let status = child.status.as_ref().expect("a status");
    assert_eq!((status.code(), status.message.as_str()), (wire::status::StatusCode::Error, "lost"));
    assert_eq!(parent.status.as_ref().map(wire::Status::code), Some(wire::status::StatusCode::Unset));
}

async fn arrives(mut received: Received, protocol: Protocol) {
    let config = collector::config(&received.endpoint, protocol);
    let (tracing, guard) = Tracing::start(config, SERVICE).expect("starts");
    tracing.identify("0badcafe");
    let (root, other) = (tracing.root(None), tracing.root(None));
    let mut recorder = tracing.recorder(root);
    record_two(&mut recorder, root, other);
    drop(recorder);
    let (resource, spans) = received.next().await;
    check(&resource, &spans, root, other);
    collector::eventually("two exported spans", || tracing.counts().exported == 2).await;
    guard.shutdown(LONG).await;
    let counts = tracing.counts();
    assert_eq!((counts.failed_exports, counts.dropped_export_failed), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn spans_arrive_over_grpc() {
    arrives(collector::grpc().await, Protocol::Grpc).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn spans_arrive_over_http() {
    arrives(collector::http().await, Protocol::Http).await;
}

#[tokio::test]
async fn a_file_holds_what_a_collector_would_get_and_is_appended_to() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("spans.jsonl");
    let mut traces = Vec::new();
    for _ in 0..2 {
        let config = collector::config("unused", Protocol::Grpc);
        let config =
            baton_telemetry::trace::TracingConfig { collector: None, file: Some(file.clone()), ..config };
        let (tracing, guard) = Tracing::start(config, SERVICE).expect("starts");
        tracing.identify("0badcafe");
        let (root, other) = (tracing.root(None), tracing.root(None));
        record_two(&mut tracing.recorder(root), root, other);
        guard.shutdown(LONG).await;
        assert_eq!(tracing.counts().exported, 2);
        traces.push((root, other));
    }
    let written = std::fs::read_to_string(&file).expect("a file");
    let lines: Vec<&str> = written.lines().collect();
    assert_eq!(lines.len(), 2);
    for (line, (root, other)) in lines.into_iter().zip(traces) {
        let request: ExportTraceServiceRequest = serde_json::from_str(line).expect("OTLP JSON");
        let of_one = &request.resource_spans[0];
        check(of_one.resource.as_ref().expect("a resource"), &of_one.scope_spans[0].spans, root, other);
        // As the standard has it: ids in hexadecimal, times as text.
        let json: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let span = &json["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
        assert_eq!(span["traceId"], root.trace_id_hex());
        assert!(span["startTimeUnixNano"].is_string(), "{span}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_that_was_not_sampled_is_delivered_when_a_router_keeps_it() {
    let mut received = collector::grpc().await;
    let mut config = collector::config(&received.endpoint, Protocol::Grpc);
    config.sampler = Sampler { parent_based: true, ratio: 0.0 };
    let (tracing, guard) = Tracing::start(config, SERVICE).expect("starts");
    let [kept, dropped] = [tracing.root(None), tracing.root(None)];
    let at = Instant::now();
    for trace in [kept, dropped] {
        let mut recorder = tracing.recorder(trace);
        recorder.record(Span::new("decode", SpanKind::Server, Some(new_span_id()), at, at));
    }
    tracing.keep(&[kept.trace_id]);
    let (_, spans) = received.next().await;
    assert_eq!(spans.len(), 1);
    assert_eq!(spans[0].trace_id, kept.trace_id);
    guard.shutdown(LONG).await;
    assert_eq!(tracing.counts().exported, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_delivers_what_is_queued_in_batches() {
    let mut received = collector::grpc().await;
    let mut config = collector::config(&received.endpoint, Protocol::Grpc);
    config.delay = Duration::from_secs(3600);
    config.max_batch = 100;
    let (tracing, guard) = Tracing::start(config, SERVICE).expect("starts");
    let at = Instant::now();
    for _ in 0..3 {
        let mut recorder = tracing.recorder(tracing.root(None));
        (0..90).for_each(|_| recorder.record(Span::new("s", SpanKind::Internal, None, at, at)));
    }
    guard.shutdown(LONG).await;
    assert_eq!(tracing.counts().exported, 270);
    let mut sizes = Vec::new();
    while sizes.iter().sum::<usize>() < 270 {
        sizes.push(received.next().await.1.len());
    }
    assert!(sizes.iter().all(|size| *size <= 100), "{sizes:?}");
}
