//! Attention over a paged cache, with an online softmax (Milakov and Gimelshein, 2018) over tiles of 256 tokens.
//!
//! Tiles sit at absolute positions 0, 256, 512, ...; for each query the operations are: one chain over the head's
//! elements for each score, a lane-wise sum of a tile's exponentials with a fixed tree, one chain over tokens for each
//! output element. Which queries are computed together changes none of these. All query heads of a KV head, and
//! several rows of a prompt, share the loads of K and V.

use super::simd::{LANES, Simd};

/// Tokens of one softmax tile.
pub(crate) const TILE_TOKENS: usize = 256;
/// Queries (row x head) computed together.
pub(crate) const MAX_QUERIES: usize = 12;
/// Largest head.
pub(crate) const MAX_HEAD_DIM: usize = 256;
/// Floats that [`Attend::scratch`] must have: queries, scores and sums.
pub(crate) const SCRATCH_FLOATS: usize = MAX_QUERIES * (2 * MAX_HEAD_DIM + TILE_TOKENS);

/// Blocks of a tile, at most.
const TILE_BLOCKS: usize = TILE_TOKENS / LANES;
const LINE: usize = 64;

/// Some consecutive rows of one sequence, over the query heads of one KV head.
///
/// A block of one layer is `[K][V]`, K being `[kv head][element][token]` and V `[kv head][token][element]`.
pub(crate) struct Attend<'a> {
    /// Query of the first row and first head of the group; a row's heads lie `head_dim` apart.
    pub(crate) q: *const f32,
    /// Floats from one row's query to the next.
    pub(crate) q_stride: usize,
    /// Output, arranged as the queries.
    pub(crate) out: *mut f32,
    /// Floats from one output row to the next.
    pub(crate) out_stride: usize,
    /// Rows.
    pub(crate) num_rows: usize,
    /// Absolute position of the first row; row `r` sees tokens `0..=position + r`.
    pub(crate) position: usize,
    /// Query heads of this KV head.
    pub(crate) group: usize,
    /// Elements of a head: a multiple of 16, at most 256.
    pub(crate) head_dim: usize,
    /// Which KV head.
    pub(crate) kv_head: usize,
    /// KV heads of a block.
    pub(crate) num_kv_heads: usize,
    /// Tokens of a block: 16, 32, 64, 128 or 256.
    pub(crate) block_size: usize,
    /// The sequence's block table.
    pub(crate) blocks: &'a [u32],
    /// Block 0 of this layer.
    pub(crate) layer: *const u8,
    /// Bytes of a block in one layer.
    pub(crate) block_bytes: usize,
    /// Factor on scores.
    pub(crate) scale: f32,
    /// Scratch of this member.
    pub(crate) scratch: *mut f32,
}

/// How an element of K and V is stored.
pub(super) trait Element: Copy {
    /// # Safety
    /// The CPU has `S`; `p` covers 16 elements.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load(p) }
    }
}

impl Element for half::f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const half::f16) -> S::F {
        // SAFETY: the caller's; f16 is a u16 inside.
        unsafe { S::load_f16(p.cast()) }
    }
}

/// The queries computed together, their running softmax, and where their sums stand in the scratch.
struct Queries {
    num: usize,
    /// Tokens each one sees.
    limits: [usize; MAX_QUERIES],
    largest: [f32; MAX_QUERIES],
    sum: [f32; MAX_QUERIES],
    /// `[query][256]`, scaled.
    q: *mut f32,
    /// `[query][256]`: scores, then exponentials.
    scores: *mut f32,
    /// `[query][256]`: sums of V.
    acc: *mut f32,
}

/// One tile of a sequence as the kernels see it.
struct Tile<E> {
    start: usize,
    /// K of this head in each block of the tile.
    k: [*const E; TILE_BLOCKS],
    v: [*const E; TILE_BLOCKS],
    /// K of the blocks of the tile after it; null where there is none, or no use in asking for it early.
    next_k: [*const E; TILE_BLOCKS],
}

/// Asks for `len` bytes from `p`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn prefetch<S: Simd, E>(p: *const E, len: usize) {
    for line in (0..len).step_by(LINE) {
        // SAFETY: any address may be prefetched.
        unsafe { S::prefetch_far(p.cast::<u8>().wrapping_add(line)) }
    }
}

