//! Small models of random weights in every storage format, with an independent reading of those formats.

use std::borrow::Cow;
use std::collections::HashMap;

use baton_engine::WeightSource;
use baton_model::{ModelConfig, ModelError, RopeScaling, RopeStyle, Tensor, WeightType};
use half::{bf16, f16};

use super::Random;

pub struct RandomModel {
    pub config: ModelConfig,
    tensors: HashMap<String, (usize, usize, WeightType, Vec<u8>)>,
}

/// A small shape that fits `kind`: unquantised formats get sizes that are no multiple of a vector or a block.
pub fn config(kind: WeightType) -> ModelConfig {
    let plain = kind.block_elements() == 1;
    ModelConfig {
        num_layers: 2,
        hidden: if plain { 48 } else { 64 },
        num_heads: if plain { 3 } else { 6 },
        num_kv_heads: if plain { 1 } else { 2 },
        head_dim: 16,
        ffn: if plain { 84 } else { 160 },
        vocab: 77,
        context: 4096,
        rope_base: 10_000.0,
        rope_style: if plain { RopeStyle::HalfSplit } else { RopeStyle::Interleaved },
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        tied_embedding: !plain,
        ..baton_model::Model::tiny().config
    }
}

impl RandomModel {
    pub fn new(seed: u64, config: ModelConfig, kind: WeightType) -> RandomModel {
        let mut random = Random(seed);
        let (q, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
        let mut shapes = vec![
            ("token_embd.weight".to_owned(), config.vocab, config.hidden),
            ("output_norm.weight".to_owned(), 1, config.hidden),
        ];
        if !config.tied_embedding {
            shapes.push(("output.weight".to_owned(), config.vocab, config.hidden));
        }
        for n in 0..config.num_layers {
            for (name, rows, cols) in [
                ("attn_norm", 1, config.hidden),
                ("attn_q", q, config.hidden),
                ("attn_k", kv, config.hidden),
                ("attn_v", kv, config.hidden),
                ("attn_output", config.hidden, q),
                ("ffn_norm", 1, config.hidden),
                ("ffn_gate", config.ffn, config.hidden),
                ("ffn_up", config.ffn, config.hidden),
                ("ffn_down", config.hidden, config.ffn),
            ] {
                shapes.push((format!("blk.{n}.{name}.weight"), rows, cols));
            }
        }
        let tensors = shapes.into_iter().map(|(name, rows, cols)| {
            let tensor = if name.ends_with("norm.weight") {
                let data = (0..cols).flat_map(|_| (1.0 + 0.2 * random.signed()).to_le_bytes()).collect();
                (rows, cols, WeightType::F32, data)
            } else {
                // Rows of deviation about 1 for embeddings, 1 / sqrt(cols) otherwise.
                let size = if name == "token_embd.weight" { 1.0 } else { 1.7 / (cols as f32).sqrt() };
                (rows, cols, kind, encode(kind, rows * cols, size, &mut random))
            };
            (name, tensor)
        });
        RandomModel { tensors: tensors.collect(), config }
    }

    /// A tensor as f64, row by row.
    pub fn values(&self, name: &str) -> Vec<f64> {
        let (_, _, kind, data) = &self.tensors[name];
        decode(*kind, data)
    }
}

impl WeightSource for RandomModel {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn digest(&self) -> [u8; 32] {
        [0; 32]
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        match self.tensors.get(name) {
            Some((rows, cols, kind, data)) => Ok(Tensor {
                name: name.to_owned(),
                rows: *rows,
                cols: *cols,
                kind: *kind,
                data: Cow::Borrowed(data),
            }),
            None => Err(ModelError::NotFound { path: name.into() }),
        }
    }
}

/// Random weights of about `size`, in GGML's layout.
fn encode(kind: WeightType, count: usize, size: f32, random: &mut Random) -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 0..count / kind.block_elements() {
        let mut half = |x: f32| out.extend(f16::from_f32(x).to_le_bytes());
        let spread = 0.75 + 0.25 * random.signed();
        let quants = match kind {
            WeightType::F32 => {
                out.extend((size * random.signed()).to_le_bytes());
                0
            }
            WeightType::F16 => {
                half(size * random.signed());
                0
            }
            WeightType::BF16 => {
                out.extend(bf16::from_f32(size * random.signed()).to_le_bytes());
                0
            }
            WeightType::Q8_0 => {
                half(size * spread / 128.0);
                32
            }
            WeightType::Q4_0 => {
                half(-size * spread / 8.0);
                16
            }
            WeightType::Q4_1 => {
                half(size * spread / 7.5);
                half(-size * spread);
                16
            }
        };
        out.extend((0..quants).map(|_| random.next() as u8));
    }
    out
}

/// GGML's blocks, read by the book.
fn decode(kind: WeightType, data: &[u8]) -> Vec<f64> {
    let half = |b: &[u8]| f64::from(f16::from_le_bytes([b[0], b[1]]).to_f32());
    let mut out = Vec::new();
    for block in data.chunks_exact(kind.block_bytes()) {
        let nibbles = |q: &[u8]| -> Vec<f64> {
            let (low, high) = (q.iter().map(|b| b & 15), q.iter().map(|b| b >> 4));
            low.chain(high).map(f64::from).collect()
        };
        match kind {
            WeightType::F32 => out.push(f64::from(f32::from_le_bytes(block.try_into().unwrap()))),
            WeightType::F16 => out.push(half(block)),
            WeightType::BF16 => out.push(f64::from(bf16::from_le_bytes([block[0], block[1]]).to_f32())),
            WeightType::Q8_0 => out.extend(block[2..].iter().map(|&q| half(block) * f64::from(q as i8))),
            WeightType::Q4_0 => out.extend(nibbles(&block[2..]).iter().map(|q| half(block) * (q - 8.0))),
            WeightType::Q4_1 => {
                out.extend(nibbles(&block[4..]).iter().map(|q| half(block) * q + half(&block[2..])));
            }
        }
    }
    out
}
