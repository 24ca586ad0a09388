//! All weights of a model on the device: matrices in 16 bits, whatever the file has, or rounded to 8; and vectors in f32.

use std::sync::Arc;

use baton_model::{ModelConfig, Tensor, WeightType};
use half::{bf16, f16};

use super::config::Half;
use super::driver::{Device, Memory, Pinned, Span, Stream};
use super::int8::{self, Int8Matrix};
use super::linear::{Linear, Matrix};
use super::products::Products;
use crate::config::Quantize;
use crate::error::EngineBuildError;
use crate::rope::Rope;
use crate::source::WeightSource;
use crate::weights::checked;

/// Everything starts at a multiple of this.
const ALIGN: usize = 256;
/// Converted and uploaded at a time; at least one row.
const PIECE_BYTES: usize = 4 << 20;

/// One decoder layer.
pub(super) struct LayerWeights {
    pub(super) attn_norm: Span,
    /// Queries, keys and values, one after another.
    pub(super) qkv: Linear,
    pub(super) qkv_bias: Option<Span>,
    pub(super) q_norm: Option<Span>,
    pub(super) k_norm: Option<Span>,
    pub(super) attn_output: Linear,
    pub(super) ffn_norm: Span,
    /// Gate, then up.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
}

/// A whole model.
pub(super) struct DeviceWeights {
    pub(super) embedding: Matrix,
    pub(super) output: Linear,
    pub(super) output_norm: Span,
    pub(super) layers: Vec<LayerWeights>,
    /// Cosines and sines of every position.
    pub(super) turns: Span,
    _memory: Memory,
}

const fn rounded(elements: usize, element_bytes: usize) -> usize {
    (elements * element_bytes).next_multiple_of(ALIGN)
}

/// Bytes of a matrix.
fn matrix_bytes(rows: usize, cols: usize, quantize: Quantize) -> usize {
    match quantize {
        Quantize::None => rounded(rows * cols, 2),
        Quantize::Int8 => rounded(rows * int8::stride(cols), 1) + rounded(rows, 4),
    }
}

/// Bytes of [`DeviceWeights`].
pub(super) fn bytes_needed(c: &ModelConfig, quantize: Quantize) -> usize {
    let matrix = |rows, cols| matrix_bytes(rows, cols, quantize);
    let (q, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
    let wide = q + 2 * kv;
    let embeddings = if c.tied_embedding { 1 } else { 2 };
    let mut layer = matrix(wide, c.hidden)
        + matrix(c.hidden, q)
        + matrix(2 * c.ffn, c.hidden)
        + matrix(c.hidden, c.ffn)
        + 2 * rounded(c.hidden, 4);
    if c.attention_bias {
        layer += rounded(wide, 4);
    }
    if c.qk_norm {
        layer += 2 * rounded(c.head_dim, 4);
    }
    embeddings * matrix(c.vocab, c.hidden)
        + rounded(c.hidden, 4)
        + rounded(c.context * c.head_dim, 4)
        + c.num_layers * layer
}

impl DeviceWeights {
    /// Reads, converts and uploads everything.
    ///
    /// # Errors
    /// A tensor is missing, has another shape than the configuration calls for, or an element too large for `half`, or not finite where it is
    /// rounded to 8 bits; the device has no memory or fails.
    pub(super) fn load(
        source: &dyn WeightSource,
        device: &Arc<Device>,
        products: &Products,
        kept: Kept,
    ) -> Result<DeviceWeights, EngineBuildError> {
        let c = source.config();
        let memory = Memory::new(device, bytes_needed(c, kept.quantize))?;
        let widest = c.hidden.max(c.ffn).max(c.num_heads * c.head_dim).max(c.head_dim);
        let piece = PIECE_BYTES.max(4 * widest);
        let (stream, pinned) = (Stream::new(device)?, Pinned::new(device, piece)?);
        let mut loader = Loader { source, kept, products, memory: &memory, offset: 0, stream, pinned, piece };
        let embedding = loader.matrix(&[("token_embd.weight".to_owned(), c.vocab)], c.hidden)?;
        let output = match c.tied_embedding {
            true => embedding,
            false => loader.matrix(&[("output.weight".to_owned(), c.vocab)], c.hidden)?,
        };
        let output = loader.linear(output, c.vocab, c.hidden)?;
        let output_norm = loader.vectors(&[("output_norm.weight".to_owned(), c.hidden)])?;
        let turns = loader.turns()?;
        let layers = (0..c.num_layers).map(|n| loader.layer(n)).collect::<Result<_, _>>()?;
        drop(loader);
        Ok(DeviceWeights { embedding, output, output_norm, layers, turns, _memory: memory })
    }
}

/// In what form matrices are kept.
#[derive(Clone, Copy)]
pub(super) struct Kept {
    /// The type of activations, and of matrices that are not rounded further.
    pub(super) half: Half,
    pub(super) quantize: Quantize,
}

struct Loader<'a> {
    source: &'a dyn WeightSource,
    kept: Kept,
    products: &'a Products,
    memory: &'a Memory,
    offset: usize,
    // Finished before the memory that it copies from is given back.
    stream: Stream,
    pinned: Pinned,
    piece: usize,
}

