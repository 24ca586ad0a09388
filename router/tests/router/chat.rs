//! What a chat's answer looks like.

use std::time::Duration;

use serde_json::{Value, json};

use crate::fake::{EOS, Script};
use crate::harness::{Cluster, ONE_PAIR, Shape};

const CHAT: &str = "/v1/chat/completions";

fn ask(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in extra.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// What ChatML makes of "hi": with the built-in tokenizer a byte is a token, and each mark one more.
const PROMPT_TOKENS: usize = 1 + "user\nhi".len() + 1 + 1 + 1 + "assistant\n".len();

#[tokio::test]
async fn a_whole_answer_has_text_usage_and_what_the_handoff_cost() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &[]).await;
    let answer = cluster.client.post_with(CHAT, &[("x-request-id", "mine")], &ask(json!({}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let body = answer.json();
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "builtin:tiny");
    assert_eq!(body["choices"][0]["message"], json!({"role": "assistant", "content": "hello"}));
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    let usage = json!({
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 6,
        "total_tokens": PROMPT_TOKENS + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    });
    assert_eq!(body["usage"], usage);
    assert_eq!(body["baton"]["mode"], "disaggregated");
    assert_eq!(
        body["baton"]["kv"],
        json!({"bytes": 4096, "total_ms": 2.5, "hidden_ms": 2.0, "exposed_ms": 0.5})
    );
    assert!(body["baton"]["ttft_ms"].as_f64().expect("a number") > 0.0);
    assert_eq!(answer.header("x-baton-mode"), Some("disaggregated"));
    assert_eq!(answer.header("x-request-id"), Some("mine"));
    let id = answer.header("x-baton-request-id").expect("an id");
    assert_eq!((id.len(), body["id"].as_str()), (32, Some(format!("chatcmpl-{id}").as_str())));
    assert_eq!((cluster.num_ended("disaggregated", "stop"), cluster.num_in_flight()), (1, 0));
    let metrics = cluster.client.get("/metrics").await.text();
    for count in
        ["ttft_seconds_count 1", "itl_seconds_count 5", "tpot_seconds_count 1", "e2e_seconds_count 1"]
    {
        assert!(metrics.contains(count), "{count} is missing in\n{metrics}");
    }
}

#[tokio::test]
async fn a_streamed_answer_begins_with_the_role_and_ends_with_done() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &[]).await;
    let answer = cluster.client.post(CHAT, &ask(json!({"stream": true}))).await;
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(answer.header("x-baton-mode"), Some("disaggregated"));
    let chunks = answer.chunks();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let (last, before) = chunks.split_last().expect("chunks");
    for chunk in before {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["choices"][0].get("finish_reason"), Some(&Value::Null), "{chunk}");
        assert!(chunk.get("usage").is_none() && chunk.get("baton").is_none());
        assert_eq!((&chunk["id"], &chunk["created"]), (&last["id"], &last["created"]));
    }
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "hello");
    assert_eq!(last["choices"][0]["delta"], json!({}));
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(last["baton"]["kv"]["bytes"], 4096);
}

