//! Rows of quantised activations times quantised weights.
//!
//! For each element of the output, block by block in the order of k: the dot product of 32 pairs of integers, which is
//! exact, then `out += dot * (weight scale * row scale)` and for formats with a minimum `out += minimum * (row scale *
//! sum of the row's quants)`, one chain of multiply-adds. So its bits are the same on every instruction set
//! that rounds a multiply-add alike, and whatever rows and tiles are computed together.

use std::ops::Range;

use baton_model::WeightType;

use super::quantise::{self, BLOCK_STRIDE, RECORD, ROW_GROUP, SCALE, SCALED_SUM};
use super::simd::{LANES, Simd};
use crate::weights::{Packed, QUANT_BLOCK};

/// u32 rows of a block once nibbles are spread to bytes.
const QUANT_ROWS: usize = QUANT_BLOCK / 4;
/// Floats of a spread block: quants, scales and minimums.
pub(super) const SPREAD: usize = (QUANT_ROWS + 2) * LANES;
/// Blocks that are spread together: 40 KiB.
pub(super) const SLAB: usize = 64;
/// Floats that [`Int8Matmul::scratch`] must have.
pub(super) const SCRATCH_FLOATS: usize = SLAB * SPREAD;
/// With more rows than this, weights are spread once for all of them rather than for each few.
const FEW_ROWS: usize = ROW_GROUP;
const LINE: usize = 64;

/// One member's share of a product.
pub(crate) struct Int8Matmul<'a> {
    /// The weights, of a quantised format.
    pub(crate) weights: &'a Packed,
    /// Which column tiles to compute.
    pub(crate) tiles: Range<usize>,
    /// Groups of 16 quantised rows, each of [`quantise::group_bytes`].
    pub(crate) x: *const u8,
    /// Number of rows.
    pub(crate) num_rows: usize,
    /// Output: `num_rows` rows; tile `t` goes to columns `16 t ..`, padding included.
    pub(crate) out: *mut f32,
    /// Floats from one output row to the next.
    pub(crate) out_stride: usize,
    /// 64-byte aligned scratch of this member.
    pub(crate) scratch: *mut f32,
    /// How many bytes ahead of its use a weight is asked for.
    pub(crate) ahead: usize,
}

/// How a block of a tile gives its parts.
///
/// # Safety
/// The CPU has `S`; `p` covers a block of a tile in this format.
pub(super) trait Format {
    /// From one block to the next.
    const BYTES: usize;
    /// Whether it may come from memory, so that it is worth asking for early.
    const FAR: bool;
    /// Where a row's record has what the sums start from.
    const START: Option<usize>;
    /// Whether there is a minimum.
    const MIN: bool;
    /// Whether quants are bytes rather than nibbles.
    const WIDE: bool;
    /// Unsigned bytes in the order of a record, 4 of each column.
    unsafe fn quants<S: Simd>(p: *const u8, row: usize) -> S::I;
    unsafe fn scales<S: Simd>(p: *const u8) -> S::F;
    /// Only called with `MIN`.
    unsafe fn mins<S: Simd>(p: *const u8) -> S::F;
}

/// Row `row` of a block whose u32 rows hold nibbles.
///
/// # Safety
/// As [`Format`]; `p` is the first u32.
#[inline(always)]
unsafe fn nibbles<S: Simd>(p: *const u8, row: usize) -> S::I {
    // SAFETY: the caller's.
    unsafe {
        let both = S::load_u32(p.cast::<u32>().add(row / 2 * LANES));
        if row.is_multiple_of(2) { S::low_nibbles(both) } else { S::high_nibbles(both) }
    }
}

