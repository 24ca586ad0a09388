//! From GGML's row-major blocks to tiles, and one row back to f32.

use std::sync::Arc;

use baton_model::{Tensor, WeightType};
use half::{bf16, f16};

use super::{NIBBLE_GROUP, Packed, QUANT_BLOCK, TILE_COLUMNS, TileShape};
use crate::region::Region;

impl Packed {
    /// Writes the tensor's tiles to `out`, which has [`Packed::bytes_needed`] zeroed bytes; the tensor's data has the
    /// size that its shape calls for.
    pub(super) fn write_tiles(tensor: &Tensor<'_>, out: &mut [u8]) {
        let shape = TileShape { kind: tensor.kind, cols: tensor.cols };
        let row_bytes = tensor.cols / shape.k_unit() * tensor.kind.block_bytes();
        for (row, blocks) in tensor.data.chunks_exact(row_bytes).enumerate() {
            write_row(shape, row, blocks, out);
        }
    }

    /// A matrix of `rows` rows whose tiles stand in `region` from `offset`.
    pub(super) const fn in_region(
        shape: TileShape,
        rows: usize,
        region: Arc<Region>,
        offset: usize,
    ) -> Packed {
        Packed { shape, rows, cols: shape.cols, region, offset }
    }

    /// One row as f32, as the kernels see it. `out` has `cols` elements; `row` is below `rows`.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let (tile, lane) = (self.tile_bytes(row / TILE_COLUMNS), row % TILE_COLUMNS);
        let units = tile.chunks_exact(self.shape.bytes_of_k());
        for (unit, out) in units.zip(out.chunks_exact_mut(self.shape.k_unit())) {
            read_unit(self.shape.kind, unit, out, lane);
        }
    }
}

/// Writes one row, given as GGML's blocks, to its place among the tiles in `out`.
pub(super) fn write_row(shape: TileShape, row: usize, blocks: &[u8], out: &mut [u8]) {
    let tile = &mut out[row / TILE_COLUMNS * shape.bytes()..][..shape.bytes()];
    let units = tile.chunks_exact_mut(shape.bytes_of_k());
    for (block, unit) in blocks.chunks_exact(shape.kind.block_bytes()).zip(units) {
        write_unit(shape.kind, block, unit, row % TILE_COLUMNS);
    }
}

/// Where the 16 columns' quants begin in a unit.
const fn quants_at(kind: WeightType) -> usize {
    match kind {
        WeightType::Q8_0 | WeightType::Q4_0 => 2 * TILE_COLUMNS,
        WeightType::Q4_1 => 4 * TILE_COLUMNS,
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => 0,
    }
}

/// Bytes 0, 2, 4 and 6, side by side.
const fn even_bytes(x: u64) -> u32 {
    let x = x & 0x00ff_00ff_00ff_00ff;
    let x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
    (x | x >> 16) as u32
}

/// The low nibbles of 8 bytes, side by side. GGML puts elements 0..16 of a block there, and 16..32 in the high ones.
const fn low_nibbles(x: u64) -> u32 {
    let x = x & 0x0f0f_0f0f_0f0f_0f0f;
    even_bytes(x | x >> 4)
}

/// Writes column `lane` of the `row`th row of u32.
fn put_word(unit: &mut [u8], quants_at: usize, row: usize, lane: usize, word: u32) {
    let at = quants_at + (row * TILE_COLUMNS + lane) * 4;
    unit[at..at + 4].copy_from_slice(&word.to_le_bytes());
}

/// Byte of a unit that holds column `lane`'s nibble `k`, and whether it is the high one.
const fn nibble_place(k: usize, lane: usize) -> (usize, bool) {
    let word = k / NIBBLE_GROUP * TILE_COLUMNS + lane;
    (word * 4 + k % NIBBLE_GROUP / 2, k % 2 == 1)
}

/// Byte of a unit that holds column `lane`'s byte `k`.
const fn byte_place(k: usize, lane: usize) -> usize {
    let row = k / NIBBLE_GROUP * 2 + k % 2;
    (row * TILE_COLUMNS + lane) * 4 + k % NIBBLE_GROUP / 2
}

fn write_unit(kind: WeightType, block: &[u8], unit: &mut [u8], lane: usize) {
    let at = quants_at(kind);
    match kind {
        WeightType::F32 => unit[4 * lane..][..4].copy_from_slice(block),
        WeightType::F16 | WeightType::BF16 => unit[2 * lane..][..2].copy_from_slice(block),
        WeightType::Q8_0 => {
            unit[2 * lane..][..2].copy_from_slice(&block[..2]);
            let (eights, _) = block[2..].as_chunks::<NIBBLE_GROUP>();
            for (g, &eight) in eights.iter().enumerate() {
                let biased = u64::from_le_bytes(eight) ^ 0x8080_8080_8080_8080;
                put_word(unit, at, 2 * g, lane, even_bytes(biased));
                put_word(unit, at, 2 * g + 1, lane, even_bytes(biased >> 8));
            }
        }
        WeightType::Q4_0 | WeightType::Q4_1 => {
            let head = block.len() - QUANT_BLOCK / 2;
            for (n, part) in block[..head].chunks_exact(2).enumerate() {
                unit[2 * (n * TILE_COLUMNS + lane)..][..2].copy_from_slice(part);
            }
            let (eights, _) = block[head..].as_chunks::<NIBBLE_GROUP>();
            for (g, &eight) in eights.iter().enumerate() {
                let bytes = u64::from_le_bytes(eight);
                put_word(unit, at, g, lane, low_nibbles(bytes));
                put_word(unit, at, g + eights.len(), lane, low_nibbles(bytes >> 4));
            }
        }
    }
}

