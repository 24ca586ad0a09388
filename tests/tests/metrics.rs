//! `/metrics` of every role, by the rules that Prometheus's own linter checks, and as Prometheus asks for it.

use std::io::Write;
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use baton_tests::cluster::{greedy, strings, with};
use baton_tests::go::Program;
use baton_tests::otlp::Collector;
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Metrics, Turn, client};
use serde_json::json;

async fn metrics(at: SocketAddr, accept: &str) -> (String, String) {
    let answer =
        client::request_with(at, "GET", "/metrics", None, &[("accept", accept)]).await.expect("an answer");
    let answer = answer.expect(200);
    (answer.header("content-type"), answer.text())
}

/// A cluster with traces on and every kind of request behind it.
async fn used(random: &mut Random, collector: &Collector) -> Cluster {
    let cluster = Cluster::start(ClusterConfig {
        env: collector.over_grpc(),
        router_args: strings(&["--slo-ttft-ms", "1000", "--slo-itl-ms", "100"]),
        ..ClusterConfig::default()
    })
    .await;
    for body in
        [greedy(&random.tiny_prompt(200), 8), with(greedy(&random.tiny_prompt(40), 8), json!({"n": 2}))]
    {
        cluster.post("/v1/completions", &body).await.expect(200);
    }
    cluster
        .post("/v1/completions", &with(greedy(&random.tiny_prompt(4), 4), json!({"temperature": -1})))
        .await
        .expect(400);
    cluster
}

fn addresses(cluster: &Cluster) -> [SocketAddr; 3] {
    [cluster.http, cluster.prefill[0].address, cluster.decode[0].address]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prometheus_finds_nothing_wrong_with_the_metrics() {
    let _turn = Turn::take();
    let Some(promlint) = Program::Promlint.path_or_skip() else { return };
    let mut random = Random::from_env("prometheus_finds_nothing_wrong");
    let collector = Collector::start().await;
    let cluster = used(&mut random, &collector).await;
    for at in addresses(&cluster) {
        let (kind, text) = metrics(at, "*/*").await;
        assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
        let mut child = Command::new(&promlint)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the linter starts");
        child.stdin.take().expect("piped").write_all(text.as_bytes()).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Prometheus asks for OpenMetrics, the only format that carries exemplars.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_asks_for_openmetrics_gets_exemplars_that_name_traces() {
    let _turn = Turn::take();
    let mut random = Random::from_env("who_asks_for_openmetrics");
    let collector = Collector::start().await;
    let cluster = used(&mut random, &collector).await;
    let (kind, text) =
        metrics(cluster.http, "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2").await;
    assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    let ids: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_once(" # {trace_id=\"")?.1.split_once('"'))
        .map(|(id, _)| id)
        .collect();
    assert!(!ids.is_empty(), "no exemplar:\n{text}");
    for id in ids {
        collector.trace(id, |trace| trace.named("tokenize").next().is_some()).await;
    }
    let plain = Metrics::parse(&metrics(cluster.http, "*/*").await.1);
    let open = Metrics::parse(&text);
    for name in ["baton_requests_total", "baton_ttft_seconds_count"] {
        assert!(open.sum(name, &[]) > 0.0, "no {name}:\n{text}");
        assert_eq!(plain.sum(name, &[]), open.sum(name, &[]), "{name}");
    }
}
