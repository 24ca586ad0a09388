//! Rows times packed weights.
//!
//! `out[row][o] = sum over k of x[row][k] * w[o][k]`: one chain of multiply-adds per element, in the order of k,
//! whatever number of rows and tiles is computed together. Weights are widened to f32 a slab at a time into a scratch
//! that stays in the nearest caches, and all rows then pass over it, so that many rows pay for widening once.

use std::ops::Range;

use super::simd::{LANES, Simd};
use super::unpack::{Run, unpack};
use crate::weights::Packed;

/// Tiles widened together.
const GROUP: usize = 4;
/// k of one slab, a multiple of every format's block: 4 tiles take 32 KiB.
const SLAB: usize = 128;
/// Floats of input that pass over one widened slab before the next: 1 MiB, half of a second-level cache.
const ROWS_FLOATS: usize = 256 * 1024;
/// Floats that [`Matmul::scratch`] must have.
pub(crate) const SCRATCH_FLOATS: usize = GROUP * SLAB * LANES;

/// One member's share of a matrix product.
pub(crate) struct Matmul<'a> {
    /// The weights.
    pub(crate) weights: &'a Packed,
    /// Which column tiles to compute.
    pub(crate) tiles: Range<usize>,
    /// Input: `num_rows` rows of `weights.cols` floats.
    pub(crate) x: *const f32,
    /// Floats from one input row to the next.
    pub(crate) x_stride: usize,
    /// Number of rows.
    pub(crate) num_rows: usize,
    /// Output: `num_rows` rows; tile `t` goes to columns `16 t ..`, padding included.
    pub(crate) out: *mut f32,
    /// Floats from one output row to the next.
    pub(crate) out_stride: usize,
    /// 64-byte aligned scratch of this member.
    pub(crate) scratch: *mut f32,
}

/// Where one pass reads and writes.
#[derive(Clone, Copy)]
struct Pass {
    x: *const f32,
    x_stride: usize,
    out: *mut f32,
    out_stride: usize,
    num_k: usize,
    /// Start from 0 rather than from what `out` holds.
    first: bool,
}

/// # Safety
/// The CPU has `S`; the pointers of `m` cover what their fields say, `tiles` lies in the weights, and nobody else
/// touches the outputs of these tiles.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(m: &Matmul<'_>) {
    let block = (ROWS_FLOATS / m.weights.cols / S::MAX_ROWS).max(4) * S::MAX_ROWS;
    let mut row = 0;
    while row < m.num_rows {
        let num_rows = block.min(m.num_rows - row);
        let mut tile = m.tiles.start;
        while tile < m.tiles.end {
            let num_tiles = GROUP.min(m.tiles.end - tile);
            // SAFETY: the group and the rows lie within the caller's.
            unsafe { group::<S>(m, row..row + num_rows, tile, num_tiles) };
            tile += num_tiles;
        }
        row += num_rows;
    }
}

/// # Safety
/// As [`run`], for `num_tiles` tiles from `tile`.
#[inline(always)]
unsafe fn group<S: Simd>(m: &Matmul<'_>, rows: Range<usize>, tile: usize, num_tiles: usize) {
    let shape = m.weights.shape();
    let cols = m.weights.cols;
    let mut k0 = 0;
    while k0 < cols {
        let k1 = (k0 + SLAB).min(cols);
        // SAFETY: each tile's slab has its own part of the scratch, and offsets stay within the arrays of the contract.
        unsafe {
            let mut w = [std::ptr::null(); GROUP];
            for (t, w) in w.iter_mut().enumerate().take(num_tiles) {
                let run = Run { tile: m.weights.tile(tile + t), k0, k1, ahead: GROUP * shape.bytes() };
                *w = unpack::<S>(shape, run, m.scratch.add(t * SLAB * LANES));
            }
            let pass = Pass {
                x: m.x.add(rows.start * m.x_stride + k0),
                x_stride: m.x_stride,
                out: m.out.add(rows.start * m.out_stride + tile * LANES),
                out_stride: m.out_stride,
                num_k: k1 - k0,
                first: k0 == 0,
            };
            slab::<S>(pass, rows.len(), &w[..num_tiles]);
        }
        k0 = k1;
    }
}

/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn slab<S: Simd>(mut pass: Pass, num_rows: usize, w: &[*const f32]) {
    let mut left = num_rows;
    macro_rules! rows {
        ($($rows:literal),*) => {$(
            while const { $rows <= S::MAX_ROWS } && left >= $rows {
                // SAFETY: `$rows` rows are left.
                unsafe {
                    tiles::<S, $rows>(pass, w);
                    pass.x = pass.x.add($rows * pass.x_stride);
                    pass.out = pass.out.add($rows * pass.out_stride);
                }
                left -= $rows;
            }
        )*};
    }
    rows!(12, 8, 6, 4, 2, 1);
}

/// # Safety
/// As [`run`], for `R` rows.
#[inline(always)]
unsafe fn tiles<S: Simd, const R: usize>(mut pass: Pass, mut w: &[*const f32]) {
    macro_rules! width {
        ($($tiles:literal),*) => {$(
            while const { R * $tiles <= S::MAX_ACCUMULATORS }
                && let Some((now, later)) = w.split_first_chunk()
            {
                // SAFETY: these tiles are among the caller's.
                unsafe {
                    kernel::<S, R, $tiles>(pass, *now);
                    pass.out = pass.out.add($tiles * LANES);
                }
                w = later;
            }
        )*};
    }
    width!(4, 2, 1);
}

/// # Safety
/// As [`run`], for `R` rows and the `T` tiles at `w`.
#[inline(always)]
unsafe fn kernel<S: Simd, const R: usize, const T: usize>(pass: Pass, w: [*const f32; T]) {
    // SAFETY: by contract `x` covers R rows of num_k, `w` T tiles of num_k x 16, `out` R rows of those tiles.
    unsafe {
        let out = pass.out;
        let mut acc = [[S::zero(); T]; R];
        if !pass.first {
            for (r, acc) in acc.iter_mut().enumerate() {
                for (t, acc) in acc.iter_mut().enumerate() {
                    *acc = S::load(out.add(r * pass.out_stride + t * LANES));
                }
            }
        }
        for k in 0..pass.num_k {
            let mut weights = [S::zero(); T];
            for (weights, w) in weights.iter_mut().zip(w) {
                *weights = S::load(w.add(k * LANES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = S::splat(*pass.x.add(r * pass.x_stride + k));
                for (acc, &weight) in acc.iter_mut().zip(&weights) {
                    *acc = S::fma(x, weight, *acc);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (t, &acc) in acc.iter().enumerate() {
                S::store(out.add(r * pass.out_stride + t * LANES), acc);
            }
        }
    }
}