/// # Safety
/// The CPU has `S`; the pointers of `a` cover what their fields say, the table covers the last row's position, and
/// the blocks hold elements of type `E` that nobody writes meanwhile.
#[inline(always)]
pub(super) unsafe fn run<S: Simd, E: Element>(a: &Attend<'_>) {
    let total = a.num_rows * a.group;
    let mut first = 0;
    while first < total {
        let num = MAX_QUERIES.min(total - first);
        // SAFETY: these queries are among the caller's.
        unsafe { queries::<S, E>(a, first, num) };
        first += num;
    }
}

/// # Safety
/// As [`run`], for `num` queries from the `first`, counted row by row.
#[inline(always)]
unsafe fn queries<S: Simd, E: Element>(a: &Attend<'_>, first: usize, num: usize) {
    let place = |i: usize| ((first + i) / a.group, (first + i) % a.group * a.head_dim);
    // SAFETY: the scratch has room for three arrays of 12 x 256; row and head of each query lie within q and out.
    unsafe {
        let mut qs = Queries {
            num,
            limits: [0; MAX_QUERIES],
            largest: [f32::NEG_INFINITY; MAX_QUERIES],
            sum: [0.0; MAX_QUERIES],
            q: a.scratch,
            acc: a.scratch.add(MAX_QUERIES * MAX_HEAD_DIM),
            scores: a.scratch.add(2 * MAX_QUERIES * MAX_HEAD_DIM),
        };
        let mut context = 0;
        for i in 0..num {
            let (row, head) = place(i);
            qs.limits[i] = a.position + row + 1;
            context = context.max(qs.limits[i]);
            for d in (0..a.head_dim).step_by(LANES) {
                let q = S::load(a.q.add(row * a.q_stride + head + d));
                S::store(qs.q.add(i * MAX_HEAD_DIM + d), S::mul(q, S::splat(a.scale)));
                S::store(qs.acc.add(i * MAX_HEAD_DIM + d), S::zero());
            }
        }
        for start in (0..context).step_by(TILE_TOKENS) {
            let tile = tile::<E>(a, start, context);
            scores::<S, E>(a, &tile, &qs, (context - start).min(TILE_TOKENS));
            (0..num).for_each(|i| softmax::<S>(&mut qs, i, start, a.head_dim));
            values::<S, E>(a, &tile, &qs);
        }
        for i in 0..num {
            let (row, head) = place(i);
            for d in (0..a.head_dim).step_by(LANES) {
                let acc = S::load(qs.acc.add(i * MAX_HEAD_DIM + d));
                S::store(a.out.add(row * a.out_stride + head + d), S::div(acc, S::splat(qs.sum[i])));
            }
        }
    }
}

/// Finds a tile's blocks, and with one row those of the next: its bytes come from far and are wanted once only,
/// while rows of a prompt find them in the caches.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn tile<E: Element>(a: &Attend<'_>, start: usize, context: usize) -> Tile<E> {
    let head = a.head_dim * a.block_size;
    let none = [std::ptr::null(); TILE_BLOCKS];
    let mut tile = Tile { start, k: none, v: none, next_k: none };
    let num_blocks = TILE_TOKENS / a.block_size;
    let first = start / a.block_size;
    for (n, &block) in a.blocks[first..context.div_ceil(a.block_size)].iter().take(2 * num_blocks).enumerate()
    {
        // SAFETY: by contract the block lies in the layer; K and V are `num_kv_heads` heads each.
        unsafe {
            let base = a.layer.add(block as usize * a.block_bytes).cast::<E>();
            let k = base.add(a.kv_head * head);
            if n < num_blocks {
                tile.k[n] = k;
                tile.v[n] = base.add((a.num_kv_heads + a.kv_head) * head);
            } else if a.num_rows == 1 {
                tile.next_k[n - num_blocks] = k;
            }
        }
    }
    tile
}