macro_rules! format {
    ($name:ident, $kind:ident, $start:expr, $min:literal, $wide:literal, |$p:ident, $row:ident| $quants:expr) => {
        pub(super) struct $name;

        impl Format for $name {
            const BYTES: usize = LANES * WeightType::$kind.block_bytes();
            const FAR: bool = true;
            const START: Option<usize> = $start;
            const MIN: bool = $min;
            const WIDE: bool = $wide;

            #[inline(always)]
            unsafe fn quants<S: Simd>($p: *const u8, $row: usize) -> S::I {
                // SAFETY: the caller's.
                unsafe { $quants }
            }

            #[inline(always)]
            unsafe fn scales<S: Simd>(p: *const u8) -> S::F {
                // SAFETY: the caller's; a block begins with 16 scales.
                unsafe { S::load_f16(p.cast()) }
            }

            #[inline(always)]
            unsafe fn mins<S: Simd>(p: *const u8) -> S::F {
                // SAFETY: the caller's; 16 minimums follow the scales.
                unsafe { S::load_f16(p.cast::<u16>().add(LANES)) }
            }
        }
    };
}

format!(Q8, Q8_0, Some(quantise::LESS_128), false, true, |p, row| S::load_u32(
    p.add(2 * LANES).cast::<u32>().add(row * LANES)
));
format!(Q4, Q4_0, Some(quantise::LESS_8), false, false, |p, row| nibbles::<S>(p.add(2 * LANES), row));
format!(Q4Min, Q4_1, None, true, false, |p, row| nibbles::<S>(p.add(4 * LANES), row));

/// A block of `W` with its quants as bytes, then scales and minimums as f32.
pub(super) struct Spread<W>(std::marker::PhantomData<W>);

impl<W: Format> Format for Spread<W> {
    const BYTES: usize = SPREAD * size_of::<f32>();
    const FAR: bool = false;
    const START: Option<usize> = W::START;
    const MIN: bool = W::MIN;
    const WIDE: bool = W::WIDE;

    #[inline(always)]
    unsafe fn quants<S: Simd>(p: *const u8, row: usize) -> S::I {
        // SAFETY: the caller's.
        unsafe { S::load_u32(p.cast::<u32>().add(row * LANES)) }
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load(p.cast::<f32>().add(QUANT_ROWS * LANES)) }
    }

    #[inline(always)]
    unsafe fn mins<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load(p.cast::<f32>().add((QUANT_ROWS + 1) * LANES)) }
    }
}

/// Some rows of one group, over some blocks of one tile.
#[derive(Clone, Copy)]
struct Piece {
    /// First block of the tile.
    w: *const u8,
    /// First row's record of that block.
    x: *const u8,
    num_blocks: usize,
    out: *mut f32,
    out_stride: usize,
    /// Start from 0 rather than from what `out` holds.
    first: bool,
    /// As [`Int8Matmul::ahead`].
    ahead: usize,
}

/// # Safety
/// The CPU has `S`; the pointers of `m` cover what their fields say, `tiles` lies in the weights, whose format is
/// quantised, and nobody else touches the outputs of these tiles.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(m: &Int8Matmul<'_>) {
    // SAFETY: the caller's, and the format is that of the weights.
    unsafe {
        match m.weights.shape().kind {
            WeightType::Q8_0 => tiles::<S, Q8>(m),
            WeightType::Q4_0 => tiles::<S, Q4>(m),
            WeightType::Q4_1 => tiles::<S, Q4Min>(m),
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => {}
        }
    }
}

/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn tiles<S: Simd, W: Format>(m: &Int8Matmul<'_>) {
    let group_bytes = quantise::group_bytes(m.weights.cols);
    let pass = (S::ROWS_BYTES / group_bytes).max(1) * ROW_GROUP;
    let mut row = 0;
    while row < m.num_rows {
        let num_rows = pass.min(m.num_rows - row);
        for tile in m.tiles.clone() {
            // SAFETY: rows `row..row + num_rows` and the tile are the caller's; `row` begins a group.
            unsafe {
                let piece = Piece {
                    w: m.weights.tile(tile),
                    x: m.x.add(row / ROW_GROUP * group_bytes),
                    num_blocks: m.weights.cols / QUANT_BLOCK,
                    out: m.out.add(row * m.out_stride + tile * LANES),
                    out_stride: m.out_stride,
                    first: true,
                    ahead: m.ahead,
                };
                if m.num_rows <= FEW_ROWS {
                    rows::<S, W>(piece, num_rows, group_bytes);
                } else {
                    spread_tile::<S, W>(piece, num_rows, group_bytes, m.scratch);
                }
            }
        }
        row += num_rows;
    }
}

