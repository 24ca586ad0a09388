//! Plain completions.

use std::sync::Arc;

use baton_proto::v1::worker_status::State;
use serde_json::{Value, json};

use crate::fake::{FakeWorker, Kind, Script};
use crate::harness::{Cluster, ONE_PAIR, eventually};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn text_and_token_ids_name_the_same_prompt() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("yes"), &[]).await;
    for prompt in [json!("abc"), json!([97, 98, 99]), json!(["abc"]), json!([[97, 98, 99]])] {
        let body = cluster.client.post(PATH, &json!({"prompt": prompt})).await.json();
        assert_eq!(body["object"], "text_completion");
        assert_eq!(body["choices"][0]["text"], "yes");
        assert_eq!(body["usage"]["prompt_tokens"], 3);
        assert!(body["choices"][0].get("token_ids").is_none());
    }
    for request in cluster.prefill[0].prefills() {
        assert_eq!(request.prompt, [97, 98, 99]);
        assert_eq!(request.stopping.expect("stopping").max_new_tokens, 16, "the default of this path");
    }
}

#[tokio::test]
async fn token_ids_are_returned_when_asked_for() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("é!"), &[]).await;
    let ask = |stream| json!({"prompt": "a", "return_token_ids": true, "stream": stream});
    let body = cluster.client.post(PATH, &ask(false)).await.json();
    assert_eq!(body["choices"][0]["token_ids"], json!([0xc3, 0xa9, 33, 257]));
    let chunks = cluster.client.post(PATH, &ask(true)).await.chunks();
    let ids: Vec<Value> = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().expect("ids").clone())
        .collect();
    assert_eq!(json!(ids), json!([0xc3, 0xa9, 33, 257]));
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "é!");
}

#[tokio::test]
async fn the_context_is_the_least_offered_and_bounds_requests() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("yes"), &["--context", "64"]).await;
    assert_eq!(cluster.client.get("/v1/models").await.json()["data"][0]["max_model_len"], 64);
    let ids = |num: usize| json!(vec![97; num]);
    // A default is clipped, a wish is refused, both at the edge.
    assert_eq!(cluster.client.post(PATH, &json!({"prompt": ids(63)})).await.status, 200);
    assert_eq!(cluster.prefill[0].prefills()[0].stopping.clone().expect("stopping").max_new_tokens, 1);
    assert_eq!(cluster.client.post(PATH, &json!({"prompt": ids(60), "max_tokens": 4})).await.status, 200);
    let legs = cluster.num_legs();
    for (body, param, numbers) in [
        (json!({"prompt": ids(60), "max_tokens": 5}), "max_tokens", ["5", "60", "64"]),
        (json!({"prompt": ids(64)}), "prompt", ["64", "64", "1"]),
        (json!({"prompt": "a".repeat(70)}), "prompt", ["70", "64", "1"]),
    ] {
        let answer = cluster.client.post(PATH, &body).await;
        let error = answer.error();
        assert_eq!((answer.status, &error["param"]), (400, &json!(param)), "{error}");
        assert_eq!(error["code"], "context_length_exceeded");
        let message = error["message"].as_str().expect("a message");
        assert!(numbers.iter().all(|number| message.contains(number)), "{message}");
    }
    assert_eq!(cluster.num_legs(), legs, "no worker heard of the refused ones");
}

#[tokio::test]
async fn the_pool_of_a_worker_bounds_the_context_too() {
    let mut cluster = Cluster::start(ONE_PAIR, Script::says("yes"), &[]).await;
    assert_eq!(cluster.client.get("/v1/models").await.json()["data"][0]["max_model_len"], 131_072);
    let (at, script) = (cluster.decode[0].socket(), Arc::new(Script::says("yes")));
    cluster.decode[0].kill();
    let again = FakeWorker::start_at(at, Kind::Decode, script, State::Loading);
    // 4 blocks of 16 tokens.
    again.describe(|description| description.num_blocks = 4);
    again.set_state(State::Ready);
    let offered = async || cluster.client.get("/v1/models").await.json()["data"][0]["max_model_len"] == 64;
    eventually("the context follows", offered).await;
}

#[tokio::test]
async fn long_text_is_tokenized_too() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("yes"), &[]).await;
    let prompt = "0123456789".repeat(10_000);
    let body = cluster.client.post(PATH, &json!({"prompt": prompt})).await.json();
    assert_eq!(body["usage"]["prompt_tokens"], 100_000);
}
