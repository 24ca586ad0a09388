//! The trace of a request, as a collector gets it: whose spans, below whom, when, and what of them a person sees on the critical path.

use std::collections::BTreeSet;
use std::time::Duration;

use baton_tests::cluster::{greedy, strings, with};
use baton_tests::otlp::Collector;
use baton_tests::seed::Random;
use baton_tests::spans::{Caller, Kind, Span, Trace, critical_path};
use baton_tests::{Cluster, ClusterConfig, EventStream, Turn, client, eventually};
use serde_json::{Value, json};

const ROUTER: &str = "baton-router";
const PREFILL: &str = "baton-prefill-worker";
const DECODE: &str = "baton-decode-worker";

/// How far a child may lie outside its parent when they are of two processes, in the median: each turns its own monotonic clock into wall
/// time, and hears of the other's deeds a message later. Single ones lie further out when a process gets no core for a while.
const BETWEEN_PROCESSES: Duration = Duration::from_millis(2);

/// Name, kind, service and parent of every span of a prompt of one chunk that is handed off.
const HANDED_OFF: [(&str, Kind, &str, (&str, Kind)); 16] = [
    ("tokenize", Kind::Internal, ROUTER, ("", Kind::Server)),
    ("route", Kind::Internal, ROUTER, ("", Kind::Server)),
    ("reserve", Kind::Client, ROUTER, ("", Kind::Server)),
    ("reserve", Kind::Server, DECODE, ("reserve", Kind::Client)),
    ("prefill", Kind::Client, ROUTER, ("", Kind::Server)),
    ("prefill", Kind::Server, PREFILL, ("prefill", Kind::Client)),
    ("prefill.queue", Kind::Internal, PREFILL, ("prefill", Kind::Server)),
    ("prefill.chunk", Kind::Internal, PREFILL, ("prefill", Kind::Server)),
    ("handoff", Kind::Internal, PREFILL, ("", Kind::Server)),
    ("kv.send", Kind::Producer, PREFILL, ("handoff", Kind::Internal)),
    ("kv.recv", Kind::Consumer, DECODE, ("kv.send", Kind::Producer)),
    ("decode", Kind::Client, ROUTER, ("", Kind::Server)),
    ("decode", Kind::Server, DECODE, ("decode", Kind::Client)),
    ("decode.queue", Kind::Internal, DECODE, ("decode", Kind::Server)),
    ("decode.run", Kind::Internal, DECODE, ("decode", Kind::Server)),
    ("respond", Kind::Internal, ROUTER, ("", Kind::Server)),
];

/// Spans that a machine's mood makes or not.
const DEPENDS: [&str; 5] = ["read", "door", "kv.wait", "decode.commit", "decode.stall"];

fn has(trace: &Trace, names: &[&str]) -> bool {
    names.iter().all(|name| trace.named(name).next().is_some())
}

/// Whether everybody has told what a handed-off request leaves.
fn is_whole(trace: &Trace) -> bool {
    has(trace, &["tokenize", "prefill.chunk", "handoff", "kv.send", "kv.recv", "decode.run"])
        && trace.named("decode").count() == 2
}

async fn ask(cluster: &Cluster, caller: &Caller, body: &Value) -> client::Answer {
    let headers = [("traceparent", &*caller.header())];
    client::request_with(cluster.http, "POST", "/v1/completions", Some(body), &headers)
        .await
        .expect("an answer")
}

/// Demands the shape: one root below the caller, each wanted span once and nothing else of that kind.
fn check_shape(trace: &Trace, caller: &Caller) {
    let root = trace.root();
    assert_eq!(root.parent_id.as_ref(), Some(&caller.span_id), "{trace}");
    assert!(root.name.starts_with("text_completion "), "{trace}");
    assert_eq!((root.kind, root.service()), (Kind::Server, ROUTER), "{trace}");
    for (name, kind, service, (parent_name, parent_kind)) in HANDED_OFF {
        let spans: Vec<&Span> = trace.named(name).filter(|span| span.kind == kind).collect();
        let is_chunk = name == "prefill.chunk";
        assert!(
            spans.len() == 1 || (is_chunk && !spans.is_empty()),
            "{name} {kind:?}: {}\n{trace}",
            spans.len()
        );
        for span in spans {
            assert_eq!(span.service(), service, "{name}\n{trace}");
            let parent = trace.parent(span).unwrap_or_else(|| panic!("{name} has no parent\n{trace}"));
            let is_right = if parent_name.is_empty() { parent == root } else { parent.name == parent_name };
            assert!(is_right && parent.kind == parent_kind, "{name} {kind:?} below {}\n{trace}", parent.name);
        }
    }
    let known: BTreeSet<&str> = HANDED_OFF.iter().map(|(name, ..)| *name).collect();
    let rest: Vec<&str> =
        trace.spans.iter().map(|span| span.name.as_str()).filter(|name| !known.contains(name)).collect();
    assert!(rest.iter().all(|name| DEPENDS.contains(name) || *name == root.name), "{rest:?}\n{trace}");
    assert!(trace.spans.len() <= 30, "{} spans\n{trace}", trace.spans.len());
}

