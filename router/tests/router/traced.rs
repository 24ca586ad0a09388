//! The spans of requests that run once, or not at all.

use std::time::{Duration, Instant};

use baton_proto::v1;
use baton_proto::v1::inference_client::InferenceClient;
use baton_telemetry::trace::{SpanKind, TraceContext, Value};
use bytes::Bytes;
use futures::StreamExt;
use http::Method;
use serde_json::{Value as Json, json};

use crate::fake::Script;
use crate::harness::{Cluster, ONE_PAIR, Shape, eventually};
use crate::spans::{number, text};

const CHAT: &str = "/v1/chat/completions";
const PLAIN: &str = "/v1/completions";
const CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn chat(extra: Json) -> Json {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in extra.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

#[tokio::test]
async fn a_chat_is_a_tree_in_its_callers_trace() {
    let script = Script { pace: Duration::from_millis(2), ..Script::says("hello") };
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, script, &[], 0.0).await;
    let headers = [("traceparent", CALLER), ("x-request-id", "mine")];
    let answer = cluster.client.post_with(CHAT, &headers, &chat(json!({}))).await;
    let trace = spans.next().await;
    let caller = TraceContext::parse(CALLER.as_bytes()).expect("valid");
    assert_eq!(trace.id, caller.trace_id);
    assert_eq!(answer.header("x-baton-trace-id"), Some(trace.hex().as_str()));
    let root = trace.root();
    assert_eq!((root.name(), root.parent()), ("chat builtin:tiny", Some(caller.span_id)));
    let names = trace.names();
    assert_eq!(names.len(), 6, "{names:?}");
    let [tokenize, route, reserve, prefill, decode, respond] =
        ["tokenize", "route", "reserve", "prefill", "decode", "respond"].map(|name| trace.one(name));
    trace.follow(&[tokenize, route, prefill, decode, respond]);
    assert_eq!(tokenize.start(), root.start(), "nothing lies before it");
    trace.follow(&[route, reserve]);
    for (span, kind) in [tokenize, route, respond]
        .map(|span| (span, SpanKind::Internal))
        .into_iter()
        .chain([reserve, prefill, decode].map(|span| (span, SpanKind::Client)))
    {
        assert_eq!((span.kind(), span.failure()), (kind, None), "{span:#?}");
    }

    // What the workers heard is what came of it.
    let (at_prefill, at_decode) = (cluster.prefill[0].contexts(), cluster.decode[0].contexts());
    assert_eq!((at_prefill.len(), at_decode.len()), (1, 1));
    for (context, parent, reserve) in
        [(at_prefill[0], prefill.id(), [0; 8]), (at_decode[0], decode.id(), reserve.id())]
    {
        let expected = TraceContext { trace_id: trace.id, span_id: parent, sampled: true };
        assert_eq!((context.parent, context.root, context.reserve), (expected, root.id(), reserve));
    }

    let (p, d) = (cluster.prefill[0].address(), cluster.decode[0].address());
    for (span, key, value) in [
        (route, "baton.route.policy", "kv-aware"),
        (route, "baton.route.prefill_worker", &*p),
        (route, "baton.route.decode_worker", &*d),
        (route, "baton.reason", "cost"),
        (prefill, "server.address", &*p),
        (decode, "server.address", &*d),
        (decode, "rpc.service", "baton.v1.Decode"),
        (root, "baton.request_id", answer.header("x-baton-request-id").expect("an id")),
        (root, "baton.client_request_id", "mine"),
        (root, "baton.mode", "disaggregated"),
        (root, "baton.reason", "cost"),
        (root, "gen_ai.operation.name", "chat"),
        (root, "gen_ai.request.model", "builtin:tiny"),
        (root, "gen_ai.response.finish_reasons", "stop"),
        (root, "http.request.method", "POST"),
        (root, "http.route", CHAT),
    ] {
        assert_eq!(text(span, key), Some(value), "{key}");
    }
    let usage = &answer.json()["usage"];
    for (key, value) in [
        ("gen_ai.usage.input_tokens", usage["prompt_tokens"].as_f64().expect("a number")),
        ("gen_ai.usage.output_tokens", 6.0),
        ("baton.kv.bytes", 4096.0),
        ("baton.kv.total_ms", 2.5),
        ("baton.kv.hidden_ms", 2.0),
        ("baton.kv.exposed_ms", 0.5),
        ("baton.retries", 0.0),
        ("baton.preemptions", 0.0),
        ("http.response.status_code", 200.0),
    ] {
        assert_eq!(number(root, key), Some(value), "{key}");
    }
    assert!(number(root, "baton.token_gap_1_2_ms").is_some_and(|ms| (0.0..1e4).contains(&ms)));
    let ttft = answer.json()["baton"]["ttft_ms"].as_f64().expect("a number");
    assert!((number(root, "baton.ttft_ms").expect("a number") - ttft).abs() < 1e-3, "that of the answer");
    assert_eq!(root.attribute("baton.stalled"), Some(&Value::Bool(false)));
    assert_eq!(root.attribute("baton.exact"), Some(&Value::Bool(true)));
    for absent in ["error.type", "baton.slo.ttft", "baton.stall.cause", "baton.hol.method"] {
        assert_eq!(root.attribute(absent), None, "{absent}");
    }
    spans.none().await;
}