/// Splits `num` queries and `width` vectors into pieces that fit in registers: `$kernel::<S, E, Q, W>(first, at)`.
macro_rules! pieces {
    ($s:ident, $e:ident, $num:expr, $width:expr, $kernel:ident($($arg:expr),*)) => {{
        let mut first = 0;
        pieces!(@queries $s, $e, first, $num, $width, $kernel($($arg),*), 12 6 4 3 2 1);
    }};
    (@queries $s:ident, $e:ident, $first:ident, $num:expr, $width:expr, $kernel:ident $args:tt, $($q:literal)*) => {$(
        while $q <= $s::MAX_ACCUMULATORS && $num - $first >= $q {
            let mut at = 0;
            pieces!(@width $s, $e, $first, at, $width, $q, $kernel $args, 4);
            pieces!(@width $s, $e, $first, at, $width, $q, $kernel $args, 2);
            pieces!(@width $s, $e, $first, at, $width, $q, $kernel $args, 1);
            $first += $q;
        }
    )*};
    (@width $s:ident, $e:ident, $first:ident, $at:ident, $width:expr, $q:literal, $kernel:ident($($arg:expr),*), $w:literal) => {
        while $q * $w <= $s::MAX_ACCUMULATORS && $width - $at >= $w {
            $kernel::<$s, $e, $q, $w>($($arg,)* $first, $at);
            $at += $w;
        }
    };
}

/// Scores of all queries for the tile's first `num_tokens` tokens; those a query may not see are masked later.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn scores<S: Simd, E: Element>(a: &Attend<'_>, tile: &Tile<E>, qs: &Queries, num_tokens: usize) {
    let num_chunks = num_tokens.div_ceil(LANES);
    // SAFETY: pieces stay within `qs.num` queries and the chunks of the tile's blocks.
    unsafe { pieces!(S, E, qs.num, num_chunks, score_piece(a, tile, qs)) }
}

/// # Safety
/// As [`run`], for queries `first..first + Q` and 16-token chunks `at..at + C`.
#[inline(always)]
unsafe fn score_piece<S: Simd, E: Element, const Q: usize, const C: usize>(
    a: &Attend<'_>,
    tile: &Tile<E>,
    qs: &Queries,
    first: usize,
    at: usize,
) {
    // SAFETY: a chunk lies within one block, since a block is a multiple of 16 tokens.
    unsafe {
        let (mut k, mut v) = ([std::ptr::null::<E>(); C], [std::ptr::null::<E>(); C]);
        for (c, k) in k.iter_mut().enumerate() {
            let token = (at + c) * LANES;
            let (block, slot) = (token / a.block_size, token % a.block_size);
            *k = tile.k[block].add(slot);
            v[c] = tile.v[block].add(slot * a.head_dim);
        }
        let ahead = first == 0 && a.num_rows == 1;
        let q = qs.q.add(first * MAX_HEAD_DIM);
        let mut acc = [[S::zero(); C]; Q];
        for d in 0..a.head_dim {
            // V of these tokens is as large as K: as much of it is asked for as K is read, so that requests never pile up.
            if ahead && (d * LANES * size_of::<E>()).is_multiple_of(LINE) {
                v.iter().for_each(|v| S::prefetch_far(v.add(d * LANES).cast()));
            }
            let mut keys = [S::zero(); C];
            for (c, keys) in keys.iter_mut().enumerate() {
                *keys = E::load::<S>(k[c].add(d * a.block_size));
            }
            for (i, acc) in acc.iter_mut().enumerate() {
                let q = S::splat(*q.add(i * MAX_HEAD_DIM + d));
                for (acc, &keys) in acc.iter_mut().zip(&keys) {
                    *acc = S::fma(q, keys, *acc);
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            for (c, &acc) in acc.iter().enumerate() {
                S::store(qs.scores.add((first + i) * TILE_TOKENS + (at + c) * LANES), acc);
            }
        }
    }
}

/// Turns query `i`'s scores of one tile into exponentials and brings its sums to the new maximum.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn softmax<S: Simd>(qs: &mut Queries, i: usize, start: usize, head_dim: usize) {
    let limit = qs.limits[i].saturating_sub(start).min(TILE_TOKENS);
    if limit == 0 {
        return;
    }
    // SAFETY: scores of a tile are 256 floats, sums 256 floats.
    unsafe {
        let scores = qs.scores.add(i * TILE_TOKENS);
        let hidden = S::splat(f32::NEG_INFINITY);
        let mut largest = hidden;
        for t in (0..limit).step_by(LANES) {
            // What lies beyond the limit may be anything, NaN included.
            let score = S::first_lanes(limit - t, S::load(scores.add(t)), hidden);
            S::store(scores.add(t), score);
            largest = S::max(largest, score);
        }
        let new = f32::max(qs.largest[i], S::largest(largest));
        let mut sum = S::zero();
        for t in (0..limit).step_by(LANES) {
            let e = S::exp(S::sub(S::load(scores.add(t)), S::splat(new)));
            S::store(scores.add(t), e);
            sum = S::add(sum, e);
        }
        let fade = S::exp(S::splat(qs.largest[i] - new));
        for d in (0..head_dim).step_by(LANES) {
            let acc = qs.acc.add(i * MAX_HEAD_DIM + d);
            S::store(acc, S::mul(S::load(acc), fade));
        }
        qs.sum[i] = qs.sum[i] * S::largest(fade) + S::sum(sum);
        qs.largest[i] = new;
    }
}

/// Adds the tile's weighted V: together for the tokens that all queries see, one query at a time for the rest.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn values<S: Simd, E: Element>(a: &Attend<'_>, tile: &Tile<E>, qs: &Queries) {
    let seen = |i: usize| qs.limits[i].saturating_sub(tile.start).min(TILE_TOKENS);
    let common = (0..qs.num).map(seen).min().unwrap_or(0);
    let width = a.head_dim / LANES;
    // SAFETY: pieces stay within the queries, a head's vectors and the tokens they see.
    unsafe {
        pieces!(S, E, qs.num, width, value_piece(a, tile, qs, 0, common));
        for i in 0..qs.num {
            let own = seen(i);
            if own > common {
                one_query::<S, E>(a, tile, qs, (common, own), i);
            }
        }
    }
}

