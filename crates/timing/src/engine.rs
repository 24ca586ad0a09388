//! [`TimingEngine`]: the pseudo model of [`crate::hash`] over [`FingerprintMemory`].

use std::ops::Range;
use std::time::Duration;

use baton_kv::{KvDtype, KvLayout};
use baton_scheduler::{
    Engine, EngineError, Flow, Logits, PlanRow, Sampled, SequenceId, StepCost, StepOutput, StepPlan,
    StepPoint,
};

use crate::hash::{EMPTY, draw, embed, kv, mix};
use crate::{FingerprintMemory, ModelShape, Roofline, StepWork};

/// What a timing engine is created with.
#[derive(Clone, Copy, Debug)]
pub struct TimingConfig {
    /// The device that it plays.
    pub roofline: Roofline,
    /// The model whose time it predicts.
    pub shape: ModelShape,
    /// Blocks of memory.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Layers of the pseudo model, which need not be as many as the predicted model's.
    pub num_layers: usize,
    /// Size of the vocabulary.
    pub vocab: u32,
    /// Tokens of one plan at most.
    pub max_step_tokens: usize,
}

/// An engine whose tokens are hashes of everything before them and whose steps take no time, but say how long
/// they would have taken.
pub struct TimingEngine {
    config: TimingConfig,
    layout: KvLayout,
    memory: FingerprintMemory,
    hidden: Vec<u64>,
    /// Of a row in parts: whose, at which position and layer it was left, and its hidden state there.
    carry: Option<((SequenceId, usize, usize), u64)>,
    last_step_time: Duration,
    /// Measured; in place of the roofline.
    cost: Option<StepCost>,
}

impl TimingEngine {
    /// An engine with empty memory.
    pub fn new(config: TimingConfig) -> Self {
        let layout = KvLayout {
            model_digest: [0; 32],
            num_layers: config.num_layers,
            num_kv_heads: 1,
            head_dim: 1,
            block_size: config.block_size,
            // One K and one V of four bytes each: room for a fingerprint.
            dtype: KvDtype::F32,
            arrangement: "fingerprint".into(),
            numerics_id: "timing".into(),
        };
        let memory = FingerprintMemory::new(config.num_layers, config.num_blocks, config.block_size);
        Self {
            config,
            layout,
            memory,
            hidden: Vec::new(),
            carry: None,
            last_step_time: Duration::ZERO,
            cost: None,
        }
    }

    /// From now on steps take what a real device's steps were measured to, in place of what the roofline says.
    pub const fn set_step_cost(&mut self, cost: StepCost) {
        self.cost = Some(cost);
    }

    /// How long the last step would have taken.
    pub const fn last_step_time(&self) -> Duration {
        self.last_step_time
    }

    /// Block memory, as a sender reads it.
    pub const fn memory(&self) -> &FingerprintMemory {
        &self.memory
    }

    /// Block memory, as a receiver writes it.
    pub const fn memory_mut(&mut self) -> &mut FingerprintMemory {
        &mut self.memory
    }

    fn check(&self, plan: &StepPlan) -> Result<(), EngineError> {
        let bad = |what: String| Err(EngineError::BadPlan(what));
        if plan.tokens.len() > self.config.max_step_tokens {
            return bad(format!("{} tokens, at most {}", plan.tokens.len(), self.config.max_step_tokens));
        }
        for (nth, row) in plan.rows.iter().enumerate() {
            let tokens = plan.tokens.get(row.tokens.clone()).map_or(0, <[u32]>::len);
            let blocks = plan.blocks.get(row.blocks.clone()).map_or(0, <[u32]>::len);
            if tokens == 0 || blocks * self.config.block_size < row.position + tokens {
                return bad(format!("row {nth}: {blocks} blocks for {} + {tokens} tokens", row.position));
            }
            match &row.logits {
                Logits::None => {}
                Logits::Sample(wanted)
                    if plan.samplings.get(wanted.clone()).is_some_and(|s| !s.is_empty()) => {}
                Logits::Sample(wanted) => {
                    return bad(format!("row {nth}: samplings {wanted:?} of {}", plan.samplings.len()));
                }
                Logits::All => return bad(format!("row {nth}: a timing engine has no logits")),
            }
        }
        // The largest, and not the first that is too large: that is looked for in many at a time.
        match plan.blocks.iter().copied().max().filter(|block| *block as usize >= self.config.num_blocks) {
            Some(block) => bad(format!("block {block} of {}", self.config.num_blocks)),
            None => Ok(()),
        }
    }