#[tokio::test]
async fn latencies_name_a_trace_that_can_be_found() {
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, Script::says("hello"), &[], 1.0).await;
    cluster.client.post(CHAT, &chat(json!({}))).await;
    let label = format!("{{trace_id=\"{}\"}}", spans.next().await.hex());
    let headers = [("accept", "application/openmetrics-text")];
    let text = cluster.client.send(Method::GET, "/metrics", &headers, Bytes::new()).await.text();
    for name in ["ttft", "itl", "tpot", "e2e", "queue"] {
        let bucket = format!("baton_{name}_seconds_bucket");
        let named = |line: &&str| line.starts_with(&bucket) && line.contains(&label);
        assert!(text.lines().any(|line| named(&line)), "{name} in\n{text}");
    }
}

#[tokio::test]
async fn a_streams_root_ends_with_its_last_byte_and_knows_when_its_first_went_out() {
    let script = Script { pace: Duration::from_millis(10), ..Script::says("hello") };
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, script, &["--placement", "round-robin"], 1.0).await;
    let began = Instant::now();
    let mut stream = cluster.client.stream(CHAT, &[], &chat(json!({"stream": true}))).await;
    assert!(stream.until("\"h\"").await);
    let ttft = began.elapsed().as_secs_f64() * 1e3;
    stream.rest().await;
    let ended = Instant::now();
    let trace = spans.next().await;
    let root = trace.root();
    let told = number(root, "baton.ttft_ms").expect("a number");
    assert!(told > 0.0 && told <= ttft, "{told} of {ttft}");
    assert!(root.end() <= ended + Duration::from_millis(50), "its end is no later than the client's");
    assert!(root.end() - trace.one("decode").end() < Duration::from_millis(50));
    assert_eq!(root.parent(), None);
    assert_eq!(text(trace.one("route"), "baton.route.policy"), Some("round-robin"));
    assert_eq!(text(root, "baton.reason"), Some("policy"));
}

#[tokio::test]
async fn a_stream_whose_client_left_is_cancelled_and_whole() {
    let script = Script { decode_hangs_after: Some(2), ..Script::says("hello") };
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, script, &[], 1.0).await;
    let mut stream = cluster.client.stream(PLAIN, &[], &json!({"prompt": "x", "stream": true})).await;
    assert!(stream.until("\"l\"").await);
    spans.none().await;
    drop(stream);
    let trace = spans.next().await;
    assert_eq!(trace.names().len(), 5, "{:?}", trace.names());
    assert_eq!(trace.root().name(), "text_completion builtin:tiny");
    assert_eq!(
        (text(trace.root(), "error.type"), trace.root().failure()),
        (Some("cancelled"), Some("cancelled"))
    );
    assert_eq!((trace.one("decode").failure(), trace.one("prefill").failure()), (Some("cancelled"), None));
}

#[tokio::test]
async fn who_leaves_before_the_first_token_leaves_a_prefill_that_failed() {
    let script = Script { prefill_hangs: true, ..Script::says("hello") };
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, script, &[], 1.0).await;
    let headers = [("x-request-timeout-ms", "300")];
    let answer = cluster.client.post_with(PLAIN, &headers, &json!({"prompt": "x"})).await;
    assert_eq!(answer.status, 504);
    let trace = spans.next().await;
    assert_eq!(text(trace.root(), "error.type"), Some("deadline_exceeded"));
    assert_eq!(number(trace.root(), "http.response.status_code"), Some(504.0));
    assert_eq!(trace.one("prefill").failure(), Some("deadline"));
    assert_eq!(trace.one("reserve").failure(), None);
    assert!(trace.named("decode").is_empty(), "it could never have gone on");
}

