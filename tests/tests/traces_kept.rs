//! Which traces are kept when hardly any is, and that a collector that is dead or slow costs a request nothing.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use baton_tests::cluster::{free_port, greedy, strings, with};
use baton_tests::otlp::Collector;
use baton_tests::seed::Random;
use baton_tests::spans::{Caller, Trace};
use baton_tests::{Answer, Cluster, ClusterConfig, Turn, client};
use serde_json::{Value, json};

/// Longer than any process keeps a finished span to itself, here.
const SETTLED: Duration = Duration::from_secs(3);

async fn ask(cluster: &Cluster, body: &Value, headers: &[(&str, &str)]) -> Answer {
    client::request_with(cluster.http, "POST", "/v1/completions", Some(body), headers)
        .await
        .expect("an answer")
}

fn services(trace: &Trace) -> Vec<&str> {
    let services: std::collections::BTreeSet<&str> = trace.spans.iter().map(|span| span.service()).collect();
    services.into_iter().collect()
}

const ALL: [&str; 3] = ["baton-decode-worker", "baton-prefill-worker", "baton-router"];

/// An unsampled trace of the client's, as its own sampling says.
fn unsampled(random: &mut Random) -> Caller {
    Caller { is_sampled: false, ..Caller::new(random) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_sampling_what_missed_its_objective_or_failed_is_kept_everywhere_and_nothing_else() {
    let _turn = Turn::take();
    let mut random = Random::from_env("without_sampling");
    let collector = Collector::start().await;
    let cluster = Cluster::start(ClusterConfig {
        env: collector.over_grpc(),
        worker_args: strings(&["--trace-sample-ratio", "0"]),
        prefill_args: strings(&["--pace-tokens-per-s", "2048", "--max-step-tokens", "256"]),
        router_args: strings(&["--trace-sample-ratio", "0", "--slo-ttft-ms", "500"]),
        ..ClusterConfig::default()
    })
    .await;
    let [met, missed, failed] = [(); 3].map(|()| unsampled(&mut random));
    let own = greedy(&random.tiny_prompt(50), 8);
    ask(&cluster, &greedy(&random.tiny_prompt(50), 8), &[("traceparent", &met.header())]).await.expect(200);
    // And one that comes without a trace.
    ask(&cluster, &own, &[]).await.expect(200);
    let long = greedy(&random.tiny_prompt(2048), 8);
    ask(&cluster, &long, &[("traceparent", &missed.header())]).await.expect(200);
    let headers = [("traceparent", &*failed.header()), ("x-request-timeout-ms", "300")];
    ask(&cluster, &greedy(&random.tiny_prompt(2048), 8), &headers).await.expect(504);

    let whole = |trace: &Trace| services(trace) == ALL && trace.named("decode.run").next().is_some();
    let trace = collector.trace(&missed.trace_id, whole).await;
    assert_eq!(trace.root().text("baton.slo.ttft"), "missed", "{trace}");
    assert_eq!(trace.named("prefill.chunk").count(), 8, "{trace}");

    let trace =
        collector.trace(&failed.trace_id, |trace| services(trace).contains(&"baton-prefill-worker")).await;
    assert!(trace.root().is_error && trace.root().attributes.contains_key("error.type"), "{trace}");

    tokio::time::sleep(SETTLED).await;
    let traces = collector.traces();
    let kept: Vec<&String> = traces.keys().collect();
    let mut wanted = [&missed.trace_id, &failed.trace_id];
    wanted.sort();
    assert_eq!(kept, wanted, "kept besides: {}", traces.values().map(Trace::to_string).collect::<String>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_sampling_what_stalled_is_kept() {
    let _turn = Turn::take();
    let mut random = Random::from_env("without_sampling_what_stalled");
    let collector = Collector::start().await;
    let env = [
        collector.over_grpc(),
        strings(&["OTEL_TRACES_SAMPLER=parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG=0"]),
    ];
    let cluster = Cluster::start(ClusterConfig {
        env: env.concat(),
        decode_args: strings(&["--pace-tokens-per-s", "2048", "--local-prefill-tokens", "256"]),
        ..ClusterConfig::default().colocated()
    })
    .await;
    let [victim, blocker] = [(); 2].map(|()| unsampled(&mut random));
    let body = with(greedy(&random.tiny_prompt(20), 500), json!({"stream": true}));
    let headers = [("traceparent", &*victim.header())];
    let mut stream = client::EventStream::post_with(cluster.http, "/v1/completions", &body, &headers)
        .await
        .expect("a stream");
    stream.next().await.expect("no break");
    ask(&cluster, &greedy(&random.tiny_prompt(1024), 2), &[("traceparent", &blocker.header())])
        .await
        .expect(200);
    stream.completion().await.expect("a whole stream");

    let whole = |trace: &Trace| {
        trace.named("decode.stall").next().is_some() && trace.named("tokenize").next().is_some()
    };
    let trace = collector.trace(&victim.trace_id, whole).await;
    assert_eq!(trace.root().attribute("baton.stalled"), true, "{trace}");
    tokio::time::sleep(SETTLED).await;
    assert_eq!(collector.traces().keys().collect::<Vec<_>>(), [&victim.trace_id]);
}

/// Half of the traces, by their ids: every process decides the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ratio_keeps_whole_traces() {
    const NUM: usize = 200;
    let _turn = Turn::take();
    let mut random = Random::from_env("a_ratio_keeps_whole_traces");
    let collector = Collector::start().await;
    let ratio = strings(&["--trace-sample-ratio", "0.5"]);
    let cluster = Cluster::start(ClusterConfig {
        env: collector.over_grpc(),
        worker_args: ratio.clone(),
        router_args: ratio,
        ..ClusterConfig::default()
    })
    .await;
    for _ in 0..NUM {
        ask(&cluster, &greedy(&random.tiny_prompt(20), 3), &[]).await.expect(200);
    }
    tokio::time::sleep(SETTLED).await;
    let traces = collector.traces();
    let of_requests: Vec<&Trace> =
        traces.values().filter(|trace| trace.named("tokenize").next().is_some()).collect();
    // Six standard deviations of a fair coin.
    assert!(of_requests.len().abs_diff(NUM / 2) <= 43, "{} of {NUM} were kept", of_requests.len());
    for trace in of_requests {
        assert_eq!(services(trace), ALL, "{trace}");
    }
}

/// Idle processes end at once, and spans that can't be handed over hold none of them longer than a second.
const EXIT_BOUND: Duration = Duration::from_millis(2_500);

/// Latencies of short requests, in milliseconds, and whether every process then ends well and soon.
async fn serve_and_stop(env: Vec<String>, random: &mut Random) -> Vec<f64> {
    let mut cluster = Cluster::start(ClusterConfig { env, ..ClusterConfig::default() }).await;
    let mut latencies = Vec::new();
    for _ in 0..60 {
        let body = greedy(&random.tiny_prompt(50), 8);
        let start = Instant::now();
        ask(&cluster, &body, &[]).await.expect(200);
        latencies.push(start.elapsed().as_secs_f64() * 1e3);
    }
    latencies.sort_by(f64::total_cmp);
    let workers = cluster.prefill.iter_mut().chain(&mut cluster.decode).map(|worker| &mut worker.process);
    for process in std::iter::once(&mut cluster.router).chain(workers) {
        let start = Instant::now();
        process.signal(libc::SIGTERM);
        assert_eq!(process.exit_code(EXIT_BOUND), 0, "{}", process.name);
        eprintln!("{} ended after {:?}", process.name, start.elapsed());
    }
    latencies
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_dead_silent_or_slow_slows_no_request_and_no_exit() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_collector_that_is_dead");
    let without = serve_and_stop(Vec::new(), &mut random).await;
    let slow = Collector::start().await;
    slow.answer_after(Duration::from_secs(60));
    // The system takes connections to it; nobody ever reads.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let dead = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let to = |at: SocketAddr| vec![format!("OTEL_EXPORTER_OTLP_ENDPOINT=http://{at}")];
    let median = |latencies: &[f64]| latencies[latencies.len() / 2];
    for (kind, env) in [
        ("dead", to(dead)),
        ("silent", to(silent.local_addr().expect("an address"))),
        ("slow", slow.over_grpc()),
        ("slow over HTTP", slow.over_http()),
    ] {
        let with = serve_and_stop(env, &mut random).await;
        let worst = with[with.len() - 1];
        eprintln!(
            "{kind}: median {:.2} ms, worst {worst:.2} ms; without tracing {:.2} ms",
            median(&with),
            median(&without)
        );
        assert!(
            median(&with) <= 1.5 * median(&without) + 2.0,
            "{kind}: {with:?}, and without tracing {without:?}"
        );
        assert!(worst < 1_000.0, "{kind}: {with:?}");
    }
    let (num_grpc, num_http) = slow.num_exports();
    assert!(num_grpc > 0 && num_http > 0, "the slow collector was never asked");
}
