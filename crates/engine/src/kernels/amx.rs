//! The integer product on AMX, where 16 rows times 16 columns over a block of 32 are one instruction.
//!
//! That gives exact integers, and from them on every element is computed as [`super::int8`] says, so its bits are the same. Integers
//! come out through memory: those of a few blocks are staged there before any of them is scaled, since reading what a
//! tile has just stored waits for the store.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;
use std::sync::OnceLock;

use baton_model::WeightType;

use super::avx512::{self, Avx512};
use super::int8::{Format, Int8Matmul, Q4, Q4Min, Q8, SLAB, SPREAD, Spread, spread};
use super::quantise::{self, BLOCK_STRIDE, RECORD, ROW_GROUP, SCALE, SCALED_SUM};
use super::simd::{LANES, Simd};
use super::{Isa, Kernels, Peak};
use crate::weights::QUANT_BLOCK;

/// Groups of rows, and tiles of columns, whose products are staged together.
const SIDE: usize = 2;
/// Blocks that are staged together: 16 KiB of sums.
const STAGED: usize = 4;
/// Sums of one group, one column tile and one block.
const SUMS: usize = ROW_GROUP * LANES;
/// Floats of scratch: spread weights of as many column tiles as are computed together, what is staged, what is not yet done.
pub(super) const SCRATCH_FLOATS: usize = RUNNING_AT + SIDE * SIDE * SUMS;
const STAGE_AT: usize = SIDE * SLAB * SPREAD;
/// Where outputs stand until their last block is added: of the matrix they go to, each line may be far.
const RUNNING_AT: usize = STAGE_AT + SIDE * SIDE * STAGED * SUMS;
/// With fewer rows the products without tiles are faster.
const MIN_ROWS: usize = 16;
/// Bytes of input that pass over all tiles before the next rows: a quarter of the second-level cache of CPUs that have AMX.
const ROWS_BYTES: usize = 1 << 19;
/// How many blocks ahead of its use a weight is asked for, of each of two column tiles.
const AHEAD: usize = 24;
const LINE: usize = 64;

/// Whether this CPU has everything used here, and the system lets this process use it; asked for once.
pub(super) fn detected() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| avx512::vnni_detected() && has_tiles() && permitted())
}

/// AMX-TILE and AMX-INT8: bits 24 and 25 of EDX of leaf 7.
fn has_tiles() -> bool {
    const BOTH: u32 = 1 << 24 | 1 << 25;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BOTH == BOTH
}

/// Linux gives the tiles' state to processes that ask for it; threads that exist and those to come may use it then.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    /// `ARCH_REQ_XCOMP_PERM` of `asm/prctl.h`.
    const REQUEST: libc::c_int = 0x1023;
    /// The number of the state component that holds tiles.
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: the request takes no pointer, and grants or refuses.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The kernels of this instruction set: AVX-512's but for integer products.
pub(super) static TABLE: Kernels = Kernels { isa: Isa::Amx, matmul_int8, peak, ..avx512::TABLE };

