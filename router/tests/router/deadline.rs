//! A request's own time: at the door, in prefill, in decode, on both faces.

use std::time::{Duration, Instant};

use baton_proto::v1;
use baton_proto::v1::generate_request::Input;
use baton_proto::v1::inference_client::InferenceClient;
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tonic::{Code, Request};

use crate::client::{Answer, events};
use crate::fake::Script;
use crate::harness::{Cluster, ONE_PAIR, Shape, eventually};

const PLAIN: &str = "/v1/completions";
const HEADER: &str = "x-request-timeout-ms";

fn hangs_in_prefill() -> Script {
    Script { prefill_hangs: true, ..Script::says("hello") }
}

fn hangs_in_decode() -> Script {
    Script { decode_hangs_after: Some(2), ..Script::says("hello") }
}

async fn post(cluster: &Cluster, timeout_ms: &str, body: &Value) -> Answer {
    cluster.client.post_with(PLAIN, &[(HEADER, timeout_ms)], body).await
}

fn is_late(answer: &Answer) {
    assert_eq!(answer.status, 504, "{}", answer.text());
    let error = answer.error();
    assert_eq!((&error["code"], &error["type"]), (&json!("deadline_exceeded"), &json!("server_error")));
}

/// What the workers were told, of every leg: prefill legs first.
fn told(cluster: &Cluster) -> Vec<u64> {
    let prefills = cluster.prefill.iter().flat_map(|worker| worker.prefills());
    let decodes = cluster.decode.iter().flat_map(|worker| worker.decodes());
    let prefills = prefills.map(|request| request.terms.expect("terms"));
    let terms = prefills.chain(decodes.map(|request| request.terms.expect("terms")));
    terms.map(|terms| terms.timeout_ms).collect()
}

#[tokio::test]
async fn at_the_door_it_ends_the_wait_and_no_worker_hears_of_it() {
    let options = ["--max-concurrent", "1", "--max-queue", "1", "--keep-alive", "0.05"];
    let cluster = Cluster::start(ONE_PAIR, hangs_in_prefill(), &options).await;
    let first = cluster.client.stream(PLAIN, &[], &json!({"prompt": "a", "stream": true})).await;
    for stream in [false, true] {
        let began = Instant::now();
        is_late(&post(&cluster, "150", &json!({"prompt": "b", "stream": stream})).await);
        assert!(began.elapsed() >= Duration::from_millis(150), "{:?}", began.elapsed());
    }
    eventually("only the first reached workers, and it has no deadline", async || told(&cluster) == [0, 0])
        .await;
    assert_eq!((cluster.num_ended("none", "deadline_exceeded"), cluster.num_in_flight()), (2, 1));
    drop(first);
    cluster.until_no_leg_is_open().await;
}

#[tokio::test]
async fn in_prefill_it_is_a_504_and_both_legs_are_dropped() {
    let cluster = Cluster::start(ONE_PAIR, hangs_in_prefill(), &[]).await;
    for stream in [false, true] {
        is_late(&post(&cluster, "1000", &json!({"prompt": "a", "stream": stream})).await);
        cluster.until_no_leg_is_open().await;
    }
    let told = told(&cluster);
    assert!(told.len() == 4 && told.iter().all(|ms| (1..=1000).contains(ms)), "{told:?}");
    assert_eq!((cluster.num_ended("disaggregated", "deadline_exceeded"), cluster.num_in_flight()), (2, 0));
}

#[tokio::test]
async fn a_stream_that_has_begun_ends_with_the_error_event() {
    for (script, keep_alive, text) in [(hangs_in_prefill(), "0.05", ""), (hangs_in_decode(), "10", "hel")] {
        let cluster = Cluster::start(ONE_PAIR, script, &["--keep-alive", keep_alive]).await;
        let body = json!({"prompt": "a", "stream": true});
        let answer = post(&cluster, "1500", &body).await;
        assert_eq!(answer.status, 200);
        let all = answer.text();
        assert!(all.contains("event: error\n") && !all.contains("[DONE]"), "{all}");
        let chunks: Vec<Value> =
            events(&all).iter().map(|event| serde_json::from_str(event).expect("JSON")).collect();
        assert_eq!(chunks.last().expect("events")["error"]["code"], "deadline_exceeded");
        let said: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(said, text);
        cluster.until_no_leg_is_open().await;
        assert_eq!(cluster.num_ended("disaggregated", "deadline_exceeded"), 1);
    }
}

