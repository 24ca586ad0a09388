//! Rounding a matrix to 8 bits while it is packed: GGML's `Q8_0`, 32 elements of a row and their scale.

use baton_model::{Tensor, WeightType};
use half::{bf16, f16};

use super::pack::write_row;
use super::{QUANT_BLOCK, TileShape};
use crate::config::Quantize;
use crate::error::EngineBuildError;

/// Largest quant.
const LEVELS: f32 = 127.0;

/// How a tensor is kept: as it is stored, or as `Q8_0`.
///
/// # Errors
/// [`EngineBuildError::BadTensor`] for a type or a shape that can't be quantised.
pub(super) fn kept_as(tensor: &Tensor<'_>, quantize: Quantize) -> Result<WeightType, EngineBuildError> {
    match (quantize, tensor.kind) {
        (Quantize::None, kind) => Ok(kind),
        (Quantize::Int8, WeightType::F32 | WeightType::F16 | WeightType::BF16) => {
            if tensor.cols.is_multiple_of(QUANT_BLOCK) {
                return Ok(WeightType::Q8_0);
            }
            let reason = format!(
                "is {} in rows of {} elements: to quantise them to int8 takes a multiple of {QUANT_BLOCK}",
                tensor.kind, tensor.cols
            );
            Err(EngineBuildError::tensor(&tensor.name, reason))
        }
        (Quantize::Int8, kind) => {
            let reason =
                format!("is {kind}, which is quantised already: F32, F16 and BF16 can be quantised to int8");
            Err(EngineBuildError::tensor(&tensor.name, reason))
        }
    }
}

/// Quantises a tensor of F32, F16 or BF16 row by row into the tiles of `out`, as `Packed::write_tiles` does.
///
/// # Errors
/// [`EngineBuildError::BadTensor`] for an element that is not finite, or too large for a scale in f16.
pub(super) fn write_quantised(tensor: &Tensor<'_>, out: &mut [u8]) -> Result<(), EngineBuildError> {
    let shape = TileShape { kind: WeightType::Q8_0, cols: tensor.cols };
    let mut row = vec![0.0; tensor.cols];
    let mut blocks = vec![0; tensor.cols / QUANT_BLOCK * WeightType::Q8_0.block_bytes()];
    let row_bytes = tensor.cols * tensor.kind.block_bytes();
    for (nth, data) in tensor.data.chunks_exact(row_bytes).enumerate() {
        widen(tensor.kind, data, &mut row);
        let places =
            row.chunks_exact(QUANT_BLOCK).zip(blocks.chunks_exact_mut(WeightType::Q8_0.block_bytes()));
        for (x, block) in places {
            if !quantise_block(x, block) {
                let reason = format!("row {nth} has an element that is not finite or too large for int8");
                return Err(EngineBuildError::tensor(&tensor.name, reason));
            }
        }
        write_row(shape, nth, &blocks, out);
    }
    Ok(())
}

fn widen(kind: WeightType, data: &[u8], out: &mut [f32]) {
    match kind {
        WeightType::F16 => {
            let halves = data.as_chunks::<2>().0.iter().map(|&b| f16::from_le_bytes(b).to_f32());
            out.iter_mut().zip(halves).for_each(|(out, x)| *out = x);
        }
        WeightType::BF16 => {
            let halves = data.as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32());
            out.iter_mut().zip(halves).for_each(|(out, x)| *out = x);
        }
        _ => {
            let floats = data.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b));
            out.iter_mut().zip(floats).for_each(|(out, x)| *out = x);
        }
    }
}