#[tokio::test]
async fn usage_comes_in_a_chunk_of_its_own_when_asked_for() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &[]).await;
    let body = ask(json!({"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 3}));
    let chunks = cluster.client.post(CHAT, &body).await.chunks();
    let (last, before) = chunks.split_last().expect("chunks");
    assert!(before.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 3);
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(last["baton"]["mode"], "disaggregated");
    assert_eq!(before.last().expect("chunks")["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn what_workers_hear_is_what_was_asked() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &[]).await;
    let body = ask(json!({"temperature": 0.5, "top_p": 0.25, "seed": -1, "max_completion_tokens": 4}));
    cluster.client.post(CHAT, &body).await;
    let (prefills, decodes) = (cluster.prefill[0].prefills(), cluster.decode[0].decodes());
    let (prefill, decode) = (&prefills[0], &decodes[0]);
    let sampling = prefill.sampling.expect("sampling");
    assert_eq!((sampling.temperature, sampling.top_p, sampling.seed), (0.5, 0.25, u64::MAX));
    assert_eq!((prefill.key.clone(), &prefill.prompt), (decode.key.clone(), &decode.prompt));
    assert_eq!((prefill.sampling, prefill.stopping.clone()), (decode.sampling, decode.stopping.clone()));
    let stopping = prefill.stopping.clone().expect("stopping");
    assert_eq!((stopping.max_new_tokens, stopping.stop_token_ids.contains(&EOS)), (4, true));
    let destination = prefill.destination.clone().expect("a destination");
    assert_eq!(destination.address, cluster.decode[0].address());
    assert!(!decode.local);
}

#[tokio::test]
async fn a_missing_seed_is_drawn_and_ignore_eos_goes_on() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("ab"), &[]).await;
    for _ in 0..2 {
        let body = cluster.client.post(CHAT, &ask(json!({"ignore_eos": true, "max_tokens": 5}))).await.json();
        assert_eq!(body["choices"][0]["message"]["content"], "ababa");
        assert_eq!(body["choices"][0]["finish_reason"], "length");
    }
    let seeds: Vec<u64> = cluster.prefill[0]
        .prefills()
        .iter()
        .map(|request| request.sampling.expect("sampling").seed)
        .collect();
    assert_ne!(seeds[0], seeds[1]);
}

#[tokio::test]
async fn one_token_opens_no_decode_leg() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &[]).await;
    let body = cluster.client.post(CHAT, &ask(json!({"max_tokens": 1}))).await.json();
    assert_eq!(body["choices"][0]["message"]["content"], "h");
    assert_eq!(
        (&body["choices"][0]["finish_reason"], &body["usage"]["completion_tokens"]),
        (&json!("length"), &json!(1))
    );
    let streamed = cluster.client.post(CHAT, &ask(json!({"max_tokens": 1, "stream": true}))).await.chunks();
    assert_eq!(streamed.last().expect("chunks")["choices"][0]["finish_reason"], "length");
    assert!(cluster.decode[0].decodes().is_empty());
    assert!(cluster.prefill[0].prefills().iter().all(|request| request.destination.is_none()));
}

#[tokio::test]
async fn a_first_token_that_ends_the_answer_leaves_it_empty() {
    let cluster = Cluster::start(ONE_PAIR, Script::says(""), &[]).await;
    let body = cluster.client.post(CHAT, &ask(json!({}))).await.json();
    assert_eq!(body["choices"][0]["message"]["content"], "");
    assert_eq!(
        (&body["choices"][0]["finish_reason"], &body["usage"]["completion_tokens"]),
        (&json!("stop"), &json!(1))
    );
    cluster.until_no_leg_is_open().await;
}

#[tokio::test]
async fn a_stop_string_never_shows_however_it_is_cut() {
    for tokens_per_message in [1, 3, 64] {
        let script = Script {
            tokens_per_message,
            pace: Duration::from_millis(1),
            ..Script::says("ABCDEFGHIJKLMNOPQRSTUVWXYZ and so on, for a while")
        };
        let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
        for stream in [false, true] {
            let options =
                json!({"stop": ["DEFGHIJ", "zzz"], "stream": stream, "ignore_eos": true, "max_tokens": 9000});
            let answer = cluster.client.post(CHAT, &ask(options)).await;
            let (text, usage) = if stream {
                let chunks = answer.chunks();
                let pieces =
                    chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
                assert_eq!(chunks.last().expect("chunks")["choices"][0]["finish_reason"], "stop");
                (pieces.collect::<String>(), None)
            } else {
                let body = answer.json();
                assert_eq!(body["choices"][0]["finish_reason"], "stop");
                let text = body["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
                (text, body["usage"]["completion_tokens"].as_u64())
            };
            assert_eq!(text, "ABC");
            // Counted up to the token that completed the stop string.
            assert!(usage.is_none_or(|tokens| tokens == 10), "{usage:?}");
        }
        cluster.until_no_leg_is_open().await;
        assert_eq!(cluster.decode[0].num_cancelled(), 2);
    }
}

#[tokio::test]
async fn what_could_have_become_a_stop_string_is_said_at_the_end() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("see END"), &[]).await;
    let body = cluster.client.post(CHAT, &ask(json!({"stop": "ENDING"}))).await.json();
    assert_eq!(body["choices"][0]["message"]["content"], "see END");
}

