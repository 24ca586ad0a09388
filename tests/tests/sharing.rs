//! Several answers from one prompt, and prompts that begin alike: what is computed, moved and held only once.

use std::time::Duration;

use baton_tests::cluster::{greedy, with};
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Completion, Turn, eventually};
use serde_json::{Value, json};

/// Bytes of KV of one token of `builtin:tiny` in f16: 2 x 4 layers x 2 heads x 16 x 2.
const TINY_TOKEN_BYTES: f64 = 512.0;

fn four(prompt: &[u32], num_tokens: usize, seed: u64) -> Value {
    with(greedy(prompt, num_tokens), json!({"n": 4, "temperature": 1.0, "seed": seed}))
}

async fn choices(cluster: &Cluster, body: &Value) -> Vec<Completion> {
    Completion::choices(&cluster.post("/v1/completions", body).await.expect(200))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_answers_share_their_prompt_and_differ_by_seed() {
    let _turn = Turn::take();
    let mut random = Random::from_env("four_answers_share_their_prompt");
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let together = Cluster::start(ClusterConfig::default().colocated()).await;
    let mut num_tokens = 0;
    // Prompts that end inside a block, at its end, and just after.
    for length in [1, 15, 16, 17, 300] {
        let body = four(&random.tiny_prompt(length), 40, random.next_u64() >> 1);
        let apart = choices(&cluster, &body).await;
        assert_eq!(apart.len(), 4);
        for (nth, choice) in apart.iter().enumerate() {
            assert_eq!((choice.token_ids.len(), choice.finish_reason.as_str()), (40, "length"));
            assert_eq!(choice.mode, "disaggregated");
            assert!(apart[..nth].iter().all(|other| other.token_ids != choice.token_ids), "{apart:?}");
        }
        assert_eq!(apart[0].usage["prompt_tokens"], length);
        assert_eq!(apart[0].usage["completion_tokens"], 160);

        let streamed = cluster.stream("/v1/completions", &with(body.clone(), json!({"stream": true}))).await;
        let streamed = streamed.choices(4).await.expect("a whole stream");
        let tokens = |choices: &[Completion]| -> Vec<Vec<u32>> {
            choices.iter().map(|choice| choice.token_ids.clone()).collect()
        };
        assert_eq!(tokens(&streamed), tokens(&apart), "streamed, {length} tokens");
        assert_eq!(tokens(&choices(&together, &body).await), tokens(&apart), "colocated, {length} tokens");
        // Twice: whole and streamed.
        num_tokens += 2 * length;
        let received = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;
        assert_eq!(
            received,
            num_tokens as f64 * TINY_TOKEN_BYTES,
            "a prompt's KV moves once, not four times"
        );
    }
    assert_eq!(cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await, 0.0);
    assert_eq!(
        cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await,
        f64::from(num_tokens as u32)
    );
    cluster.wait_baseline(Duration::from_secs(5)).await;
    together.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_running_answers_hold_their_prompts_blocks_once() {
    let _turn = Turn::take();
    let mut random = Random::from_env("four_running_answers_hold");
    let cluster = Cluster::start(ClusterConfig::default()).await;
    // 126 blocks, the last one partly filled.
    let body = with(four(&random.tiny_prompt(2010), 30_000, 1), json!({"stream": true}));
    let stream = cluster.stream("/v1/completions", &body).await;
    let held = eventually("four sequences run", Duration::from_secs(30), async || {
        let running = cluster.decode_sum("baton_num_requests", &[("stage", "running")]).await;
        let held = cluster.decode_sum("baton_blocks", &[("state", "held")]).await;
        if running == 4.0 { Ok(held) } else { Err(format!("{running} run")) }
    })
    .await;
    // Four copies would hold at least 504 blocks before they had written 125 blocks of their own each.
    assert!((129.0..450.0).contains(&held), "{held} blocks held");
    drop(stream);
    cluster.wait_baseline(Duration::from_secs(3)).await;
}

/// Greedy answers are equal whoever computed them, so a stop string in one choice stops all; by seed they stop each for itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_ends_its_own_answer_only() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_stop_string_ends_its_own_answer_only");
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let body = four(&random.tiny_prompt(40), 200, 11);
    let whole = choices(&cluster, &body).await;
    // A short piece of the first answer that no other contains.
    let text: Vec<char> = whole[0].text.chars().collect();
    let piece = |at: usize| text.get(at..at + 3).map(|piece| piece.iter().collect::<String>());
    let own = |piece: &String| whole[1..].iter().all(|other| !other.text.contains(piece.as_str()));
    let stop = (5..text.len()).filter_map(piece).find(own).expect("some piece is the first answer's alone");
    let stopped = choices(&cluster, &with(body, json!({"stop": [stop]}))).await;
    let before = whole[0].text.split(&stop).next().expect("a first part");
    assert_eq!((stopped[0].text.as_str(), stopped[0].finish_reason.as_str()), (before, "stop"));
    for (stopped, whole) in stopped[1..].iter().zip(&whole[1..]) {
        assert_eq!((&stopped.token_ids, &stopped.finish_reason), (&whole.token_ids, &whole.finish_reason));
    }
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_prompt_twice_computes_its_uncached_tail_and_says_so() {
    let _turn = Turn::take();
    let mut random = Random::from_env("the_same_prompt_twice");
    let cluster = Cluster::start(ClusterConfig { prefix_cache: true, ..ClusterConfig::default() }).await;
    let prompt = random.tiny_prompt(330);
    let body = greedy(&prompt, 12);
    let first = cluster.completion(&body).await;
    assert_eq!(first.usage["prompt_tokens_details"]["cached_tokens"], 0);
    let computed = cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await;
    let second = cluster.completion(&body).await;
    assert_eq!(second.token_ids, first.token_ids);
    assert_eq!(second.usage["prompt_tokens_details"]["cached_tokens"], 320);
    let tail = cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await - computed;
    assert_eq!(tail, 10.0);
    // Whoever opts out computes all of it, with the same tokens.
    let aside = cluster.completion(&with(body, json!({"no_prefix_cache": true}))).await;
    assert_eq!(aside.token_ids, first.token_ids);
    assert_eq!(aside.usage["prompt_tokens_details"]["cached_tokens"], 0);
    let all = cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await - computed - tail;
    assert_eq!(all, 330.0);
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

/// With two of each, a prompt that was seen goes where its blocks are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_was_seen_is_placed_where_its_blocks_are() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_prompt_that_was_seen");
    let config =
        ClusterConfig { prefix_cache: true, num_prefill: 2, num_decode: 2, ..ClusterConfig::default() };
    let cluster = Cluster::start(config).await;
    let prompts: Vec<Vec<u32>> = (0..6).map(|_| random.tiny_prompt(800)).collect();
    for prompt in &prompts {
        cluster.greedy(prompt, 4).await;
    }
    // The routers hear of new blocks a moment later.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let computed = cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await;
    for prompt in &prompts {
        cluster.greedy(prompt, 4).await;
    }
    let again = cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await - computed;
    // 16 of 800 tokens of each are the last block, which is always computed.
    assert_eq!(again, 6.0 * 16.0, "tokens computed for prompts that were all cached somewhere");
}