/// One block: the scale, then the quants nearest to the elements under that very scale. False if there is no such scale.
fn quantise_block(x: &[f32], block: &mut [u8]) -> bool {
    let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let scale = f16::from_f32(largest / LEVELS);
    if !scale.is_finite() || x.iter().any(|x| !x.is_finite()) {
        return false;
    }
    let (head, quants) = block.split_at_mut(2);
    head.copy_from_slice(&scale.to_le_bytes());
    let scale = scale.to_f32();
    for (x, quant) in x.iter().zip(quants) {
        let nearest = if scale > 0.0 { (x / scale).round_ties_even().clamp(-LEVELS, LEVELS) } else { 0.0 };
        *quant = (nearest as i8).cast_unsigned();
    }
    true
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::sync::Arc;

    use super::super::Packed;
    use super::*;
    use crate::region::Region;

    fn tensor(kind: WeightType, cols: usize, values: &[f32]) -> Tensor<'static> {
        let data = values.iter().flat_map(|&v| match kind {
            WeightType::F16 => f16::from_f32(v).to_le_bytes().to_vec(),
            WeightType::BF16 => bf16::from_f32(v).to_le_bytes().to_vec(),
            _ => v.to_le_bytes().to_vec(),
        });
        let data = Cow::Owned(data.collect());
        Tensor { name: "blk.3.ffn_down.weight".into(), rows: values.len() / cols, cols, kind, data }
    }

    fn quantised(tensor: &Tensor<'_>) -> Result<Packed, EngineBuildError> {
        let kind = kept_as(tensor, Quantize::Int8)?;
        let len = Packed::bytes_needed(kind, tensor.rows, tensor.cols);
        let region = Arc::new(Region::new(len).unwrap());
        // SAFETY: nobody else has the region yet.
        write_quantised(tensor, unsafe { std::slice::from_raw_parts_mut(region.base(), len) })?;
        Ok(Packed::in_region(TileShape { kind, cols: tensor.cols }, tensor.rows, region, 0))
    }

    #[test]
    fn each_element_is_within_half_a_step_of_its_own_block() {
        // 19 rows, so that the second tile is partly padding; blocks of very different sizes.
        let values: Vec<f32> =
            (0..19 * 64).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.25f32.powi(i / 32 % 4)).collect();
        for kind in [WeightType::F32, WeightType::F16, WeightType::BF16] {
            let packed = quantised(&tensor(kind, 64, &values)).unwrap();
            let mut got = vec![0.0; 64];
            for (nth, row) in values.chunks_exact(64).enumerate() {
                packed.row(nth, &mut got);
                for (want, got) in row.chunks_exact(32).zip(got.chunks_exact(32)) {
                    let largest = want.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                    // What rounding to bfloat16 takes comes on top.
                    let bound =
                        largest * (0.5 / 127.0 + 1.0 / 256.0 * f32::from(kind == WeightType::BF16)) + 1e-6;
                    for (want, got) in want.iter().zip(got) {
                        assert!(
                            (want - got).abs() <= bound * 1.002,
                            "{kind}, row {nth}: {want} became {got}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn what_int8_holds_exactly_comes_back_exactly() {
        let values: Vec<f32> = (0..32).map(|i| ((i * 8) as f32 - 127.0) * 0.5).chain([0.0; 32]).collect();
        let packed = quantised(&tensor(WeightType::F32, 64, &values)).unwrap();
        let mut got = vec![1.0; 64];
        packed.row(0, &mut got);
        assert_eq!(got, values);
    }

    #[test]
    fn what_can_not_be_quantised_is_refused_by_tensor_and_type() {
        let refusal = |tensor: Tensor<'_>| quantised(&tensor).err().expect("to be refused").to_string();
        assert_eq!(
            refusal(tensor(WeightType::BF16, 48, &[1.0; 48])),
            "tensor 'blk.3.ffn_down.weight': is BF16 in rows of 48 elements: to quantise them to int8 takes a multiple of 32"
        );
        let quantised = Tensor { kind: WeightType::Q4_1, ..tensor(WeightType::F32, 32, &[1.0; 32]) };
        assert_eq!(
            refusal(quantised),
            "tensor 'blk.3.ffn_down.weight': is Q4_1, which is quantised already: F32, F16 and BF16 can be quantised to int8"
        );
        for bad in [f32::NAN, f32::INFINITY, 1e8] {
            let mut values = [0.5; 64];
            values[40] = bad;
            let said = refusal(tensor(WeightType::F32, 32, &values));
            assert!(said.starts_with("tensor 'blk.3.ffn_down.weight': row 1 has"), "{said}");
        }
        assert_eq!(
            kept_as(&tensor(WeightType::F16, 48, &[1.0; 48]), Quantize::None).unwrap(),
            WeightType::F16
        );
    }
}
