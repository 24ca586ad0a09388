//! Device memory for the activations of one step, taken once.

use std::sync::Arc;

use baton_model::ModelConfig;

use super::driver::{Device, DeviceError, Memory, Span};
use super::products::ROW_UNIT;

/// Rows whose logits are computed together, and tokens drawn together.
pub(super) const LOGIT_ROWS: usize = 64;
/// (query head, token) pairs that one decode item holds, at most.
pub(super) const DECODE_CAPACITY: usize = 16;
/// Positions of a decode item.
pub(super) const DECODE_TILE: usize = 128;
/// Partial results of decode, at least: rows beyond that are computed in a further launch, and not as a graph. Of an 8B model's shape this holds 32 rows of one
/// token at a context of 7,500.
const LEAST_PARTIAL_BYTES: usize = 32 << 20;
const ALIGN: usize = 256;

/// Matrices of a step; row `t` belongs to the step's token `t`.
pub(super) struct Scratch {
    /// f32, as wide as the model.
    pub(super) residual: Span,
    /// 16 bits; also the rows whose logits are wanted.
    pub(super) normed: Span,
    /// f32: queries, keys and values.
    pub(super) qkv: Span,
    /// 16 bits: queries, turned.
    pub(super) q: Span,
    /// 16 bits: what attention gave.
    pub(super) attended: Span,
    /// f32: what is added to the residual next.
    pub(super) projected: Span,
    /// f32: gate, then up.
    pub(super) gate_up: Span,
    /// 16 bits: their product.
    pub(super) hidden: Span,
    /// f32, [`LOGIT_ROWS`] of them.
    pub(super) logits: Span,
    /// f32, for drawing.
    pub(super) probabilities: Span,
    /// f32: what decode's tiles gave.
    pub(super) partials: Span,
    _memory: Memory,
}

/// Bytes of each matrix, in the order of the fields.
fn sizes(c: &ModelConfig, max_step_tokens: usize) -> [usize; 11] {
    let rows = max_step_tokens.next_multiple_of(ROW_UNIT);
    let (q, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
    [
        rows * c.hidden * 4,
        rows.max(LOGIT_ROWS) * c.hidden * 2,
        rows * (q + 2 * kv) * 4,
        rows * q * 2,
        rows * q * 2,
        rows * c.hidden * 4,
        rows * 2 * c.ffn * 4,
        rows * c.ffn * 2,
        LOGIT_ROWS * c.vocab * 4,
        LOGIT_ROWS * c.vocab * 4,
        partial_bytes(c),
    ]
    .map(|bytes| bytes.next_multiple_of(ALIGN))
}

/// Partial results of one item.
const fn item_bytes(c: &ModelConfig, capacity: usize) -> usize {
    c.num_kv_heads * capacity * (c.head_dim + 2) * 4
}

fn partial_bytes(c: &ModelConfig) -> usize {
    LEAST_PARTIAL_BYTES.max(c.context.div_ceil(DECODE_TILE) * item_bytes(c, DECODE_CAPACITY))
}

/// Decode items whose partial results there is room for, where each holds so many (query head, token) pairs at most.
pub(super) fn max_items(c: &ModelConfig, capacity: usize) -> usize {
    partial_bytes(c) / item_bytes(c, capacity)
}

/// Bytes of [`Scratch`].
pub(super) fn bytes_needed(model: &ModelConfig, max_step_tokens: usize) -> usize {
    sizes(model, max_step_tokens).iter().sum()
}

impl Scratch {
    pub(super) fn new(
        device: &Arc<Device>,
        model: &ModelConfig,
        max_step_tokens: usize,
    ) -> Result<Scratch, DeviceError> {
        let sizes = sizes(model, max_step_tokens);
        let memory = Memory::new(device, sizes.iter().sum())?;
        let mut offset = 0;
        let [residual, normed, qkv, q, attended, projected, gate_up, hidden, logits, probabilities, partials] =
            sizes.map(|len| {
                let span = memory.at(offset, len);
                offset += len;
                span
            });
        Ok(Scratch {
            residual,
            normed,
            qkv,
            q,
            attended,
            projected,
            gate_up,
            hidden,
            logits,
            probabilities,
            partials,
            _memory: memory,
        })
    }
}