    fn slot<'a>(&'a mut self, layer: usize, blocks: &[u32], position: usize) -> Option<&'a mut u64> {
        let block = *blocks.get(position / self.config.block_size)?;
        let slot = position % self.config.block_size;
        self.memory.block_mut(layer, block)?.get_mut(slot)
    }

    /// Everything before the row's tokens, read from its blocks.
    fn attend(&self, layer: usize, blocks: &[u32], position: usize) -> u64 {
        let mut attended = EMPTY;
        let mut left = position;
        for block in blocks {
            let num = left.min(self.config.block_size);
            let slots = self.memory.block(layer, *block).and_then(|slots| slots.get(..num)).unwrap_or(&[]);
            attended = slots.iter().fold(attended, |attended, slot| mix(attended, *slot));
            left -= num;
            if left == 0 {
                break;
            }
        }
        attended
    }

    fn layer(&mut self, layer: usize, row: &PlanRow, plan: &StepPlan) {
        let blocks = plan.blocks.get(row.blocks.clone()).unwrap_or(&[]);
        let mut attended = self.attend(layer, blocks, row.position);
        for (nth, at) in row.tokens.clone().enumerate() {
            let position = row.position + nth;
            let hidden = self.hidden.get(at).copied().unwrap_or(EMPTY);
            let value = kv(layer, position, hidden);
            if let Some(slot) = self.slot(layer, blocks, position) {
                *slot = value;
            }
            attended = mix(attended, value);
            if let Some(out) = self.hidden.get_mut(at) {
                *out = mix(hidden, attended);
            }
        }
    }

    fn work(plan: &StepPlan) -> StepWork {
        let mut work = StepWork { num_tokens: plan.tokens.len() as u64, ..StepWork::default() };
        for row in &plan.rows {
            let (position, tokens) = (row.position as u64, num(&row.tokens));
            work.num_context += position + tokens;
            work.num_attended += position * tokens + tokens * (tokens + 1) / 2;
        }
        if let (Some(part), Some(row)) = (&plan.part, plan.rows.last()) {
            let left_out = ((1.0 - part.share()) * (row.position + 1) as f64) as u64;
            work.num_context -= left_out;
            work.num_attended -= left_out;
        }
        work
    }

    /// Where the last row goes on, if it was begun in steps before.
    fn resume(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        let (Some(part), Some(row)) = (&plan.part, plan.rows.last()) else { return Ok(()) };
        // Without layers the pseudo model's tokens depend on none, so that a row may be in parts of any.
        let knows = self.config.num_layers == 0 || part.num_layers == self.config.num_layers;
        if !knows || part.layers.end > part.num_layers || row.tokens.len() != 1 {
            return Err(EngineError::BadPlan(format!("a part {part:?} of {} tokens", row.tokens.len())));
        }
        if part.layers.start == 0 {
            return Ok(());
        }
        match (self.carry, self.hidden.last_mut()) {
            (Some((at, hidden)), Some(last)) if at == (row.id, row.position, part.layers.start) => {
                *last = hidden
            }
            (carry, _) => return Err(EngineError::BadPlan(format!("a part {part:?} after {carry:?}"))),
        }
        Ok(())
    }

    /// Keeps the last row if it is not done.
    fn leave(&mut self, plan: &StepPlan) {
        if let (Some(part), Some(row), Some(&hidden)) = (&plan.part, plan.rows.last(), self.hidden.last()) {
            let at = (row.id, row.position, part.layers.end);
            self.carry = (!part.is_last()).then_some((at, hidden));
        }
    }
}

/// What a step of this work costs by the measured costs; their contexts are tokens attended over.
fn measured(cost: &StepCost, (tokens, attended): (f64, f64)) -> Duration {
    let StepCost { fixed_s, per_token_s, per_context_token_s } = *cost;
    let seconds = fixed_s + per_token_s * tokens + per_context_token_s * attended;
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(86_400))
}

fn num(range: &Range<usize>) -> u64 {
    (range.end - range.start) as u64
}

impl Engine for TimingEngine {
    fn layout(&self) -> &KvLayout {
        &self.layout
    }

    fn max_step_tokens(&self) -> usize {
        self.config.max_step_tokens
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab as usize
    }

    fn splits_rows(&self) -> bool {
        true
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        on_point: &mut dyn FnMut(StepPoint) -> Flow,
    ) -> Result<(), EngineError> {
        output.sampled.clear();
        output.logits.clear();
        output.stopped = false;
        self.check(plan)?;
        if !plan.copies.iter().all(|copy| self.memory.copy(copy.from, copy.to)) {
            return Err(EngineError::BadPlan("a copy outside the memory".into()));
        }
        self.last_step_time = match &self.cost {
            Some(cost) => measured(cost, plan.load()),
            None => self.config.roofline.step_time(&self.config.shape, &Self::work(plan)),
        };
        self.hidden.clear();
        self.hidden.extend(plan.tokens.iter().map(|token| embed(*token)));
        self.resume(plan)?;
        for layer in 0..self.config.num_layers {
            let leaves_out_last = plan.part.as_ref().is_some_and(|part| !part.layers.contains(&layer));
            for row in &plan.rows[..plan.rows.len().saturating_sub(usize::from(leaves_out_last))] {
                self.layer(layer, row, plan);
            }
            if on_point(StepPoint::LayerEnd(layer)) == Flow::Stop {
                output.stopped = true;
                return Ok(());
            }
        }
        self.leave(plan);
        for (nth, row) in plan.rows.iter().enumerate() {
            let Logits::Sample(wanted) = &row.logits else { continue };
            let hidden = row.tokens.end.checked_sub(1).and_then(|at| self.hidden.get(at)).copied();
            for (at, sampling) in wanted.clone().zip(&plan.samplings[wanted.clone()]) {
                let token = draw(hidden.unwrap_or(EMPTY), sampling, self.config.vocab.max(1));
                output.sampled.push(Sampled { row: nth as u32, sampling: at as u32, token, logprob: -1.0 });
            }
        }
        Ok(())
    }
}