#[tokio::test]
async fn what_is_refused_has_a_root_that_says_why() {
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, Script::says("x"), &["--context", "32"], 1.0).await;
    let json = [("content-type", "application/json")];
    for (headers, body, code) in [
        (&json[..], "{".to_owned(), "invalid_value"),
        (&json[..0], "{}".to_owned(), "unsupported_media_type"),
        (&json[..], json!({"prompt": "x", "model": "yours"}).to_string(), "model_not_found"),
        (&json[..], json!({"prompt": "x".repeat(40)}).to_string(), "context_length_exceeded"),
    ] {
        let answer = cluster.client.send(Method::POST, PLAIN, headers, Bytes::from(body)).await;
        let trace = spans.next().await;
        assert_eq!(answer.header("x-baton-trace-id"), Some(trace.hex().as_str()));
        assert_eq!(trace.names(), ["tokenize"], "{code}");
        assert_eq!((text(trace.root(), "error.type"), trace.root().failure()), (Some(code), Some(code)));
        assert_eq!(number(trace.root(), "http.response.status_code"), Some(f64::from(answer.status)));
    }
    let headers = [json[0], ("x-request-id", "no spaces")];
    cluster.client.send(Method::POST, PLAIN, &headers, Bytes::from("{}")).await;
    assert_eq!(spans.next().await.root().failure(), Some("invalid_value"));
    assert_eq!(cluster.num_legs(), 0);
}

#[tokio::test]
async fn what_can_not_be_placed_has_a_route_that_failed() {
    let shape = Shape { num_prefill: 0, num_decode: 1 };
    let (mut cluster, mut spans) = Cluster::traced(shape, Script::says("x"), &["--colocated"], 1.0).await;
    cluster.decode[0].kill();
    eventually("the worker is missing", async || cluster.client.get("/health").await.status == 503).await;
    assert_eq!(cluster.client.post(PLAIN, &json!({"prompt": "x"})).await.status, 503);
    let trace = spans.next().await;
    assert_eq!(trace.names(), ["tokenize", "route", "respond"]);
    assert!(trace.one("route").failure().is_some());
    assert_eq!(text(trace.root(), "error.type"), Some("unavailable"));
}

#[tokio::test]
async fn waiting_at_the_door_is_a_span_of_its_own() {
    let script = Script { pace: Duration::from_millis(20), ..Script::says("hello") };
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, script, &["--max-concurrent", "1"], 1.0).await;
    let mut first = cluster.client.stream(PLAIN, &[], &json!({"prompt": "x", "stream": true})).await;
    assert!(first.until("\"h\"").await);
    assert_eq!(cluster.client.post(PLAIN, &json!({"prompt": "x"})).await.status, 200);
    first.rest().await;
    let (one, other) = (spans.next().await, spans.next().await);
    let [passed, waited] = if one.named("door").is_empty() { [one, other] } else { [other, one] };
    assert!(passed.named("door").is_empty());
    let door = waited.one("door");
    assert!(door.end() - door.start() >= Duration::from_millis(20), "{door:#?}");
    waited.follow(&[door, waited.one("tokenize"), waited.one("route")]);
}

#[tokio::test]
async fn one_token_needs_no_decode_worker() {
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, Script::says("hello"), &[], 1.0).await;
    cluster.client.post(PLAIN, &json!({"prompt": "x", "max_tokens": 1})).await;
    let trace = spans.next().await;
    assert_eq!(trace.names(), ["tokenize", "route", "prefill", "respond"]);
    assert_eq!(trace.one("prefill").failure(), None);
}

