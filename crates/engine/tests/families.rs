//! One decoder for all families, against logits that transformers made from small random models.

mod support;

use std::path::{Path, PathBuf};

use baton_engine::{CpuEngineConfig, Isa, Precision};
use baton_kv::KvDtype;
use baton_model::{Model, ModelSource};
use serde_json::Value;
use support::Rig;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(name)
}

fn reference(name: &str) -> (Vec<u32>, Vec<f64>) {
    let text = std::fs::read_to_string(folder(name).join("reference.json")).unwrap();
    let reference: Value = serde_json::from_str(&text).unwrap();
    let numbers = |v: &Value| v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
    let tokens = numbers(&reference["tokens"]).into_iter().map(|t| t as u32).collect();
    let logits = reference["logits"].as_array().unwrap().iter().flat_map(numbers).collect();
    (tokens, logits)
}

fn compare(name: &str) {
    let model = Model::open(&ModelSource::Folder(folder(name))).unwrap();
    let (tokens, want) = reference(name);
    for isa in Isa::available() {
        for (num_threads, chunk) in [(1, 40), (2, 7), (1, 1)] {
            let engine = CpuEngineConfig {
                num_blocks: 4,
                kv_dtype: KvDtype::F32,
                precision: Precision::F32,
                num_threads,
                isa: Some(isa),
                ..CpuEngineConfig::default()
            };
            let mut rig = Rig::new(&model, engine);
            let mut sequence = rig.sequence(tokens.len());
            let got = rig.logits(&mut sequence, &tokens, chunk);
            assert_eq!(got.len(), want.len());
            let off = got.iter().zip(&want).map(|(&g, w)| (f64::from(g) - w).abs()).fold(0.0, f64::max);
            assert!(off < 1e-4, "{name}, {isa:?}, chunks of {chunk}: off by {off}");
        }
    }
}

#[test]
fn llama() {
    compare("llama");
}

#[test]
fn llama_with_a_linear_rope() {
    compare("llama-rope-linear");
}

#[test]
fn llama_3_with_its_rope() {
    compare("llama-rope-llama3");
}

#[test]
fn qwen2_with_its_biases() {
    compare("qwen2");
}

#[test]
fn qwen3_with_its_norms_of_heads() {
    compare("qwen3");
}
