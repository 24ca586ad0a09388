//! Against tokens made by another implementation: f32 arithmetic over the same weights.

mod support;

use baton_engine::{CpuEngineConfig, Precision};
use baton_kv::KvDtype;
use serde_json::Value;
use support::divergence::Divergence;
use support::{Logits, Rig, default_model_or_skip, greedy};

/// Below this margin between the two best logits, other rounding may choose the other token.
const DECIDED: f64 = 0.005;
const LOGPROB_TOLERANCE: f64 = 2e-3;

struct Golden {
    name: String,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    margins: Vec<f64>,
    logprobs: Vec<f64>,
    top5: Vec<(u32, f64)>,
}

/// Prompts of more tokens than this are left to the tests of the whole cluster, for the sake of time.
const LONGEST: usize = 1600;

fn goldens() -> Vec<Golden> {
    let text = include_str!("../../../tests/golden/smollm2-135m-q4_1.json");
    let golden: Value = serde_json::from_str(text).unwrap();
    let ids = |v: &Value| v.as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
    let floats = |v: &Value| v.as_array().unwrap().iter().map(|t| t.as_f64().unwrap()).collect();
    let top5 = |v: &Value| {
        let pairs = v.as_array().unwrap().iter().map(|pair| pair.as_array().unwrap());
        pairs.map(|pair| (pair[0].as_u64().unwrap() as u32, pair[1].as_f64().unwrap())).collect()
    };
    let prompts = golden["prompts"].as_array().unwrap().iter();
    prompts
        .map(|p| Golden {
            name: p["name"].as_str().unwrap().to_owned(),
            prompt: ids(&p["prompt_tokens"]),
            tokens: ids(&p["greedy_tokens"]),
            margins: floats(&p["top2_margins"]),
            logprobs: floats(&p["logprobs"]),
            top5: top5(&p["first_token_top5_logprobs"]),
        })
        .filter(|golden| golden.prompt.len() <= LONGEST)
        .collect()
}

/// All prompts, decoded together; each next input is the golden token, so that one close call does not hide the rest.
#[test]
fn greedy_tokens_and_logprobs_are_the_references() {
    let Some(model) = default_model_or_skip("golden tokens") else { return };
    let goldens = goldens();
    let total: usize = goldens.iter().map(|g| g.prompt.len() + g.tokens.len() + 16).sum();
    let config = CpuEngineConfig {
        num_blocks: total.div_ceil(16) + goldens.len(),
        kv_dtype: KvDtype::F32,
        num_threads: 2,
        precision: Precision::F32,
        ..CpuEngineConfig::default()
    };
    let mut rig = Rig::new(&model, config);
    let mut sequences = Vec::new();
    let mut checks = Checks::default();
    for golden in &goldens {
        let mut sequence = rig.sequence(golden.prompt.len() + golden.tokens.len());
        let first = rig.prefill(&mut sequence, &golden.prompt, 512);
        checks.token(golden, 0, first.token, first.logprob);
        // The last token again, with all its logits.
        sequence.done -= 1;
        let logits = rig.logits(&mut sequence, &golden.prompt[golden.prompt.len() - 1..], 1);
        checks.top5(golden, &logits);
        sequences.push(sequence);
    }
    for step in 1..goldens[0].tokens.len() {
        for (golden, sequence) in goldens.iter().zip(&mut sequences) {
            let position = sequence.done + 1;
            rig.add(sequence, &golden.tokens[step - 1..step], greedy(position));
        }
        rig.step();
        for (golden, sampled) in goldens.iter().zip(&rig.output.sampled) {
            checks.token(golden, step, sampled.token, sampled.logprob);
        }
    }
    assert!(checks.exact > 11 * 60, "only {} tokens were decided clearly enough to compare", checks.exact);
    assert_eq!(checks.failures, Vec::<String>::new());
}

#[derive(Default)]
struct Checks {
    exact: usize,
    failures: Vec<String>,
}

