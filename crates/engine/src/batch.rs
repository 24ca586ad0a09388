//! A step plan, checked and laid out for the decoder.

use std::ops::Range;

use baton_kv::KvLayout;
use baton_scheduler::{Logits, RowPart, StepPlan};

use crate::kernels::MAX_QUERIES;
use crate::sampler;

/// What a plan may ask of this engine.
pub(crate) struct Bounds {
    pub(crate) num_blocks: usize,
    pub(crate) vocab: usize,
    pub(crate) context: usize,
    pub(crate) max_step_tokens: usize,
    pub(crate) num_layers: usize,
    /// Query heads of a KV head.
    pub(crate) group: usize,
}

/// Where one new token stands.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) position: u32,
    pub(crate) block: u32,
    pub(crate) slot: u32,
}

/// Consecutive new tokens of one sequence whose attention is computed together.
#[derive(Clone)]
pub(crate) struct Unit {
    pub(crate) first_token: usize,
    pub(crate) num_tokens: usize,
    pub(crate) position: usize,
    /// Block table, in the plan's blocks.
    pub(crate) blocks: Range<usize>,
    /// Work of all units before this one.
    work_before: u64,
}

/// A token whose logits are wanted.
#[derive(Clone)]
pub(crate) struct Wanted {
    pub(crate) token: usize,
    pub(crate) purpose: Purpose,
}

/// What becomes of them.
#[derive(Clone)]
pub(crate) enum Purpose {
    /// Next tokens of plan row `row` are drawn.
    Sample {
        /// Index into the plan's rows.
        row: u32,
        /// How: one token for each of these entries of the plan's samplings.
        samplings: Range<usize>,
    },
    /// They are row `nth` of the output's logits.
    Copy {
        /// Counted over the whole step.
        nth: usize,
    },
}

/// Reused from step to step: the vectors keep their capacity.
pub(crate) struct Batch {
    pub(crate) places: Vec<Place>,
    pub(crate) units: Vec<Unit>,
    pub(crate) wanted: Vec<Wanted>,
    /// Tokens whose logits are copied out.
    pub(crate) num_copied: usize,
    work: u64,
    /// Layers in which the last row takes part, if not in all.
    part: Option<Range<usize>>,
    /// Which blocks this step writes: the number of the step that last wrote each.
    written: Vec<u64>,
    step: u64,
}

impl Batch {
    pub(crate) fn new(bounds: &Bounds) -> Batch {
        let tokens = bounds.max_step_tokens;
        Batch {
            places: Vec::with_capacity(tokens),
            units: Vec::with_capacity(tokens),
            wanted: Vec::with_capacity(tokens),
            num_copied: 0,
            work: 0,
            part: None,
            written: vec![0; bounds.num_blocks],
            step: 0,
        }
    }

    /// Checks the whole plan and lays it out.
    ///
    /// # Errors
    /// What contradicts the arena, the model or itself, in one line.
    pub(crate) fn prepare(
        &mut self,
        plan: &StepPlan,
        layout: &KvLayout,
        bounds: &Bounds,
    ) -> Result<(), String> {
        self.places.clear();
        self.units.clear();
        self.wanted.clear();
        (self.num_copied, self.work) = (0, 0);
        self.step += 1;
        if plan.tokens.len() > bounds.max_step_tokens {
            return Err(format!("{} tokens, the limit is {}", plan.tokens.len(), bounds.max_step_tokens));
        }
        if let Some(token) = plan.tokens.iter().find(|&&t| t as usize >= bounds.vocab) {
            return Err(format!("token {token} is outside the vocabulary of {}", bounds.vocab));
        }
        self.check_copies(plan, bounds)?;
        let mut next_token = 0;
        for (n, row) in plan.rows.iter().enumerate() {
            let refuse = |reason: String| Err(format!("row {n} (sequence {}): {reason}", row.id.0));
            if row.tokens.start != next_token || row.tokens.end <= next_token {
                return refuse(format!("tokens {:?} do not follow the row before", row.tokens));
            }
            next_token = row.tokens.end;
            if let Err(reason) = self.add_row(plan, n, layout, bounds) {
                return refuse(reason);
            }
        }
        if next_token != plan.tokens.len() {
            return Err(format!("rows hold {next_token} of {} tokens", plan.tokens.len()));
        }
        self.part = plan.part.as_ref().map(|part| part.layers.clone());
        if let Some(part) = &plan.part {
            check_part(plan, part, bounds)?;
        }
        self.check_reads(plan, layout)
    }

