//! A decode step's tables as a graph finds them: every part where it always lies, padded to a number of rows and of items.
//!
//! What differs from step to step is in the words alone: kernels of a graph are launched with the same addresses and grids each time. Padding rows
//! embed token 0 and go along with the others; they write no KV (their slot is none), attend to nothing (their row has no tokens), and nobody
//! looks at what they give.

use baton_scheduler::{Logits, StepPlan};

use super::scratch::{DECODE_TILE, LOGIT_ROWS};
use super::tables::{DecodeLaunch, LogitGroup, SAMPLING_WORDS, Shape, Tables, row_words, sampling_words};
use crate::batch::{Batch, Purpose};

/// Rows of a graph, at most.
pub(super) const MAX_ROWS: usize = 256;
/// Block ids of all rows together, at most: a megabyte of them.
const MAX_BLOCK_WORDS: usize = 1 << 18;
/// A slot that is none, and an item's row that is none.
const NONE: u32 = u32::MAX;
/// Words of a row of the table `rows`, and of an item.
const ROW_WORDS: usize = 5;
const ITEM_WORDS: usize = 2;

/// What a graph was captured for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Padded {
    /// Rows of one token.
    pub(super) rows: usize,
    /// Tiles of context, of all rows together.
    pub(super) items: usize,
}

/// The next number of rows that there are graphs for: 1, 2, 4, 8, then in steps of 8, of 16 from 64 on, of 32 from 128 on.
fn padded_rows(num: usize) -> usize {
    match num {
        0..=8 => num.next_power_of_two(),
        9..=64 => num.next_multiple_of(8),
        65..=128 => num.next_multiple_of(16),
        _ => num.next_multiple_of(32),
    }
}

impl Padded {
    /// What a plan is padded to; `None` if it is not for a graph: a step that computes more than one token of a sequence, wants other logits than to
    /// draw one token a row, or has too many rows, tiles, blocks or copies.
    pub(super) fn of(plan: &StepPlan, shape: Shape, max_step_tokens: usize) -> Option<Padded> {
        let decodes = plan.rows.iter().all(|row| {
            row.tokens.len() == 1 && matches!(&row.logits, Logits::Sample(wanted) if wanted.len() == 1)
        });
        let rows = padded_rows(plan.rows.len());
        let num_items: usize = plan.rows.iter().map(|row| (row.position + 1).div_ceil(DECODE_TILE)).sum();
        // A padding item costs a block of threads that ends at once, a graph more than that.
        let items = num_items.next_power_of_two().max(rows).min(shape.max_padded_items);
        let fits = rows <= MAX_ROWS.min(max_step_tokens) && num_items <= items;
        let block_words = plan.blocks.len() + 2 * plan.copies.len();
        (decodes && fits && block_words <= MAX_BLOCK_WORDS && !plan.is_empty())
            .then_some(Padded { rows, items })
    }

    /// Words of the tables of every plan that is for a graph, at most.
    pub(super) const fn max_words(max_padded_items: usize) -> usize {
        MAX_ROWS * (SAMPLING_WORDS + 4 + ROW_WORDS) + ITEM_WORDS * max_padded_items + MAX_BLOCK_WORDS
    }
}

impl Tables {
    /// Lays out a plan that `batch` was prepared from and that is for a graph. Where everything begins follows from `padded` alone.
    pub(super) fn build_padded(&mut self, plan: &StepPlan, batch: &Batch, shape: Shape, padded: Padded) {
        self.clear();
        let Padded { rows, items } = padded;
        self.pad_samplings(plan, batch, rows);
        let num = plan.rows.len();
        let block_size = shape.block_size as u32;
        self.tokens = self.push_padded(plan.tokens.iter().copied(), rows, 0);
        self.positions = self.push_padded(batch.places.iter().map(|place| place.position), rows, 0);
        let slots = batch.places.iter().map(|place| place.block * block_size + place.slot);
        self.slots = self.push_padded(slots, rows, NONE);
        self.select = self.push(0..rows as u32);
        let mut first_item = 0;
        let mut words = Vec::with_capacity(ROW_WORDS * rows);
        let mut tiles = Vec::with_capacity(ITEM_WORDS * items);
        for (nth, row) in (0u32..).zip(&plan.rows) {
            words.extend(row_words(row, first_item as u32));
            let num_tiles = (row.position + 1).div_ceil(DECODE_TILE);
            tiles.extend((0..num_tiles as u32).flat_map(|tile| [nth, tile]));
            first_item += num_tiles;
        }
        debug_assert!(num <= rows && first_item <= items);
        let rows = self.push_padded(words.into_iter(), ROW_WORDS * rows, 0);
        let items = self.push_padded(tiles.into_iter(), ITEM_WORDS * items, NONE);
        self.decode.push(DecodeLaunch { rows, items, capacity: shape.group });
        // Last, since these have no length of their own.
        self.blocks = self.push(plan.blocks.iter().copied());
        self.build_copies(plan);
    }

    /// One token a row, in groups as many as the padded rows have.
    fn pad_samplings(&mut self, plan: &StepPlan, batch: &Batch, rows: usize) {
        let drawn = batch.wanted.iter().filter_map(|wanted| match &wanted.purpose {
            Purpose::Sample { samplings, .. } => plan.samplings.get(samplings.start),
            Purpose::Copy { .. } => None,
        });
        let mut words = Vec::with_capacity(SAMPLING_WORDS * rows);
        for (nth, sampling) in drawn.enumerate() {
            words.extend(sampling_words(sampling, (nth % LOGIT_ROWS) as u32));
        }
        // Padding is drawn greedily, from logits of its own group's first row.
        self.samplings = self.push_padded(words.into_iter(), SAMPLING_WORDS * rows, 0);
        for first in (0..rows).step_by(LOGIT_ROWS) {
            let group = first..rows.min(first + LOGIT_ROWS);
            self.groups.push(LogitGroup { wanted: group.clone(), samplings: group });
        }
    }

    fn push_padded(
        &mut self,
        words: impl Iterator<Item = u32>,
        num: usize,
        padding: u32,
    ) -> std::ops::Range<usize> {
        self.push(words.chain(std::iter::repeat(padding)).take(num))
    }
}

#[cfg(test)]
#[path = "padded_tests.rs"]
mod tests;
