//! `--quantize int8`: what the engine computes is what it would from the same model stored as Q8_0.

mod support;

use std::borrow::Cow;
use std::path::Path;

use baton_engine::{CpuEngine, CpuEngineConfig, Precision, Quantize, WeightSource};
use baton_kv::KvDtype;
use baton_model::{Model, ModelConfig, ModelError, ModelSource, Tensor, WeightType};
use half::f16;
use support::divergence::Divergence;
use support::random_model::{RandomModel, config};
use support::{Random, Rig, bits};

/// A model whose matrices are read as Q8_0, quantised here by the book.
struct AsQ8<'a>(&'a RandomModel);

impl WeightSource for AsQ8<'_> {
    fn config(&self) -> &ModelConfig {
        &self.0.config
    }

    fn digest(&self) -> [u8; 32] {
        [0; 32]
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let tensor = self.0.tensor(name)?;
        if name.ends_with("norm.weight") {
            return Ok(tensor);
        }
        let data = self.0.values(name).chunks_exact(32).flat_map(q8_0).collect();
        Ok(Tensor { kind: WeightType::Q8_0, data: Cow::Owned(data), ..tensor })
    }
}

fn q8_0(x: &[f64]) -> Vec<u8> {
    let largest = x.iter().fold(0f64, |largest, x| largest.max(x.abs()));
    // Divided in f32 as the engine does: a quotient that rounds onto a half would go either way otherwise.
    let scale = f16::from_f32(largest as f32 / 127.0);
    let quant =
        |x: &f64| ((*x as f32 / scale.to_f32()).round_ties_even().clamp(-127.0, 127.0) as i8).cast_unsigned();
    scale.to_le_bytes().into_iter().chain(x.iter().map(quant)).collect()
}

#[test]
fn quantising_at_load_gives_the_bits_of_a_model_stored_that_way() {
    // A shape of whole blocks of 32.
    let shape = ModelConfig { tied_embedding: false, ..config(WeightType::Q8_0) };
    for kind in [WeightType::F32, WeightType::F16, WeightType::BF16] {
        let model = RandomModel::new(61, shape.clone(), kind);
        let tokens = Random(62).tokens(40, shape.vocab);
        let logits = |source: &dyn WeightSource, quantize, precision| {
            let engine = CpuEngineConfig { num_blocks: 4, quantize, precision, ..CpuEngineConfig::default() };
            let mut rig = Rig::new(source, engine);
            let mut sequence = rig.sequence(tokens.len());
            bits(&rig.logits(&mut sequence, &tokens, 16))
        };
        for precision in [Precision::Int8, Precision::F32] {
            let want = logits(&AsQ8(&model), Quantize::None, precision);
            assert!(want == logits(&model, Quantize::Int8, precision), "{kind}, {precision:?}");
            assert!(
                want != logits(&model, Quantize::None, precision),
                "{kind}: quantising changes something"
            );
        }
    }
}

/// Safetensors as they come, single and in shards, of every family: close to transformers' own logits.
#[test]
fn safetensors_models_stay_close_when_they_are_quantised() {
    for name in ["llama", "llama-rope-linear", "llama-rope-llama3", "qwen2", "qwen3"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(name);
        let model = Model::open(&ModelSource::Folder(folder)).unwrap();
        let vocab = model.config.vocab;
        let tokens = Random(63).tokens(40, vocab);
        let logits = |quantize, precision| {
            let engine = CpuEngineConfig {
                num_blocks: 4,
                quantize,
                precision,
                kv_dtype: KvDtype::F32,
                ..CpuEngineConfig::default()
            };
            let mut rig = Rig::new(&model, engine);
            let mut sequence = rig.sequence(tokens.len());
            rig.logits(&mut sequence, &tokens, 64)
        };
        let want = logits(Quantize::None, Precision::F32);
        let mut divergence = Divergence::default();
        let got = logits(Quantize::Int8, Precision::Auto);
        for (want, got) in want.chunks_exact(vocab).zip(got.chunks_exact(vocab)) {
            divergence.add(want, got);
        }
        eprintln!("{name}: mean KL {:.2e}, {divergence:?}", divergence.mean_kl());
        // Random weights have no structure that would hide rounding: 0.003 in the first of them.
        assert!(divergence.mean_kl() < 0.02 && divergence.mean_kl() > 0.0, "{name}");
    }
}

#[test]
fn what_can_not_be_quantised_is_refused_by_name_before_anything_is_loaded() {
    let refusal = |kind| {
        let model = RandomModel::new(64, config(kind), kind);
        let engine = CpuEngineConfig { quantize: Quantize::Int8, ..CpuEngineConfig::default() };
        CpuEngine::from_source(&model, engine).err().expect("to be refused").to_string()
    };
    // Rows of 48.
    assert!(
        refusal(WeightType::F16).starts_with("tensor 'token_embd.weight': is F16 in rows of 48 elements")
    );
    for kind in [WeightType::Q4_0, WeightType::Q4_1, WeightType::Q8_0] {
        let said = refusal(kind);
        assert!(said.starts_with(&format!("tensor 'token_embd.weight': is {kind}, which is")), "{said}");
    }
}
