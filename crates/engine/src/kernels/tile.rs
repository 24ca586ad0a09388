//! K and V of 256 tokens: scores of queries against K, and sums of V weighted by their exponentials.

use super::attention::{Attend, MAX_HEAD_DIM, MAX_QUERIES, Queries, TILE_TOKENS};
use super::element::{Element, scales};
use super::simd::{LANES, Simd};

/// Runs of 16 tokens in a tile.
const TILE_CHUNKS: usize = TILE_TOKENS / LANES;
/// Runs whose elements are widened together: 16 KiB of heads of 64.
const WIDE_CHUNKS: usize = 4;
/// Floats of [`Queries::wide`].
pub(super) const WIDE_FLOATS: usize = WIDE_CHUNKS * LANES * MAX_HEAD_DIM;
const LINE: usize = 64;

/// One tile of a sequence as the kernels see it, in runs of 16 tokens; a run lies within one block.
pub(super) struct Tile<E> {
    pub(super) start: usize,
    /// K of this head: 16 tokens of its first element.
    k: [*const E; TILE_CHUNKS],
    /// From one element of K to the next.
    k_stride: usize,
    v: [*const E; TILE_CHUNKS],
    /// Scales of K's rows of this head, and of V's, where there are any.
    k_scales: [*const u8; TILE_CHUNKS],
    pub(super) v_scales: [*const u8; TILE_CHUNKS],
    /// As many bytes as a run has of K, of the tile after it; null where there is none, or no use in asking for it early.
    next_k: [*const E; TILE_CHUNKS],
}

impl<E: Element> Tile<E> {
    /// Finds a tile's blocks of the `nth` head, and with one row the K that is wanted next: of this head in the next tile, or of what
    /// comes after this sequence. Its bytes come from far and are wanted once only, while rows of a prompt find them in the caches.
    ///
    /// # Safety
    /// As [`super::attention::run`].
    #[inline(always)]
    pub(super) unsafe fn of(a: &Attend<'_>, (start, context): (usize, usize), nth: usize) -> Tile<E> {
        let head = a.head_dim * a.block_size;
        let kv_head = a.kv_head + nth;
        let scales = a.num_kv_heads * head * size_of::<E>() + kv_head * a.block_size;
        let mut tile = Tile { start, k_stride: a.block_size, ..Tile::nothing() };
        let (shift, mask) = (a.block_size.trailing_zeros(), a.block_size - 1);
        for n in 0..(context - start).div_ceil(LANES).min(TILE_CHUNKS) {
            let token = start + n * LANES;
            let (block, slot) = (a.blocks[token >> shift] as usize, token & mask);
            // SAFETY: by contract the block lies in the layer; K and V are half of it each, `num_kv_heads` heads and their scales.
            unsafe {
                let k_half = a.layer.add(block * a.block_bytes);
                let v_half = k_half.add(a.block_bytes / 2);
                tile.k[n] = k_half.cast::<E>().add(kv_head * head + slot);
                tile.v[n] = v_half.cast::<E>().add(kv_head * head + slot * a.head_dim);
                if E::SCALED {
                    tile.k_scales[n] = k_half.add(scales + slot);
                    tile.v_scales[n] = v_half.add(scales + slot);
                }
            }
        }
        let next = if a.num_rows > 1 {
            None
        } else if start + TILE_TOKENS < context {
            Some((kv_head, start + TILE_TOKENS, a.blocks))
        } else {
            a.next.map(|(kv_head, blocks)| (kv_head + nth, 0, blocks))
        };
        if let Some((kv_head, start, blocks)) = next {
            for (n, next_k) in tile.next_k.iter_mut().enumerate() {
                let token = start + n * LANES;
                let Some(&block) = blocks.get(token >> shift) else { break };
                // No more than an address: it is asked for and not read. As many bytes as the run has, if it is not this run.
                let k = a.layer.wrapping_add(block as usize * a.block_bytes).cast::<E>();
                *next_k = k.wrapping_add(kv_head * head + (token & mask) * a.head_dim);
            }
        }
        tile
    }