    /// Tokens that are computed in a layer: the first so many.
    pub(crate) fn num_tokens(&self, layer: usize) -> usize {
        self.places.len() - usize::from(self.leaves_out_last(layer))
    }

    fn leaves_out_last(&self, layer: usize) -> bool {
        self.part.as_ref().is_some_and(|layers| !layers.contains(&layer))
    }

    /// No row reads a block that another writes in this step: rows are computed in no order. Every row was added before.
    fn check_reads(&self, plan: &StepPlan, layout: &KvLayout) -> Result<(), String> {
        for (n, row) in plan.rows.iter().enumerate() {
            // From here on the row's blocks are its own to write.
            let read = &plan.blocks[row.blocks.clone()][..row.position / layout.block_size];
            if let Some(block) = read.iter().find(|&&block| self.written[block as usize] == self.step) {
                let id = row.id.0;
                return Err(format!(
                    "row {n} (sequence {id}): block {block} is read and written in this step"
                ));
            }
        }
        Ok(())
    }

    fn check_copies(&mut self, plan: &StepPlan, bounds: &Bounds) -> Result<(), String> {
        for copy in &plan.copies {
            let (from, to) = (copy.from as usize, copy.to as usize);
            if from >= bounds.num_blocks || to >= bounds.num_blocks || from == to {
                return Err(format!("copy of block {from} to {to} of {}", bounds.num_blocks));
            }
        }
        Ok(())
    }

    fn add_row(
        &mut self,
        plan: &StepPlan,
        n: usize,
        layout: &KvLayout,
        bounds: &Bounds,
    ) -> Result<(), String> {
        let row = &plan.rows[n];
        let Some(tokens) = plan.tokens.get(row.tokens.clone()) else {
            return Err(format!("tokens {:?} of {}", row.tokens, plan.tokens.len()));
        };
        let Some(table) = plan.blocks.get(row.blocks.clone()) else {
            return Err(format!("blocks {:?} of {}", row.blocks, plan.blocks.len()));
        };
        let Some(end) = row.position.checked_add(tokens.len()).filter(|&end| end <= bounds.context) else {
            let last = row.position.saturating_add(tokens.len() - 1);
            return Err(format!("position {last} is beyond the context of {}", bounds.context));
        };
        let used = layout.blocks_for(end);
        if table.len() < used {
            return Err(format!("{} blocks in its table, {end} tokens need {used}", table.len()));
        }
        if let Some(block) = table[..used].iter().find(|&&b| b as usize >= bounds.num_blocks) {
            return Err(format!("block {block} of {}", bounds.num_blocks));
        }
        for &block in &table[row.position / layout.block_size..used] {
            if std::mem::replace(&mut self.written[block as usize], self.step) == self.step {
                return Err(format!("block {block} is written twice in this step"));
            }
        }
        for position in row.position..end {
            let (block, slot) = (table[position / layout.block_size], position % layout.block_size);
            self.places.push(Place { position: position as u32, block, slot: slot as u32 });
        }
        self.add_units(row.tokens.clone(), row.position, row.blocks.clone(), bounds);
        self.add_wanted(n as u32, plan)
    }

    /// Cuts a row so that one unit's queries fit in registers together.
    fn add_units(&mut self, tokens: Range<usize>, position: usize, blocks: Range<usize>, bounds: &Bounds) {
        let most = (MAX_QUERIES / bounds.group).max(1);
        let mut first = tokens.start;
        while first < tokens.end {
            let num_tokens = most.min(tokens.end - first);
            let position = position + first - tokens.start;
            let unit = Unit {
                first_token: first,
                num_tokens,
                position,
                blocks: blocks.clone(),
                work_before: self.work,
            };
            self.units.push(unit);
            // Loads of K and V are shared; the constant stands for what each unit does once.
            self.work += (position + 64) as u64 * (num_tokens + 1) as u64;
            first += num_tokens;
        }
    }

