//! All weights of a model, packed into one region.

use std::sync::Arc;

use baton_model::{ModelConfig, Tensor, WeightType};

use super::quantise::{kept_as, write_quantised};
use super::{Packed, TILE_COLUMNS, TileShape};
use crate::config::Quantize;
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
}

/// What packing a model's matrices will take and give.
pub(crate) struct WeightPlan {
    /// Bytes of all packed matrices.
    pub(crate) num_bytes: usize,
    kinds: Vec<WeightType>,
}

impl WeightPlan {
    /// Looks at every matrix's shape and type, and at no element.
    ///
    /// # Errors
    /// A tensor is missing, has another shape than the configuration calls for, or can't be quantised as asked.
    pub(crate) fn new(source: &dyn WeightSource, quantize: Quantize) -> Result<WeightPlan, EngineBuildError> {
        let mut plan = WeightPlan { num_bytes: 0, kinds: Vec::new() };
        for (name, rows, cols) in matrices(source.config()) {
            let kind = kept_as(&checked(source, &name, rows, cols)?, quantize)?;
            plan.num_bytes += Packed::bytes_needed(kind, rows, cols).next_multiple_of(ALIGN);
            if !plan.kinds.contains(&kind) {
                plan.kinds.push(kind);
            }
        }
        Ok(plan)
    }

    /// Whether some matrix is kept in blocks of small integers.
    pub(crate) fn any_quantised(&self) -> bool {
        self.kinds.iter().any(|kind| kind.block_elements() > 1)
    }

    /// How matrices are kept, as one name: `q4_1+q8_0`.
    pub(crate) fn format_name(&self) -> String {
        let mut names: Vec<_> = self.kinds.iter().map(|kind| kind.to_string().to_lowercase()).collect();
        names.sort();
        names.join("+")
    }
}

impl ModelWeights {
    /// Reads and packs everything that `plan` was made from.
    ///
    /// # Errors
    /// As [`WeightPlan::new`]; there is no memory, or an element can't be quantised.
    pub(crate) fn load(
        source: &dyn WeightSource,
        quantize: Quantize,
        plan: &WeightPlan,
    ) -> Result<ModelWeights, EngineBuildError> {
        let needed = plan.num_bytes;
        let region = Region::new(needed).map_err(EngineBuildError::out_of_memory("the weights", needed))?;
        let mut loader = Loader { source, quantize, region: Arc::new(region), offset: 0 };
        let c = source.config();
        let embedding = loader.matrix("token_embd.weight", c.vocab, c.hidden)?;
        let output = match c.tied_embedding {
            true => None,
            false => Some(loader.matrix("output.weight", c.vocab, c.hidden)?),
        };
        let output_norm = loader.vector("output_norm.weight", c.hidden)?;
        let layers = (0..c.num_layers).map(|n| loader.layer(n)).collect::<Result<_, _>>()?;
        Ok(ModelWeights { embedding, output, output_norm, layers })
    }

    /// The matrix that gives logits.
    pub(crate) fn output(&self) -> &Packed {
        self.output.as_ref().unwrap_or(&self.embedding)
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

pub(crate) fn checked<'a>(
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
    quantize: Quantize,
    region: Arc<Region>,
    offset: usize,
}

impl Loader<'_> {
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Packed, EngineBuildError> {
        let tensor = checked(self.source, name, rows, cols)?;
        let shape = TileShape { kind: kept_as(&tensor, self.quantize)?, cols };
        let len = Packed::bytes_needed(shape.kind, rows, cols);
        if self.offset + len > self.region.len() {
            return Err(EngineBuildError::tensor(name, "its type changed while it was read"));
        }
        // SAFETY: the range was just checked, each matrix gets its own, and nothing reads it before it is packed.
        let out = unsafe { std::slice::from_raw_parts_mut(self.region.base().add(self.offset), len) };
        match shape.kind == tensor.kind {
            true => Packed::write_tiles(&tensor, out),
            false => write_quantised(&tensor, out)?,
        }
        // Else a model is in memory twice at the end, as it is stored and as it is packed.
        self.source.let_go(name);
        let packed = Packed::in_region(shape, rows, Arc::clone(&self.region), self.offset);
        self.offset += len.next_multiple_of(ALIGN);
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