    pub(super) const fn nothing() -> Tile<E> {
        let (none, no_scales) = ([std::ptr::null(); TILE_CHUNKS], [std::ptr::null(); TILE_CHUNKS]);
        Tile {
            start: 0,
            k: none,
            k_stride: 0,
            v: none,
            k_scales: no_scales,
            v_scales: no_scales,
            next_k: none,
        }
    }

    /// Runs `from..to` of K as f32 in `wide`.
    ///
    /// # Safety
    /// The CPU has `S`; the runs are there, at most [`WIDE_CHUNKS`] of them.
    #[inline(always)]
    unsafe fn wide_k<S: Simd>(
        &self,
        head_dim: usize,
        (from, to): (usize, usize),
        wide: *mut f32,
    ) -> Tile<f32> {
        let mut tile =
            Tile { start: self.start, k_stride: LANES, k_scales: self.k_scales, ..Tile::nothing() };
        for n in from..to {
            // SAFETY: a run of K is `head_dim` times 16 elements, and as many floats of `wide` are its own.
            unsafe {
                let out = wide.add((n - from) * head_dim * LANES);
                for d in 0..head_dim {
                    S::store(out.add(d * LANES), E::load::<S>(self.k[n].add(d * self.k_stride)));
                }
                tile.k[n] = out;
            }
        }
        tile
    }

    /// Runs `from..to` of V as f32 in `wide`.
    ///
    /// # Safety
    /// As [`Self::wide_k`].
    #[inline(always)]
    unsafe fn wide_v<S: Simd>(
        &self,
        head_dim: usize,
        (from, to): (usize, usize),
        wide: *mut f32,
    ) -> Tile<f32> {
        let mut tile = Tile { start: self.start, ..Tile::nothing() };
        for n in from..to {
            // SAFETY: a run of V is 16 times `head_dim` elements, and as many floats of `wide` are its own.
            unsafe {
                let out = wide.add((n - from) * head_dim * LANES);
                for i in (0..head_dim * LANES).step_by(LANES) {
                    S::store(out.add(i), E::load::<S>(self.v[n].add(i)));
                }
                tile.v[n] = out;
            }
        }
        tile
    }
}

/// Whether elements are widened once for all queries, if they are more than registers hold, rather than by each piece of them.
const fn widens<S: Simd, E: Element>() -> bool {
    size_of::<E>() < size_of::<f32>() && S::MAX_ACCUMULATORS < MAX_QUERIES
}

/// Splits `num` queries and vectors `from..end` into pieces that fit in registers: `$kernel::<S, E, Q, W>(first, at)`. Pieces that
/// never fit are ruled out by constants, so that they are not even compiled.
macro_rules! pieces {
    ($s:ident, $e:ty, $num:expr, $from:expr, $end:expr, $kernel:ident($($arg:expr),*)) => {{
        let mut first = 0;
        pieces!(@queries $s, $e, first, $num, ($from, $end), $kernel($($arg),*), 12 6 4 3 2 1);
    }};
    (@queries $s:ident, $e:ty, $first:ident, $num:expr, ($from:expr, $end:expr), $kernel:ident $args:tt, $($q:literal)*) => {$(
        while const { $q <= $s::MAX_ACCUMULATORS } && $num - $first >= $q {
            let mut at = $from;
            pieces!(@width $s, $e, $first, at, $end, $q, $kernel $args, 4);
            pieces!(@width $s, $e, $first, at, $end, $q, $kernel $args, 2);
            pieces!(@width $s, $e, $first, at, $end, $q, $kernel $args, 1);
            $first += $q;
        }
    )*};
    (@width $s:ident, $e:ty, $first:ident, $at:ident, $end:expr, $q:literal, $kernel:ident($($arg:expr),*), $w:literal) => {
        while const { $w == 1 || $q * $w <= $s::MAX_ACCUMULATORS } && $end - $at >= $w {
            $kernel::<$s, $e, $q, $w>($($arg,)* $first, $at);
            $at += $w;
        }
    };
}

