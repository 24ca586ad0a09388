//! All weights of a model, packed into one region.

use std::sync::Arc;

use baton_model::{ModelConfig, Tensor, WeightType};

use super::{Packed, TILE_COLUMNS};
use crate::error::EngineBuildError;
use crate::region::Region;
use crate::source::WeightSource;

/// Each matrix starts on a cache line.
const ALIGN: usize = 64;

/// Several matrices over the same input, side by side in the output.
pub(crate) struct Linear {
    /// Each with the output column, a multiple of 16, where it begins.
    pub(crate) parts: Vec<(Packed, usize)>,
}

/// Biases of queries, keys and values.
pub(crate) struct QkvBias {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

/// One decoder layer.
pub(crate) struct LayerWeights {
    pub(crate) attn_norm: Vec<f32>,
    pub(crate) qkv: Linear,
    /// Added to what `qkv` gives; Qwen2 has them.
    pub(crate) qkv_bias: Option<QkvBias>,
    /// Norm of each query head before it turns; Qwen3 has it.
    pub(crate) q_norm: Option<Vec<f32>>,
    /// And of each key head.
    pub(crate) k_norm: Option<Vec<f32>>,
    pub(crate) attn_output: Linear,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) gate: Packed,
    pub(crate) up: Packed,
    pub(crate) down: Linear,
}

/// A whole model.
pub(crate) struct ModelWeights {
    pub(crate) embedding: Packed,
    /// Absent when the embedding is also the output matrix.
    output: Option<Packed>,
    pub(crate) output_norm: Vec<f32>,
    pub(crate) layers: Vec<LayerWeights>,
    kinds: Vec<WeightType>,
}

impl ModelWeights {
    /// Bytes that the packed matrices take.
    ///
    /// # Errors
    /// As [`Self::load`], for a tensor that does not fit the configuration.
    pub(crate) fn bytes_needed(source: &dyn WeightSource) -> Result<usize, EngineBuildError> {
        let mut total = 0;
        for (name, rows, cols) in matrices(source.config()) {
            let tensor = checked(source, &name, rows, cols)?;
            total += Packed::bytes_needed(tensor.kind, rows, cols).next_multiple_of(ALIGN);
        }
        Ok(total)
    }

    /// Reads and packs everything.
    ///
    /// # Errors
    /// A tensor is missing or has another shape than the configuration calls for, or there is no memory.
    pub(crate) fn load(source: &dyn WeightSource) -> Result<ModelWeights, EngineBuildError> {
        let needed = Self::bytes_needed(source)?;
        let region = Region::new(needed).map_err(EngineBuildError::out_of_memory("the weights", needed))?;
        let mut loader = Loader { source, region: Arc::new(region), offset: 0, kinds: Vec::new() };
        let c = source.config();
        let embedding = loader.matrix("token_embd.weight", c.vocab, c.hidden)?;
        let output = match c.tied_embedding {
            true => None,
            false => Some(loader.matrix("output.weight", c.vocab, c.hidden)?),
        };
        let output_norm = loader.vector("output_norm.weight", c.hidden)?;
        let layers = (0..c.num_layers).map(|n| loader.layer(n)).collect::<Result<_, _>>()?;
        Ok(ModelWeights { embedding, output, output_norm, layers, kinds: loader.kinds })
    }

    /// The matrix that gives logits.
    pub(crate) fn output(&self) -> &Packed {
        self.output.as_ref().unwrap_or(&self.embedding)
    }

    /// Whether some matrix is stored in blocks of small integers.
    pub(crate) fn any_quantised(&self) -> bool {
        self.kinds.iter().any(|kind| kind.block_elements() > 1)
    }

    /// Storage of all matrices, as one name: `q4_1+q8_0`.
    pub(crate) fn format_name(&self) -> String {
        let mut names: Vec<_> = self.kinds.iter().map(|kind| kind.to_string().to_lowercase()).collect();
        names.sort();
        names.dedup();
        names.join("+")
    }
}

