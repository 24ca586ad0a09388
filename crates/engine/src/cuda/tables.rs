//! A step's tables, as `cuda/ABI.md` describes them: words on the host, uploaded once a step.

use std::ops::Range;
use std::sync::Arc;

use baton_scheduler::{PlanRow, RowSampling, StepPlan};

use super::driver::{Device, DeviceError, Memory, Pinned, Span, Stream};
use super::scratch::{DECODE_CAPACITY, DECODE_TILE, LOGIT_ROWS};
use crate::batch::{Batch, Purpose};

/// Packed queries of a prefill item.
const PREFILL_ITEM: usize = 64;
/// Words of a sampling; it begins at a multiple of 8 bytes.
pub(super) const SAMPLING_WORDS: usize = 10;
/// Words that tables have room for at first.
const FIRST_WORDS: usize = 1 << 14;

/// What the layout of a step depends on beside its plan.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) group: usize,
    pub(super) block_size: usize,
    /// Decode items whose partial results fit into scratch.
    pub(super) max_decode_items: usize,
    /// The same where every row is of one token, so that an item holds no more than a group of query heads.
    pub(super) max_padded_items: usize,
}

/// Rows of one launch of decode: words of `rows` and of `items`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DecodeLaunch {
    pub(super) rows: Range<usize>,
    pub(super) items: Range<usize>,
    /// The most (query head, token) pairs of a row.
    pub(super) capacity: usize,
}

/// Wanted tokens whose logits are computed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LogitGroup {
    /// In the batch's wanted tokens, and in `select`.
    pub(super) wanted: Range<usize>,
    /// Of the step's samplings, in their order here.
    pub(super) samplings: Range<usize>,
}

/// Where in the words everything lies.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) words: Vec<u32>,
    pub(super) samplings: Range<usize>,
    pub(super) tokens: Range<usize>,
    pub(super) positions: Range<usize>,
    pub(super) slots: Range<usize>,
    pub(super) blocks: Range<usize>,
    pub(super) select: Range<usize>,
    pub(super) decode: Vec<DecodeLaunch>,
    pub(super) prefill_rows: Range<usize>,
    pub(super) prefill_items: Range<usize>,
    /// Pairs of blocks; no block is both copied to and from within one launch.
    pub(super) copies: Vec<Range<usize>>,
    pub(super) groups: Vec<LogitGroup>,
}

impl Tables {
    /// Lays out a plan that `batch` was prepared from.
    pub(super) fn build(&mut self, plan: &StepPlan, batch: &Batch, shape: Shape) {
        self.clear();
        // First, since they have the widest elements.
        self.build_samplings(plan, batch);
        self.tokens = self.push(plan.tokens.iter().copied());
        self.positions = self.push(batch.places.iter().map(|place| place.position));
        let block_size = shape.block_size as u32;
        self.slots = self.push(batch.places.iter().map(|place| place.block * block_size + place.slot));
        self.blocks = self.push(plan.blocks.iter().copied());
        self.select = self.push(batch.wanted.iter().map(|wanted| wanted.token as u32));
        self.build_decode(plan, shape);
        self.build_prefill(plan, shape);
        self.build_copies(plan);
    }

    /// Leaves nothing but the vectors' capacity.
    pub(super) fn clear(&mut self) {
        self.words.clear();
        self.decode.clear();
        self.copies.clear();
        self.groups.clear();
        (self.prefill_rows, self.prefill_items) = (0..0, 0..0);
    }

    /// Tokens drawn in the step.
    pub(super) fn num_samplings(&self) -> usize {
        self.groups.last().map_or(0, |group| group.samplings.end)
    }

    pub(super) fn push(&mut self, words: impl Iterator<Item = u32>) -> Range<usize> {
        let start = self.words.len();
        self.words.extend(words);
        start..self.words.len()
    }

    fn build_samplings(&mut self, plan: &StepPlan, batch: &Batch) {
        let mut num = 0;
        for first in (0..batch.wanted.len()).step_by(LOGIT_ROWS) {
            let wanted = first..batch.wanted.len().min(first + LOGIT_ROWS);
            let before = num;
            for (row, wanted) in (0u32..).zip(&batch.wanted[wanted.clone()]) {
                let Purpose::Sample { samplings, .. } = &wanted.purpose else { continue };
                for sampling in &plan.samplings[samplings.clone()] {
                    self.words.extend(sampling_words(sampling, row));
                    num += 1;
                }
            }
            self.groups.push(LogitGroup { wanted, samplings: before..num });
        }
        self.samplings = 0..self.words.len();
    }

