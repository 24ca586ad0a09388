//! Attention over a paged cache, with an online softmax (Milakov and Gimelshein, 2018) over tiles of 256 tokens.
//!
//! Tiles sit at absolute positions 0, 256, 512, ...; for each query the operations are: one chain over the head's
//! elements for each score, a lane-wise sum of a tile's exponentials with a fixed tree, one chain over tokens for each
//! output element. Which queries are computed together changes none of these. All query heads of a KV head, and
//! several rows of a prompt, share the loads of K and V.

use super::element::{Element, scales};
use super::simd::{LANES, Simd};
use super::tile::{Tile, WIDE_FLOATS, scores, values};

/// Tokens of one softmax tile.
pub(crate) const TILE_TOKENS: usize = 256;
/// Queries (row x head) computed together.
pub(crate) const MAX_QUERIES: usize = 12;
/// Largest head.
pub(crate) const MAX_HEAD_DIM: usize = 256;
/// Floats that [`Attend::scratch`] must have: queries, scores and sums.
pub(crate) const SCRATCH_FLOATS: usize = WIDE_AT + WIDE_FLOATS;

/// Tiles between two looks at whether the step is left: some tens of microseconds.
const TILES_A_LOOK: usize = 4;

/// Where the scratch has room for K or V as f32.
const WIDE_AT: usize = MAX_QUERIES * (2 * MAX_HEAD_DIM + TILE_TOKENS);

/// Some consecutive rows of one sequence, over the query heads of one KV head, or one row over those of several.
///
/// A block of one layer is `[K][V]`, K being `[kv head][element][token]` and V `[kv head][token][element]`; where elements have
/// scales, each is followed by a byte a row, `[kv head][token]`.
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
    /// Which KV head, the first one if there are several.
    pub(crate) kv_head: usize,
    /// KV heads that are gone through tile by tile, since they lie side by side in each block. More than one only with one row, and
    /// with no more query heads than [`MAX_QUERIES`].
    pub(crate) num_heads: usize,
    /// KV heads of a block.
    pub(crate) num_kv_heads: usize,
    /// Tokens of a block: 16, 32, 64, 128 or 256.
    pub(crate) block_size: usize,
    /// The sequence's block table.
    pub(crate) blocks: &'a [u32],
    /// What this member attends to after this: a KV head, and the block table of a sequence.
    pub(crate) next: Option<(usize, &'a [u32])>,
    /// Block 0 of this layer.
    pub(crate) layer: *const u8,
    /// Bytes of a block in one layer.
    pub(crate) block_bytes: usize,
    /// Factor on scores.
    pub(crate) scale: f32,
    /// Scratch of this member.
    pub(crate) scratch: *mut f32,
    /// Asked between tiles, so that a long context is left soon: whether the answer is not wanted any more. What `out` holds then is nothing.
    pub(crate) leaves: &'a dyn Fn() -> bool,
}

/// The queries computed together, their running softmax, and where their sums stand in the scratch.
pub(super) struct Queries {
    pub(super) num: usize,
    /// Tokens each one sees.
    pub(super) limits: [usize; MAX_QUERIES],
    largest: [f32; MAX_QUERIES],
    sum: [f32; MAX_QUERIES],
    /// `[query][256]`, scaled.
    pub(super) q: *mut f32,
    /// `[query][256]`: scores, then exponentials.
    pub(super) scores: *mut f32,
    /// `[query][256]`: sums of V.
    pub(super) acc: *mut f32,
    /// Room for `[WIDE_FLOATS]`.
    pub(super) wide: *mut f32,
}

impl Queries {
    /// Some of them, for what looks at queries, scores and sums alone.
    ///
    /// # Safety
    /// They are among these.
    #[inline(always)]
    unsafe fn of(&self, first: usize, num: usize) -> Queries {
        let mut limits = [0; MAX_QUERIES];
        limits[..num].copy_from_slice(&self.limits[first..first + num]);
        // SAFETY: each array has room for all queries.
        unsafe {
            Queries {
                num,
                limits,
                largest: self.largest,
                sum: self.sum,
                q: self.q.add(first * MAX_HEAD_DIM),
                scores: self.scores.add(first * TILE_TOKENS),
                acc: self.acc.add(first * MAX_HEAD_DIM),
                wide: self.wide,
            }
        }
    }
}