/// # Safety
/// As [`run`], for one query's tokens `range.0..range.1`.
#[inline(always)]
unsafe fn one_query<S: Simd, E: Element>(
    a: &Attend<'_>,
    tile: &Tile<E>,
    qs: &Queries,
    range: (usize, usize),
    i: usize,
) {
    for at in 0..a.head_dim / LANES {
        // SAFETY: one query, one vector of the head.
        unsafe { value_piece::<S, E, 1, 1>(a, tile, qs, range.0, range.1, i, at) }
    }
}

/// # Safety
/// As [`run`], for queries `first..first + Q`, vectors `at..at + D` of the head and tokens `from..to` of the tile.
#[inline(always)]
unsafe fn value_piece<S: Simd, E: Element, const Q: usize, const D: usize>(
    a: &Attend<'_>,
    tile: &Tile<E>,
    qs: &Queries,
    from: usize,
    to: usize,
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
            let block_end = (t / a.block_size + 1) * a.block_size;
            let next_k = tile.next_k[t / a.block_size];
            let ahead = first == 0 && at == 0 && !next_k.is_null();
            let mut v = tile.v[t / a.block_size].add(t % a.block_size * a.head_dim + at * LANES);
            for t in t..block_end.min(to) {
                if ahead {
                    let part = next_k.wrapping_add(t % a.block_size * a.head_dim);
                    prefetch::<S, E>(part, a.head_dim * size_of::<E>());
                }
                let mut row = [S::zero(); D];
                for (d, row) in row.iter_mut().enumerate() {
                    *row = E::load::<S>(v.add(d * LANES));
                }
                for (i, acc) in acc.iter_mut().enumerate() {
                    let p = S::splat(*p.add(i * TILE_TOKENS + t));
                    for (acc, &row) in acc.iter_mut().zip(&row) {
                        *acc = S::fma(p, row, *acc);
                    }
                }
                v = v.add(a.head_dim);
            }
            t = block_end;
        }
        for (i, acc) in acc.iter().enumerate() {
            for (d, &acc) in acc.iter().enumerate() {
                S::store(out.add(i * MAX_HEAD_DIM + d * LANES), acc);
            }
        }
    }
}