    fn add_wanted(&mut self, n: u32, plan: &StepPlan) -> Result<(), String> {
        let row = &plan.rows[n as usize];
        match &row.logits {
            Logits::None => {}
            Logits::Sample(wanted) => {
                let samplings = plan.samplings.get(wanted.clone()).filter(|s| !s.is_empty());
                let Some(samplings) = samplings else {
                    return Err(format!("samplings {wanted:?} of {}", plan.samplings.len()));
                };
                samplings.iter().try_for_each(|sampling| sampler::check(&sampling.params))?;
                let purpose = Purpose::Sample { row: n, samplings: wanted.clone() };
                self.wanted.push(Wanted { token: row.tokens.end - 1, purpose });
            }
            Logits::All => {
                for token in row.tokens.clone() {
                    self.wanted.push(Wanted { token, purpose: Purpose::Copy { nth: self.num_copied } });
                    self.num_copied += 1;
                }
            }
        }
        Ok(())
    }

    /// What attends in a layer.
    pub(crate) fn attending(&self, layer: usize) -> Attending<'_> {
        let (mut units, mut work) = (&self.units[..], self.work);
        if self.leaves_out_last(layer)
            && let Some((last, others)) = units.split_last()
        {
            (units, work) = (others, last.work_before);
        }
        Attending { units, work, by_unit: self.units.len() == self.places.len() }
    }
}

/// A row in parts is the last, of one token, and drawn from when it is done.
fn check_part(plan: &StepPlan, part: &RowPart, bounds: &Bounds) -> Result<(), String> {
    let layers = &part.layers;
    if part.num_layers != bounds.num_layers || layers.is_empty() || layers.end > part.num_layers {
        let (of, num_layers) = (part.num_layers, bounds.num_layers);
        return Err(format!("layers {layers:?} of {of} for a part, the model has {num_layers}"));
    }
    match plan.rows.last() {
        Some(row) if row.tokens.len() != 1 => Err(format!("a row of {} tokens in parts", row.tokens.len())),
        Some(row) if row.logits != Logits::None && !part.is_last() => {
            Err("logits are wanted of a row that is not done".to_owned())
        }
        Some(_) => Ok(()),
        None => Err("a part of no row".to_owned()),
    }
}

/// The units that attend in a layer, and how their work is shared.
#[derive(Clone, Copy)]
pub(crate) struct Attending<'a> {
    units: &'a [Unit],
    /// Of all of them, a head.
    work: u64,
    /// Whether attention goes unit by unit rather than head by head. Where all are of one token nothing is read twice, and the heads
    /// of a block lie side by side; units of one prompt find a head of K and V in the caches.
    by_unit: bool,
}

impl<'a> Attending<'a> {
    /// The KV head and the unit of a pair.
    pub(crate) fn pair(&self, pair: usize, num_kv_heads: usize) -> (usize, &'a Unit) {
        let num_units = self.units.len();
        match self.by_unit {
            true => (pair % num_kv_heads, &self.units[pair / num_kv_heads]),
            false => (pair / num_units, &self.units[pair % num_units]),
        }
    }

    /// How many of the pairs, from the first of them on, are heads of one unit whose queries fit in registers together.
    pub(crate) fn together(&self, pairs: Range<usize>, num_kv_heads: usize, group: usize) -> usize {
        match self.by_unit {
            true => {
                pairs.len().min(num_kv_heads - pairs.start % num_kv_heads).min((MAX_QUERIES / group).max(1))
            }
            false => 1,
        }
    }

    /// A member's share of (KV head, unit) pairs: about the same work for each.
    pub(crate) fn share(&self, index: usize, count: usize, num_kv_heads: usize) -> Range<usize> {
        let bound = |index: usize| {
            if index == count {
                return num_kv_heads * self.units.len();
            }
            if self.by_unit {
                return self.head_at(self.work * index as u64 / count as u64, num_kv_heads);
            }
            let goal = self.work * num_kv_heads as u64 * index as u64 / count as u64;
            let (head, within) = (goal / self.work.max(1), goal % self.work.max(1));
            let unit = self.units.partition_point(|unit| unit.work_before < within);
            head as usize * self.units.len() + unit
        };
        bound(index)..bound(index + 1)
    }

    /// The pair that is nearest below so much work, of all heads together.
    fn head_at(&self, work: u64, num_kv_heads: usize) -> usize {
        let after = self.units.partition_point(|unit| unit.work_before <= work);
        let Some(unit) = after.checked_sub(1) else { return 0 };
        let end = self.units.get(after).map_or(self.work, |unit| unit.work_before);
        let begin = self.units[unit].work_before;
        let heads = (work - begin) * num_kv_heads as u64 / (end - begin).max(1);
        unit * num_kv_heads + heads as usize
    }
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
