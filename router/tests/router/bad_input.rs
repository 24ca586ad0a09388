//! What is refused, with which field named, before any worker hears of it.

use serde_json::{Value, json};

use crate::fake::Script;
use crate::harness::{Cluster, ONE_PAIR};

const CHAT: &str = "/v1/chat/completions";
const PLAIN: &str = "/v1/completions";

struct Case {
    path: &'static str,
    body: Value,
    status: u16,
    param: Value,
    /// Must stand in the message: the limit, or what was found.
    says: &'static str,
}

fn user() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

fn chat(field: &str, value: Value, says: &'static str) -> Case {
    let mut body = json!({"messages": user()});
    body[field] = value;
    Case { path: CHAT, body, status: 400, param: json!(field), says }
}

fn messages(messages: Value, param: &str, says: &'static str) -> Case {
    Case { path: CHAT, body: json!({"messages": messages}), status: 400, param: json!(param), says }
}

fn plain(body: Value, param: &str, says: &'static str) -> Case {
    Case { path: PLAIN, body, status: 400, param: json!(param), says }
}

fn cases() -> Vec<Case> {
    let mut cases = vec![
        chat("temperature", json!(-0.1), "from 0 to 2"),
        chat("temperature", json!(2.1), "from 0 to 2"),
        chat("temperature", json!("hot"), "a number, not a string"),
        chat("temperature", json!(true), "a number, not a boolean"),
        chat("top_p", json!(0), "above 0"),
        chat("top_p", json!(1.01), "at most 1"),
        chat("top_p", json!(1e-300), "above 0"),
        chat("top_p", json!([0.5]), "an array"),
        chat("max_tokens", json!(0), "at least 1, not 0"),
        chat("max_tokens", json!(-3), "at least 1, not -3"),
        chat("max_tokens", json!(1.5), "an integer"),
        chat("max_tokens", json!("10"), "an integer"),
        chat("max_tokens", json!(5_000_000_000_u64), "at most 4294967295"),
        chat("max_completion_tokens", json!(0), "at least 1"),
        chat("seed", json!(1.5), "64-bit integer"),
        chat("seed", json!("7"), "64-bit integer"),
        chat("seed", json!(1e30), "64-bit integer"),
        chat("stop", json!(""), "empty"),
        chat("stop", json!(["a", ""]), "empty"),
        chat("stop", json!(["a", "b", "c", "d", "e"]), "at most 4"),
        chat("stop", json!([1]), "a string"),
        chat("stop", json!({"a": 1}), "a string or an array"),
        chat("stop", json!("x".repeat(1025)), "at most 1024"),
        chat("n", json!(0), "at least 1"),
        chat("n", json!(9), "at most 8"),
        chat("priority", json!(101), "from -100 to 100"),
        chat("no_prefix_cache", json!("yes"), "a boolean"),
        chat("n", json!("1"), "an integer"),
        chat("stream", json!("yes"), "a boolean"),
        chat("stream_options", json!({"include_usage": true}), "needs stream"),
        chat("ignore_eos", json!(1), "a boolean"),
        chat("return_token_ids", json!("no"), "a boolean"),
        chat("model", json!(7), "a string"),
        chat("logprobs", json!(true), "not supported"),
        chat("top_logprobs", json!(3), "not supported"),
        chat("frequency_penalty", json!(0.5), "send 0"),
        chat("presence_penalty", json!(-1), "send 0"),
        chat("repetition_penalty", json!(1.1), "send 1"),
        chat("logit_bias", json!({"50": 100}), "not supported"),
        chat("top_k", json!(40), "not supported"),
        chat("min_p", json!(0.1), "not supported"),
        chat("tools", json!([{"type": "function"}]), "not supported"),
        chat("tool_choice", json!("required"), "not supported"),
        chat("response_format", json!({"type": "json_object"}), "not supported"),
        chat("guided_json", json!({}), "leave it out"),
        chat("best_of", json!(2), "send 1"),
        chat("reasoning_effort", json!("high"), "not supported"),
        chat("temprature", json!(0.5), "unknown field 'temprature'"),
        chat("prompt", json!("x"), "unknown field 'prompt'"),
        messages(json!([]), "messages", "at least 1"),
        messages(json!("hi"), "messages", "an array"),
        messages(json!([7]), "messages[0]", "an object"),
        messages(json!([{"content": "x"}]), "messages[0].role", "required"),
        messages(json!([{"role": "user"}]), "messages[0].content", "required"),
        messages(json!([{"role": "user", "content": null}]), "messages[0].content", "required"),
        messages(json!([{"role": "user", "content": 5}]), "messages[0].content", "a string"),
        messages(json!([{"role": "user", "content": []}]), "messages[0].content", "at least 1"),
        messages(json!([{"role": "wizard", "content": "x"}]), "messages[0].role", "not 'wizard'"),
        messages(json!([{"role": "tool", "content": "x"}]), "messages[0].role", "no tools"),
        messages(json!([{"role": "user", "content": "x", "mood": 1}]), "messages[0].mood", "unknown field"),
        messages(
            json!([{"role": "assistant", "content": "x", "tool_calls": [1]}]),
            "messages[0].tool_calls",
            "not supported",
        ),
        messages(
            json!([{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[1].content[0].type",
            "only text",
        ),
        messages(
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            "messages[0].content[0].text",
            "required",
        ),
        plain(json!({}), "prompt", "required"),
        plain(json!({"prompt": ""}), "prompt", "empty"),
        plain(json!({"prompt": []}), "prompt", "empty"),
        plain(json!({"prompt": [[]]}), "prompt", "empty"),
        plain(json!({"prompt": [""]}), "prompt", "empty"),
        plain(json!({"prompt": 5}), "prompt", "a string or an array"),
        plain(json!({"prompt": {"a": 1}}), "prompt", "an object"),
        plain(json!({"prompt": ["a", "b"]}), "prompt", "at most 1"),
        plain(json!({"prompt": [1, "b"]}), "prompt[1]", "not a token id"),
        plain(json!({"prompt": [1, -2]}), "prompt[1]", "not a token id"),
        plain(json!({"prompt": [1, 2.5]}), "prompt[1]", "not a token id"),
        plain(json!({"prompt": [97, 288]}), "prompt[1]", "below 288"),
        plain(json!({"prompt": "a", "suffix": "b"}), "suffix", "not supported"),
        plain(json!({"prompt": "a", "echo": true}), "echo", "send false"),
        plain(json!({"prompt": "a", "logprobs": 1}), "logprobs", "not supported"),
        plain(json!({"prompt": "a", "messages": []}), "messages", "unknown field"),
        plain(json!({"prompt": "a", "max_completion_tokens": 3}), "max_completion_tokens", "unknown field"),
    ];
    let with = |body: Value, status, param: Value, says| Case { path: CHAT, body, status, param, says };
    cases.extend([
        with(
            json!({"messages": user(), "max_tokens": 3, "max_completion_tokens": 4}),
            400,
            json!("max_tokens"),
            "send one",
        ),
        with(
            json!({"messages": user(), "stream": true, "stream_options": {"include_usage": 1}}),
            400,
            json!("stream_options.include_usage"),
            "a boolean",
        ),
        with(
            json!({"messages": user(), "stream": true, "stream_options": {"speed": 1}}),
            400,
            json!("stream_options.speed"),
            "unknown field",
        ),
        with(json!({"messages": user(), "stream": true, "n": 0}), 400, json!("n"), "at least 1"),
        with(json!({"messages": user(), "model": "gpt-17"}), 404, json!("model"), "builtin:tiny"),
        with(json!({"messages": user(), "\u{7}odd\nname": 1}), 400, json!("oddname"), "unknown field"),
    ]);
    cases
}

#[tokio::test]
async fn each_is_refused_with_its_field_before_any_worker_hears_of_it() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("x"), &[]).await;
    let cases = cases();
    assert!(cases.len() >= 40);
    for case in &cases {
        let answer = cluster.client.post(case.path, &case.body).await;
        let error = answer.error();
        assert_eq!((answer.status, &error["param"]), (case.status, &case.param), "{}: {error}", case.body);
        assert!(
            error["message"].as_str().is_some_and(|message| message.contains(case.says)),
            "{}: {error}",
            case.body
        );
        assert_eq!(error["type"], "invalid_request_error");
        assert!(answer.header("x-baton-request-id").is_some());
    }
    assert_eq!(cluster.num_legs(), 0);
    assert_eq!(cluster.num_ended("none", "invalid_value"), cases.len() as u64 - 1);
    assert_eq!(cluster.num_ended("none", "model_not_found"), 1);
}

#[tokio::test]
async fn values_that_change_nothing_are_accepted() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("x"), &[]).await;
    for (field, value) in [
        ("logprobs", json!(false)),
        ("logprobs", json!(null)),
        ("top_logprobs", json!(0)),
        ("frequency_penalty", json!(0)),
        ("presence_penalty", json!(0.0)),
        ("best_of", json!(1)),
        ("echo", json!(false)),
        ("logit_bias", json!({})),
        ("tools", json!([])),
        ("tool_choice", json!("none")),
        ("response_format", json!({"type": "text"})),
        ("top_k", json!(-1)),
        ("min_p", json!(0.0)),
        ("n", json!(1)),
        ("priority", json!(0)),
        ("no_prefix_cache", json!(false)),
        ("user", json!("someone")),
        ("metadata", json!({"a": "b"})),
        ("store", json!(false)),
        ("stop", json!(null)),
        ("stop", json!([])),
        ("temperature", json!(null)),
        ("temperature", json!(0)),
        ("temperature", json!(2)),
        ("top_p", json!(1)),
        ("seed", json!(u64::MAX)),
        ("seed", json!(i64::MIN)),
        ("stream_options", json!(null)),
        ("model", json!("builtin:tiny")),
        ("model", json!("default")),
        ("model", json!("")),
        ("model", json!(null)),
    ] {
        let body = json!({"messages": user(), field: value});
        let answer = cluster.client.post(CHAT, &body).await;
        assert_eq!(answer.status, 200, "{body}: {}", answer.text());
    }
    let both = json!({"messages": user(), "max_tokens": 3, "max_completion_tokens": 3});
    assert_eq!(cluster.client.post(CHAT, &both).await.status, 200);
}
