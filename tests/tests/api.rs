//! The HTTP face under the requests that break others.

use std::time::{Duration, Instant};

use baton_tests::client::request_with;
use baton_tests::cluster::{greedy, strings, with};
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, EventStream, Turn, eventually};
use serde_json::{Value, json};

const CONTEXT: usize = 2048;

fn small_context() -> ClusterConfig {
    ClusterConfig {
        worker_args: strings(&["--context", &CONTEXT.to_string()]),
        kv_memory: "8M".into(),
        ..ClusterConfig::default()
    }
}

/// Posts with and without `stream` and demands the same refusal: a status before any stream opens, with the field named.
async fn refused(cluster: &Cluster, path: &str, body: &Value, status: u16, param: &str) -> Vec<String> {
    let mut messages = Vec::new();
    for stream in [false, true] {
        let body = with(body.clone(), json!({"stream": stream}));
        let answer = cluster.post(path, &body).await.expect(status);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{body} -> {error}");
        let message = error["message"].as_str().expect("a message").to_owned();
        assert!(!message.contains('\n') && !message.is_empty(), "{message}");
        messages.push(message);
    }
    messages
}

#[tokio::test]
async fn what_would_change_the_result_and_is_not_done_is_refused_with_its_field() {
    let _turn = Turn::take();
    let cluster = Cluster::start(small_context()).await;
    let completion = json!({"prompt": "Hello", "max_tokens": 4});
    let chat = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4});
    for (field, value) in [
        ("n", json!(0)),
        ("n", json!(9)),
        ("priority", json!(101)),
        ("best_of", json!(3)),
        ("logit_bias", json!({"5": 1.0})),
        ("presence_penalty", json!(0.5)),
        ("frequency_penalty", json!(0.5)),
        ("temperature", json!(-1)),
        ("temperature", json!("hot")),
        ("top_p", json!(0)),
        ("top_p", json!(1.5)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-1)),
        ("stop", json!(["a", "b", "c", "d", "e"])),
        ("stop", json!([""])),
        ("no_such_field", json!(1)),
    ] {
        refused(&cluster, "/v1/completions", &with(completion.clone(), json!({field: value})), 400, field)
            .await;
        if field != "best_of" {
            refused(&cluster, "/v1/chat/completions", &with(chat.clone(), json!({field: value})), 400, field)
                .await;
        }
    }
    refused(
        &cluster,
        "/v1/chat/completions",
        &with(chat, json!({"tools": [{"type": "function"}]})),
        400,
        "tools",
    )
    .await;
    let unknown =
        refused(&cluster, "/v1/completions", &with(completion, json!({"model": "gpt-4"})), 404, "model")
            .await;
    let models =
        baton_tests::client::request(cluster.http, "GET", "/v1/models", None).await.expect("an answer");
    let served = models.expect(200).json()["data"][0]["id"].as_str().expect("an id").to_owned();
    assert!(unknown[0].contains(&served), "{} does not list '{served}'", unknown[0]);
    let named = cluster.completion(&with(greedy(&[65], 2), json!({"model": served}))).await;
    assert_eq!(named.token_ids.len(), 2);
    assert_eq!(
        cluster.prefill_sum("baton_generated_tokens_total", &[]).await,
        1.0,
        "a refused request was computed"
    );
}