#[tokio::test]
async fn the_option_bounds_what_clients_ask_for() {
    let cluster = Cluster::start(ONE_PAIR, hangs_in_decode(), &["--request-timeout", "1"]).await;
    let body = json!({"prompt": "a"});
    is_late(&cluster.client.post(PLAIN, &body).await);
    let began = Instant::now();
    is_late(&post(&cluster, "86400000", &body).await);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let told = told(&cluster);
    assert!(told.len() == 4 && told.iter().all(|ms| (1..=1000).contains(ms)), "{told:?}");
    cluster.until_no_leg_is_open().await;
}

#[tokio::test]
async fn tokens_without_a_pause_do_not_outrun_it() {
    let script = Script { tokens_per_message: 64, ..Script::says("0123456789") };
    let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
    let body = json!({"prompt": "a", "ignore_eos": true, "max_tokens": 130_000});
    let began = Instant::now();
    is_late(&post(&cluster, "20", &body).await);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    cluster.until_no_leg_is_open().await;
}

#[tokio::test]
async fn a_retry_is_told_what_is_left() {
    let shape = Shape { num_prefill: 1, num_decode: 2 };
    let pace = Duration::from_millis(20);
    let script = Script { decode_breaks_before: Some(3), pace, ..Script::says("hello") };
    let cluster = Cluster::start(shape, script, &[]).await;
    cluster.until_all_ready().await;
    let answer = post(&cluster, "60000", &json!({"prompt": "a"})).await;
    assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (200, &json!("hello")));
    let told = told(&cluster);
    assert!(told[0] <= 60_000 && told[1] < told[0] && told[1] > 30_000, "{told:?}");
}

#[tokio::test]
async fn a_header_that_can_not_be_used_is_refused_by_name() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("x"), &[]).await;
    for bad in ["0", "86400001", "soon", "1.5", "-1", ""] {
        let answer = post(&cluster, bad, &json!({"prompt": "a"})).await;
        let error = answer.error();
        assert_eq!((answer.status, &error["param"]), (400, &json!(HEADER)), "{bad}: {error}");
        assert!(error["message"].as_str().is_some_and(|message| message.contains("from 1 to 86400000")));
    }
    assert_eq!(post(&cluster, "86400000", &json!({"prompt": "a"})).await.status, 200);
    assert_eq!(cluster.num_ended("none", "invalid_value"), 6);
}

/// Without a timer of its own, unlike `tonic`'s channel.
type Plain = Pool<HttpConnector, tonic::body::Body>;

fn connect(cluster: &Cluster) -> InferenceClient<Plain> {
    let pool = Pool::builder(TokioExecutor::new()).http2_only(true).build_http();
    let origin = format!("http://{}", cluster.router.grpc).parse().expect("an address");
    InferenceClient::with_origin(pool, origin)
}

fn prompt(timeout: &str) -> Request<v1::GenerateRequest> {
    let input = Some(Input::Prompt("a".to_owned()));
    let mut request = Request::new(v1::GenerateRequest { input, ..v1::GenerateRequest::default() });
    request.metadata_mut().insert("grpc-timeout", timeout.parse().expect("metadata"));
    request
}

#[tokio::test]
async fn grpc_clients_send_theirs_as_ever() {
    let options = ["--max-concurrent", "1", "--keep-alive", "10"];
    let cluster = Cluster::start(ONE_PAIR, hangs_in_prefill(), &options).await;
    let mut client = connect(&cluster);
    let status = client.generate(prompt("1000m")).await.expect_err("late in prefill");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    cluster.until_no_leg_is_open().await;
    assert_eq!(cluster.num_ended("disaggregated", "deadline_exceeded"), 1);
    let told = told(&cluster);
    assert!(told.len() == 2 && told.iter().all(|ms| (1..=995).contains(ms)), "{told:?}");
    let body = json!({"prompt": "a", "stream": true});
    let mut holder = Box::pin(cluster.client.stream(PLAIN, &[], &body));
    let _ = tokio::time::timeout(Duration::from_millis(100), holder.as_mut()).await;
    let status = client.generate(prompt("200000u")).await.expect_err("late at the door");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert_eq!(cluster.num_ended("none", "deadline_exceeded"), 1);
    let status = client.generate(prompt("5x")).await.expect_err("no unit");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("grpc-timeout"), "{status}");
}

#[tokio::test]
async fn a_grpc_stream_that_has_begun_ends_with_the_status() {
    let cluster = Cluster::start(ONE_PAIR, hangs_in_decode(), &[]).await;
    let mut stream = connect(&cluster).generate(prompt("1500m")).await.expect("accepted").into_inner();
    let mut text = String::new();
    let status = loop {
        match stream.message().await {
            Ok(Some(message)) => text.push_str(&message.text),
            Ok(None) => panic!("it ended well"),
            Err(status) => break status,
        }
    };
    assert_eq!((status.code(), text.as_str()), (Code::DeadlineExceeded, "hel"));
    cluster.until_no_leg_is_open().await;
}