/// What `ldtilecfg` reads: bytes and rows of eight tiles.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// Tiles 0 to 3 hold sums, 4 and 5 a group of rows, 6 and 7 weights: 8 rows of 4 bytes of each of 16 columns.
static SHAPES: Shapes = Shapes {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes: [64, 64, 64, 64, 32, 32, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// The calling thread's tiles have [`SHAPES`] while this lives; after it the thread has no tiles to save at a switch.
struct Tiles;

impl Tiles {
    /// # Safety
    /// [`detected`].
    unsafe fn new() -> Tiles {
        // SAFETY: reads 64 bytes.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, preserves_flags, readonly))
        };
        Tiles
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: there are tiles, or this value could not have been made.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

/// `load!(tile, address, bytes from row to row)`; reads as many rows as the tile has, within [`Tiles`].
macro_rules! load {
    ($tile:literal, $p:expr, $stride:expr) => {
        asm!(concat!("tileloadd tmm", $tile, ", [{p} + {stride} * 1]"), p = in(reg) $p, stride = in(reg) $stride,
             options(nostack, preserves_flags, readonly))
    };
}

/// `multiply!(sums, rows, weights)`: sums begin at 0.
macro_rules! multiply {
    ($sums:literal, $x:literal, $w:literal) => {
        asm!(
            concat!("tilezero tmm", $sums),
            concat!("tdpbsud tmm", $sums, ", tmm", $x, ", tmm", $w),
            options(nostack, preserves_flags, nomem)
        )
    };
}

/// `store!(address, tile)`; writes rows of 64 bytes one after the other.
macro_rules! store {
    ($p:expr, $tile:literal) => {
        asm!(concat!("tilestored [{p} + {stride} * 1], tmm", $tile), p = in(reg) $p, stride = in(reg) LANES * 4,
             options(nostack, preserves_flags))
    };
}

/// # Safety
/// As [`super::int8::run`]; the CPU is [`detected`].
unsafe fn matmul_int8(m: &Int8Matmul<'_>) {
    if m.num_rows < MIN_ROWS {
        // SAFETY: the caller's.
        return unsafe { (avx512::TABLE.matmul_int8)(m) };
    }
    // SAFETY: the caller's, and the format is that of the weights.
    unsafe {
        let _tiles = Tiles::new();
        match m.weights.shape().kind {
            WeightType::Q8_0 => columns::<Q8>(m),
            WeightType::Q4_0 => columns::<Q4>(m),
            WeightType::Q4_1 => columns::<Q4Min>(m),
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => {}
        }
    }
}

/// Where outputs stand.
#[derive(Clone, Copy)]
struct Place {
    /// First row of the first column tile.
    p: *mut f32,
    /// Floats from one row to the next.
    row: usize,
    /// Floats from one column tile to the next.
    tile: usize,
}

/// Some rows over one or two column tiles, and some of their blocks.
#[derive(Clone, Copy)]
struct Band {
    /// First spread block of the first column tile.
    w: *const u8,
    /// First record of the first group.
    x: *const u8,
    num_blocks: usize,
    /// What is added to; nothing is 0.
    from: Option<Place>,
    to: Place,
    num_rows: usize,
    num_tiles: usize,
    /// From one group to the next.
    group_bytes: usize,
    /// This member's.
    scratch: *mut f32,
}

/// From one column tile's spread blocks to the next one's.
const TILE_BYTES: usize = SLAB * SPREAD * size_of::<f32>();

/// # Safety
/// As [`matmul_int8`], with tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn columns<W: Format>(m: &Int8Matmul<'_>) {
    let group_bytes = quantise::group_bytes(m.weights.cols);
    let num_blocks = m.weights.cols / QUANT_BLOCK;
    let pass = (ROWS_BYTES / group_bytes / SIDE).max(1) * SIDE * ROW_GROUP;
    // What is used once need not last.
    let slab = if m.num_rows <= SIDE * ROW_GROUP { STAGED } else { SLAB };
    for row in (0..m.num_rows).step_by(pass) {
        for tile in m.tiles.clone().step_by(SIDE) {
            let num_tiles = SIDE.min(m.tiles.end - tile);
            for block in (0..num_blocks).step_by(slab) {
                let blocks = block..num_blocks.min(block + slab);
                // SAFETY: tiles, blocks and rows are the caller's; `row` begins a group; the scratch has room for two slabs and
                // the stage.
                unsafe {
                    for t in 0..num_tiles {
                        spread_blocks::<W>(m, tile + t, blocks.clone(), m.scratch.add(t * SLAB * SPREAD));
                    }
                    let p = m.out.add(row * m.out_stride + tile * LANES);
                    let to = Place { p, row: m.out_stride, tile: LANES };
                    bands::<W>(Band {
                        w: m.scratch.cast_const().cast(),
                        x: m.x.add(row / ROW_GROUP * group_bytes + block * BLOCK_STRIDE),
                        num_blocks: blocks.len(),
                        from: (block > 0).then_some(to),
                        to,
                        num_rows: pass.min(m.num_rows - row),
                        num_tiles,
                        group_bytes,
                        scratch: m.scratch,
                    });
                }
            }
        }
    }
}

/// Spreads some blocks of a tile. What is asked for early is of the same tile, or of those that come when this and its neighbour are done.
///
/// # Safety
/// As [`columns`]; `out` covers as many blocks.
#[inline(always)]
unsafe fn spread_blocks<W: Format>(m: &Int8Matmul<'_>, tile: usize, blocks: Range<usize>, out: *mut f32) {
    let (w, num_blocks) = (m.weights.tile(tile), m.weights.cols / QUANT_BLOCK);
    for (nth, block) in blocks.enumerate() {
        let next = block + AHEAD;
        let next = next / num_blocks * SIDE * num_blocks + next % num_blocks;
        // SAFETY: by contract; any address may be asked for.
        unsafe {
            spread::<Avx512, W>(
                w.add(block * W::BYTES),
                w.wrapping_add(next * W::BYTES),
                out.add(nth * SPREAD),
            );
        }
    }
}

/// Two groups of rows at a time, a few blocks at a time.
///
/// # Safety
/// As [`columns`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn bands<W: Format>(all: Band) {
    for row in (0..all.num_rows).step_by(SIDE * ROW_GROUP) {
        // SAFETY: within the rows of the contract.
        let of_row = |place: Place| unsafe { Place { p: place.p.add(row * place.row), ..place } };
        let running = all.scratch.wrapping_add(RUNNING_AT);
        let running = Place { p: running, row: LANES, tile: SIDE * ROW_GROUP * LANES };
        for block in (0..all.num_blocks).step_by(STAGED) {
            let last = block + STAGED >= all.num_blocks;
            // SAFETY: within the rows and blocks of the contract.
            unsafe {
                let band = Band {
                    w: all.w.add(block * Spread::<W>::BYTES),
                    x: all.x.add(row / ROW_GROUP * all.group_bytes + block * BLOCK_STRIDE),
                    num_blocks: STAGED.min(all.num_blocks - block),
                    from: if block == 0 { all.from.map(of_row) } else { Some(running) },
                    to: if last { of_row(all.to) } else { running },
                    num_rows: (SIDE * ROW_GROUP).min(all.num_rows - row),
                    ..all
                };
                (0..band.num_blocks).for_each(|b| sums(&band, b));
                scale::<W>(&band);
            }
        }
    }
}

/// Where the sums of one group, column tile and block are staged.
const fn staged((group, tile): (usize, usize), block: usize) -> usize {
    ((tile * SIDE + group) * STAGED + block) * SUMS
}

/// Stages the sums of block `b`. Records of a group that no row has are computed too, and looked at by nobody.
///
/// # Safety
/// As [`columns`].
#[inline(always)]
unsafe fn sums(band: &Band, b: usize) {
    // SAFETY: by contract: a group has 16 records of each block, a spread block 8 rows of 64 bytes, and the stage room for its sums.
    unsafe {
        let x = band.x.add(b * BLOCK_STRIDE);
        let w = band.w.add(b * SPREAD * size_of::<f32>());
        let at = |group, tile| band.scratch.add(STAGE_AT + staged((group, tile), b));
        let (two_groups, two_tiles) = (band.num_rows > ROW_GROUP, band.num_tiles > 1);
        load!(4, x, RECORD);
        load!(6, w, LANES * 4);
        multiply!(0, 4, 6);
        if two_groups {
            load!(5, x.add(band.group_bytes), RECORD);
            multiply!(1, 5, 6);
        }
        if two_tiles {
            load!(7, w.add(TILE_BYTES), LANES * 4);
            multiply!(2, 4, 7);
            if two_groups {
                multiply!(3, 5, 7);
            }
        }
        // In the order in which they are ready.
        store!(at(0, 0), 0);
        if two_groups {
            store!(at(1, 0), 1);
        }
        if two_tiles {
            store!(at(0, 1), 2);
            if two_groups {
                store!(at(1, 1), 3);
            }
        }
    }
}

/// Scales what is staged and adds it to the outputs.
///
/// # Safety
/// As [`columns`].
#[inline(always)]
unsafe fn scale<W: Format>(band: &Band) {
    for tile in 0..band.num_tiles {
        for first in (0..band.num_rows).step_by(ROW_GROUP) {
            let (mut row, end) = (first, band.num_rows.min(first + ROW_GROUP));
            macro_rules! rows {
                ($($rows:literal),*) => {$(
                    while end - row >= $rows {
                        // SAFETY: `$rows` rows of the group are left.
                        unsafe { scale_some::<W, $rows>(band, tile, row) };
                        row += $rows;
                    }
                )*};
            }
            rows!(16, 8, 4, 2, 1);
        }
    }
}

/// # Safety
/// As [`columns`], for `R` rows of a group from `row` on, in one column tile.
#[inline(always)]
unsafe fn scale_some<W: Format, const R: usize>(band: &Band, tile: usize, row: usize) {
    type S = Avx512;
    // SAFETY: by contract; the constants are offsets within a record.
    unsafe {
        let float = |p: *const u8| S::splat(p.cast::<f32>().read_unaligned());
        let mut acc = [S::zero(); R];
        if let Some(from) = band.from {
            let p = from.p.add(tile * from.tile + row * from.row);
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = S::load(p.add(r * from.row));
            }
        }
        let within = row % ROW_GROUP;
        let sums = band
            .scratch
            .add(STAGE_AT + staged((row / ROW_GROUP, tile), 0) + within * LANES)
            .cast_const()
            .cast::<u32>();
        let x = band.x.add(row / ROW_GROUP * band.group_bytes + within * RECORD);
        for block in 0..band.num_blocks {
            let w = band.w.add(tile * TILE_BYTES + block * Spread::<W>::BYTES);
            let x = x.add(block * BLOCK_STRIDE);
            let sums = sums.add(block * SUMS);
            // The blocks that are staged next; any address may be prefetched.
            for line in (0..R * RECORD).step_by(LINE) {
                S::prefetch_near(x.wrapping_add(STAGED * BLOCK_STRIDE + line));
            }
            let scales = Spread::<W>::scales::<S>(w);
            for (r, acc) in acc.iter_mut().enumerate() {
                let mut sum = S::load_u32(sums.add(r * LANES));
                if let Some(start) = W::START {
                    sum = _mm512_add_epi32(sum, S::splat_i32(x.add(r * RECORD + start)));
                }
                let scale = S::mul(scales, float(x.add(r * RECORD + SCALE)));
                *acc = S::fma(S::to_float(sum), scale, *acc);
            }
            if W::MIN {
                let mins = Spread::<W>::mins::<S>(w);
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = S::fma(mins, float(x.add(r * RECORD + SCALED_SUM)), *acc);
                }
            }
        }
        let p = band.to.p.add(tile * band.to.tile + row * band.to.row);
        for (r, acc) in acc.iter().enumerate() {
            S::store(p.add(r * band.to.row), *acc);
        }
    }
}

