//! `builtin:tiny`: a small llama-like model made in memory, the same on every machine.
//!
//! It exists for tests and for a first run without a download. It has every trait of a real model that the serving
//! path cares about (layers, grouped KV heads, a long context, end tokens) and answers with letters at random, which
//! depend on the whole prompt. Weights come from a counter-based generator: element `i` of tensor `t` is a function of
//! `(t, i)` alone, made of integer steps and one exact product, so no platform rounds it differently.

use std::borrow::Cow;

use crate::tensors::expected_tensors;
use crate::{ByteSpecials, ModelConfig, ModelError, RopeScaling, RopeStyle, Tensor, WeightType};

/// 256 bytes and the specials, padded to whole blocks of 32.
const VOCAB: usize = 288;
const BOS: u32 = 256;
const EOS: u32 = 257;
const IM_START: u32 = 258;
const IM_END: u32 = 259;

/// Wanted deviation of a printable byte's logit. Over the whole vocabulary, most of which is scaled down below, it
/// makes about 2.5: spread enough that greedy is decided, close enough that sampling varies.
const LOGIT_DEVIATION: f32 = 4.0;
/// Factor on q and k, so that attention looks at some positions much more than at others.
const SHARPNESS: f32 = 2.0;
/// Factor on the output rows of bytes that are not printable, so that greedy text can be read.
const UNPRINTABLE: f32 = 0.3;

pub(crate) fn config() -> (ModelConfig, ByteSpecials) {
    let config = ModelConfig {
        family: "llama".to_owned(),
        name: "builtin:tiny".to_owned(),
        num_layers: 4,
        hidden: 64,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        ffn: 128,
        vocab: VOCAB,
        context: 131_072,
        rope_base: 500_000.0,
        rope_style: RopeStyle::Interleaved,
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        tied_embedding: false,
        attention_bias: false,
        qk_norm: false,
        bos: Some(BOS),
        turn_end: Some(IM_END),
        eos: vec![EOS, IM_END],
        add_bos: false,
    };
    (config, ByteSpecials { bos: BOS, eos: EOS, im_start: IM_START, im_end: IM_END })
}

struct TinyTensor {
    name: String,
    rows: usize,
    cols: usize,
    data: Vec<u8>,
}

/// The generated weights, f32.
pub(crate) struct TinyWeights {
    tensors: Vec<TinyTensor>,
}

impl TinyWeights {
    pub(crate) fn generate(config: &ModelConfig) -> TinyWeights {
        let tensors = (0u64..)
            .zip(expected_tensors(config))
            .map(|(stream, (name, rows, cols))| {
                let data = (0..rows)
                    .flat_map(|row| {
                        let scale = scale(&name, row, cols);
                        (0..cols).map(move |col| scale * uniform(stream, (row * cols + col) as u64))
                    })
                    .map(|value| if name.ends_with("norm.weight") { 1.0 } else { value })
                    .flat_map(f32::to_le_bytes)
                    .collect();
                TinyTensor { name, rows, cols, data }
            })
            .collect();
        TinyWeights { tensors }
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let tensor = self
            .tensors
            .iter()
            .find(|tensor| tensor.name == name)
            .ok_or_else(|| ModelError::corrupt("builtin:tiny".as_ref(), format!("no tensor '{name}'")))?;
        Ok(Tensor {
            name: tensor.name.clone(),
            rows: tensor.rows,
            cols: tensor.cols,
            kind: WeightType::F32,
            data: Cow::Borrowed(&tensor.data),
        })
    }

    pub(crate) fn parts(&self) -> impl Iterator<Item = &[u8]> {
        self.tensors.iter().map(|tensor| tensor.data.as_slice())
    }
}

/// Deviation of the elements of one row.
fn scale(name: &str, row: usize, cols: usize) -> f32 {
    let unit = 1.0 / (cols as f32).sqrt();
    if name == "token_embd.weight" {
        1.0
    } else if name == "output.weight" {
        unit * LOGIT_DEVIATION * likelihood(row)
    } else if name.contains("attn_q") || name.contains("attn_k") {
        unit * SHARPNESS
    } else {
        unit
    }
}

/// How strongly a token may be preferred; ids that no text uses never win over the others.
fn likelihood(id: usize) -> f32 {
    match id {
        0x20..=0x7e | 0x0a => 1.0,
        0..=255 => UNPRINTABLE,
        id if id == EOS as usize || id == IM_END as usize => 1.0,
        _ => 0.0,
    }
}

/// A number of deviation 1, uniform over its range, from SplitMix64 (Steele, Lea, Flood 2014) at counter `index` of
/// `stream`.
fn uniform(stream: u64, index: u64) -> f32 {
    let mut x = (stream << 32 | index).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 31;
    // 24 bits fill an f32 exactly; the range [-1, 1) has a deviation of 1 / sqrt(3).
    let unit = (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    unit * 1.732_050_8
}
