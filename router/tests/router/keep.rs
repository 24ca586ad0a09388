//! Traces that sampling left out are kept when there is something to see in them, here and on the workers that took part.

use std::time::Duration;

use baton_proto::v1;
use baton_telemetry::trace::Value;
use bytes::Bytes;
use serde_json::json;

use crate::fake::{FakeWorker, Script};
use crate::harness::{Cluster, ONE_PAIR, Shape, eventually};
use crate::spans::{number, text};

const PLAIN: &str = "/v1/completions";

fn kept(workers: &[FakeWorker]) -> Vec<Bytes> {
    workers.iter().flat_map(FakeWorker::kept).collect()
}

#[tokio::test]
async fn a_stall_is_told_to_those_that_took_part_and_to_nobody_else() {
    let stall = v1::Stall {
        sequence: 0,
        cause: v1::StallCause::LocalPrefill.into(),
        blocked_us: 45_000,
        blocker_request_id: Bytes::copy_from_slice(&[7; 16]),
    };
    let script = Script { stalls: Some((2, stall)), ..Script::says("hello") };
    let shape = Shape { num_prefill: 2, num_decode: 2 };
    let (cluster, mut spans) = Cluster::traced(shape, script, &[], 0.0).await;
    cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
    let trace = spans.next().await;
    assert_eq!(trace.root().attribute("baton.stalled"), Some(&Value::Bool(true)));
    assert_eq!(text(trace.root(), "baton.stall.cause"), Some("local_prefill"));
    assert_eq!(number(trace.root(), "baton.stall.blocked_ms"), Some(45.0));
    assert_eq!(trace.root().failure(), None);
    eventually("both workers heard", async || {
        !kept(&cluster.prefill).is_empty() && !kept(&cluster.decode).is_empty()
    })
    .await;
    for workers in [&cluster.prefill, &cluster.decode] {
        assert_eq!(kept(workers), [Bytes::copy_from_slice(&trace.id)]);
        for worker in workers {
            assert_eq!(worker.kept().len(), worker.contexts().len(), "only who took part");
            assert!(worker.contexts().iter().all(|context| !context.parent.sampled));
        }
    }
    let metrics = cluster.router.metrics();
    assert_eq!((metrics.kept_traces.get(), metrics.kept_traces_failed.get()), (1, 0));
}

#[tokio::test]
async fn an_ordinary_request_is_left_out_and_nobody_is_told() {
    let options = ["--slo-ttft-ms", "60000", "--slo-itl-ms", "60000"];
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, Script::says("hello"), &options, 0.0).await;
    cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
    assert_eq!(cluster.client.post(PLAIN, &json!({"prompt": 7})).await.status, 400);
    spans.none().await;
    assert!(kept(&cluster.prefill).is_empty() && kept(&cluster.decode).is_empty());
    let text = cluster.client.get("/metrics").await.text();
    for slo in ["ttft", "itl"] {
        let line = format!("baton_slo_total{{slo=\"{slo}\",outcome=\"met\"}} 1");
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
}

#[tokio::test]
async fn a_missed_promise_is_kept_and_counted() {
    for (option, missed) in [("--slo-ttft-ms", "baton.slo.ttft"), ("--slo-itl-ms", "baton.slo.itl")] {
        let script = Script { pace: Duration::from_millis(3), ..Script::says("hello") };
        let (cluster, mut spans) = Cluster::traced(ONE_PAIR, script, &[option, "0.1"], 0.0).await;
        cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
        let trace = spans.next().await;
        assert_eq!(text(trace.root(), missed), Some("missed"));
        eventually("the decode worker heard", async || !kept(&cluster.decode).is_empty()).await;
        let slo = missed.trim_start_matches("baton.slo.");
        let line = format!("baton_slo_total{{slo=\"{slo}\",outcome=\"missed\"}} 1");
        let text = cluster.client.get("/metrics").await.text();
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
}

#[tokio::test]
async fn a_failure_is_kept() {
    let script = Script { refuses: Some(v1::Cause::Engine), ..Script::says("hello") };
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, script, &[], 0.0).await;
    let answer = cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
    assert!(answer.status >= 500, "{}", answer.text());
    let trace = spans.next().await;
    assert!(trace.root().failure().is_some());
    eventually("a worker heard", async || !kept(&cluster.prefill).is_empty()).await;
}

#[tokio::test]
async fn a_sampled_trace_needs_no_word() {
    let options = ["--slo-ttft-ms", "0.1"];
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, Script::says("hello"), &options, 1.0).await;
    cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
    assert_eq!(text(spans.next().await.root(), "baton.slo.ttft"), Some("missed"));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(kept(&cluster.prefill).is_empty() && kept(&cluster.decode).is_empty());
}

#[tokio::test]
async fn a_worker_that_can_not_be_told_is_counted_and_hurts_nobody() {
    let script = Script { pace: Duration::from_millis(20), ..Script::says("hello") };
    let (mut cluster, mut spans) = Cluster::traced(ONE_PAIR, script, &["--slo-ttft-ms", "0.1"], 0.0).await;
    let mut stream = cluster.client.stream(PLAIN, &[], &json!({"prompt": "x", "stream": true})).await;
    assert!(stream.until("\"e\"").await);
    cluster.prefill[0].kill();
    stream.rest().await;
    spans.next().await;
    let metrics = cluster.router.metrics();
    eventually("the loss is counted", async || metrics.kept_traces_failed.get() == 1).await;
    eventually("the other one heard", async || kept(&cluster.decode).len() == 1).await;
}

#[tokio::test]
async fn without_tracing_there_is_only_an_id() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &["--slo-ttft-ms", "0.1"]).await;
    let caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
    let answer = cluster.client.post_with(PLAIN, &[("traceparent", caller)], &json!({"prompt": "x"})).await;
    assert_eq!(answer.header("x-baton-trace-id"), Some("4bf92f3577b34da6a3ce929d0e0e4736"));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(kept(&cluster.prefill).is_empty() && kept(&cluster.decode).is_empty());
    let contexts = cluster.prefill[0].contexts();
    assert_eq!((contexts[0].reserve, contexts[0].parent.sampled), ([0; 8], false));
    assert_eq!(cluster.router.metrics().kept_traces.get(), 0);
    let text = cluster.client.get("/metrics").await.text();
    assert!(
        text.contains("baton_slo_total{slo=\"ttft\",outcome=\"missed\"} 1"),
        "promises are kept track of\n{text}"
    );
}