/// Demands that each span lies in its parent, but for what a consumer does after its producer has ended. Gives how far the worst lies outside
/// a parent of another process.
fn check_nesting(trace: &Trace) -> Duration {
    let mut worst_ns = 0;
    for span in &trace.spans {
        assert!(span.start_ns <= span.end_ns, "{} {:?}\n{trace}", span.name, span.kind);
        let Some(parent) = trace.parent(span) else { continue };
        let is_consumer = (parent.kind, span.kind) == (Kind::Producer, Kind::Consumer);
        let before_ns = parent.start_ns.saturating_sub(span.start_ns);
        let after_ns = if is_consumer { 0 } else { span.end_ns.saturating_sub(parent.end_ns) };
        let outside_ns = before_ns.max(after_ns);
        if span.resource["service.instance.id"] == parent.resource["service.instance.id"] {
            assert_eq!(outside_ns, 0, "{} {:?} lies outside {}\n{trace}", span.name, span.kind, parent.name);
        }
        worst_ns = worst_ns.max(outside_ns);
    }
    let root = trace.root();
    let of_router = trace.children(root).filter(|child| child.service() == ROUTER);
    assert!(
        of_router.map(|child| child.end_ns).max() <= Some(root.end_ns),
        "the root does not end last\n{trace}"
    );
    Duration::from_nanos(worst_ns)
}

fn on_critical_path(trace: &Trace) -> BTreeSet<(&str, Kind)> {
    critical_path(trace).iter().map(|section| (section.span.name.as_str(), section.span.kind)).collect()
}

fn check_resources(trace: &Trace) {
    for span in &trace.spans {
        for key in ["service.name", "service.instance.id", "host.name", "service.version"] {
            let value = span.resource.get(key).and_then(Value::as_str).unwrap_or_default();
            assert!(!value.is_empty(), "{} has no {key}: {:?}", span.name, span.resource);
        }
    }
    let instances: BTreeSet<String> =
        trace.spans.iter().map(|span| span.resource["service.instance.id"].to_string()).collect();
    assert_eq!(instances.len(), 3, "router, P and D\n{trace}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_one_trace_over_client_router_both_workers_and_their_kv_stream() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_request_is_one_trace");
    let collector = Collector::start().await;
    for (env, transport) in [(collector.over_grpc(), "grpc"), (collector.over_http(), "shm")] {
        let config = ClusterConfig { env, kv_transport: Some(transport.into()), ..ClusterConfig::default() };
        let cluster = Cluster::start(config).await;
        let mut sizes = BTreeSet::new();
        let mut outside = Vec::new();
        for num_tokens in [16, 400, 16, 16, 16, 16, 16] {
            let caller = Caller::new(&mut random);
            let answer =
                ask(&cluster, &caller, &greedy(&random.tiny_prompt(400), num_tokens)).await.expect(200);
            assert_eq!(answer.header("x-baton-mode"), "disaggregated");
            assert_eq!(answer.header("x-baton-trace-id"), caller.trace_id);
            let trace = collector.trace(&caller.trace_id, is_whole).await;
            check_shape(&trace, &caller);
            check_resources(&trace);
            check_root(trace.root(), num_tokens, &answer);
            outside.push(check_nesting(&trace));
            let send = trace.one("kv.send", Kind::Producer);
            assert_eq!(send.text("baton.kv.transport"), transport, "{trace}");
            assert_eq!(send.number("baton.kv.bytes"), 400.0 * 512.0, "{trace}");
            let run = trace.one("decode.run", Kind::Internal);
            // P made the first token.
            assert_eq!(run.number("baton.steps"), num_tokens as f64 - 1.0, "{trace}");
            sizes.insert(trace.spans.iter().filter(|span| !DEPENDS.contains(&&*span.name)).count());
        }
        assert_eq!(sizes.len(), 1, "the number of spans grows with the tokens: {sizes:?}");
        outside.sort();
        eprintln!("{transport}: {sizes:?} spans; outside a parent of another process: {outside:?}");
        assert!(outside[outside.len() / 2] <= BETWEEN_PROCESSES, "{outside:?}");
    }
    let (num_grpc, num_http) = collector.num_exports();
    assert!(num_grpc >= 3 && num_http >= 3, "{num_grpc} exports over gRPC, {num_http} over HTTP");
}

