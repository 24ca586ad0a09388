//! What the CUDA engine does with the shape of an 8B model, weights at random, beside what the card does at most. Figures, no test: `tests/gpu/shape` asks
//! for them by `BATON_SHAPE`, `8b` or `tiny`, and takes this program to a card.

use std::borrow::Cow;
use std::time::Instant;

use baton_engine::{CudaEngine, CudaEngineConfig, CudaRates, Quantize, WeightSource, cuda_rates};
use baton_kv::KvDtype;
use baton_model::{Model, ModelConfig, ModelError, RopeScaling, RopeStyle, Tensor, WeightType};
use baton_scheduler::{Engine, Flow, RowSampling, SamplingParams, SequenceId, StepOutput, StepPlan};
use serde_json::json;

/// Rounds, of which the median counts.
const ROUNDS: usize = 5;

/// Sizes of a run.
struct Sizes {
    config: ModelConfig,
    /// Tokens of a prompt.
    prompt: usize,
    /// Sequences that decode.
    batch: usize,
    /// Width of the matrices, and bytes of the copies, that the card's own rates are measured with.
    width: usize,
    copied: usize,
}

/// Llama 3 8B (Grattafiori and others, 2024, table 3).
fn eight_b() -> ModelConfig {
    ModelConfig {
        family: "llama".to_owned(),
        name: "8B shape, weights at random".to_owned(),
        num_layers: 32,
        hidden: 4096,
        num_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        ffn: 14_336,
        vocab: 128_256,
        context: 8192,
        rope_base: 500_000.0,
        rope_style: RopeStyle::Interleaved,
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        tied_embedding: false,
        attention_bias: false,
        qk_norm: false,
        bos: None,
        turn_end: None,
        eos: Vec::new(),
        add_bos: false,
    }
}

fn sizes(name: &str) -> Sizes {
    match name {
        "8b" => Sizes { config: eight_b(), prompt: 2048, batch: 32, width: 8192, copied: 1 << 30 },
        "tiny" => Sizes { config: Model::tiny().config, prompt: 64, batch: 2, width: 64, copied: 1 << 20 },
        other => panic!("BATON_SHAPE is {other}: 8b or tiny"),
    }
}

/// Weights at random, made when they are asked for.
struct AtRandom(ModelConfig);

impl AtRandom {
    /// (rows, columns) of a tensor.
    fn shape(&self, name: &str) -> Option<(usize, usize)> {
        let c = &self.0;
        let (q, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        Some(match layer.map_or(name, |(_, rest)| rest) {
            "token_embd.weight" | "output.weight" => (c.vocab, c.hidden),
            "output_norm.weight" | "attn_norm.weight" | "ffn_norm.weight" => (1, c.hidden),
            "attn_q.weight" => (q, c.hidden),
            "attn_k.weight" | "attn_v.weight" => (kv, c.hidden),
            "attn_output.weight" => (c.hidden, q),
            "ffn_gate.weight" | "ffn_up.weight" => (c.ffn, c.hidden),
            "ffn_down.weight" => (c.hidden, c.ffn),
            _ => return None,
        })
    }

    /// Elements of all matrices that a token passes, the output matrix excepted; and of that.
    fn macs(&self) -> (usize, usize) {
        let c = &self.0;
        let layer = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
        let elements = layer.iter().filter_map(|name| self.shape(&format!("blk.0.{name}.weight")));
        let in_layers: usize = elements.map(|(rows, cols)| rows * cols).sum();
        (c.num_layers * in_layers, c.vocab * c.hidden)
    }
}

impl WeightSource for AtRandom {
    fn config(&self) -> &ModelConfig {
        &self.0
    }

