//! What rounding costs on real text: perplexity, divergence and choices of every KV type and of 8-bit activations, against f32.

mod support;

use std::path::Path;

use baton_engine::{CpuEngineConfig, Precision};
use baton_kv::KvDtype;
use baton_model::Model;
use baton_text::TextModel;
use support::divergence::{Divergence, log_sum};
use support::{Rig, default_model_or_skip};

/// Tokens of a step.
const CHUNK: usize = 256;

/// Two public-domain texts one after the other: about 2,000 tokens.
fn tokens(model: &Model) -> Vec<u32> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let text =
        ["declaration.txt", "gettysburg.txt"].map(|name| std::fs::read_to_string(folder.join(name)).unwrap());
    TextModel::open(model).unwrap().encode(&text.join("\n\n"), true).unwrap()
}

/// Runs the text and gives each step's logits to `each`, with the position of their first token.
fn run(model: &Model, engine: CpuEngineConfig, tokens: &[u32], mut each: impl FnMut(usize, &[f32])) {
    let num_blocks = tokens.len().div_ceil(16);
    let mut rig = Rig::new(model, CpuEngineConfig { num_blocks, num_threads: 2, ..engine });
    let mut sequence = rig.sequence(tokens.len());
    for (nth, chunk) in tokens.chunks(CHUNK).enumerate() {
        each(nth * CHUNK, &rig.logits(&mut sequence, chunk, CHUNK));
    }
}

/// Mean surprise at each next token, exponentiated.
#[derive(Default)]
struct Perplexity {
    nats: f64,
    count: usize,
}

impl Perplexity {
    fn add(&mut self, logits: &[f32], next: Option<&u32>) {
        if let Some(&next) = next {
            self.nats += log_sum(logits) - f64::from(logits[next as usize]);
            self.count += 1;
        }
    }

    fn value(&self) -> f64 {
        (self.nats / self.count as f64).exp()
    }
}

/// What is allowed, about twice what was measured.
struct Bounds {
    perplexity_off: f64,
    mean_kl: f64,
    flips: f64,
}

/// Prints and checks each case against f32 arithmetic over f32 KV.
fn compare(model: &Model, cases: &[(&str, CpuEngineConfig, Bounds)]) {
    let exact =
        CpuEngineConfig { precision: Precision::F32, kv_dtype: KvDtype::F32, ..CpuEngineConfig::default() };
    let tokens = tokens(model);
    assert!((1800..2300).contains(&tokens.len()), "{} tokens", tokens.len());
    let vocab = model.config.vocab;
    let mut reference = Vec::with_capacity(tokens.len() * vocab);
    let mut of_reference = Perplexity::default();
    run(model, exact, &tokens, |first, logits| {
        for (nth, row) in logits.chunks_exact(vocab).enumerate() {
            of_reference.add(row, tokens.get(first + nth + 1));
        }
        reference.extend_from_slice(logits);
    });
    eprintln!("f32: perplexity {:.4} over {} tokens", of_reference.value(), tokens.len());
    let mut failures = Vec::new();
    for (name, engine, bounds) in cases {
        let (mut perplexity, mut divergence) = (Perplexity::default(), Divergence::default());
        run(model, engine.clone(), &tokens, |first, logits| {
            let wanted = reference[first * vocab..].chunks_exact(vocab);
            for (nth, (got, want)) in logits.chunks_exact(vocab).zip(wanted).enumerate() {
                perplexity.add(got, tokens.get(first + nth + 1));
                divergence.add(want, got);
            }
        });
        let off = perplexity.value() / of_reference.value() - 1.0;
        let flips = divergence.flips as f64 / divergence.count as f64;
        eprintln!(
            "{name}: perplexity {:.4} ({:+.3} %), mean KL {:.2e}, largest logit difference {:.3}, top-1 differs {:.2} % \
             (widest margin {:.3})",
            perplexity.value(),
            100.0 * off,
            divergence.mean_kl(),
            divergence.largest_difference,
            100.0 * flips,
            divergence.widest_flip
        );
        if off.abs() >= bounds.perplexity_off
            || divergence.mean_kl() >= bounds.mean_kl
            || flips >= bounds.flips
        {
            failures.push(name);
        }
    }
    assert!(failures.is_empty(), "beyond their bounds, see above: {failures:?}");
}

#[test]
fn rounding_costs_less_than_a_percent_of_perplexity() {
    let Some(model) = default_model_or_skip("perplexity") else { return };
    let kv = |kv_dtype| CpuEngineConfig { precision: Precision::F32, kv_dtype, ..CpuEngineConfig::default() };
    let served = |kv_dtype| CpuEngineConfig { kv_dtype, ..CpuEngineConfig::default() };
    let bounds = |perplexity_off, mean_kl, flips| Bounds { perplexity_off, mean_kl, flips };
    compare(
        &model,
        &[
            ("f16 KV", kv(KvDtype::F16), bounds(0.001, 1e-5, 0.005)),
            ("bf16 KV", kv(KvDtype::BF16), bounds(0.002, 3e-4, 0.02)),
            ("fp8 KV", kv(KvDtype::Fp8), bounds(0.05, 0.06, 0.15)),
            ("int8 activations, f16 KV (the default)", served(KvDtype::F16), bounds(0.01, 1e-2, 0.08)),
            ("int8 activations, fp8 KV", served(KvDtype::Fp8), bounds(0.05, 0.06, 0.15)),
        ],
    );
}
