//! Rows of activations to signed bytes, 32 at a time with a scale of their own.

use super::simd::{LANES, Simd};
use crate::weights::QUANT_BLOCK;

/// Rows whose records of one block lie together.
pub(crate) const ROW_GROUP: usize = 16;
/// Bytes of one row's block: 32 quants, of each eight the even ones first; the scale, f32; scale times the quants' sum,
/// f32; -8 times the sum and -128 times the sum, i32.
pub(super) const RECORD: usize = 48;
/// Where a record has what follows the quants.
pub(super) const SCALE: usize = QUANT_BLOCK;
/// Scale times sum.
pub(super) const SCALED_SUM: usize = SCALE + 4;
/// -8 times the sum.
pub(super) const LESS_8: usize = SCALED_SUM + 4;
/// -128 times the sum.
pub(super) const LESS_128: usize = LESS_8 + 4;
/// From one block to the next.
pub(super) const BLOCK_STRIDE: usize = ROW_GROUP * RECORD;
/// A block whose elements are all smaller counts as zeros: its inverse scale would leave f32's range.
const SMALLEST: f32 = 1e-30;

/// Bytes of a group of 16 rows, `[block][row]{record}`.
pub(crate) const fn group_bytes(cols: usize) -> usize {
    cols / QUANT_BLOCK * BLOCK_STRIDE
}

/// Byte of the record of a block that begins at `(row, col)`.
pub(crate) const fn record((row, col): (usize, usize), cols: usize) -> usize {
    row / ROW_GROUP * group_bytes(cols) + col / QUANT_BLOCK * BLOCK_STRIDE + row % ROW_GROUP * RECORD
}

/// A row, or some blocks of it: each 32 elements become `q = round(x / scale)`, ties to even, with `scale = largest / 127`.
///
/// What is not finite makes the scale NaN.
pub(crate) struct Quantise {
    /// Input.
    pub(crate) x: *const f32,
    /// Elements, a multiple of 32.
    pub(crate) len: usize,
    /// First record; the next one lies [`BLOCK_STRIDE`] bytes on.
    pub(crate) out: *mut u8,
}

/// `x * inverse` as whole numbers. No closure: those are not compiled for the instruction set.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn rounded<S: Simd>(x: S::F, inverse: f32) -> S::F {
    // 1.5 * 2^23: adding it rounds to whole numbers.
    let magic = 12_582_912.0;
    // SAFETY: the caller's.
    unsafe {
        let shifted = S::add(S::mul(x, S::splat(inverse)), S::splat(magic));
        S::sub(shifted, S::splat(magic))
    }
}

/// Blocks that are quantised together: what is found across lanes, the largest element and the sum, is found for all of them at once.
const TOGETHER: usize = 4;

/// # Safety
/// The CPU has `S`; `x` covers `len` floats, `out` as many records.
#[inline(always)]
pub(super) unsafe fn quantise<S: Simd>(arg: &Quantise) {
    let num = arg.len / QUANT_BLOCK;
    let mut block = 0;
    macro_rules! blocks {
        ($($together:literal),*) => {$(
            while num - block >= $together {
                // SAFETY: by contract; so many blocks are left.
                unsafe { blocks::<S, $together>(arg.x.add(block * QUANT_BLOCK), arg.out.add(block * BLOCK_STRIDE)) }
                block += $together;
            }
        )*};
    }
    blocks!(4, 2, 1);
}

/// # Safety
/// As [`quantise`], for `N` blocks, at most [`TOGETHER`].
#[inline(always)]
unsafe fn blocks<S: Simd, const N: usize>(x: *const f32, out: *mut u8) {
    // SAFETY: by contract; a record is 48 bytes.
    unsafe {
        let zero = S::zero();
        let mut halves = [(zero, zero); N];
        let mut sizes = [zero; TOGETHER];
        for (n, half) in halves.iter_mut().enumerate() {
            let (a, b) = (S::load(x.add(n * QUANT_BLOCK)), S::load(x.add(n * QUANT_BLOCK + LANES)));
            sizes[n] = S::max(S::max(a, S::sub(zero, a)), S::max(b, S::sub(zero, b)));
            *half = (a, b);
        }
        let mut scale = S::largest_of_each(sizes);
        let mut inverse = [0.0; TOGETHER];
        for (scale, inverse) in scale.iter_mut().zip(&mut inverse) {
            let largest = *scale;
            let is_small = largest < SMALLEST;
            *inverse = if is_small { 0.0 } else { 127.0 / largest };
            *scale = if is_small { 0.0 } else { largest / 127.0 };
        }
        let mut sums = [zero; TOGETHER];
        for (n, (a, b)) in halves.iter_mut().enumerate() {
            (*a, *b) = (rounded::<S>(*a, inverse[n]), rounded::<S>(*b, inverse[n]));
            sums[n] = S::add(*a, *b);
        }
        // Whole numbers this small add up exactly in any order. A NaN stays one here, whatever the maximum did with it,
        // and with an infinity the inverse is 0 and their product NaN.
        let sums = S::sum_of_each(sums);
        for (n, (a, b)) in halves.iter().enumerate() {
            let (out, sum) = (out.add(n * BLOCK_STRIDE), sums[n]);
            S::store_quants(out, *a);
            S::store_quants(out.add(LANES), *b);
            let scale = scale[n] + sum * 0.0;
            out.add(SCALE).cast::<f32>().write_unaligned(scale);
            out.add(SCALED_SUM).cast::<f32>().write_unaligned(scale * sum);
            out.add(LESS_8).cast::<i32>().write_unaligned(-8 * sum as i32);
            out.add(LESS_128).cast::<i32>().write_unaligned(-128 * sum as i32);
        }
    }
}