/// Whether so many factors fit in registers beside a vector and all sums; a factor takes half a vector's place where that is a pair.
const fn keeps_factors<S: Simd>(queries: usize, vectors: usize) -> bool {
    queries <= 2 * vectors && queries * vectors + queries.div_ceil(2) < S::VECTORS
}

/// `$sums[i][n] += $factor * $vector`, keeping the fewer of the two kinds of operand in registers, or a vector at a time. No function
/// over closures: those are not compiled for the instruction set.
macro_rules! products {
    ($s:ident, $q:ident, $n:ident, $sums:ident, |$i:ident| $factor:expr, |$v:ident| $vector:expr) => {
        if const { keeps_factors::<$s>($q, $n) } {
            let mut factors = [$s::zero(); $q];
            for ($i, factor) in factors.iter_mut().enumerate() {
                *factor = $factor;
            }
            for $v in 0..$n {
                let vector = $vector;
                for (sums, &factor) in $sums.iter_mut().zip(&factors) {
                    sums[$v] = $s::fma(factor, vector, sums[$v]);
                }
            }
        } else if const { $q <= 2 * $n } {
            for $v in 0..$n {
                let vector = $vector;
                for ($i, sums) in $sums.iter_mut().enumerate() {
                    sums[$v] = $s::fma($factor, vector, sums[$v]);
                }
            }
        } else {
            let mut vectors = [$s::zero(); $n];
            for ($v, vector) in vectors.iter_mut().enumerate() {
                *vector = $vector;
            }
            for ($i, sums) in $sums.iter_mut().enumerate() {
                let factor = $factor;
                for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                    *sum = $s::fma(factor, vector, *sum);
                }
            }
        }
    };
}

/// Scores of all queries for the tile's first `num_tokens` tokens; those a query may not see are masked later.
///
/// # Safety
/// As [`super::attention::run`].
#[inline(always)]
pub(super) unsafe fn scores<S: Simd, E: Element>(
    a: &Attend<'_>,
    tile: &Tile<E>,
    qs: &Queries,
    num_tokens: usize,
) {
    let num_chunks = num_tokens.div_ceil(LANES);
    // SAFETY: pieces stay within `qs.num` queries and the runs of the tile.
    unsafe {
        if const { widens::<S, E>() } && qs.num > S::MAX_ACCUMULATORS {
            for from in (0..num_chunks).step_by(WIDE_CHUNKS) {
                let to = num_chunks.min(from + WIDE_CHUNKS);
                let wide = tile.wide_k::<S>(a.head_dim, (from, to), qs.wide);
                pieces!(S, f32, qs.num, from, to, score_piece(a, &wide, qs, E::SCALED));
            }
        } else {
            pieces!(S, E, qs.num, 0, num_chunks, score_piece(a, tile, qs, E::SCALED));
        }
    }
}

/// # Safety
/// As [`super::attention::run`], for queries `first..first + Q` and runs `at..at + C`.
#[inline(always)]
unsafe fn score_piece<S: Simd, E: Element, const Q: usize, const C: usize>(
    a: &Attend<'_>,
    tile: &Tile<E>,
    qs: &Queries,
    scaled: bool,
    first: usize,
    at: usize,
) {
    // SAFETY: by contract.
    unsafe {
        let ahead = first == 0 && a.num_rows == 1;
        let k: [*const E; C] = std::array::from_fn(|c| tile.k[at + c]);
        let v: [*const E; C] = std::array::from_fn(|c| tile.v[at + c]);
        let q = qs.q.add(first * MAX_HEAD_DIM);
        let mut acc = [[S::zero(); C]; Q];
        for d in 0..a.head_dim {
            // V of these tokens is as large as K: as much of it is asked for as K is read, so that requests never pile up.
            if ahead && (d * LANES * size_of::<E>()).is_multiple_of(LINE) {
                for v in v {
                    S::prefetch_far(v.wrapping_add(d * LANES).cast());
                }
            }
            products!(S, Q, C, acc, |i| S::splat(*q.add(i * MAX_HEAD_DIM + d)), |c| E::load::<S>(
                k[c].add(d * tile.k_stride)
            ));
        }
        for (i, acc) in acc.iter().enumerate() {
            for (c, &acc) in acc.iter().enumerate() {
                let acc = if scaled { S::mul(acc, scales::<S>(tile.k_scales[at + c])) } else { acc };
                S::store(qs.scores.add((first + i) * TILE_TOKENS + (at + c) * LANES), acc);
            }
        }
    }
}