impl Checks {
    fn token(&mut self, golden: &Golden, step: usize, token: u32, logprob: f32) {
        let (name, want) = (&golden.name, golden.tokens[step]);
        if golden.margins[step] >= DECIDED {
            self.exact += 1;
            if token != want {
                self.failures.push(format!("{name}, token {step}: {token}, want {want}"));
            }
        }
        let off = (f64::from(logprob) - golden.logprobs[step]).abs();
        if token == want && off > LOGPROB_TOLERANCE {
            self.failures.push(format!("{name}, token {step}: log-probability is off by {off}"));
        }
    }

    fn top5(&mut self, golden: &Golden, logits: &[f32]) {
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        for &(token, want) in &golden.top5 {
            let off = (f64::from(logits[token as usize]) - sum.ln() - want).abs();
            if off > LOGPROB_TOLERANCE {
                self.failures.push(format!("{}, first token's {token}: off by {off}", golden.name));
            }
        }
    }
}

/// f16 KV is the default: it rounds K and V, and stays close.
#[test]
fn f16_kv_stays_close_to_the_reference() {
    let Some(model) = default_model_or_skip("f16 KV against the reference") else { return };
    let golden = &goldens()[3];
    let mut rig = Rig::new(
        &model,
        CpuEngineConfig { num_blocks: 32, precision: Precision::F32, ..CpuEngineConfig::default() },
    );
    let mut sequence = rig.sequence(golden.prompt.len() + golden.tokens.len());
    let tokens = [&golden.prompt[..], &golden.tokens].concat();
    rig.add(&mut sequence, &tokens, Logits::All);
    rig.step();
    let vocab = rig.output.logits.len() / tokens.len();
    let mut worst: f64 = 0.0;
    for (step, &token) in golden.tokens.iter().enumerate() {
        let logits = &rig.output.logits[(golden.prompt.len() - 1 + step) * vocab..][..vocab];
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        worst = worst.max((f64::from(logits[token as usize]) - sum.ln() - golden.logprobs[step]).abs());
    }
    assert!(worst < 0.02, "log-probabilities are off by {worst}");
}

/// Where the margin between the two best logits is at least this, rounding activations to 8 bits changes no choice.
const INT8_DECIDED: f64 = 0.5;

/// Teacher-forced over every golden token: both precisions see the same input at each step.
#[test]
fn int8_activations_change_little() {
    let Some(model) = default_model_or_skip("int8 activations against f32") else { return };
    let rig = |precision| {
        let engine =
            CpuEngineConfig { num_blocks: 128, num_threads: 2, precision, ..CpuEngineConfig::default() };
        Rig::new(&model, engine)
    };
    let (mut exact, mut rounded) = (rig(Precision::F32), rig(Precision::Int8));
    let mut divergence = Divergence::default();
    for golden in &goldens() {
        let [want, got] = [&mut exact, &mut rounded].map(|rig| {
            let mut sequence = rig.sequence(golden.prompt.len() + golden.tokens.len());
            rig.prefill(&mut sequence, &golden.prompt, 512);
            sequence.done -= 1;
            let forced = golden.prompt.last().into_iter().chain(&golden.tokens[..golden.tokens.len() - 1]);
            let logits = rig.logits(&mut sequence, &forced.copied().collect::<Vec<_>>(), 64);
            rig.release(sequence);
            logits
        });
        let vocab = want.len() / golden.tokens.len();
        for (want, got) in want.chunks_exact(vocab).zip(got.chunks_exact(vocab)) {
            divergence.add(want, got);
        }
    }
    eprintln!("{divergence:?}, mean KL {:.2e}", divergence.mean_kl());
    assert!(divergence.count >= 64 * 11);
    assert!(divergence.widest_flip < INT8_DECIDED);
    // Measured: mean KL 0.0023, 22 of 704 choices differ, by a margin of 0.25 at most. One outlier of a logit is off by 5.
    assert!(divergence.mean_kl() < 0.005);
    assert!(divergence.flips <= 35 && divergence.largest_difference < 8.0);
}
