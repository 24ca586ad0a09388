//! `blocktable`: ten tokens in blocks of four, on a pool whose free blocks lie scattered.

use baton_kv::{Block, BlockPool};

use crate::report::{Report, SlotRow, SlotState};
use crate::serving::{Ask, Serving, ServingConfig};
use crate::{Cell, Demonstration, LabError};

const BLOCK_SIZE: usize = 4;
const NUM_BLOCKS: usize = 10;
/// Blocks of the prompt and the one after it, as the pool will give them out.
const FREE: [u32; 4] = [5, 2, 9, 0];
const PROMPT: usize = 10;

/// A sequence's blocks once `num_tokens` are in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) num_tokens: usize,
    pub(crate) blocks: Vec<u32>,
}

impl Moment {
    /// Slots without a token, all of them in the last block.
    pub(crate) fn waste(&self) -> usize {
        self.blocks.len() * BLOCK_SIZE - self.num_tokens
    }

    /// Where the `nth` token lies: its block, the slot in it, and the slot in the arena.
    fn slot(&self, nth: usize) -> Option<(u32, usize, usize)> {
        let block = *self.blocks.get(nth / BLOCK_SIZE)?;
        Some((block, nth % BLOCK_SIZE, block as usize * BLOCK_SIZE + nth % BLOCK_SIZE))
    }

    fn shown(&self) -> Vec<Cell> {
        let table = self.blocks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        vec![self.num_tokens.into(), format!("[{table}]").into(), self.waste().into()]
    }

    fn row(&self) -> SlotRow {
        let state = |slot| if slot < self.num_tokens { SlotState::Used } else { SlotState::Empty };
        let block = |(nth, id): (usize, &u32)| {
            let slots = (nth * BLOCK_SIZE..(nth + 1) * BLOCK_SIZE).map(state).collect();
            (format!("block {id}"), slots)
        };
        SlotRow {
            name: format!("{} tokens", self.num_tokens),
            blocks: self.blocks.iter().enumerate().map(block).collect(),
        }
    }
}

/// A pool in which only [`FREE`] are free, and what holds the others.
fn scattered() -> (BlockPool, Vec<Block>) {
    let pool = BlockPool::new(NUM_BLOCKS);
    let mut held: Vec<Block> = (0..NUM_BLOCKS).filter_map(|_| pool.allocate_one()).collect();
    // A prompt is given the blocks that came back last, in the order in which they came; growth takes what came before them.
    let [first, second, third, growth] = FREE;
    for id in [growth, first, second, third] {
        held.retain(|block| block.id() != id);
    }
    (pool, held)
}

/// The prompt, and each token after it, as the scheduler's plans have them.
pub(crate) fn moments() -> Result<Vec<Moment>, LabError> {
    let (pool, _held) = scattered();
    let mut serving = Serving::over(&ServingConfig::roomy(NUM_BLOCKS, BLOCK_SIZE), pool);
    // The last token that is sampled is never computed: three tokens behind the prompt take four samples.
    serving.submit(Ask::new(1, (1..=PROMPT as u32).collect(), 4))?;
    let mut moments = Vec::new();
    serving.run("blocktable", |step| {
        for row in &step.rows {
            moments.push(Moment { num_tokens: row.position + row.num_tokens, blocks: row.blocks.clone() });
        }
    })?;
    Ok(moments)
}

pub(crate) fn report() -> Result<Report, LabError> {
    let moments = moments()?;
    let mut report = Report::new(
        Demonstration::BlockTable,
        "From a token to its block",
        "KV memory is cut into blocks of equal size, and a sequence's table names its blocks in token order. They need not lie side by side, so \
         any free block will do, and what is wasted is at most the rest of the last block. Token i lies in block table[i / size], slot i % size.",
    );
    report.table(
        "Ten tokens, then three more; blocks of 4, free blocks 5, 2, 9, 0 (from the scheduler's plans)",
        &[("tokens", ""), ("block table", ""), ("empty slots", "")],
        moments.iter().map(Moment::shown).collect(),
    );
    if let Some(last) = moments.last() {
        let rows = [0, 3, 4, 9, 12].into_iter().filter_map(|nth| {
            let (block, slot, arena) = last.slot(nth)?;
            Some(vec![
                nth.into(),
                (nth / BLOCK_SIZE).into(),
                u64::from(block).into(),
                slot.into(),
                arena.into(),
            ])
        });
        report.table(
            "Where tokens lie",
            &[
                ("token", ""),
                ("place in the table", ""),
                ("block", ""),
                ("slot in it", ""),
                ("slot in the arena", ""),
            ],
            rows.collect(),
        );
    }
    report.slots("Each cell is the slot of one token", moments.iter().map(Moment::row).collect());
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_tokens_take_5_2_9_and_the_thirteenth_takes_0() {
        let moments = moments().unwrap();
        assert_eq!(moments[0], Moment { num_tokens: 10, blocks: vec![5, 2, 9] });
        assert_eq!(moments[0].waste(), 2);
        assert_eq!(moments[3], Moment { num_tokens: 13, blocks: vec![5, 2, 9, 0] });
        let counts: Vec<(usize, usize)> = moments.iter().map(|m| (m.num_tokens, m.blocks.len())).collect();
        assert_eq!(counts, [(10, 3), (11, 3), (12, 3), (13, 4)]);
        assert_eq!(moments[3].slot(9), Some((9, 1, 37)));
        assert_eq!(moments[3].slot(12), Some((0, 0, 0)));
        assert_eq!(moments[3].slot(16), None);
    }
}