fn check_root(root: &Span, num_tokens: usize, answer: &client::Answer) {
    assert_eq!(root.text("baton.mode"), "disaggregated");
    assert_eq!(root.text("gen_ai.operation.name"), "text_completion");
    assert_eq!(root.number("gen_ai.usage.input_tokens"), 400.0);
    assert_eq!(root.number("gen_ai.usage.output_tokens"), num_tokens as f64);
    assert_eq!(root.attribute("baton.exact"), true, "{root:#?}");
    assert!(!root.is_error, "{root:#?}");
    assert_eq!(root.text("baton.request_id").len(), 32, "{root:#?}");
    let said = &answer.json()["baton"]["kv"];
    for (attribute, field) in [
        ("baton.kv.bytes", "bytes"),
        ("baton.kv.total_ms", "total_ms"),
        ("baton.kv.exposed_ms", "exposed_ms"),
    ] {
        let (in_trace, in_answer) = (root.number(attribute), said[field].as_f64().unwrap_or(f64::NAN));
        assert!(
            (in_trace - in_answer).abs() < 0.01,
            "{attribute}: {in_trace}, and the answer says {in_answer}"
        );
    }
    let [total, hidden, exposed] =
        ["total", "hidden", "exposed"].map(|part| root.number(&format!("baton.kv.{part}_ms")));
    assert!((total - hidden - exposed).abs() < 0.01, "{root:#?}");
}

/// An answer of a few tokens can be over before its workers have heard of each other that it is: what they did for it lies before its end
/// nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_shortest_answers_end_after_all_that_was_done_for_them() {
    let _turn = Turn::take();
    let mut random = Random::from_env("the_shortest_answers");
    let collector = Collector::start().await;
    for transport in ["grpc", "shm"] {
        let (env, kv_transport) = (collector.over_grpc(), Some(transport.into()));
        let cluster = Cluster::start(ClusterConfig { env, kv_transport, ..ClusterConfig::default() }).await;
        let mut asked = Vec::new();
        for nth in 0..60 {
            let (caller, num_tokens) = (Caller::new(&mut random), 1 + nth % 3);
            let prompt = random.tiny_prompt(20 + nth);
            ask(&cluster, &caller, &greedy(&prompt, num_tokens)).await.expect(200);
            asked.push((caller, num_tokens));
        }
        for (caller, num_tokens) in asked {
            // One token needs no decode worker.
            let is_handed_off = num_tokens > 1;
            let trace = collector
                .trace(&caller.trace_id, |trace| match is_handed_off {
                    true => is_whole(trace) && has(trace, &["respond"]),
                    false => has(trace, &["prefill.chunk", "respond"]) && trace.named("prefill").count() == 2,
                })
                .await;
            assert_eq!(has(&trace, &["kv.send"]), is_handed_off, "{trace}");
            let root = trace.root();
            for span in trace.spans.iter().filter(|span| *span != root) {
                assert!(
                    span.end_ns <= root.end_ns,
                    "{} of {num_tokens} tokens ends last\n{trace}",
                    span.name
                );
            }
            if is_handed_off {
                let (handoff, send) =
                    (trace.one("handoff", Kind::Internal), trace.one("kv.send", Kind::Producer));
                assert!(send.start_ns >= handoff.start_ns && send.end_ns <= handoff.end_ns, "{trace}");
            }
        }
    }
}

