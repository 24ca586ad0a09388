//! The golden tokens through real clusters: the f32 path against the reference, and every way of cutting the work against every
//! other.

use std::time::Instant;

use baton_tests::cluster::{greedy, with};
use baton_tests::golden::{self, Golden};
use baton_tests::{Cluster, ClusterConfig, Completion, Turn, model_or_skip};
use serde_json::json;

const NUM_TOKENS: usize = 64;

/// Longer prompts go only through the variants that cut in several ways at once: they are nearly all of the work.
const MAX_TOKENS_OF_ONE_CUT: usize = 600;

/// One way of cutting the work.
struct Variant {
    name: &'static str,
    config: ClusterConfig,
    at_once: usize,
}

impl Variant {
    fn cuts_in_several_ways(&self) -> bool {
        self.name.contains(',')
    }
}

/// Each of: colocated, chunks of 1 block, 64 and 512 tokens, 2 threads, 8 prompts at once; then several together, so that
/// what interacts is met too.
fn variants(base: &ClusterConfig) -> Vec<Variant> {
    let chunks = |config: ClusterConfig, tokens: usize| ClusterConfig {
        max_step_tokens: Some(tokens),
        // Each running sequence needs a token in every step.
        worker_args: baton_tests::cluster::strings(&["--max-num-seqs", "16"]),
        ..config
    };
    let threads = |config: ClusterConfig| ClusterConfig { threads: 2, ..config };
    let variant = |name, at_once, config| Variant { name, config, at_once };
    let (apart, together) = (|| base.clone(), || base.clone().colocated());
    vec![
        variant("colocated", 1, together()),
        variant("chunks of 1 block", 1, chunks(apart(), 16)),
        variant("chunks of 64", 1, chunks(apart(), 64)),
        variant("chunks of 512", 1, chunks(apart(), 512)),
        variant("2 threads", 1, threads(apart())),
        variant("8 at once", 8, apart()),
        variant("colocated, 8 at once", 8, together()),
        variant("chunks of 1 block, 8 at once", 8, chunks(apart(), 16)),
        variant("chunks of 64, 2 threads, 8 at once", 8, threads(chunks(apart(), 64))),
        variant("colocated, chunks of 512, 2 threads, 4 at once", 4, threads(chunks(together(), 512))),
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

/// Runs the base one prompt at a time, hands it to `check_base`, and runs every variant against it.
async fn every_variant_agrees(
    base_config: ClusterConfig,
    variants: Vec<Variant>,
    check_base: impl AsyncFnOnce(&Cluster, &[Golden], &[Completion]),
) {
    let prompts = golden::all();
    let start = Instant::now();
    let base = {
        let cluster = Cluster::start(base_config.clone()).await;
        let base = generate(&cluster, &prompts, 1).await;
        assert!(base.iter().all(|completion| completion.mode == "disaggregated"));
        check_base(&cluster, &prompts, &base).await;
        assert_eq!(cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await, 0.0);
        base
    };
    eprintln!("base: {:.1} s", start.elapsed().as_secs_f64());
    for variant in variants {
        let start = Instant::now();
        let most = if variant.cuts_in_several_ways() { usize::MAX } else { MAX_TOKENS_OF_ONE_CUT };
        let (prompts, base): (Vec<Golden>, Vec<Completion>) = prompts
            .iter()
            .zip(&base)
            .filter(|(prompt, _)| prompt.prompt_tokens.len() <= most)
            .map(|(prompt, base)| (prompt.clone(), base.clone()))
            .unzip();
        let cluster = Cluster::start(variant.config).await;
        let got = generate(&cluster, &prompts, variant.at_once).await;
        assert_same(variant.name, &prompts, &base, &got);
        eprintln!("{}: {:.1} s", variant.name, start.elapsed().as_secs_f64());
    }
}

/// The reference's tokens, exactly where its margin is wide enough, teacher-forced where it is not.
async fn assert_golden(cluster: &Cluster, prompts: &[Golden], base: &[Completion]) {
    for (prompt, base) in prompts.iter().zip(base) {
        let num_forced = prompt
            .check(async |tokens, num_tokens| {
                if tokens == prompt.prompt_tokens {
                    return base.token_ids.clone();
                }
                cluster.greedy(tokens, num_tokens).await
            })
            .await;
        eprintln!("{}: {num_forced} tokens forced", prompt.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_f32_path_gives_the_golden_tokens_however_the_work_is_cut() {
    let Some(model) = model_or_skip() else { return };
    let _turn = Turn::take();
    let base = ClusterConfig::golden(&model).f32();
    // The slow path: what the other one is asked way by way, this one is asked in the widest mixture.
    let last = variants(&base).pop().into_iter().collect();
    every_variant_agrees(base, last, assert_golden).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_path_gives_the_same_tokens_however_the_work_is_cut() {
    let Some(model) = model_or_skip() else { return };
    let _turn = Turn::take();
    let base = ClusterConfig::golden(&model);
    let variants = variants(&base);
    every_variant_agrees(base, variants, async |_, _, _| {}).await;
}

/// Text in, text out: the tokenizer, the detokenizer and the stream against the reference's own text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn golden_text_in_gives_golden_text_out_streamed_and_not() {
    let Some(model) = model_or_skip() else { return };
    let _turn = Turn::take();
    let cluster = Cluster::start(ClusterConfig::golden(&model).f32()).await;
    for prompt in golden::all().iter().filter(|prompt| prompt.prompt_tokens.len() < 200) {
        let Some(text) = &prompt.prompt else { continue };
        let (whole, streamed) = both_ways(&cluster, text).await;
        assert_eq!(whole.usage["prompt_tokens"], prompt.prompt_tokens.len(), "{}", prompt.name);
        assert_eq!(streamed.text, whole.text, "{}", prompt.name);
        assert_eq!(streamed.token_ids, whole.token_ids, "{}", prompt.name);
        if prompt.top2_margins.iter().all(|&margin| margin >= golden::MARGIN) {
            // The reference spells special tokens out.
            let text = prompt.text.replace("<|im_start|>", "").replace("<|im_end|>", "");
            assert_eq!(whole.text, text, "{}", prompt.name);
        }
    }
    // Characters of several tokens: none is cut, unless the very end cuts it.
    for text in [
        "\u{c548}\u{b155}\u{d558}\u{c138}\u{c694}! \u{c548}\u{b155}\u{d558}\u{c138}\u{c694}! \u{c548}\u{b155}",
        "\u{1f600} \u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467} \u{1f600} \u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467} \u{1f600}",
        "\u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}\u{3002}\u{4f60}\u{597d}\u{ff0c}",
    ] {
        let (whole, streamed) = both_ways(&cluster, text).await;
        assert_eq!(streamed.text, whole.text, "{text}");
        assert!(!whole.text.trim_end_matches('\u{fffd}').contains('\u{fffd}'), "{text} -> {}", whole.text);
    }
}

/// Completes 64 tokens after a text, in one answer and as a stream.
async fn both_ways(cluster: &Cluster, text: &str) -> (Completion, Completion) {
    let body = with(greedy(&[], NUM_TOKENS), json!({"prompt": text}));
    let whole = cluster.completion(&body).await;
    let stream = cluster.stream("/v1/completions", &with(body, json!({"stream": true}))).await;
    (whole, stream.completion().await.expect("a whole stream"))
}