/// # Safety
/// The CPU has `S`; the pointers of `a` cover what their fields say, the table covers the last row's position, and
/// the blocks hold elements of type `E` that nobody writes meanwhile.
#[inline(always)]
pub(super) unsafe fn run<S: Simd, E: Element>(a: &Attend<'_>) {
    let total = a.num_rows * a.num_heads * a.group;
    let mut first = 0;
    while first < total {
        let num = MAX_QUERIES.min(total - first);
        // SAFETY: these queries are among the caller's.
        if unsafe { queries::<S, E>(a, first, num) }.is_none() {
            return;
        }
        first += num;
    }
}

/// `None`: the answer is not wanted any more.
///
/// # Safety
/// As [`run`], for `num` queries from the `first`, counted row by row.
#[inline(always)]
unsafe fn queries<S: Simd, E: Element>(a: &Attend<'_>, first: usize, num: usize) -> Option<()> {
    let width = a.num_heads * a.group;
    let place = |i: usize| ((first + i) / width, (first + i) % width * a.head_dim);
    // Of each KV head.
    let num_queries = if a.num_heads == 1 { num } else { a.group };
    // SAFETY: the scratch has room for three arrays of 12 x 256 and the wide elements; row and head of each query lie within q and out.
    unsafe {
        let mut qs = Queries {
            num,
            limits: [0; MAX_QUERIES],
            largest: [f32::NEG_INFINITY; MAX_QUERIES],
            sum: [0.0; MAX_QUERIES],
            q: a.scratch,
            acc: a.scratch.add(MAX_QUERIES * MAX_HEAD_DIM),
            scores: a.scratch.add(2 * MAX_QUERIES * MAX_HEAD_DIM),
            wide: a.scratch.add(WIDE_AT),
        };
        let mut tiles = [const { Tile::<E>::nothing() }; MAX_QUERIES];
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
        for (nth, start) in (0..context).step_by(TILE_TOKENS).enumerate() {
            if nth > 0 && nth.is_multiple_of(TILES_A_LOOK) && (a.leaves)() {
                return None;
            }
            // All K, then all V: what is asked for early has the time that the other heads take to come.
            for (head, tile) in tiles[..a.num_heads].iter_mut().enumerate() {
                *tile = Tile::<E>::of(a, (start, context), head);
                let of_head = qs.of(head * num_queries, num_queries);
                scores::<S, E>(a, tile, &of_head, (context - start).min(TILE_TOKENS));
            }
            for i in 0..num {
                softmax::<S>(&mut qs, i, start, a.head_dim);
                if E::SCALED {
                    weigh::<S, E>(&tiles[i / num_queries], &qs, i);
                }
            }
            for (head, tile) in tiles[..a.num_heads].iter().enumerate() {
                values::<S, E>(a, tile, &qs.of(head * num_queries, num_queries));
            }
        }
        for i in 0..num {
            let (row, head) = place(i);
            for d in (0..a.head_dim).step_by(LANES) {
                let acc = S::load(qs.acc.add(i * MAX_HEAD_DIM + d));
                S::store(a.out.add(row * a.out_stride + head + d), S::div(acc, S::splat(qs.sum[i])));
            }
        }
    }
    Some(())
}

/// Multiplies query `i`'s exponentials by the factors of V's rows; their sum was taken before.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn weigh<S: Simd, E: Element>(tile: &Tile<E>, qs: &Queries, i: usize) {
    let seen = qs.limits[i].saturating_sub(tile.start).min(TILE_TOKENS);
    for chunk in 0..seen.div_ceil(LANES) {
        // SAFETY: chunks of tokens that the query sees; what a last one has beyond them is not looked at any more.
        unsafe {
            let at = qs.scores.add(i * TILE_TOKENS + chunk * LANES);
            S::store(at, S::mul(S::load(at), scales::<S>(tile.v_scales[chunk])));
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
        let whole = limit / LANES * LANES;
        if whole < limit {
            // What lies beyond the limit may be anything, NaN included.
            let last = scores.add(whole);
            S::store(last, S::first_lanes(limit - whole, S::load(last), hidden));
        }
        for t in (0..limit).step_by(LANES) {
            largest = S::max(largest, S::load(scores.add(t)));
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