#[tokio::test]
async fn a_prompt_computed_where_it_goes_on_has_neither_prefill_nor_reserve() {
    let shape = Shape { num_prefill: 0, num_decode: 1 };
    let (cluster, mut spans) = Cluster::traced(shape, Script::says("hello"), &["--colocated"], 1.0).await;
    cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
    let trace = spans.next().await;
    assert_eq!(trace.names(), ["tokenize", "route", "decode", "respond"]);
    trace.follow(&[trace.one("tokenize"), trace.one("route"), trace.one("decode")]);
    assert_eq!(text(trace.root(), "baton.mode"), Some("colocated"));
    let context = cluster.decode[0].contexts()[0];
    assert_eq!((context.parent.span_id, context.reserve), (trace.one("decode").id(), [0; 8]));
}

#[tokio::test]
async fn several_answers_are_one_tree() {
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, Script::says_each(&["abc", "de"]), &[], 1.0).await;
    cluster.client.post(PLAIN, &json!({"prompt": "x", "n": 2, "max_tokens": 3})).await;
    let trace = spans.next().await;
    assert_eq!(trace.names().len(), 6, "{:?}", trace.names());
    assert_eq!(text(trace.root(), "gen_ai.response.finish_reasons"), Some("length,stop"));
    assert_eq!(number(trace.root(), "gen_ai.usage.output_tokens"), Some(6.0));
}

#[tokio::test]
async fn grpc_has_the_same_tree() {
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, Script::says("hello"), &[], 1.0).await;
    let address = format!("http://{}", cluster.router.grpc);
    let mut client = InferenceClient::connect(address).await.expect("connected");
    let chat = v1::ChatMessages {
        messages: vec![v1::ChatMessage { role: "user".to_owned(), content: "hi".to_owned() }],
    };
    let asks = |input| v1::GenerateRequest { input: Some(input), ..v1::GenerateRequest::default() };
    let ask = asks(v1::generate_request::Input::Chat(chat));
    let response = client.generate(ask).await.expect("accepted");
    let id = response.metadata().get("x-baton-trace-id").expect("an id").clone();
    assert_eq!(response.into_inner().filter(|said| std::future::ready(said.is_err())).count().await, 0);
    let trace = spans.next().await;
    assert_eq!(id, trace.hex());
    assert_eq!((trace.names().len(), trace.root().name()), (6, "chat builtin:tiny"));
    for (key, value) in
        [("rpc.system", "grpc"), ("rpc.service", "baton.v1.Inference"), ("rpc.method", "Generate")]
    {
        assert_eq!(text(trace.root(), key), Some(value));
    }
    assert_eq!(number(trace.root(), "rpc.grpc.status_code"), Some(0.0));
    assert!(number(trace.root(), "baton.ttft_ms").is_some());

    let refused = client.generate(asks(v1::generate_request::Input::Prompt(String::new()))).await;
    let status = refused.expect_err("refused");
    let trace = spans.next().await;
    assert_eq!(status.metadata().get("x-baton-trace-id").expect("an id"), &*trace.hex());
    assert_eq!((trace.root().name(), trace.names()), ("text_completion builtin:tiny", vec!["tokenize"]));
    assert_eq!(number(trace.root(), "rpc.grpc.status_code"), Some(3.0));
}

#[tokio::test]
async fn what_neighbours_were_spared_is_scaled_to_the_baseline_and_named() {
    let script = Script {
        avoided: Some(v1::AvoidedStall { victims: 3, total_us: 90_000, residual: 0.04 }),
        stats: Some(v1::RunStats { avoided_us: 30_000, avoided_prefills: 2, ..v1::RunStats::default() }),
        ..Script::says("hello")
    };
    let shape = Shape { num_prefill: 2, num_decode: 1 };
    let (cluster, mut spans) = Cluster::traced(shape, script, &[], 1.0).await;
    cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
    let trace = spans.next().await;
    let root = trace.root();
    let method = "colocated-3x1 expected-share linear-step-cost";
    assert_eq!(text(root, "baton.hol.method"), Some(method));
    for (key, value) in [
        ("baton.hol.avoided_ms", 30.0),
        ("baton.hol.victims", 3.0),
        ("baton.hol.residual", 0.04),
        ("baton.hol.would_block_ms", 10.0),
        ("baton.hol.prefills", 2.0),
    ] {
        assert!((number(root, key).expect(key) - value).abs() < 1e-9, "{key}: {:?}", root.attribute(key));
    }
    let counted = cluster.router.metrics().hol_avoided.get();
    assert!((counted - 0.03).abs() < 1e-9, "{counted}");
}