/// Products of tiles as [`sums`] makes them, one after the other.
///
/// # Safety
/// The CPU is [`detected`].
unsafe fn peak(peak: &Peak) -> f32 {
    /// Dot products of 16 lanes in one instruction.
    const DOTS: usize = ROW_GROUP * QUANT_BLOCK / 4;
    let (x, w) = ([1u8; ROW_GROUP * QUANT_BLOCK], [0x0302_0100u32; QUANT_BLOCK / 4 * LANES]);
    let mut sums = [0i32; SUMS];
    let num = peak.num_dots / DOTS;
    // SAFETY: tiles are no larger than the arrays.
    unsafe {
        let _tiles = Tiles::new();
        load!(4, x.as_ptr(), QUANT_BLOCK);
        load!(6, w.as_ptr(), LANES * 4);
        multiply!(0, 4, 6);
        multiply!(1, 4, 6);
        for _ in 1..num / 2 {
            asm!(
                "tdpbsud tmm0, tmm4, tmm6",
                "tdpbsud tmm1, tmm4, tmm6",
                options(nostack, preserves_flags, nomem)
            );
        }
        if num % 2 == 1 {
            asm!("tdpbsud tmm1, tmm4, tmm6", options(nostack, preserves_flags, nomem));
        }
        store!(sums.as_mut_ptr(), 0);
        let half: i64 = sums.iter().map(|&sum| i64::from(sum)).sum();
        store!(sums.as_mut_ptr(), 1);
        (half + sums.iter().map(|&sum| i64::from(sum)).sum::<i64>()) as f32
    }
}