    fn digest(&self) -> [u8; 32] {
        [8; 32]
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let Some((rows, cols)) = self.shape(name) else {
            panic!("the engine asks for {name}, of which this file knows nothing");
        };
        let (kind, data) = match rows {
            1 => (WeightType::F32, vec![1f32.to_le_bytes(); cols].concat()),
            _ => (WeightType::BF16, at_random(rows * cols, cols)),
        };
        Ok(Tensor { name: name.to_owned(), rows, cols, kind, data: Cow::Owned(data) })
    }
}

/// bf16 elements of either sign, of 1 to 2 times the power of two below 1 / sqrt(cols).
fn at_random(elements: usize, cols: usize) -> Vec<u8> {
    let exponent = (127 - (cols as f32).sqrt().log2().ceil() as u16) << 7;
    let mut state = 0x1234_5678_9ABC_DEF1u64;
    let mut data = Vec::with_capacity(2 * elements);
    while data.len() < 2 * elements {
        // xorshift64* (Marsaglia, 2003; Vigna, 2016).
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let mut bits = state.wrapping_mul(0x2545_F491_4F6C_DD1D);
        for _ in 0..4 {
            data.extend(((bits as u16 & 0x807F) | exponent).to_le_bytes());
            bits >>= 16;
        }
    }
    data.truncate(2 * elements);
    data
}

/// The engine and the blocks of `batch` sequences.
struct Rig {
    engine: CudaEngine,
    tables: Vec<Vec<u32>>,
    sizes: Sizes,
}

impl Rig {
    fn new(sizes: Sizes, source: &AtRandom) -> Rig {
        // One token more than the prompt for each decoding step.
        let blocks = (sizes.prompt + ROUNDS + 2).div_ceil(16);
        let config = CudaEngineConfig {
            ordinal: 0,
            num_blocks: sizes.batch * blocks,
            block_size: 16,
            kv_dtype: KvDtype::BF16,
            quantize: Quantize::None,
            graphs: true,
            max_step_tokens: sizes.prompt,
        };
        let (engine, _arena) = CudaEngine::from_source(source, &config).expect("a CUDA engine");
        let table = |nth: usize| ((nth * blocks) as u32..((nth + 1) * blocks) as u32).collect();
        Rig { engine, tables: (0..sizes.batch).map(table).collect(), sizes }
    }

    fn step(&mut self, plan: &StepPlan) -> f64 {
        let (mut output, began) = (StepOutput::default(), Instant::now());
        self.engine.step(plan, &mut output, &mut |_| Flow::Continue).expect("a step");
        began.elapsed().as_secs_f64()
    }

    /// Seconds of a step that computes a whole prompt of sequence `nth` and draws its first token.
    fn prefill(&mut self, nth: usize) -> f64 {
        let vocab = self.sizes.config.vocab as u32;
        let tokens: Vec<u32> =
            (0..self.sizes.prompt as u32).map(|n| (n * 7919 + nth as u32) % vocab).collect();
        let mut plan = StepPlan::default();
        plan.push(SequenceId(nth as u64), 0, &tokens, &self.tables[nth], &[greedy(self.sizes.prompt)]);
        self.step(&plan)
    }

    /// Seconds of a step in which every sequence gets the token at `position`.
    fn decode(&mut self, position: usize) -> f64 {
        let mut plan = StepPlan::default();
        for (nth, table) in self.tables.iter().enumerate() {
            plan.push(SequenceId(nth as u64), position, &[nth as u32], table, &[greedy(position + 1)]);
        }
        self.step(&plan)
    }
}

fn greedy(position: usize) -> RowSampling {
    let params = SamplingParams { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 };
    RowSampling { params, sequence: 0, position: position as u32 }
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

#[test]
fn figures_of_a_shape() {
    let Ok(name) = std::env::var("BATON_SHAPE") else { return };
    let sizes = sizes(&name);
    let (prompt, batch, config) = (sizes.prompt, sizes.batch, sizes.config.clone());
    let card = cuda_rates(0, sizes.width, sizes.copied).expect("the card's rates");
    let source = AtRandom(config.clone());
    let (layers, output) = source.macs();
    let mut rig = Rig::new(sizes, &source);
    rig.prefill(0);
    let prefill_s = median((0..ROUNDS).map(|_| rig.prefill(0)).collect());
    for nth in 1..batch {
        rig.prefill(nth);
    }
    rig.decode(prompt);
    let decode_s = median((1..=ROUNDS).map(|nth| rig.decode(prompt + nth)).collect());

    // Attention: a score and a sum for each (query, position it sees) and element of a head; the output matrix for the last token alone.
    let attended = config.num_layers * config.num_heads * config.head_dim * prompt * (prompt + 1);
    let prefill_tflops = 2.0 * (layers * prompt + attended + output) as f64 / prefill_s / 1e12;
    let token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2;
    let step_bytes = 2 * (layers + output) + batch * prompt * token_bytes;
    let decode_gb_per_s = step_bytes as f64 / decode_s / 1e9;
    let CudaRates { matrix_tflops, copy_gb_per_s, to_device_gb_per_s, from_device_gb_per_s } = card;
    let found = json!({
        "shape": config.name, "prompt_tokens": prompt, "batch": batch, "context": prompt, "rounds": ROUNDS,
        "prefill_ms": prefill_s * 1e3, "prefill_tflops": prefill_tflops,
        "prefill_share_of_matrix_rate": prefill_tflops / matrix_tflops,
        "decode_ms": decode_s * 1e3, "decode_gb_per_s": decode_gb_per_s,
        "decode_share_of_copy_rate": decode_gb_per_s / copy_gb_per_s,
        "card_matrix_tflops": matrix_tflops, "card_copy_gb_per_s": copy_gb_per_s,
        "to_device_gb_per_s": to_device_gb_per_s, "from_device_gb_per_s": from_device_gb_per_s,
    });
    println!("\nshape: {found}");
}
