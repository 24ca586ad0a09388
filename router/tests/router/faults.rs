//! Workers that refuse, break or die under a request.

use std::time::Duration;

use baton_proto::v1;
use serde_json::json;

use crate::client::events;
use crate::fake::Script;
use crate::harness::{Cluster, ONE_PAIR, Shape, eventually};

const PLAIN: &str = "/v1/completions";

fn text_of(events: &[String]) -> String {
    let chunk = |event: &String| serde_json::from_str::<serde_json::Value>(event).ok();
    let text = |chunk: serde_json::Value| Some(chunk["choices"][0]["text"].as_str()?.to_owned());
    events.iter().filter_map(chunk).filter_map(text).collect()
}

#[tokio::test]
async fn a_stream_that_breaks_is_resumed_without_gap_or_repetition() {
    let shape = Shape { num_prefill: 1, num_decode: 2 };
    let pace = Duration::from_millis(5);
    let script = Script { decode_breaks_before: Some(5), pace, ..Script::says("abcdefghijkl") };
    let cluster = Cluster::start(shape, script, &[]).await;
    cluster.until_all_ready().await;
    let answer = cluster.client.post(PLAIN, &json!({"prompt": "x", "stream": true})).await;
    let events = answer.events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "{}", answer.text());
    assert_eq!(text_of(&events), "abcdefghijkl");
    let prefills = cluster.prefill[0].prefills();
    assert_eq!(prefills.len(), 2);
    let (first, again) = (&prefills[0], &prefills[1]);
    assert_eq!((first.num_generated, again.num_generated), (0, 5));
    assert_eq!(again.prompt, [&first.prompt[..], b"abcde".map(u32::from).as_slice()].concat());
    assert_eq!(again.sampling, first.sampling, "the same seed draws the same tokens");
    let max_new = |request: &v1::PrefillRequest| request.stopping.as_ref().expect("stopping").max_new_tokens;
    assert_eq!(max_new(again), max_new(first) - 5);
    let key = |request: &v1::PrefillRequest| request.key.clone().expect("a key");
    assert_eq!((key(first).request, key(first).attempt + 1), (key(again).request, key(again).attempt));
    assert!(!cluster.decode.iter().any(|worker| worker.decodes().len() > 1), "another worker took over");
}

#[tokio::test]
async fn a_killed_decode_worker_is_replaced_by_another() {
    let shape = Shape { num_prefill: 1, num_decode: 2 };
    let script = Script { pace: Duration::from_millis(20), ..Script::says("abcdefghijklmnop") };
    let mut cluster = Cluster::start(shape, script, &[]).await;
    cluster.until_all_ready().await;
    let mut stream =
        cluster.client.stream(PLAIN, &[], &json!({"prompt": "x", "stream": true, "max_tokens": 16})).await;
    assert!(stream.until("\"c\"").await);
    let busy = cluster.decode.iter().position(|worker| worker.num_open() > 0).expect("one decodes");
    cluster.decode[busy].kill();
    let text = stream.rest().await;
    assert_eq!(text_of(&events(&text)), "abcdefghijklmnop", "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn without_another_worker_the_stream_ends_with_an_error() {
    let script = Script { pace: Duration::from_millis(20), ..Script::says("abcdefghijklmnop") };
    let mut cluster = Cluster::start(ONE_PAIR, script, &[]).await;
    let mut stream = cluster.client.stream(PLAIN, &[], &json!({"prompt": "x", "stream": true})).await;
    assert!(stream.until("\"c\"").await);
    cluster.decode[0].kill();
    let text = stream.rest().await;
    assert!(!text.contains("[DONE]"), "{text}");
    let last: serde_json::Value = serde_json::from_str(events(&text).last().expect("events")).expect("JSON");
    assert_eq!(last["error"]["type"], "server_error", "{text}");
    assert!(text.contains("event: error\n"));
    eventually("the prefill leg is closed", async || cluster.prefill[0].num_open() == 0).await;
}

#[tokio::test]
async fn a_worker_that_freezes_is_found_by_its_silence() {
    let shape = Shape { num_prefill: 1, num_decode: 2 };
    let script = Script {
        pace: Duration::from_millis(20),
        decode_hangs_after: Some(6),
        ..Script::says("abcdefghijklmnop")
    };
    let cluster = Cluster::start(shape, script, &["--heartbeat-timeout", "1"]).await;
    cluster.until_all_ready().await;
    let mut stream = cluster.client.stream(PLAIN, &[], &json!({"prompt": "x", "stream": true})).await;
    assert!(stream.until("\"g\"").await, "it hangs after g");
    let frozen = cluster.decode.iter().position(|worker| worker.num_open() > 0).expect("one decodes");
    cluster.decode[frozen].mute();
    // The other worker takes over behind g, since its own script hangs only when it says g itself.
    let text = stream.rest().await;
    assert_eq!(text_of(&events(&text)), "abcdefghijklmnop", "{text}");
    assert_eq!(cluster.decode[1 - frozen].decodes()[0].num_generated, 7);
    eventually("the frozen leg is dropped", async || cluster.num_open() == 0).await;
}

#[tokio::test]
async fn refusals_have_a_status_before_the_first_token_and_none_is_a_success() {
    for (cause, status, code) in [
        (v1::Cause::Busy, 429, "overloaded"),
        (v1::Cause::TooLarge, 400, "context_length_exceeded"),
        (v1::Cause::Engine, 500, "engine"),
        (v1::Cause::Layout, 500, "layout"),
        (v1::Cause::Draining, 503, "unavailable"),
        (v1::Cause::Protocol, 500, "protocol"),
    ] {
        for stream in [false, true] {
            let script = Script { refuses: Some(cause), ..Script::says("x") };
            let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
            let answer = cluster.client.post(PLAIN, &json!({"prompt": "x", "stream": stream})).await;
            assert_eq!(answer.status, status, "{cause:?}: {}", answer.text());
            assert_eq!(answer.error()["code"], code, "{cause:?}");
            assert_eq!(answer.header("retry-after").is_some(), matches!(status, 429 | 503), "{cause:?}");
            cluster.until_no_leg_is_open().await;
        }
    }
}

#[tokio::test]
async fn a_killed_prefill_worker_is_replaced_before_the_first_token() {
    let shape = Shape { num_prefill: 2, num_decode: 1 };
    let mut cluster = Cluster::start(shape, Script::says("hello"), &[]).await;
    cluster.until_all_ready().await;
    cluster.prefill[0].kill();
    // The router may not have noticed yet: the request must not either way.
    for _ in 0..4 {
        let answer = cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["choices"][0]["text"], "hello");
    }
}

#[tokio::test]
async fn when_the_last_prefill_worker_dies_requests_run_locally() {
    let mut cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &[]).await;
    cluster.prefill[0].kill();
    for _ in 0..2 {
        let answer = cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
        assert_eq!((answer.status, answer.header("x-baton-mode")), (200, Some("local")), "{}", answer.text());
        assert_eq!(answer.json()["choices"][0]["text"], "hello");
    }
    assert_eq!(cluster.client.get("/health").await.status, 200, "a chat would succeed");
}