    /// Rows of few tokens; as many to a launch as scratch has room for.
    fn build_decode(&mut self, plan: &StepPlan, shape: Shape) {
        let (mut rows, mut items) = (Vec::new(), Vec::new());
        for row in &plan.rows {
            if row.tokens.len() * shape.group > DECODE_CAPACITY {
                continue;
            }
            let num_items = (row.position + row.tokens.len()).div_ceil(DECODE_TILE);
            if items.len() / 2 + num_items > shape.max_decode_items && !rows.is_empty() {
                self.close_decode(&mut rows, &mut items);
            }
            let nth = (rows.len() / 5) as u32;
            let first_item = (items.len() / 2) as u32;
            rows.extend(row_words(row, first_item));
            items.extend((0..num_items as u32).flat_map(|tile| [nth, tile]));
        }
        if !rows.is_empty() {
            self.close_decode(&mut rows, &mut items);
        }
    }

    fn close_decode(&mut self, rows: &mut Vec<u32>, items: &mut Vec<u32>) {
        let rows = self.push(rows.drain(..));
        let items = self.push(items.drain(..));
        self.decode.push(DecodeLaunch { rows, items, capacity: DECODE_CAPACITY });
    }

    /// Rows of many tokens; the last parts of each take longest and go first.
    fn build_prefill(&mut self, plan: &StepPlan, shape: Shape) {
        let group = shape.group;
        let is_wide = move |row: &&PlanRow| row.tokens.len() * group > DECODE_CAPACITY;
        let wide = || plan.rows.iter().filter(is_wide);
        self.prefill_rows = self.push(wide().flat_map(|row| row_words(row, 0)));
        let parts = |row: &PlanRow| (row.tokens.len() * group).div_ceil(PREFILL_ITEM) as u32;
        let items = (0u32..)
            .zip(wide())
            .flat_map(|(nth, row)| (0..parts(row)).rev().flat_map(move |part| [nth, part]));
        self.prefill_items = self.push(items);
    }

    pub(super) fn build_copies(&mut self, plan: &StepPlan) {
        let mut start = self.words.len();
        for copy in &plan.copies {
            let (earlier, _) = self.words[start..].as_chunks::<2>();
            // Copies of one launch are made in no order.
            if earlier.iter().any(|&[from, to]| from == copy.to || to == copy.from || to == copy.to) {
                self.copies.push(start..self.words.len());
                start = self.words.len();
            }
            self.words.extend([copy.from, copy.to]);
        }
        if start < self.words.len() {
            self.copies.push(start..self.words.len());
        }
    }
}

pub(super) fn row_words(row: &PlanRow, first_item: u32) -> [u32; 5] {
    [row.tokens.start, row.tokens.len(), row.position, row.blocks.start, first_item as usize]
        .map(|n| n as u32)
}

pub(super) fn sampling_words(sampling: &RowSampling, row: u32) -> [u32; SAMPLING_WORDS] {
    let RowSampling { params, sequence, position } = sampling;
    [
        params.seed as u32,
        (params.seed >> 32) as u32,
        *sequence,
        *position,
        params.temperature.to_bits(),
        params.top_p.to_bits(),
        params.min_p.to_bits(),
        params.top_k,
        row,
        0,
    ]
}

/// The words on their way, and on the device. Grows with the longest tables seen: what was captured with its addresses must not let it.
pub(super) struct Upload {
    device: Arc<Device>,
    pinned: Pinned,
    memory: Memory,
    num_words: usize,
}

impl Upload {
    pub(super) fn new(device: &Arc<Device>) -> Result<Upload, DeviceError> {
        Self::with_room(device, FIRST_WORDS)
    }

    /// With room for so many words from the start.
    pub(super) fn with_room(device: &Arc<Device>, num_words: usize) -> Result<Upload, DeviceError> {
        Ok(Upload {
            device: Arc::clone(device),
            pinned: Pinned::new(device, 4 * num_words)?,
            memory: Memory::new(device, 4 * num_words)?,
            num_words,
        })
    }

    /// Queues the tables' way to the device. The stream was finished since the last time.
    pub(super) fn send(&mut self, tables: &Tables, stream: &Stream) -> Result<(), DeviceError> {
        let words = &tables.words;
        if words.len() > self.num_words {
            *self = Self::with_room(&self.device, words.len().next_power_of_two())?;
        }
        if words.is_empty() {
            return Ok(());
        }
        // SAFETY: the stream was finished, so nothing is copied from here.
        let bytes = unsafe { self.pinned.get_mut(0, 4 * words.len()) };
        for (to, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        // SAFETY: the bytes stay until the next step, which comes after the stream is finished; kernels that read the
        // device's side are queued behind.
        unsafe { stream.upload(bytes, self.memory.at(0, bytes.len())) }
    }

    /// Some of the words.
    pub(super) fn span(&self, words: Range<usize>) -> Span {
        self.memory.at(4 * words.start, 4 * words.len())
    }

    /// Some of the samplings.
    pub(super) fn samplings(&self, tables: &Tables, samplings: Range<usize>) -> Span {
        let start = tables.samplings.start;
        self.span(start + samplings.start * SAMPLING_WORDS..start + samplings.end * SAMPLING_WORDS)
    }
}

#[cfg(test)]
#[path = "tables_tests.rs"]
mod tests;