/// All rows over one tile, whose nibbles are spread once, a slab at a time.
///
/// # Safety
/// As [`run`], for the piece's tile.
#[inline(always)]
unsafe fn spread_tile<S: Simd, W: Format>(
    piece: Piece,
    num_rows: usize,
    group_bytes: usize,
    scratch: *mut f32,
) {
    let mut block = 0;
    while block < piece.num_blocks {
        let num_blocks = SLAB.min(piece.num_blocks - block);
        // SAFETY: blocks `block..block + num_blocks` lie in the tile; the scratch holds a slab.
        unsafe {
            for b in 0..num_blocks {
                let w = piece.w.add((block + b) * W::BYTES);
                spread::<S, W>(w, w.wrapping_add(piece.ahead), scratch.add(b * SPREAD));
            }
            let slab = Piece {
                w: scratch.cast_const().cast(),
                x: piece.x.add(block * BLOCK_STRIDE),
                num_blocks,
                first: block == 0,
                ..piece
            };
            rows::<S, Spread<W>>(slab, num_rows, group_bytes);
        }
        block += num_blocks;
    }
}

/// Spreads the block at `p`, and asks for one at `ahead`.
///
/// # Safety
/// The CPU has `S`; `p` covers a block of `W`, `out` [`SPREAD`] floats.
#[inline(always)]
pub(super) unsafe fn spread<S: Simd, W: Format>(p: *const u8, ahead: *const u8, out: *mut f32) {
    // SAFETY: by contract; any address may be prefetched.
    unsafe {
        for line in 0..W::BYTES / LINE {
            S::prefetch_far(ahead.wrapping_add(line * LINE));
        }
        for row in 0..QUANT_ROWS {
            S::store_u32(out.cast::<u32>().add(row * LANES), W::quants::<S>(p, row));
        }
        S::store(out.add(QUANT_ROWS * LANES), W::scales::<S>(p));
        if W::MIN {
            S::store(out.add((QUANT_ROWS + 1) * LANES), W::mins::<S>(p));
        }
    }
}

/// `num_rows` rows from the piece's, which begin a group.
///
/// # Safety
/// As [`run`], for the piece's tile.
#[inline(always)]
unsafe fn rows<S: Simd, W: Format>(piece: Piece, num_rows: usize, group_bytes: usize) {
    let mut row = 0;
    // One row more than fits in registers together would cost nearly a whole pass again, so what is left of a group goes together if it can.
    while row < num_rows {
        let left = (num_rows - row).min(ROW_GROUP - row % ROW_GROUP);
        let count = if left <= S::MAX_QUANT_ROWS { left } else { S::MAX_QUANT_ROWS.min(8) };
        macro_rules! kernels {
            ($($rows:literal),*) => {
                match count {
                    $($rows if const { $rows <= S::MAX_QUANT_ROWS } => {
                        // SAFETY: `count` rows are left in the group that `row` lies in.
                        unsafe {
                            kernel::<S, W, $rows>(Piece {
                                x: piece.x.add(row / ROW_GROUP * group_bytes + row % ROW_GROUP * RECORD),
                                out: piece.out.add(row * piece.out_stride),
                                ..piece
                            });
                        }
                    })*
                    _ => unreachable!("between 1 and the most rows"),
                }
            };
        }
        kernels!(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12);
        row += count;
    }
}

/// Row `row` of a block's quants: whole bytes with `FACTOR` 0, else their low (1) or high (16) nibbles.
///
/// # Safety
/// As [`Format`].
#[inline(always)]
unsafe fn part<S: Simd, W: Format, const FACTOR: i16>(w: *const u8, row: usize) -> S::I {
    // SAFETY: the caller's.
    unsafe {
        let quants = W::quants::<S>(w, row);
        match FACTOR {
            0 => quants,
            1 => S::low_nibbles(quants),
            _ => S::high_nibbles(quants),
        }
    }
}