fn read_unit(kind: WeightType, unit: &[u8], out: &mut [f32], lane: usize) {
    let half = |n: usize| {
        let at = 2 * (n * TILE_COLUMNS + lane);
        u16::from_le_bytes([unit[at], unit[at + 1]])
    };
    let scale = |n| f16::from_bits(half(n)).to_f32();
    let at = quants_at(kind);
    let nibble = |k| {
        let (byte, high) = nibble_place(k, lane);
        f32::from(if high { unit[at + byte] >> 4 } else { unit[at + byte] & 15 })
    };
    match kind {
        WeightType::F32 => {
            let at = 4 * lane;
            out[0] = f32::from_le_bytes([unit[at], unit[at + 1], unit[at + 2], unit[at + 3]]);
        }
        WeightType::F16 => out[0] = scale(0),
        WeightType::BF16 => out[0] = bf16::from_bits(half(0)).to_f32(),
        WeightType::Q8_0 => {
            for (k, out) in out.iter_mut().enumerate() {
                *out = scale(0) * f32::from((unit[at + byte_place(k, lane)] ^ 0x80).cast_signed());
            }
        }
        WeightType::Q4_0 => (0..QUANT_BLOCK).for_each(|k| out[k] = scale(0) * (nibble(k) - 8.0)),
        WeightType::Q4_1 => (0..QUANT_BLOCK).for_each(|k| out[k] = scale(0) * nibble(k) + scale(1)),
    }
}

#[cfg(test)]
impl Packed {
    /// A matrix in a region of its own.
    pub(crate) fn of(tensor: &Tensor<'_>) -> Packed {
        let len = Packed::bytes_needed(tensor.kind, tensor.rows, tensor.cols);
        let region = Arc::new(Region::new(len).unwrap());
        // SAFETY: nobody else has the region yet.
        Packed::write_tiles(tensor, unsafe { std::slice::from_raw_parts_mut(region.base(), len) });
        Packed::in_region(TileShape { kind: tensor.kind, cols: tensor.cols }, tensor.rows, region, 0)
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;

    fn tensor(kind: WeightType, rows: usize, cols: usize, data: Vec<u8>) -> Tensor<'static> {
        Tensor { name: "test".into(), rows, cols, kind, data: Cow::Owned(data) }
    }

    /// One block of a quantised format: scale 0.5, minimum -3 if there is one, quants from `quant`.
    fn block(kind: WeightType, quant: impl Fn(usize) -> u8) -> Vec<u8> {
        let mut out = f16::from_f32(0.5).to_le_bytes().to_vec();
        if kind == WeightType::Q4_1 {
            out.extend(f16::from_f32(-3.0).to_le_bytes());
        }
        match kind {
            WeightType::Q8_0 => out.extend((0..32).map(quant)),
            _ => out.extend((0..16).map(|j| quant(j) | quant(j + 16) << 4)),
        }
        out
    }

    #[test]
    fn rows_come_back_as_the_format_says() {
        // 19 rows: the second tile is partly padding. Two blocks a row.
        for (kind, value) in [
            (WeightType::Q8_0, (|q| 0.5 * f32::from((q as u8).cast_signed())) as fn(usize) -> f32),
            (WeightType::Q4_0, |q| 0.5 * (q as f32 - 8.0)),
            (WeightType::Q4_1, |q| 0.5 * q as f32 - 3.0),
        ] {
            let levels = if kind == WeightType::Q8_0 { 256 } else { 16 };
            let quant = |row: usize, k: usize| (row * 5 + k * 3 + k / 16) % levels;
            let data = (0..19)
                .flat_map(|row| (0..2).flat_map(move |b| block(kind, |k| quant(row, 32 * b + k) as u8)))
                .collect();
            let packed = Packed::of(&tensor(kind, 19, 64, data));
            assert_eq!(packed.num_tiles(), 2);
            let mut out = vec![0.0; 64];
            for row in 0..19 {
                packed.row(row, &mut out);
                for (k, &got) in out.iter().enumerate() {
                    assert_eq!(got, value(quant(row, k)), "{kind}, row {row}, k {k}");
                }
            }
        }
    }

    #[test]
    fn plain_formats_keep_every_bit() {
        let values: Vec<f32> = (0..17 * 5).map(|i| (i as f32 - 40.0) * 0.375).collect();
        for kind in [WeightType::F32, WeightType::F16, WeightType::BF16] {
            let data = values.iter().flat_map(|&v| match kind {
                WeightType::F16 => f16::from_f32(v).to_le_bytes().to_vec(),
                WeightType::BF16 => bf16::from_f32(v).to_le_bytes().to_vec(),
                _ => v.to_le_bytes().to_vec(),
            });
            let packed = Packed::of(&tensor(kind, 17, 5, data.collect()));
            let mut out = vec![0.0; 5];
            for (row, want) in values.chunks_exact(5).enumerate() {
                packed.row(row, &mut out);
                assert_eq!(out, want, "{kind}");
            }
        }
    }
}
