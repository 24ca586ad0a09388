//! What must hold after every operation, recounted.

use std::collections::{HashMap, HashSet};

use crate::plan::SequenceId;
use crate::scheduler::Scheduler;
use crate::sequence::{Rank, Sequence, Stage, Wait};

type Holders = HashMap<u32, usize>;

impl Scheduler {
    /// Recounts blocks and lists: every block is free, cached, held or draining; every held one is in a table; no row of the current plan
    /// writes a block that another sequence can read; line and active sequences stand in order. Costs time in proportion to
    /// everything held: for tests and simulation.
    ///
    /// # Errors
    /// What is inconsistent: a bug.
    pub fn check(&self) -> Result<(), String> {
        self.pool.check()?;
        self.check_lists()?;
        let mut holders = Holders::new();
        let tables = self.sequences.values().filter_map(Sequence::table).chain(&self.retired);
        let blocks = tables.flat_map(|table| table.ids().iter().copied());
        for block in blocks.chain(self.copied.iter().map(baton_kv::SharedBlock::id)) {
            *holders.entry(block).or_default() += 1;
        }
        let held = self.pool.counts().held;
        if held != holders.len() {
            return Err(format!("{held} blocks are held, {} are in tables", holders.len()));
        }
        self.check_copies(&holders)?;
        self.check_rows(&holders)
    }

    fn check_rows(&self, holders: &Holders) -> Result<(), String> {
        for row in &self.plan.rows {
            let (id, blocks) = (row.id.0, &self.plan.blocks[row.blocks.clone()]);
            let table = self.sequences.get(&row.id).and_then(Sequence::table);
            if table.is_some_and(|table| table.ids() != blocks) {
                return Err(format!("the plan has another table than sequence {id}"));
            }
            let end = (row.position + row.tokens.len()).div_ceil(self.config.block_size);
            for block in &blocks[row.position / self.config.block_size..end] {
                let num = holders.get(block).copied().unwrap_or(0);
                if num != 1 {
                    return Err(format!("sequence {id} is to write block {block}, which has {num} holders"));
                }
            }
        }
        Ok(())
    }

    /// Copies may run in any order, and what they read is there.
    fn check_copies(&self, holders: &Holders) -> Result<(), String> {
        let from: HashSet<u32> = self.plan.copies.iter().map(|copy| copy.from).collect();
        let mut seen = HashSet::new();
        for copy in &self.plan.copies {
            if !holders.contains_key(&copy.from) {
                return Err(format!("block {} is to be copied, and nobody holds it", copy.from));
            }
            if from.contains(&copy.to) || !seen.insert(copy.to) || holders.get(&copy.to) != Some(&1) {
                return Err(format!("block {} is to be written by a copy, and others use it", copy.to));
            }
        }
        Ok(())
    }

    fn check_lists(&self) -> Result<(), String> {
        let stage = |id: &SequenceId| self.sequences.get(id).map(|sequence| &sequence.stage);
        let rank = |id: &SequenceId| self.sequences.get(id).map(|sequence| sequence.rank);
        if !self.line.iter().all(|id| matches!(stage(id), Some(Stage::Waiting(_)))) {
            return Err("a sequence in line does not wait".into());
        }
        let is_active = |id| {
            matches!(
                stage(id),
                Some(Stage::Prefilling { .. } | Stage::Receiving { .. } | Stage::Running { .. })
            )
        };
        if !self.active.iter().all(is_active) {
            return Err("an active sequence has no blocks".into());
        }
        let in_order = |ids: Vec<Option<Rank>>| ids.is_sorted_by(|a, b| a < b);
        if !in_order(self.line.iter().map(rank).collect())
            || !in_order(self.active.iter().map(rank).collect())
        {
            return Err("a list is not in the order of ranks".into());
        }
        let unlisted =
            |s: &&Sequence| matches!(s.stage, Stage::Held { .. } | Stage::Waiting(Wait::AwaitingOffer));
        let num_unlisted = self.sequences.values().filter(unlisted).count();
        let num_siblings: usize = self.sequences.values().map(|s| s.siblings.len()).sum();
        let listed = self.line.len() + self.active.len() + num_unlisted == self.sequences.len();
        match listed && num_siblings == self.heads.len() {
            true => Ok(()),
            false => Err("a sequence is in no list, or in two".into()),
        }
    }
}
