//! The handoff as seen from outside: whose KV D decodes from, how many bytes moved, and the first token's special cases.

use std::time::Duration;

use baton_tests::cluster::{greedy, with};
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Completion, Turn, model_or_skip};
use serde_json::{Value, json};

/// End-of-sequence tokens of `builtin:tiny`.
const TINY_EOS: [u32; 2] = [257, 259];
/// Bytes of KV of one token of `builtin:tiny` in f16: 2 x 4 layers x 2 heads x 16 x 2.
const TINY_TOKEN_BYTES: f64 = 512.0;
/// Bytes of KV of one token of the default model in f16.
const SMOLLM_TOKEN_BYTES: f64 = 23_040.0;

async fn decode_leg(cluster: &Cluster) -> [f64; 3] {
    [
        cluster.decode_sum("baton_kv_received_bytes_total", &[]).await,
        cluster.decode_sum("baton_generated_tokens_total", &[]).await,
        cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await,
    ]
}

async fn check_bytes(config: ClusterConfig, lengths: &[usize], token_bytes: f64) {
    let mut random = Random::from_env("check_bytes");
    let cluster = Cluster::start(config).await;
    let mut num_tokens = 0;
    for &length in lengths {
        let prompt = random.tiny_prompt(length);
        let completion = cluster.completion(&greedy(&prompt, 8)).await;
        assert_eq!(completion.mode, "disaggregated");
        assert_eq!(completion.token_ids.len(), 8);
        num_tokens += length;
        // The router may answer before D's counters are read; they are final at commit, which precedes token 2.
        let received = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;
        assert_eq!(received, num_tokens as f64 * token_bytes, "after a prompt of {length} tokens");
    }
    assert_eq!(cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await, 0.0);
    assert_eq!(cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await, num_tokens as f64);
    assert_eq!(
        cluster.decode_sum("baton_handoffs_total", &[("outcome", "committed")]).await,
        lengths.len() as f64
    );
    assert_eq!(
        cluster.prefill_sum("baton_handoffs_total", &[("outcome", "committed")]).await,
        lengths.len() as f64
    );
    assert_eq!(cluster.decode_sum("baton_kv_frames_corrupt_total", &[]).await, 0.0);
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn every_byte_of_kv_arrives_and_no_other() {
    let _turn = Turn::take();
    let lengths = [1, 15, 16, 17, 31, 32, 33, 512, 513, 1500];
    check_bytes(ClusterConfig::default(), &lengths, TINY_TOKEN_BYTES).await;
    let chunks = ClusterConfig { max_step_tokens: Some(64), ..ClusterConfig::default() };
    check_bytes(chunks, &lengths, TINY_TOKEN_BYTES).await;
    let f32 = ClusterConfig { block_size: Some(32), ..ClusterConfig::default() }.f32();
    check_bytes(f32, &lengths, 2.0 * TINY_TOKEN_BYTES).await;
}

#[tokio::test]
async fn the_default_model_moves_23_040_bytes_a_token() {
    let Some(model) = model_or_skip() else { return };
    let _turn = Turn::take();
    check_bytes(ClusterConfig::golden(&model), &[1, 16, 100], SMOLLM_TOKEN_BYTES).await;
}

/// Tokens that a prefix cache has are neither computed nor moved, and the answer stays the same; a prompt that is all cached too.
#[tokio::test]
async fn what_a_prefix_cache_has_is_not_moved_again() {
    let _turn = Turn::take();
    let mut random = Random::from_env("what_a_prefix_cache_has");
    let cluster = Cluster::start(ClusterConfig { prefix_cache: true, ..ClusterConfig::default() }).await;
    let plain = Cluster::start(ClusterConfig::default()).await;
    let shared = random.tiny_prompt(320);
    let mut num_tokens = 0;
    for round in 0..3 {
        for length in [320, 319, 321, 336, 500] {
            let own = random.tiny_prompt(200);
            let prompt: Vec<u32> = shared.iter().chain(&own).take(length).copied().collect();
            let body = greedy(&prompt, 12);
            let (got, wanted) = (cluster.completion(&body).await, plain.completion(&body).await);
            assert_eq!(got.token_ids, wanted.token_ids, "round {round}, {length} tokens");
            num_tokens += length;
        }
    }
    let hits = [
        cluster.prefill_sum("baton_prefix_hit_tokens_total", &[]).await,
        cluster.decode_sum("baton_prefix_hit_tokens_total", &[]).await,
    ];
    assert!(hits.iter().all(|&hits| hits >= 304.0 * 12.0), "{hits:?} of {num_tokens} tokens");
    let computed = cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await;
    assert_eq!(computed, num_tokens as f64 - hits[0]);
    let received = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;
    assert_eq!(received, (num_tokens as f64 - hits[1]) * TINY_TOKEN_BYTES);
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

/// Random prompts and sampling, so that a token that depended on where it was computed would show.
#[tokio::test]
async fn colocated_and_disaggregated_answer_the_same() {
    let _turn = Turn::take();
    let mut random = Random::from_env("colocated_and_disaggregated_answer_the_same");
    let bodies: Vec<Value> = (0..24)
        .map(|nth| {
            let length = random.within(1..400);
            let body = greedy(&random.tiny_prompt(length), random.within(1..40));
            let sampling = json!({"temperature": 0.8, "top_p": 0.9, "seed": random.next_u64() >> 1, "ignore_eos": false});
            if nth % 2 == 0 { body } else { with(body, sampling) }
        })
        .collect();
    let mut answers: Vec<Vec<Completion>> = Vec::new();
    for config in [ClusterConfig::default(), ClusterConfig::default().colocated()] {
        let cluster = Cluster::start(config).await;
        let mut these = Vec::new();
        for body in &bodies {
            these.push(cluster.completion(body).await);
        }
        answers.push(these);
    }
    for ((body, apart), together) in bodies.iter().zip(&answers[0]).zip(&answers[1]) {
        assert_eq!((apart.mode.as_str(), together.mode.as_str()), ("disaggregated", "colocated"));
        assert_eq!(apart.token_ids, together.token_ids, "{body}");
        assert_eq!(apart.text, together.text, "{body}");
        assert_eq!(apart.finish_reason, together.finish_reason, "{body}");
        assert_eq!(apart.usage, together.usage, "{body}");
    }
}

#[tokio::test]
async fn one_token_does_not_enter_decode() {
    let _turn = Turn::take();
    let mut random = Random::from_env("one_token_does_not_enter_decode");
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let before = decode_leg(&cluster).await;
    for length in [1, 16, 100] {
        let body = greedy(&random.tiny_prompt(length), 1);
        let whole = cluster.completion(&body).await;
        let stream = cluster.stream("/v1/completions", &with(body, json!({"stream": true}))).await;
        let streamed = stream.completion().await.expect("a whole stream");
        for completion in [&whole, &streamed] {
            assert_eq!(completion.token_ids.len(), 1);
            assert_eq!(completion.finish_reason, "length");
        }
        assert_eq!(whole.token_ids, streamed.token_ids);
        assert_eq!(whole.usage["completion_tokens"], 1);
    }
    assert_eq!(decode_leg(&cluster).await, before);
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_first_token_that_ends_the_sequence_is_all() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_first_token_that_ends_the_sequence_is_all");
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let mut found = None;
    for _ in 0..2000 {
        let length = random.within(1..40);
        let prompt = random.tiny_prompt(length);
        if TINY_EOS.contains(&cluster.greedy(&prompt, 1).await[0]) {
            found = Some(prompt);
            break;
        }
    }
    let prompt = found.expect("one of 2,000 prompts ends at once");
    let before = decode_leg(&cluster).await;
    let body = with(greedy(&prompt, 32), json!({"ignore_eos": false}));
    let whole = cluster.completion(&body).await;
    let stream = cluster.stream("/v1/completions", &with(body.clone(), json!({"stream": true}))).await;
    let streamed = stream.completion().await.expect("a whole stream");
    for completion in [&whole, &streamed] {
        assert_eq!(completion.finish_reason, "stop");
        assert_eq!(completion.text, "");
        assert!(completion.token_ids.len() <= 1, "{:?}", completion.token_ids);
    }
    cluster.wait_baseline(Duration::from_secs(5)).await;
    assert_eq!(decode_leg(&cluster).await[1..], before[1..], "D generated or computed something");
    // The same prompt goes on when end-of-sequence is ignored.
    assert_eq!(cluster.greedy(&prompt, 8).await.len(), 8);
}

/// Long newcomers beside short streams: each is computed a few layers a step, and has the tokens that it has where rows are computed whole.
#[tokio::test]
async fn a_newcomer_computed_in_parts_has_the_tokens_of_one_computed_whole() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_newcomer_computed_in_parts");
    // However little its context costs, it is too much.
    let apart = |growth: &str| ClusterConfig {
        decode_args: vec![format!("--max-step-growth={growth}")],
        ..ClusterConfig::default()
    };
    let (parts, whole) = (Cluster::start(apart("0.000001")).await, Cluster::start(apart("0")).await);
    let streams: Vec<Value> = (0..3).map(|_| greedy(&random.tiny_prompt(20), 600)).collect();
    let newcomers: Vec<Value> = (0..6).map(|_| greedy(&random.tiny_prompt(900), 24)).collect();
    for cluster in [&parts, &whole] {
        // One after the other, while the streams decode.
        let arriving = async {
            let mut answers = Vec::new();
            for body in &newcomers {
                answers.push(cluster.completion(body).await.token_ids);
            }
            answers
        };
        let stream = |nth: usize| cluster.completion(&streams[nth]);
        let (a, b, c, arrived) = tokio::join!(stream(0), stream(1), stream(2), arriving);
        let mut got: Vec<Vec<u32>> = [a, b, c].map(|answer| answer.token_ids).into();
        got.extend(arrived);
        for (nth, (body, got)) in streams.iter().chain(&newcomers).zip(&got).enumerate() {
            // Alone there is nobody to be spared, so this one is whole on both.
            assert_eq!(*got, whole.completion(body).await.token_ids, "answer {nth}");
        }
    }
    assert!(parts.decode_sum("baton_row_parts_total", &[]).await >= 20.0);
    assert_eq!(whole.decode_sum("baton_row_parts_total", &[]).await, 0.0);
    parts.wait_baseline(Duration::from_secs(5)).await;
}
