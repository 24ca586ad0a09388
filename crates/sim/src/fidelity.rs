//! How closely a run plays its workers: with blocks that have contents, or with time and blocks alone; by a roofline, or by costs that were
//! measured.

use crate::frames::Cut;
use crate::measured::{Measured, MeasuredSteps};

/// Layers of the pseudo model, where blocks have contents.
const NUM_LAYERS: usize = 2;
/// Blocks of a frame where nothing is in them.
const EMPTY_FRAME_BLOCKS: usize = 16;
/// Where nothing is in them, blocks of a chunk are sent in so many parts while it is computed, as layer after layer is.
pub(crate) const SLICES: u32 = 8;

/// What a run plays.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fidelity {
    /// Blocks are empty and tokens depend on nothing but their places, so that a run costs little time and memory. Who holds what, and
    /// when, is the same.
    pub(crate) empty: bool,
    pub(crate) measured: Option<Measured>,
}

impl Fidelity {
    /// Layers of the pseudo model.
    pub(crate) const fn num_layers(&self) -> usize {
        if self.empty { 0 } else { NUM_LAYERS }
    }

    /// Layers that a frame is one of.
    pub(crate) const fn wire_layers(&self) -> usize {
        if self.empty { 1 } else { NUM_LAYERS }
    }

    /// How a prompt's KV is sent.
    pub(crate) const fn cut(&self, prompt_tokens: usize, skip_tokens: usize, block_size: usize) -> Cut {
        let frame_blocks = if self.empty { EMPTY_FRAME_BLOCKS } else { 1 };
        let num_layers = self.wire_layers();
        Cut { prompt_tokens, skip_tokens, block_size, num_layers, frame_blocks, empty: self.empty }
    }

    /// What the steps of a worker take, if that was measured.
    pub(crate) fn measured(&self, worker: usize) -> Option<&MeasuredSteps> {
        self.measured.as_ref()?.worker(worker)
    }
}