/// Adds the tile's weighted V: together for the tokens that all queries see, one query at a time for the rest.
///
/// # Safety
/// As [`super::attention::run`].
#[inline(always)]
pub(super) unsafe fn values<S: Simd, E: Element>(a: &Attend<'_>, tile: &Tile<E>, qs: &Queries) {
    let seen = |i: usize| qs.limits[i].saturating_sub(tile.start).min(TILE_TOKENS);
    let common = (0..qs.num).map(seen).min().unwrap_or(0);
    let width = a.head_dim / LANES;
    // SAFETY: pieces stay within the queries, a head's vectors and the tokens they see.
    unsafe {
        if const { widens::<S, E>() } && qs.num > S::MAX_ACCUMULATORS {
            for from in (0..common).step_by(WIDE_CHUNKS * LANES) {
                let to = common.min(from + WIDE_CHUNKS * LANES);
                let wide = tile.wide_v::<S>(a.head_dim, (from / LANES, to.div_ceil(LANES)), qs.wide);
                pieces!(S, f32, qs.num, 0, width, value_piece(a, &wide, qs, (from, to)));
            }
        } else {
            pieces!(S, E, qs.num, 0, width, value_piece(a, tile, qs, (0, common)));
        }
        for i in 0..qs.num {
            let own = seen(i);
            if own > common {
                for at in 0..width {
                    value_piece::<S, E, 1, 1>(a, tile, qs, (common, own), i, at);
                }
            }
        }
    }
}

/// # Safety
/// As [`super::attention::run`], for queries `first..first + Q`, vectors `at..at + D` of the head and tokens `from..to` of the tile.
#[inline(always)]
unsafe fn value_piece<S: Simd, E: Element, const Q: usize, const D: usize>(
    a: &Attend<'_>,
    tile: &Tile<E>,
    qs: &Queries,
    (from, to): (usize, usize),
    first: usize,
    at: usize,
) {
    // SAFETY: by contract.
    unsafe {
        let p = qs.scores.add(first * TILE_TOKENS);
        let out = qs.acc.add(first * MAX_HEAD_DIM + at * LANES);
        let mut acc = [[S::zero(); D]; Q];
        for (i, acc) in acc.iter_mut().enumerate() {
            for (d, acc) in acc.iter_mut().enumerate() {
                *acc = S::load(out.add(i * MAX_HEAD_DIM + d * LANES));
            }
        }
        let mut t = from;
        while t < to {
            let (chunk, end) = (t / LANES, (t / LANES + 1) * LANES);
            let next_k = tile.next_k[chunk];
            let ahead = first == 0 && at == 0 && !next_k.is_null();
            let v = tile.v[chunk].add(at * LANES);
            for t in t..end.min(to) {
                if ahead {
                    prefetch::<S, E>(next_k.wrapping_add(t % LANES * a.head_dim), a.head_dim);
                }
                products!(S, Q, D, acc, |i| S::splat(*p.add(i * TILE_TOKENS + t)), |d| E::load::<S>(
                    v.add(t % LANES * a.head_dim + d * LANES)
                ));
            }
            t = end;
        }
        for (i, acc) in acc.iter().enumerate() {
            for (d, &acc) in acc.iter().enumerate() {
                S::store(out.add(i * MAX_HEAD_DIM + d * LANES), acc);
            }
        }
    }
}

/// Asks for `len` elements from `p`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn prefetch<S: Simd, E>(p: *const E, len: usize) {
    for line in (0..len * size_of::<E>()).step_by(LINE) {
        // SAFETY: any address may be prefetched.
        unsafe { S::prefetch_far(p.cast::<u8>().wrapping_add(line)) }
    }
}