/// Adds `FACTOR` times the dot products of the block at `w` with `R` rows, whose first record is `x`, to `sums`, once for whole
/// bytes, `FACTOR` 0. No closures here: those are not compiled for the instruction set.
///
/// # Safety
/// As [`run`]; `FACTOR` is not 0 if dot products take only nibbles and the format is of bytes.
#[inline(always)]
unsafe fn dots<S: Simd, W: Format, const R: usize, const FACTOR: i16>(
    sums: &mut [S::I; R],
    (w, x): (*const u8, *const u8),
    pairs: usize,
) {
    // SAFETY: the caller's; a record has 4 bytes for each of the 8 rows.
    unsafe {
        let mut dots = [S::first_dot(S::zero_i32(), S::zero_i32(), x); R];
        let quants = part::<S, W, FACTOR>(w, 0);
        for (r, dots) in dots.iter_mut().enumerate() {
            *dots = S::first_dot(sums[r], quants, x.add(r * RECORD));
        }
        let quants = part::<S, W, FACTOR>(w, 1);
        for (r, dots) in dots.iter_mut().enumerate() {
            *dots = S::dot(*dots, quants, x.add(r * RECORD + 4));
        }
        for pair in 1..pairs {
            for row in [2 * pair, 2 * pair + 1] {
                let quants = part::<S, W, FACTOR>(w, row);
                for (r, dots) in dots.iter_mut().enumerate() {
                    *dots = S::dot(*dots, quants, x.add(r * RECORD + 4 * row));
                }
            }
        }
        for (sum, &dots) in sums.iter_mut().zip(&dots) {
            *sum = if FACTOR == 16 { S::total::<16>(*sum, dots) } else { S::total::<1>(*sum, dots) };
        }
    }
}

/// # Safety
/// As [`run`], for `R` rows of one group.
#[inline(always)]
unsafe fn kernel<S: Simd, W: Format, const R: usize>(piece: Piece) {
    // SAFETY: by contract; the constants are offsets within a record.
    unsafe {
        let float = |p: *const u8| S::splat(p.cast::<f32>().read_unaligned());
        // Of u32 rows. Where registers are few the compiler may not know how many there are: it would unroll all, take row after row
        // of the output and spill the weights.
        let pairs = if S::NIBBLE_DOTS { std::hint::black_box(QUANT_ROWS / 2) } else { QUANT_ROWS / 2 };
        let mut acc = [S::zero(); R];
        if !piece.first {
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = S::load(piece.out.add(r * piece.out_stride));
            }
        }
        for block in 0..piece.num_blocks {
            let w = piece.w.add(block * W::BYTES);
            let x = piece.x.add(block * BLOCK_STRIDE);
            if W::FAR {
                for line in 0..W::BYTES / LINE {
                    S::prefetch_far(w.wrapping_add(piece.ahead + line * LINE));
                }
            } else {
                for line in (0..R * RECORD).step_by(LINE) {
                    S::prefetch_near(x.wrapping_add(BLOCK_STRIDE + line));
                }
            }
            let mut sums = [S::zero_i32(); R];
            if let Some(start) = W::START {
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = S::splat_i32(x.add(r * RECORD + start));
                }
            }
            if const { W::WIDE && S::NIBBLE_DOTS } {
                dots::<S, W, R, 1>(&mut sums, (w, x), pairs);
                dots::<S, W, R, 16>(&mut sums, (w, x), pairs);
            } else {
                dots::<S, W, R, 0>(&mut sums, (w, x), pairs);
            }
            let scales = W::scales::<S>(w);
            for (r, acc) in acc.iter_mut().enumerate() {
                let scale = S::mul(scales, float(x.add(r * RECORD + SCALE)));
                *acc = S::fma(S::to_float(sums[r]), scale, *acc);
            }
            if W::MIN {
                let mins = W::mins::<S>(w);
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = S::fma(mins, float(x.add(r * RECORD + SCALED_SUM)), *acc);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            S::store(piece.out.add(r * piece.out_stride), *acc);
        }
    }
}
