//! Weights as the kernels want them: tiles of 16 output columns, still quantised.

mod load;
mod pack;
mod quantise;

use std::sync::Arc;

use baton_model::WeightType;

pub(crate) use load::{LayerWeights, Linear, ModelWeights, WeightPlan, checked};

use crate::region::Region;

/// Output columns of one tile.
pub(crate) const TILE_COLUMNS: usize = 16;
/// k that share a scale.
pub(crate) const QUANT_BLOCK: usize = 32;
/// k whose nibbles share a u32, or whose bytes share two.
pub(crate) const NIBBLE_GROUP: usize = 8;

/// What one tile of 16 output columns by `cols` k looks like. k runs slowest:
///
/// * F32, F16, BF16: `[k][16]`;
/// * Q8_0: `[k / 32]{[16 scales f16][8][16 u32]}`, where of the two u32 rows of each 8 k the first holds the bytes of
///   the even k and the second those of the odd k, each 128 more than the weight;
/// * Q4_0: `[k / 32]{[16 scales f16][4][16 u32]}`, Q4_1: `[k / 32]{[16 scales f16][16 minimums f16][4][16 u32]}`, where
///   nibble `i` of a u32 in group `g` of a block is the weight at k = `8 g + i`. So the low nibbles of its bytes are the
///   even k, and the high ones the odd k, as in Q8_0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileShape {
    /// Storage of the elements.
    pub(crate) kind: WeightType,
    /// k of a tile.
    pub(crate) cols: usize,
}

impl TileShape {
    /// k that belong together: 1, or a quantised block's 32.
    pub(crate) const fn k_unit(self) -> usize {
        self.kind.block_elements()
    }

    /// Whether the elements are small integers with a scale.
    pub(crate) const fn is_quantised(self) -> bool {
        self.k_unit() > 1
    }

    /// Bytes of [`Self::k_unit`] k.
    pub(crate) const fn bytes_of_k(self) -> usize {
        TILE_COLUMNS * self.kind.block_bytes()
    }

    /// Bytes of a tile.
    pub(crate) const fn bytes(self) -> usize {
        self.cols / self.k_unit() * self.bytes_of_k()
    }
}

/// A weight matrix of `rows` outputs by `cols` inputs, in tiles; the last tile is padded with zeros.
pub(crate) struct Packed {
    shape: TileShape,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Holds the tiles.
    region: Arc<Region>,
    offset: usize,
}

impl Packed {
    /// Bytes that a matrix takes when packed.
    pub(crate) const fn bytes_needed(kind: WeightType, rows: usize, cols: usize) -> usize {
        TileShape { kind, cols }.bytes() * rows.div_ceil(TILE_COLUMNS)
    }

    pub(crate) const fn shape(&self) -> TileShape {
        self.shape
    }

    pub(crate) const fn num_tiles(&self) -> usize {
        self.rows.div_ceil(TILE_COLUMNS)
    }

    /// First byte of a tile.
    pub(crate) fn tile(&self, tile: usize) -> *const u8 {
        self.tile_bytes(tile).as_ptr()
    }

    fn tile_bytes(&self, tile: usize) -> &[u8] {
        let start = tile * self.shape.bytes();
        // SAFETY: this matrix's part was filled before the matrix was made, and is never written again.
        let part = unsafe { self.region.bytes(self.offset, self.num_tiles() * self.shape.bytes()) };
        &part[start..start + self.shape.bytes()]
    }
}