#[tokio::test]
async fn a_prompt_beyond_the_context_is_refused_with_both_numbers_and_never_cut() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_prompt_beyond_the_context");
    let cluster = Cluster::start(small_context()).await;
    for length in [CONTEXT, CONTEXT + 1, 10 * CONTEXT] {
        let body = greedy(&random.tiny_prompt(length), 1);
        let messages = refused(&cluster, "/v1/completions", &body, 400, "prompt").await;
        for message in messages {
            assert!(
                message.contains(&length.to_string()) && message.contains(&CONTEXT.to_string()),
                "{message}"
            );
        }
    }
    let text = "x".repeat(2 * CONTEXT);
    let chat = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1});
    refused(&cluster, "/v1/chat/completions", &chat, 400, "messages").await;
    // Asked for more than is left: refused. Not asked: clipped to what is left.
    let long = random.tiny_prompt(CONTEXT - 10);
    refused(&cluster, "/v1/completions", &greedy(&long, 11), 400, "max_tokens").await;
    assert_eq!(cluster.greedy(&long, 10).await.len(), 10);
    let messages = json!([{"role": "user", "content": "x".repeat(CONTEXT - 200)}]);
    let open = json!({"messages": messages, "ignore_eos": true, "temperature": 0});
    let answer = cluster.post("/v1/chat/completions", &open).await.expect(200).json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["total_tokens"], CONTEXT);
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_prompt_too_long_for_the_prefill_worker_is_answered_now() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_prompt_too_long_for_the_prefill_worker");
    let config = ClusterConfig {
        kv_memory: String::new(),
        prefill_args: strings(&["--kv-memory", "1M", "--context", "2048"]),
        decode_args: strings(&["--kv-memory", "8M", "--context", "8192"]),
        ..ClusterConfig::default()
    };
    let cluster = Cluster::start(config).await;
    let start = Instant::now();
    let answer = cluster.post("/v1/completions", &greedy(&random.tiny_prompt(6000), 4)).await;
    // Refused, or computed where it fits; never a wait.
    assert!([200, 400].contains(&answer.status.as_u16()), "{}", answer.text());
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    cluster.wait_baseline(Duration::from_secs(5)).await;
    assert_eq!(cluster.greedy(&random.tiny_prompt(1000), 4).await.len(), 4);
}

#[tokio::test]
async fn a_second_live_request_with_one_id_is_refused() {
    let _turn = Turn::take();
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let long = with(greedy(&[65, 66], 50_000), json!({"stream": true}));
    let mine = [("x-request-id", "mine")];
    let http = cluster.http;
    let (body, first) = (long.clone(), mine);
    let task =
        tokio::spawn(async move { request_with(http, "POST", "/v1/completions", Some(&body), &first).await });
    eventually("the first decodes", Duration::from_secs(10), async || {
        let running = cluster.decode_sum("baton_num_requests", &[("stage", "running")]).await;
        if running > 0.0 { Ok(()) } else { Err("nothing runs".to_owned()) }
    })
    .await;
    let second = eventually("the second is refused", Duration::from_secs(10), async || {
        let answer = request_with(http, "POST", "/v1/completions", Some(&greedy(&[65], 1)), &mine).await?;
        if answer.status == 200 { Err("accepted".to_owned()) } else { Ok(answer) }
    })
    .await;
    assert_eq!(second.status, 409, "{}", second.text());
    let other =
        request_with(http, "POST", "/v1/completions", Some(&greedy(&[65], 1)), &[("x-request-id", "other")])
            .await;
    other.expect("an answer").expect(200);
    task.abort();
    // Once the first is gone the id is free again.
    eventually("the id is free again", Duration::from_secs(5), async || {
        let answer = request_with(http, "POST", "/v1/completions", Some(&greedy(&[65], 1)), &mine).await?;
        if answer.status == 200 { Ok(()) } else { Err(answer.text()) }
    })
    .await;
}

#[tokio::test]
async fn a_finish_reason_is_null_until_the_end_and_then_a_word() {
    let _turn = Turn::take();
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let chat = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "stream": true});
    let completion = json!({"prompt": "Hello", "max_tokens": 12, "stream": true});
    for (path, body) in [("/v1/chat/completions", chat), ("/v1/completions", completion)] {
        let body = with(body, json!({"stream_options": {"include_usage": true}, "ignore_eos": true}));
        let events = cluster.stream(path, &body).await.collect().await.expect("a whole stream");
        let choices: Vec<&Value> = events.iter().filter_map(|(_, event)| event["choices"].get(0)).collect();
        let (last, before) = choices.split_last().expect("choices");
        for choice in before {
            let reason = choice.as_object().and_then(|choice| choice.get("finish_reason"));
            assert_eq!(reason, Some(&Value::Null), "{path}: {choice}");
        }
        assert_eq!(last["finish_reason"], "length", "{path}");
        let usage = &events.last().expect("events").1;
        assert_eq!(usage["choices"], json!([]), "{path}");
        assert_eq!(usage["usage"]["completion_tokens"], 12, "{path}");
    }
}

