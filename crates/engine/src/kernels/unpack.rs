//! From a weight tile as it is stored to f32, `[k][16]`.
//!
//! The products here (a scale of 11 bits times at most 8) are exact in f32, so a weight has the same bits whatever
//! instruction set widened it, and the same as a scalar `scale * q + min`.

use baton_model::WeightType;

use super::simd::{LANES, Simd};
use crate::weights::{NIBBLE_GROUP, QUANT_BLOCK, TileShape};

/// Cache line.
const LINE: usize = 64;

/// A run of one tile's k.
#[derive(Clone, Copy)]
pub(super) struct Run {
    /// First byte of the tile.
    pub(super) tile: *const u8,
    /// First k; a multiple of 32 in block formats.
    pub(super) k0: usize,
    /// One past the last k.
    pub(super) k1: usize,
    /// How many bytes further the weights lie that will be wanted next.
    pub(super) ahead: usize,
}

/// The run as `[k][16]` f32: a pointer to the weights themselves if they are stored so, else to `out`, filled.
///
/// # Safety
/// The run lies in a tile of `shape`; `out` has room for `(k1 - k0) * 16` floats.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd>(shape: TileShape, run: Run, out: *mut f32) -> *const f32 {
    let (from, num_k) = (run.k0 * shape.bytes_of_k() / shape.k_unit(), run.k1 - run.k0);
    // SAFETY: by contract the run lies within the tile, in whole blocks; prefetching may touch any address.
    unsafe {
        let bytes = run.tile.add(from);
        let num_bytes = num_k * shape.bytes_of_k() / shape.k_unit();
        for line in 0..num_bytes.div_ceil(LINE) {
            S::prefetch_far(bytes.wrapping_add(run.ahead + line * LINE));
        }
        match shape.kind {
            WeightType::F32 => return bytes.cast(),
            WeightType::F16 => {
                let p = bytes.cast::<u16>();
                (0..num_k).for_each(|k| S::store(out.add(k * LANES), S::load_f16(p.add(k * LANES))));
            }
            WeightType::BF16 => {
                let p = bytes.cast::<u16>();
                (0..num_k).for_each(|k| S::store(out.add(k * LANES), S::load_bf16(p.add(k * LANES))));
            }
            WeightType::Q8_0 => each_block(shape, bytes, num_k, out, |p, o| q8::<S>(p, o)),
            WeightType::Q4_0 => each_block(shape, bytes, num_k, out, |p, o| q4::<S, false>(p, o)),
            WeightType::Q4_1 => each_block(shape, bytes, num_k, out, |p, o| q4::<S, true>(p, o)),
        }
        out
    }
}

/// # Safety
/// As [`unpack`].
#[inline(always)]
unsafe fn each_block(
    shape: TileShape,
    bytes: *const u8,
    num_k: usize,
    out: *mut f32,
    block: impl Fn(*const u8, *mut f32),
) {
    for b in 0..num_k / QUANT_BLOCK {
        // SAFETY: block `b` of the run and its 32 x 16 floats of output lie within what the contract gives.
        unsafe { block(bytes.add(b * shape.bytes_of_k()), out.add(b * QUANT_BLOCK * LANES)) }
    }
}

/// `[16 scales f16][4 groups of 8 k][2][16 u32]`, byte `i` of a u32 being k `2 i` of the group in the first row and
/// `2 i + 1` in the second, plus 128.
///
/// # Safety
/// `p` covers one block of a tile, `out` 512 floats.
#[inline(always)]
unsafe fn q8<S: Simd>(p: *const u8, out: *mut f32) {
    // SAFETY: by contract.
    unsafe {
        let scale = S::load_f16(p.cast());
        let q = p.add(2 * LANES).cast::<u32>();
        for row in 0..2 * QUANT_BLOCK / NIBBLE_GROUP {
            let mut bits = S::load_u32(q.add(row * LANES));
            let first = row / 2 * NIBBLE_GROUP + row % 2;
            for i in 0..NIBBLE_GROUP / 2 {
                let q = S::sub(S::low_byte(bits), S::splat(128.0));
                S::store(out.add((first + 2 * i) * LANES), S::mul(scale, q));
                bits = S::next_byte(bits);
            }
        }
    }
}

/// `[16 scales f16]([16 minimums f16] if MIN)[4 groups of 8 k][16 u32]`, nibble `i` of a u32 being k `i` of the group.
///
/// # Safety
/// `p` covers one block of a tile, `out` 512 floats.
#[inline(always)]
unsafe fn q4<S: Simd, const MIN: bool>(p: *const u8, out: *mut f32) {
    // SAFETY: by contract.
    unsafe {
        let scale = S::load_f16(p.cast());
        // Q4_0 stands for scale * (q - 8) = scale * q + min with min = -8 * scale, exactly.
        let (min, q) = if MIN {
            (S::load_f16(p.cast::<u16>().add(LANES)), p.add(4 * LANES).cast::<u32>())
        } else {
            (S::mul(scale, S::splat(-8.0)), p.add(2 * LANES).cast::<u32>())
        };
        for group in 0..QUANT_BLOCK / NIBBLE_GROUP {
            let mut bits = S::load_u32(q.add(group * LANES));
            for i in 0..NIBBLE_GROUP {
                let weight = S::fma(S::low_nibble(bits), scale, min);
                S::store(out.add((group * NIBBLE_GROUP + i) * LANES), weight);
                bits = S::next_nibble(bits);
            }
        }
    }
}