#[tokio::test]
async fn the_last_token_may_complete_a_stop_string() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("abcdef"), &[]).await;
    let body = cluster.client.post(CHAT, &ask(json!({"stop": "cd", "max_tokens": 4}))).await.json();
    assert_eq!(body["choices"][0]["message"]["content"], "ab");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    // The only one, which the prefill worker reports as the last one allowed.
    let body = cluster.client.post(CHAT, &ask(json!({"stop": "a", "max_tokens": 1}))).await.json();
    assert_eq!(body["choices"][0]["message"]["content"], "");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn a_character_of_several_tokens_arrives_whole() {
    let said = "한국어 🙂 ok";
    let cluster = Cluster::start(ONE_PAIR, Script::says(said), &[]).await;
    let chunks = cluster.client.post(CHAT, &ask(json!({"stream": true}))).await.chunks();
    let pieces: Vec<&str> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
    assert_eq!(pieces.concat(), said);
    let cut = cluster.client.post(CHAT, &ask(json!({"max_tokens": 4}))).await.json();
    assert_eq!(cut["choices"][0]["message"]["content"], "한\u{fffd}");
}

#[tokio::test]
async fn text_parts_and_every_role_are_accepted() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("ok"), &[]).await;
    let body = json!({
        "model": "default",
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
            {"role": "assistant", "content": "c", "tool_calls": [], "refusal": null},
            {"role": "user", "content": "d"},
        ],
    });
    assert_eq!(cluster.client.post(CHAT, &body).await.status, 200);
    let prompt = &cluster.prefill[0].prefills()[0].prompt;
    let text: Vec<u8> = prompt.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
    let text = String::from_utf8(text).expect("UTF-8");
    assert_eq!(text, "system\nbe brief\nuser\na\nb\nassistant\nc\nuser\nd\nassistant\n");
}

#[tokio::test]
async fn an_idle_stream_carries_comments_and_begins_in_time() {
    let script = Script { prefill_hangs: true, ..Script::says("x") };
    let cluster = Cluster::start(ONE_PAIR, script, &["--keep-alive", "0.1"]).await;
    let mut stream = cluster.client.stream(CHAT, &[], &ask(json!({"stream": true}))).await;
    assert_eq!(stream.status, 200);
    assert_eq!(stream.headers["x-baton-mode"], "disaggregated");
    assert!(stream.until(": keep-alive").await);
    drop(stream);
    cluster.until_no_leg_is_open().await;
}

#[tokio::test]
async fn without_prefill_workers_it_is_local_and_loud_and_colocated_is_neither() {
    let shape = Shape { num_prefill: 0, num_decode: 1 };
    for (options, mode, fallbacks) in [(&[][..], "local", 1), (&["--colocated"][..], "colocated", 0)] {
        let cluster = Cluster::start(shape, Script::says("hello"), options).await;
        let answer = cluster.client.post(CHAT, &ask(json!({}))).await;
        assert_eq!(answer.json()["choices"][0]["message"]["content"], "hello");
        assert_eq!(
            (answer.header("x-baton-mode"), &answer.json()["baton"]["mode"]),
            (Some(mode), &json!(mode))
        );
        assert_eq!(answer.json()["baton"]["kv"]["bytes"], 0);
        assert!(cluster.decode[0].decodes()[0].local);
        assert_eq!(cluster.router.metrics().local_fallbacks.get(), fallbacks);
    }
}