impl Loader<'_> {
    fn layer(&mut self, n: usize) -> Result<LayerWeights, EngineBuildError> {
        let c = self.source.config();
        let (q, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
        let named = |part: &str, rows: usize| (format!("blk.{n}.{part}.weight"), rows);
        let bias = |part: &str, rows: usize| (format!("blk.{n}.{part}.bias"), rows);
        let qkv_bias = match c.attention_bias {
            true => Some(self.vectors(&[bias("attn_q", q), bias("attn_k", kv), bias("attn_v", kv)])?),
            false => None,
        };
        let head_norms = match c.qk_norm {
            true => Some((
                self.vectors(&[named("attn_q_norm", c.head_dim)])?,
                self.vectors(&[named("attn_k_norm", c.head_dim)])?,
            )),
            false => None,
        };
        Ok(LayerWeights {
            attn_norm: self.vectors(&[named("attn_norm", c.hidden)])?,
            qkv: self.weight(&[named("attn_q", q), named("attn_k", kv), named("attn_v", kv)], c.hidden)?,
            qkv_bias,
            q_norm: head_norms.map(|(q, _)| q),
            k_norm: head_norms.map(|(_, k)| k),
            attn_output: self.weight(&[named("attn_output", c.hidden)], q)?,
            ffn_norm: self.vectors(&[named("ffn_norm", c.hidden)])?,
            gate_up: self.weight(&[named("ffn_gate", c.ffn), named("ffn_up", c.ffn)], c.hidden)?,
            down: self.weight(&[named("ffn_down", c.hidden)], c.ffn)?,
        })
    }

    fn weight(&mut self, parts: &[(String, usize)], cols: usize) -> Result<Linear, EngineBuildError> {
        let matrix = self.matrix(parts, cols)?;
        self.linear(matrix, parts.iter().map(|(_, rows)| rows).sum(), cols)
    }

    fn linear(&self, matrix: Matrix, rows: usize, cols: usize) -> Result<Linear, EngineBuildError> {
        Ok(match matrix {
            Matrix::Half(span) => Linear::Half(self.products.weight(span, rows, cols)?),
            Matrix::Int8(matrix) => Linear::Int8(matrix),
        })
    }

    fn place(&mut self, len: usize) -> Span {
        let span = self.memory.at(self.offset, len);
        self.offset += len.next_multiple_of(ALIGN);
        span
    }

    /// Matrices over the same input, as one.
    fn matrix(&mut self, parts: &[(String, usize)], cols: usize) -> Result<Matrix, EngineBuildError> {
        match self.kept.quantize {
            Quantize::None => self.half_matrix(parts, cols).map(Matrix::Half),
            Quantize::Int8 => self.int8_matrix(parts, cols).map(Matrix::Int8),
        }
    }

    fn half_matrix(&mut self, parts: &[(String, usize)], cols: usize) -> Result<Span, EngineBuildError> {
        let row_bytes = 2 * cols;
        let all = self.place(parts.iter().map(|(_, rows)| rows * row_bytes).sum());
        let mut before = 0;
        for (name, rows) in parts {
            let tensor = checked(self.source, name, *rows, cols)?;
            let len = rows * row_bytes;
            self.upload(all.part(before, len), row_bytes, |row, out| {
                convert(&tensor, row, self.kept.half, out)
            })?;
            before += len;
        }
        Ok(all)
    }

    fn int8_matrix(
        &mut self,
        parts: &[(String, usize)],
        cols: usize,
    ) -> Result<Int8Matrix, EngineBuildError> {
        let (rows, row_bytes) = (parts.iter().map(|(_, rows)| rows).sum::<usize>(), int8::stride(cols));
        let (quants, scales) = (self.place(rows * row_bytes), self.place(4 * rows));
        let (mut before, mut values) = (0, vec![0.0f32; cols]);
        for (name, rows) in parts {
            let tensor = checked(self.source, name, *rows, cols)?;
            let mut found = Vec::with_capacity(*rows);
            self.upload(quants.part(before * row_bytes, rows * row_bytes), row_bytes, |row, out| {
                each_value(tensor.kind, row_of(&tensor, row), |k, value| values[k] = value);
                let scale = int8::round_row(&values, out).ok_or_else(|| {
                    EngineBuildError::tensor(name, format!("row {row} has an element that is not finite"))
                })?;
                found.push(scale);
                Ok(())
            })?;
            self.upload(scales.part(4 * before, 4 * rows), 4, |row, out| {
                out.copy_from_slice(&found[row].to_le_bytes());
                Ok(())
            })?;
            before += rows;
        }
        Ok(Int8Matrix { quants, scales, rows, cols })
    }

    /// Vectors of f32, one after another.
    fn vectors(&mut self, parts: &[(String, usize)]) -> Result<Span, EngineBuildError> {
        let all = self.place(parts.iter().map(|(_, len)| 4 * len).sum());
        let mut before = 0;
        for (name, len) in parts {
            let tensor = checked(self.source, name, 1, *len)?;
            if tensor.kind != WeightType::F32 {
                return Err(EngineBuildError::tensor(name, format!("is {}, but F32 is wanted", tensor.kind)));
            }
            self.upload(all.part(before, 4 * len), 4 * len, |_, out| {
                out.copy_from_slice(&tensor.data);
                Ok(())
            })?;
            before += 4 * len;
        }
        Ok(all)
    }

    /// Rotary angles, computed in f64 as on the CPU.
    fn turns(&mut self) -> Result<Span, EngineBuildError> {
        let c = self.source.config();
        let rope = Rope::new(c);
        let all = self.place(4 * c.context * c.head_dim);
        let mut turns = vec![0.0f32; c.head_dim];
        self.upload(all, 4 * c.head_dim, |position, out| {
            rope.fill(position as u32, &mut turns);
            for (out, turn) in out.as_chunks_mut::<4>().0.iter_mut().zip(&turns) {
                *out = turn.to_le_bytes();
            }
            Ok(())
        })?;
        Ok(all)
    }

    /// Fills `to` row by row, in pieces.
    fn upload(
        &self,
        to: Span,
        row_bytes: usize,
        mut row: impl FnMut(usize, &mut [u8]) -> Result<(), EngineBuildError>,
    ) -> Result<(), EngineBuildError> {
        let rows_of_piece = (self.piece / row_bytes).max(1);
        let num_rows = to.len / row_bytes;
        for first in (0..num_rows).step_by(rows_of_piece) {
            let rows = rows_of_piece.min(num_rows - first);
            // SAFETY: the stream was finished after the piece before; nobody else has this memory.
            let piece = unsafe { self.pinned.get_mut(0, rows * row_bytes) };
            for (nth, out) in piece.chunks_exact_mut(row_bytes).enumerate() {
                row(first + nth, out)?;
            }
            // SAFETY: the stream is finished before the piece is written again; nobody uses the weights yet.
            unsafe { self.stream.upload(piece, to.part(first * row_bytes, rows * row_bytes)) }?;
            self.stream.synchronize()?;
        }
        Ok(())
    }
}

