//! The golden tokens through real clusters: the f32 path against the reference, and every way of cutting the work against every
//! other.

use std::time::Instant;

use baton_tests::cluster::{greedy, with};
use baton_tests::golden::{self, Golden};
use baton_tests::{Cluster, ClusterConfig, Completion, Turn, model_or_skip};
use serde_json::json;

const NUM_TOKENS: usize = 64;

/// One way of cutting the work.
struct Variant {
    name: &'static str,
    config: ClusterConfig,
    at_once: usize,
}

/// Colocated, chunks of 1 block, 64 and 512 tokens, 1 and 2 threads, 8 prompts at once; each differs from the base in
/// more than one of them, so that what interacts is met too.
fn variants(base: &ClusterConfig) -> Vec<Variant> {
    let chunks = |config: ClusterConfig, tokens: usize| ClusterConfig {
        max_step_tokens: Some(tokens),
        // Each running sequence needs a token in every step.
        worker_args: baton_tests::cluster::strings(&["--max-num-seqs", "16"]),
        ..config
    };
    let threads = |config: ClusterConfig, threads: usize| ClusterConfig { threads, ..config };
    vec![
        Variant { name: "8 at once", config: base.clone(), at_once: 8 },
        Variant { name: "colocated, 8 at once", config: base.clone().colocated(), at_once: 8 },
        Variant { name: "chunks of 1 block, 8 at once", config: chunks(base.clone(), 16), at_once: 8 },
        Variant {
            name: "chunks of 64, 2 threads, 8 at once",
            config: threads(chunks(base.clone(), 64), 2),
            at_once: 8,
        },
        Variant {
            name: "colocated, chunks of 512, 2 threads, 4 at once",
            config: threads(chunks(base.clone().colocated(), 512), 2),
            at_once: 4,
        },
    ]
}

/// Greedy tokens of all prompts, `at_once` requests in flight; in the order of `prompts`.
async fn generate(cluster: &Cluster, prompts: &[Golden], at_once: usize) -> Vec<Completion> {
    let limit = std::sync::Arc::new(tokio::sync::Semaphore::new(at_once));
    let mut tasks = Vec::new();
    for prompt in prompts {
        let (limit, http) = (limit.clone(), cluster.http);
        let body = greedy(&prompt.prompt_tokens, NUM_TOKENS);
        tasks.push(tokio::spawn(async move {
            let _permit = limit.acquire().await.expect("never closed");
            let answer = baton_tests::client::request(http, "POST", "/v1/completions", Some(&body)).await;
            Completion::from_answer(&answer.expect("an answer").expect(200))
        }));
    }
    let mut all = Vec::new();
    for task in tasks {
        all.push(task.await.expect("a completion"));
    }
    all
}

fn assert_same(name: &str, prompts: &[Golden], base: &[Completion], got: &[Completion]) {
    for ((prompt, base), got) in prompts.iter().zip(base).zip(got) {
        let part = base.token_ids.iter().zip(&got.token_ids).position(|(a, b)| a != b);
        assert_eq!(
            part, None,
            "{name}: '{}' parts from one-at-a-time disaggregated at this token",
            prompt.name
        );
        assert_eq!(base.token_ids.len(), got.token_ids.len(), "{name}: '{}'", prompt.name);
        assert_eq!(base.text, got.text, "{name}: '{}'", prompt.name);
    }
}

/// Runs the base one prompt at a time, then every variant against it.
async fn every_variant_agrees(base_config: ClusterConfig) {
    let prompts = golden::all();
    let start = Instant::now();
    let base = {
        let cluster = Cluster::start(base_config.clone()).await;
        let base = generate(&cluster, &prompts, 1).await;
        assert!(base.iter().all(|completion| completion.mode == "disaggregated"));
        assert_eq!(cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await, 0.0);
        base
    };
    eprintln!("base: {:.1} s", start.elapsed().as_secs_f64());
    for variant in variants(&base_config) {
        let start = Instant::now();
        let cluster = Cluster::start(variant.config).await;
        let got = generate(&cluster, &prompts, variant.at_once).await;
        assert_same(variant.name, &prompts, &base, &got);
        eprintln!("{}: {:.1} s", variant.name, start.elapsed().as_secs_f64());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_f32_path_gives_the_golden_tokens() {
    let Some(model) = model_or_skip() else { return };
    let _turn = Turn::take();
    let cluster = Cluster::start(ClusterConfig::golden(&model).f32()).await;
    for prompt in golden::all() {
        let forced = prompt
            .check(async |tokens, num_tokens| {
                let completion = cluster.completion(&greedy(tokens, num_tokens)).await;
                assert_eq!(completion.mode, "disaggregated");
                completion.token_ids
            })
            .await;
        eprintln!("{}: {forced} tokens forced", prompt.name);
    }
    assert_eq!(cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_f32_path_gives_the_same_tokens_however_the_work_is_cut() {
    let Some(model) = model_or_skip() else { return };
    let _turn = Turn::take();
    every_variant_agrees(ClusterConfig::golden(&model).f32()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_path_gives_the_same_tokens_however_the_work_is_cut() {
    let Some(model) = model_or_skip() else { return };
    let _turn = Turn::take();
    every_variant_agrees(ClusterConfig::golden(&model)).await;
}

/// Text in, text out: the tokenizer, the detokenizer and the stream against the reference's own text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn golden_text_in_gives_golden_text_out_streamed_and_not() {
    let Some(model) = model_or_skip() else { return };
    let _turn = Turn::take();
    let cluster = Cluster::start(ClusterConfig::golden(&model).f32()).await;
    for prompt in golden::all().iter().filter(|prompt| prompt.prompt_tokens.len() < 200) {
        let Some(text) = &prompt.prompt else { continue };
        let body = with(greedy(&[], NUM_TOKENS), json!({"prompt": text}));
        let whole = cluster.completion(&body).await;
        let streamed = cluster.stream("/v1/completions", &with(body, json!({"stream": true}))).await;
        let streamed = streamed.completion().await.expect("a whole stream");
        assert_eq!(whole.usage["prompt_tokens"], prompt.prompt_tokens.len(), "{}", prompt.name);
        assert_eq!(streamed.text, whole.text, "{}", prompt.name);
        assert_eq!(streamed.token_ids, whole.token_ids, "{}", prompt.name);
        if prompt.top2_margins.iter().all(|&margin| margin >= golden::MARGIN) {
            assert_eq!(whole.text, prompt.text, "{}", prompt.name);
        }
    }
}
