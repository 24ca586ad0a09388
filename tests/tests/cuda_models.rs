//! What sets models apart, on the CUDA engine and a driver for machines without a card: biases, norms of heads, both pairings of the rotary
//! embedding, scaled frequencies, tied embeddings; and the default model, quantised as it is, against its golden tokens.

use baton_engine::{
    CpuEngine, CpuEngineConfig, CudaEngine, CudaEngineConfig, Precision, Quantize, WeightSource,
};
use baton_kv::KvDtype;
use baton_model::{Model, ModelConfig, ModelError, ModelSource, RopeScaling, RopeStyle, Tensor, WeightType};
use baton_scheduler::{Engine, Flow, SequenceId, StepOutput, StepPlan};
use baton_tests::fake_cuda::FakeCuda;
use baton_tests::{Turn, golden, model_or_skip};

const CONFIG: CudaEngineConfig = CudaEngineConfig {
    ordinal: 0,
    num_blocks: 8,
    block_size: 16,
    kv_dtype: KvDtype::F16,
    quantize: Quantize::None,
    graphs: true,
    max_step_tokens: 64,
};

/// `builtin:tiny` with another configuration, and tensors made up for what it lacks.
struct Altered {
    tiny: Model,
    config: ModelConfig,
}

impl Altered {
    fn new(change: impl FnOnce(&mut ModelConfig)) -> Self {
        let tiny = Model::tiny();
        let mut config = ModelConfig { context: 256, ..tiny.config.clone() };
        change(&mut config);
        Self { tiny, config }
    }
}

impl WeightSource for Altered {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn digest(&self) -> [u8; 32] {
        self.tiny.digest
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let c = &self.config;
        let made_up = |len: usize, least: f32| {
            let data = (0..len).flat_map(|i| (least + (i * 37 % 11) as f32 * 0.15).to_le_bytes()).collect();
            Tensor { name: name.to_owned(), rows: 1, cols: len, kind: WeightType::F32, data }
        };
        match name {
            _ if name.ends_with("attn_q.bias") => Ok(made_up(c.num_heads * c.head_dim, -0.7)),
            _ if name.ends_with(".bias") => Ok(made_up(c.num_kv_heads * c.head_dim, -0.9)),
            _ if name.contains("_q_norm") => Ok(made_up(c.head_dim, 0.3)),
            _ if name.contains("_k_norm") => Ok(made_up(c.head_dim, 0.5)),
            _ => self.tiny.tensor(name),
        }
    }
}

/// Logits of all tokens, computed at once.
fn logits(engine: &mut dyn Engine, tokens: &[u32]) -> Vec<f32> {
    let blocks: Vec<u32> = (0..8).rev().collect();
    let mut plan = StepPlan::default();
    plan.push_all_logits(SequenceId(1), 0, tokens, &blocks);
    let mut output = StepOutput::default();
    engine.step(&plan, &mut output, &mut |_| Flow::Continue).expect("a step");
    output.logits
}

#[test]
fn every_trait_of_a_family_gives_the_cpus_logits() {
    let _turn = Turn::take();
    let Some(_fake) = FakeCuda::build_or_skip().map(FakeCuda::loaded) else { return };
    let tokens: Vec<u32> = (0..60).map(|i| 32 + (i * i * 29 + i * 5) % 95).collect();
    let factors = || RopeScaling::Factors((0..8).map(|i| 1.0 + i as f32 * 0.8).collect());
    let qwen2 = Altered::new(|c| (c.attention_bias, c.rope_style) = (true, RopeStyle::HalfSplit));
    let qwen3 = Altered::new(|c| {
        (c.qk_norm, c.tied_embedding, c.rope_style) = (true, true, RopeStyle::HalfSplit);
    });
    let llama3 = Altered::new(|c| c.rope_scaling = factors());
    let mut all = Vec::new();
    for (name, source) in [("qwen2", &qwen2), ("qwen3", &qwen3), ("llama3", &llama3)] {
        let cpu = CpuEngineConfig {
            num_blocks: 8,
            kv_dtype: KvDtype::F32,
            precision: Precision::F32,
            ..CpuEngineConfig::default()
        };
        let want = logits(&mut CpuEngine::from_source(source, cpu).expect("a CPU engine").0, &tokens);
        let got = logits(&mut CudaEngine::from_source(source, &CONFIG).expect("a CUDA engine").0, &tokens);
        let largest = want.iter().fold(0.0, |largest: f32, logit| largest.max(logit.abs()));
        let apart = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{name}: logits up to {largest}, {apart} apart");
        assert!(got.len() == want.len() && apart < 0.03 * largest, "{name}: {apart} of {largest}");
        all.push(want);
    }
    // What sets them apart is large beside that.
    for (a, b) in [(0, 1), (1, 2), (0, 2)] {
        let apart = all[a].iter().zip(&all[b]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart > 1.0, "{apart}");
    }
}

/// Margins below which f16 may choose otherwise than f32 with the same weights.
const MARGIN: f64 = 0.4;

#[test]
fn the_default_model_gives_its_golden_tokens_where_they_are_decided() {
    let _turn = Turn::take();
    let Some(_fake) = FakeCuda::build_or_skip().map(FakeCuda::loaded) else { return };
    let Some(path) = model_or_skip() else { return };
    let model = Model::open(&ModelSource::File(path)).expect("the default model");
    let golden = golden::named("code");
    let (first, num) = (golden.prompt_tokens.len() - 1, 14);
    let tokens = [&golden.prompt_tokens[..], &golden.greedy_tokens[..num - 1]].concat();
    let (mut engine, _arena) = CudaEngine::new(&model, &CONFIG).expect("a CUDA engine");
    let all = logits(&mut engine, &tokens);
    let mut num_compared = 0;
    for (nth, row) in all.chunks_exact(engine.vocab_size()).skip(first).enumerate() {
        let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("logits") as u32;
        if golden.top2_margins[nth] >= MARGIN {
            assert_eq!(best, golden.greedy_tokens[nth], "token {nth}, margin {}", golden.top2_margins[nth]);
            num_compared += 1;
        }
    }
    assert!(num_compared > num / 2, "{num_compared} of {num} tokens are decided");
}
