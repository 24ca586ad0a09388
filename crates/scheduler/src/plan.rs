//! The step plan: one ragged batch of prefill chunks and decode rows.

use std::ops::Range;

/// Names a sequence within one scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// How the next token is drawn from logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// In (0, 1]; the smallest set of tokens with at least this much probability is kept.
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// In [0, 1): tokens less probable than this share of the most probable one are dropped.
    pub min_p: f32,
    /// The random number of a token is a function of (seed, sequence, position) alone.
    pub seed: u64,
}

impl SamplingParams {
    /// The most probable token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 };
}

/// How one row's next token is sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSampling {
    /// The request's parameters.
    pub params: SamplingParams,
    /// Which of the request's sequences this is.
    pub sequence: u32,
    /// Absolute position of the token to be drawn (prompt length plus tokens generated so far).
    pub position: u32,
}

/// Which logits a row wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: a chunk in the middle of a prompt.
    None,
    /// Of its last token, to sample from once for each of these entries of [`StepPlan::samplings`]; at least one.
    Sample(Range<usize>),
    /// Of every token, copied to [`crate::StepOutput::logits`]; nothing is sampled.
    All,
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanRow {
    /// Whose tokens these are.
    pub id: SequenceId,
    /// Its new tokens, in [`StepPlan::tokens`]; at least one.
    pub tokens: Range<usize>,
    /// Absolute position of the first of them; everything before is in the blocks already.
    pub position: usize,
    /// Its block table, in [`StepPlan::blocks`]; covers `position + tokens.len()` tokens.
    pub blocks: Range<usize>,
    /// What is wanted of it.
    pub logits: Logits,
}

/// What a step computes of its last row, where that is not all: some of the model's layers, in steps one after the other, so that a row of a
/// long context stretches no step of others by all of its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPart {
    /// These layers; those before were computed in the last step that had this row, for the same token.
    pub layers: Range<usize>,
    /// Of so many.
    pub num_layers: usize,
}

impl RowPart {
    /// Whether the row is done with it, and its next token can be drawn.
    pub const fn is_last(&self) -> bool {
        self.layers.end == self.num_layers
    }

    /// Of the whole row.
    pub fn share(&self) -> f64 {
        self.layers.len() as f64 / self.num_layers.max(1) as f64
    }
}

/// A whole block to copy before the step, in all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Copied from.
    pub from: u32,
    /// Copied to.
    pub to: u32,
}

/// What the engine computes in one step. Reused from step to step: the vectors keep their capacity.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Rows; no sequence appears twice.
    pub rows: Vec<PlanRow>,
    /// New tokens of all rows, one after the other.
    pub tokens: Vec<u32>,
    /// Block tables of all rows, one after the other.
    pub blocks: Vec<u32>,
    /// Block copies to perform first, in this order; rows may write the blocks copied from.
    pub copies: Vec<BlockCopy>,
    /// How tokens are drawn, in row order.
    pub samplings: Vec<RowSampling>,
    /// Of the last row, which is of one token then, only this is computed. For an engine that [`crate::Engine::splits_rows`].
    pub part: Option<RowPart>,
}

impl StepPlan {
    /// Empties the plan and keeps its memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.tokens.clear();
        self.blocks.clear();
        self.copies.clear();
        self.samplings.clear();
        self.part = None;
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Appends a row; `tokens` are its new tokens and `blocks` its whole block table. One token is drawn for each of
    /// `samplings`; with none, no logits are wanted.
    pub fn push(
        &mut self,
        id: SequenceId,
        position: usize,
        tokens: &[u32],
        blocks: &[u32],
        samplings: &[RowSampling],
    ) {
        let first = self.samplings.len();
        self.samplings.extend_from_slice(samplings);
        let wanted = first..self.samplings.len();
        self.add(
            id,
            position,
            tokens,
            blocks,
            if wanted.is_empty() { Logits::None } else { Logits::Sample(wanted) },
        );
    }

    /// Appends a row as [`StepPlan::push`] does; all its logits are wanted and nothing is drawn.
    pub fn push_all_logits(&mut self, id: SequenceId, position: usize, tokens: &[u32], blocks: &[u32]) {
        self.add(id, position, tokens, blocks, Logits::All);
    }

    /// Appends the last row: of one token, and only a part of it. `sampling` says how its next token is drawn once it is done.
    pub fn push_part(
        &mut self,
        (id, position): (SequenceId, usize),
        token: u32,
        blocks: &[u32],
        part: RowPart,
        sampling: RowSampling,
    ) {
        let samplings = if part.is_last() { &[sampling][..] } else { &[] };
        self.push(id, position, &[token], blocks, samplings);
        self.part = Some(part);
    }

    /// New tokens, and for each of them the tokens that it attends over, summed; of a row in parts as much as its part is of it. What
    /// [`crate::StepCost`] counts.
    pub fn load(&self) -> (f64, f64) {
        let whole = |row: &PlanRow| {
            let (position, tokens) = (row.position as f64, row.tokens.len() as f64);
            tokens * position + tokens * (tokens + 1.0) / 2.0
        };
        let (tokens, context) = (self.tokens.len() as f64, self.rows.iter().map(whole).sum::<f64>());
        match (&self.part, self.rows.last()) {
            (Some(part), Some(last)) => {
                let left_out = 1.0 - part.share();
                (tokens - left_out, context - left_out * whole(last))
            }
            _ => (tokens, context),
        }
    }

    fn add(&mut self, id: SequenceId, position: usize, tokens: &[u32], blocks: &[u32], logits: Logits) {
        let (t, b) = (self.tokens.len(), self.blocks.len());
        self.tokens.extend_from_slice(tokens);
        self.blocks.extend_from_slice(blocks);
        self.rows.push(PlanRow {
            id,
            tokens: t..self.tokens.len(),
            position,
            blocks: b..self.blocks.len(),
            logits,
        });
    }
}