/// A long prompt whose KV passes while it is computed, over a link that then stands still for a while: what of the transfer is hidden lies off
/// the critical path, what is exposed lies on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefill_and_the_exposed_transfer_lie_on_the_critical_path_and_the_rest_of_it_does_not() {
    let _turn = Turn::take();
    let mut random = Random::from_env("prefill_and_the_exposed");
    let collector = Collector::start().await;
    let cluster = Cluster::start(ClusterConfig {
        env: collector.over_grpc(),
        proxied: true,
        prefill_args: strings(&["--pace-tokens-per-s", "4096", "--max-step-tokens", "256"]),
        ..ClusterConfig::default()
    })
    .await;
    let caller = Caller::new(&mut random);
    let body = with(greedy(&random.tiny_prompt(2048), 64), json!({"stream": true}));
    let headers = [("traceparent", &*caller.header())];
    let asked = EventStream::post_with(cluster.http, "/v1/completions", &body, &headers);
    let stand_still = async {
        eventually("a part of the KV has passed", Duration::from_secs(20), async || {
            let passed = cluster.proxies[0].num_bulk_bytes();
            if passed > 200_000 { Ok(()) } else { Err(format!("{passed} bytes")) }
        })
        .await;
        cluster.proxies[0].stall(true);
    };
    let (stream, ()) = tokio::join!(asked, stand_still);
    let mut stream = stream.expect("a stream");
    // The first token, which needs no KV to come through.
    stream.next().await.expect("no break");
    tokio::time::sleep(Duration::from_millis(150)).await;
    cluster.proxies[0].stall(false);
    stream.completion().await.expect("a whole stream");
    let trace = collector.trace(&caller.trace_id, |trace| is_whole(trace) && has(trace, &["kv.wait"])).await;
    eprintln!("{trace}");
    check_shape(&trace, &caller);
    assert_eq!(trace.named("prefill.chunk").count(), 8, "{trace}");
    let path = on_critical_path(&trace);
    for wanted in
        [("prefill.chunk", Kind::Internal), ("kv.wait", Kind::Internal), ("decode.run", Kind::Internal)]
    {
        assert!(path.contains(&wanted), "{wanted:?} is not on the critical path {path:?}\n{trace}");
    }
    for other in ["kv.recv", "kv.send", "handoff"] {
        assert!(
            !path.iter().any(|(name, _)| *name == other),
            "{other} is on the critical path {path:?}\n{trace}"
        );
    }
    let (wait, root) = (trace.one("kv.wait", Kind::Internal), trace.root());
    assert!(wait.ms() > 100.0 && root.number("baton.kv.hidden_ms") > 100.0, "{trace}");
    assert!((wait.ms() - root.number("baton.kv.exposed_ms")).abs() < 0.01, "{trace}");
}

/// What is refused, what fails and what is computed where it is decoded have traces too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_failed_and_local_requests_have_their_traces() {
    let _turn = Turn::take();
    let mut random = Random::from_env("refused_failed_and_local");
    let collector = Collector::start().await;
    let config = ClusterConfig { env: collector.over_grpc(), ..ClusterConfig::default() };
    let cluster = Cluster::start(ClusterConfig { num_prefill: 0, colocated: true, ..config }).await;

    let refused = Caller::new(&mut random);
    let body = with(greedy(&random.tiny_prompt(10), 4), json!({"temperature": -1}));
    ask(&cluster, &refused, &body).await.expect(400);
    let trace = collector.trace(&refused.trace_id, |trace| !trace.spans.is_empty()).await;
    assert_eq!(trace.root().parent_id.as_ref(), Some(&refused.span_id), "{trace}");
    assert!(trace.root().attributes.contains_key("error.type"), "{trace}");

    let local = Caller::new(&mut random);
    ask(&cluster, &local, &greedy(&random.tiny_prompt(300), 8)).await.expect(200);
    let whole = |trace: &Trace| has(trace, &["prefill.queue", "prefill.chunk", "decode.run", "tokenize"]);
    let trace = collector.trace(&local.trace_id, whole).await;
    assert_eq!(trace.root().text("baton.mode"), "colocated", "{trace}");
    check_nesting(&trace);
    for name in ["prefill.queue", "prefill.chunk", "decode.run"] {
        let span = trace.one(name, Kind::Internal);
        assert_eq!(span.service(), DECODE, "{trace}");
        assert_eq!(
            trace.parent(span).map(|parent| (&*parent.name, parent.kind)),
            Some(("decode", Kind::Server)),
            "{trace}"
        );
    }
    for name in ["prefill.chunk", "decode.run"] {
        assert!(on_critical_path(&trace).contains(&(name, Kind::Internal)), "{name}\n{trace}");
    }
}