/// One row of a matrix as it is stored.
fn row_of<'a>(tensor: &'a Tensor<'_>, row: usize) -> &'a [u8] {
    let len = tensor.data.len() / tensor.rows;
    &tensor.data[row * len..][..len]
}

/// One row of a matrix in `half`.
fn convert(tensor: &Tensor<'_>, row: usize, half: Half, out: &mut [u8]) -> Result<(), EngineBuildError> {
    let bytes = row_of(tensor, row);
    if matches!((tensor.kind, half), (WeightType::F16, Half::F16) | (WeightType::BF16, Half::Bf16)) {
        out.copy_from_slice(bytes);
        return Ok(());
    }
    let mut all_finite = true;
    let (outs, _) = out.as_chunks_mut::<2>();
    each_value(tensor.kind, bytes, |k, value| {
        let rounded = match half {
            Half::F16 => f16::from_f32(value).to_bits(),
            Half::Bf16 => bf16::from_f32(value).to_bits(),
        };
        all_finite &= match half {
            Half::F16 => f16::from_bits(rounded).is_finite(),
            Half::Bf16 => bf16::from_bits(rounded).is_finite(),
        };
        outs[k] = rounded.to_le_bytes();
    });
    if !all_finite {
        let reason = format!("row {row} has an element that {} can't hold; try --kv-dtype bf16", half.name());
        return Err(EngineBuildError::tensor(&tensor.name, reason));
    }
    Ok(())
}

