//! Small random models of every family against the logits that transformers gave for them, by a plain forward pass:
//! names, shapes, rotary embeddings, biases and head norms are as the families mean them.

#[path = "support/forward.rs"]
mod forward;
mod support;

use std::path::{Path, PathBuf};

use baton_model::{Model, ModelSource, RopeScaling, RopeStyle, WeightType};
use forward::Runner;
use serde::Deserialize;
use support::{Gguf, TensorSpec, Value};

#[derive(Deserialize)]
struct Reference {
    tokens: Vec<u32>,
    /// After each token.
    logits: Vec<Vec<f64>>,
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(name)
}

fn open(name: &str) -> Model {
    Model::open(&ModelSource::Folder(folder(name))).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The largest distance of any logit after any token.
fn distance(name: &str, model: &Model) -> f64 {
    let reference: Reference =
        serde_json::from_slice(&std::fs::read(folder(name).join("reference.json")).unwrap()).unwrap();
    assert_eq!((reference.tokens.len(), reference.logits.len()), (40, 40));
    let mut runner = Runner::new(model);
    let mut largest = 0.0f64;
    for (&token, wanted) in reference.tokens.iter().zip(&reference.logits) {
        let logits = runner.step(token);
        assert_eq!((logits.len(), wanted.len()), (256, 256));
        largest = logits.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(largest, f64::max);
    }
    largest
}

const NAMES: [&str; 5] = ["llama", "llama-rope-llama3", "llama-rope-linear", "qwen2", "qwen3"];

#[test]
fn logits_are_those_of_transformers() {
    for name in NAMES {
        let distance = distance(name, &open(name));
        println!("{name}: {distance:.1e}");
        // Recorded to 5 digits, computed in f32: measured at 2e-5 at most.
        assert!(distance < 5e-5, "{name}: {distance}");
    }
}

#[test]
fn the_reference_tells_each_trait() {
    // What a mistake would cost: each of these has to be far outside the bound.
    let wrong = |name: &str, change: fn(&mut Model)| {
        let mut model = open(name);
        change(&mut model);
        let distance = distance(name, &model);
        assert!(distance > 0.02, "{name}: {distance}");
    };
    wrong("llama", |model| model.config.rope_style = RopeStyle::Interleaved);
    wrong("llama", |model| model.config.rms_eps = 1e-2);
    wrong("llama-rope-llama3", |model| model.config.rope_scaling = RopeScaling::None);
    wrong("llama-rope-llama3", |model| model.config.rope_scaling = RopeScaling::Linear(8.0));
    wrong("llama-rope-linear", |model| model.config.rope_scaling = RopeScaling::None);
    wrong("qwen2", |model| model.config.rope_base = 10_000.0);
    wrong("qwen3", |model| model.config.rope_base = 10_000.0);
}

#[test]
fn the_fixtures_are_what_they_are_for() {
    for (name, family, kind) in [
        ("llama", "llama", WeightType::BF16),
        ("llama-rope-llama3", "llama", WeightType::F32),
        ("llama-rope-linear", "llama", WeightType::BF16),
        ("qwen2", "qwen2", WeightType::BF16),
        ("qwen3", "qwen3", WeightType::F16),
    ] {
        let model = open(name);
        let config = &model.config;
        assert_eq!((config.family.as_str(), config.rope_style), (family, RopeStyle::HalfSplit));
        assert_eq!((config.num_layers, config.hidden, config.ffn, config.vocab), (2, 64, 96, 256));
        assert_eq!((config.num_heads, config.num_kv_heads), (4, 2));
        assert_eq!(config.head_dim, if name == "qwen3" { 32 } else { 16 });
        assert_eq!((config.attention_bias, config.qk_norm), (family == "qwen2", family == "qwen3"));
        assert_eq!(config.tied_embedding, !model.has_tensor("output.weight"));
        assert_eq!((config.bos, config.eos.as_slice(), config.turn_end), (Some(1), [2].as_slice(), Some(2)));
        assert_eq!(model.tensor("blk.1.ffn_down.weight").unwrap().kind, kind);
        assert_eq!(model.tensor("blk.1.ffn_norm.weight").unwrap().kind, WeightType::F32, "norms are widened");
    }
    assert!(folder("qwen2").join("model.safetensors.index.json").is_file(), "one of them is sharded");
    assert_eq!(open("qwen2").tensor("blk.0.attn_k.bias").unwrap().kind, WeightType::F32);
}

/// The same model as a GGUF file, written as converters write it.
fn as_gguf(model: &Model, name: &str) -> Gguf {
    let config = &model.config;
    let mut file = Gguf { metadata: Vec::new(), tensors: Vec::new(), alignment: 32 };
    file.set("general.architecture", config.family.as_str().into());
    for (key, value) in [
        ("block_count", config.num_layers),
        ("context_length", config.context),
        ("embedding_length", config.hidden),
        ("feed_forward_length", config.ffn),
        ("attention.head_count", config.num_heads),
        ("attention.head_count_kv", config.num_kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
    ] {
        file.set(&format!("{}.{key}", config.family), Value::U32(value as u32));
    }
    file.set(&format!("{}.attention.layer_norm_rms_epsilon", config.family), Value::F32(config.rms_eps));
    file.set(&format!("{}.rope.freq_base", config.family), Value::F32(config.rope_base));
    if let RopeScaling::Factors(factors) = &config.rope_scaling {
        let data = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        let dims = vec![factors.len() as u64];
        file.tensors.push(TensorSpec { name: "rope_freqs.weight".to_owned(), dims, kind: 0, data });
    }
    for tensor_name in tensor_names(model) {
        let tensor = model.tensor(&tensor_name).unwrap();
        let kind = match tensor.kind {
            WeightType::F32 => 0,
            WeightType::F16 => 1,
            WeightType::BF16 => 30,
            other => panic!("{name} holds {other}"),
        };
        let mut data = tensor.data.to_vec();
        let heads = [("attn_q.weight", config.num_heads), ("attn_k.weight", config.num_kv_heads)];
        let heads = heads.iter().find(|(part, _)| tensor_name.ends_with(part));
        if let Some((_, num_heads)) = heads
            && config.family == "llama"
        {
            data = interleaved(&data, *num_heads, config.head_dim);
        }
        let dims = match tensor.rows {
            1 => vec![tensor.cols as u64],
            rows => vec![tensor.cols as u64, rows as u64],
        };
        file.tensors.push(TensorSpec { name: tensor_name, dims, kind, data });
    }
    file
}

fn tensor_names(model: &Model) -> Vec<String> {
    let parts = [
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    ];
    let mut names = ["token_embd", "output_norm", "output"].map(|name| format!("{name}.weight")).to_vec();
    for layer in 0..model.config.num_layers {
        names.extend(parts.map(|part| format!("blk.{layer}.{part}.weight")));
        names.extend(["q", "k"].map(|part| format!("blk.{layer}.attn_{part}_norm.weight")));
        names.extend(["q", "k", "v"].map(|part| format!("blk.{layer}.attn_{part}.bias")));
    }
    names.retain(|name| model.has_tensor(name));
    names
}

/// Row `i` of a head's first half, then row `i` of its second.
fn interleaved(data: &[u8], num_heads: usize, head_dim: usize) -> Vec<u8> {
    let row_bytes = data.len() / (num_heads * head_dim);
    let rows: Vec<&[u8]> = data.chunks_exact(row_bytes).collect();
    let heads = rows.chunks_exact(head_dim);
    heads.flat_map(|head| (0..head_dim).flat_map(|i| head[i / 2 + i % 2 * head_dim / 2].to_vec())).collect()
}

#[test]
fn the_same_models_as_gguf_files_give_the_same_logits() {
    for name in ["llama", "llama-rope-llama3", "qwen2", "qwen3"] {
        let temporary = tempfile::tempdir().unwrap();
        let path = as_gguf(&open(name), name).write(temporary.path());
        let model = Model::open(&ModelSource::File(path)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let interleaved = model.config.rope_style == RopeStyle::Interleaved;
        assert_eq!(interleaved, model.config.family == "llama", "{name}");
        let distance = distance(name, &model);
        assert!(distance < 5e-5, "{name}: {distance}");
    }
}