/// Whole text first, then every way to stop inside it.
#[tokio::test]
async fn no_part_of_a_stop_string_leaks() {
    let _turn = Turn::take();
    let mut random = Random::from_env("no_part_of_a_stop_string_leaks");
    let cluster = Cluster::start(ClusterConfig::default()).await;
    for _ in 0..12 {
        let length = random.within(1..60);
        let body = greedy(&random.tiny_prompt(length), 80);
        let text = cluster.completion(&body).await.text;
        let chars: Vec<(usize, char)> = text.char_indices().collect();
        let at = random.within(1..chars.len() - 9);
        let stop: String = chars[at..at + random.within(1..9)].iter().map(|(_, c)| c).collect();
        let wanted = &text[..text.find(&stop).expect("taken from the text")];
        let stopping = with(body, json!({"stop": [stop, "never \u{4e2d}\u{6587}"]}));
        let whole = cluster.completion(&stopping).await;
        let stream =
            cluster.stream("/v1/completions", &with(stopping.clone(), json!({"stream": true}))).await;
        let streamed = stream.completion().await.expect("a whole stream");
        for completion in [&whole, &streamed] {
            assert_eq!(completion.text, wanted, "{stopping}");
            assert_eq!(completion.finish_reason, "stop", "{stopping}");
        }
    }
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn text_beyond_ascii_with_stop_strings_harms_nobody() {
    let _turn = Turn::take();
    let mut cluster = Cluster::start(ClusterConfig::default()).await;
    for content in [
        "\u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}",
        "\u{c548}\u{b155}\u{d558}\u{c138}\u{c694} \u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}",
        "\u{0}\u{7f}\u{fffd}\u{10ffff}",
    ] {
        for seed in 0..4 {
            let body = json!({
                "messages": [{"role": "user", "content": content}], "max_tokens": 64, "temperature": 2.0, "seed": seed,
                "stop": ["ZZZ", "\u{597d}"], "return_token_ids": true,
            });
            let whole = cluster.post("/v1/chat/completions", &body).await.expect(200);
            let whole = baton_tests::Completion::from_answer(&whole);
            let stream = cluster.stream("/v1/chat/completions", &with(body, json!({"stream": true}))).await;
            let streamed = stream.completion().await.expect("a whole stream");
            // The tiny model emits any byte, so replacement characters are right here; both forms must show the same.
            assert_eq!(whole.text, streamed.text);
            assert_eq!(whole.token_ids, streamed.token_ids);
        }
    }
    for process in [&mut cluster.router, &mut cluster.prefill[0].process, &mut cluster.decode[0].process] {
        assert!(process.try_status().is_none(), "{} died", process.name);
    }
}

#[tokio::test]
async fn too_much_load_is_refused_with_a_time_to_come_back() {
    let _turn = Turn::take();
    let config = ClusterConfig {
        router_args: strings(&["--max-concurrent", "2", "--max-queue", "2"]),
        ..ClusterConfig::default()
    };
    let cluster = Cluster::start(config).await;
    let long = with(greedy(&[65, 66], 50_000), json!({"stream": true}));
    let mut streams = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (http, body) = (cluster.http, long.clone());
        streams.spawn(
            async move { EventStream::post(http, "/v1/completions", &body).await.expect("an answer") },
        );
    }
    let mut kept = Vec::new();
    let mut num_refused = 0;
    while num_refused < 4 {
        let stream = streams.join_next().await.expect("four of eight are refused").expect("no panic");
        if stream.status == 429 {
            assert!(stream.header("retry-after").parse::<u32>().is_ok_and(|seconds| seconds >= 1));
            num_refused += 1;
        } else {
            kept.push(stream);
        }
    }
    drop((kept, streams));
    cluster.wait_baseline(Duration::from_secs(5)).await;
    assert_eq!(cluster.greedy(&[65], 3).await.len(), 3);
}