/// Calls `take(k, value)` for every element of a row.
fn each_value(kind: WeightType, bytes: &[u8], mut take: impl FnMut(usize, f32)) {
    let half_at = |block: &[u8], at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    for (n, block) in bytes.chunks_exact(kind.block_bytes()).enumerate() {
        let k = n * kind.block_elements();
        match kind {
            WeightType::F32 => take(k, f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
            WeightType::F16 => take(k, half_at(block, 0)),
            WeightType::BF16 => take(k, bf16::from_le_bytes([block[0], block[1]]).to_f32()),
            WeightType::Q8_0 => {
                let scale = half_at(block, 0);
                for (i, &q) in block[2..].iter().enumerate() {
                    take(k + i, scale * f32::from(q.cast_signed()));
                }
            }
            WeightType::Q4_0 | WeightType::Q4_1 => {
                let scale = half_at(block, 0);
                let (least, nibbles) = match kind {
                    WeightType::Q4_0 => (-8.0 * scale, &block[2..]),
                    _ => (half_at(block, 2), &block[4..]),
                };
                for (i, &byte) in nibbles.iter().enumerate() {
                    take(k + i, scale * f32::from(byte & 15) + least);
                    take(k + i + 16, scale * f32::from(byte >> 4) + least);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(kind: WeightType, quant: impl Fn(usize) -> u8) -> Vec<u8> {
        let mut bytes = f16::from_f32(0.5).to_le_bytes().to_vec();
        match kind {
            WeightType::Q8_0 => bytes.extend((0..32).map(quant)),
            _ => {
                if kind == WeightType::Q4_1 {
                    bytes.extend(f16::from_f32(-3.0).to_le_bytes());
                }
                bytes.extend((0..16).map(|j| quant(j) | quant(j + 16) << 4));
            }
        }
        bytes
    }

    #[test]
    fn every_format_is_dequantised_as_its_definition_says() {
        for (kind, value) in [
            (WeightType::Q8_0, (|q| 0.5 * f32::from((q as u8).cast_signed())) as fn(usize) -> f32),
            (WeightType::Q4_0, |q| 0.5 * (q as f32 - 8.0)),
            (WeightType::Q4_1, |q| 0.5 * q as f32 - 3.0),
        ] {
            let levels = if kind == WeightType::Q8_0 { 251 } else { 16 };
            let quant = |row: usize, k: usize| (row * 7 + k * 5 + k / 16) % levels;
            let data: Vec<u8> = (0..3)
                .flat_map(|row| (0..2).flat_map(move |b| block(kind, |k| quant(row, 32 * b + k) as u8)))
                .collect();
            let tensor = Tensor { name: "m".to_owned(), rows: 3, cols: 64, kind, data: data.into() };
            for (half, row) in [(Half::F16, 0), (Half::F16, 2), (Half::Bf16, 1)] {
                let mut out = [0; 128];
                convert(&tensor, row, half, &mut out).unwrap();
                for (k, bytes) in out.as_chunks::<2>().0.iter().enumerate() {
                    let want = value(quant(row, k));
                    let (got, want) = match half {
                        Half::F16 => (f16::from_le_bytes(*bytes).to_f32(), want),
                        Half::Bf16 => (bf16::from_le_bytes(*bytes).to_f32(), bf16::from_f32(want).to_f32()),
                    };
                    assert_eq!(got, want, "{kind}, row {row}, k {k}");
                }
            }
        }
    }

    #[test]
    fn an_element_that_does_not_fit_is_refused_by_name() {
        let data: Vec<u8> = [1.0f32, 1e6].iter().flat_map(|v| v.to_le_bytes()).collect();
        let tensor =
            Tensor { name: "m".to_owned(), rows: 1, cols: 2, kind: WeightType::F32, data: data.into() };
        let error = convert(&tensor, 0, Half::F16, &mut [0; 4]).unwrap_err().to_string();
        assert!(error.contains("'m'") && error.contains("f16"), "{error}");
        convert(&tensor, 0, Half::Bf16, &mut [0; 4]).unwrap();
    }
}