/// Every matrix by name, rows and cols.
fn matrices(c: &ModelConfig) -> Vec<(String, usize, usize)> {
    let (q, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
    let mut all = vec![("token_embd.weight".to_owned(), c.vocab, c.hidden)];
    if !c.tied_embedding {
        all.push(("output.weight".to_owned(), c.vocab, c.hidden));
    }
    for n in 0..c.num_layers {
        for (name, rows, cols) in [
            ("attn_q", q, c.hidden),
            ("attn_k", kv, c.hidden),
            ("attn_v", kv, c.hidden),
            ("attn_output", c.hidden, q),
            ("ffn_gate", c.ffn, c.hidden),
            ("ffn_up", c.ffn, c.hidden),
            ("ffn_down", c.hidden, c.ffn),
        ] {
            all.push((format!("blk.{n}.{name}.weight"), rows, cols));
        }
    }
    all
}

fn checked<'a>(
    source: &'a dyn WeightSource,
    name: &str,
    rows: usize,
    cols: usize,
) -> Result<Tensor<'a>, EngineBuildError> {
    let tensor = source.tensor(name)?;
    if (tensor.rows, tensor.cols) != (rows, cols) {
        let reason = format!("{} x {}, but {rows} x {cols} is wanted", tensor.rows, tensor.cols);
        return Err(EngineBuildError::tensor(name, reason));
    }
    let wanted = tensor.kind.row_bytes(cols).and_then(|n| n.checked_mul(rows));
    if wanted != Some(tensor.data.len()) {
        let reason = format!("{} bytes do not hold {rows} x {cols} of {}", tensor.data.len(), tensor.kind);
        return Err(EngineBuildError::tensor(name, reason));
    }
    Ok(tensor)
}

struct Loader<'a> {
    source: &'a dyn WeightSource,
    region: Arc<Region>,
    offset: usize,
    kinds: Vec<WeightType>,
}

impl Loader<'_> {
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Packed, EngineBuildError> {
        let tensor = checked(self.source, name, rows, cols)?;
        let len = Packed::bytes_needed(tensor.kind, rows, cols);
        if self.offset + len > self.region.len() {
            return Err(EngineBuildError::tensor(name, "its type changed while it was read"));
        }
        // SAFETY: the range was just checked, each matrix gets its own, and nothing reads it before it is packed.
        let out = unsafe { std::slice::from_raw_parts_mut(self.region.base().add(self.offset), len) };
        Packed::write_tiles(&tensor, out);
        let packed = Packed::in_region(&tensor, Arc::clone(&self.region), self.offset);
        self.offset += len.next_multiple_of(ALIGN);
        self.kinds.push(tensor.kind);
        Ok(packed)
    }

    /// A norm's weight as f32, zero-padded to whole vectors.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineBuildError> {
        let tensor = checked(self.source, name, 1, len)?;
        if tensor.kind != WeightType::F32 {
            return Err(EngineBuildError::tensor(name, format!("is {}, but F32 is wanted", tensor.kind)));
        }
        let (floats, _) = tensor.data.as_chunks::<4>();
        let mut values: Vec<f32> = floats.iter().map(|&b| f32::from_le_bytes(b)).collect();
        values.resize(len.next_multiple_of(TILE_COLUMNS), 0.0);
        Ok(values)
    }

    fn layer(&mut self, n: usize) -> Result<LayerWeights, EngineBuildError> {
        let c = self.source.config();
        let (q, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
        let name = |part: &str| format!("blk.{n}.{part}.weight");
        let mut parts = Vec::new();
        let mut column = 0;
        for (part, rows) in [("attn_q", q), ("attn_k", kv), ("attn_v", kv)] {
            parts.push((self.matrix(&name(part), rows, c.hidden)?, column));
            column += rows.next_multiple_of(TILE_COLUMNS);
        }
        let bias = |part: &str, len| self.vector(&format!("blk.{n}.{part}.bias"), len);
        let head_norm = |part| c.qk_norm.then(|| self.vector(&name(part), c.head_dim)).transpose();
        Ok(LayerWeights {
            attn_norm: self.vector(&name("attn_norm"), c.hidden)?,
            qkv: Linear { parts },
            qkv_bias: match c.attention_bias {
                true => {
                    Some(QkvBias { q: bias("attn_q", q)?, k: bias("attn_k", kv)?, v: bias("attn_v", kv)? })
                }
                false => None,
            },
            q_norm: head_norm("attn_q_norm")?,
            k_norm: head_norm("attn_k_norm")?,
            attn_output: Linear { parts: vec![(self.matrix(&name("attn_output"), c.hidden, q)?, 0)] },
            ffn_norm: self.vector(&name("ffn_norm"), c.hidden)?,
            gate: self.matrix(&name("ffn_gate"), c.ffn, c.hidden)?,
            up: self.matrix(&name("ffn_up"), c.ffn, c.hidden)?,
            down: Linear { parts: vec![(self.matrix(&name("ffn_down"), c.hidden, c.ffn)?, 0)] },
        })
    }
}
