//! What the engine's integration tests share: models, and sequences with hand-made plans.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

pub mod divergence;
pub mod naive;
pub mod random_model;

use std::sync::Arc;

use baton_engine::{Arena, CpuEngine, CpuEngineConfig, WeightSource};
use baton_model::{Model, ModelName, NoProgress, ResolveOptions, resolve};
use baton_scheduler::{Engine, Flow, RowSampling, Sampled, SamplingParams, SequenceId, StepOutput, StepPlan};

/// The default model from the user's cache, fetched if need be. Where it can't be had the test skips, saying why; with
/// `CI=true` that is a failure.
pub fn default_model_or_skip(test: &str) -> Option<Model> {
    let found = resolve(&ModelName::Default, &ResolveOptions::from_env(&NoProgress));
    match found.and_then(|source| Model::open(&source)) {
        Ok(model) => Some(model),
        Err(reason) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "{test} needs the default model: {reason}");
            eprintln!("SKIPPED {test}: {reason}");
            None
        }
    }
}

/// SplitMix64: random numbers of a test, the same every time.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in [-1, 1).
    pub fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }

    pub fn tokens(&mut self, count: usize, vocab: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocab) as u32).collect()
    }
}

/// Which logits a row of a hand-made plan wants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Logits {
    None,
    Last(RowSampling),
    All,
}

/// A sequence's id, block table and tokens whose KV is in the blocks.
pub struct Sequence {
    pub id: u64,
    pub blocks: Vec<u32>,
    pub done: usize,
}

/// An engine with the blocks that no sequence has.
pub struct Rig {
    pub engine: CpuEngine,
    pub arena: Arc<Arena>,
    pub free: Vec<u32>,
    pub plan: StepPlan,
    pub output: StepOutput,
    next_id: u64,
}

impl Rig {
    pub fn new(source: &dyn WeightSource, config: CpuEngineConfig) -> Rig {
        let num_blocks = config.num_blocks as u32;
        let (engine, arena) = CpuEngine::from_source(source, config).unwrap();
        let free = (0..num_blocks).rev().collect();
        Rig { engine, arena, free, plan: StepPlan::default(), output: StepOutput::default(), next_id: 0 }
    }

    /// A sequence with room for `num_tokens`.
    pub fn sequence(&mut self, num_tokens: usize) -> Sequence {
        let keep = self.free.len() - self.engine.layout().blocks_for(num_tokens);
        self.next_id += 1;
        Sequence { id: self.next_id, blocks: self.free.split_off(keep), done: 0 }
    }

    pub fn release(&mut self, sequence: Sequence) {
        self.free.extend(sequence.blocks);
    }

    /// Adds a row of new tokens to the plan.
    pub fn add(&mut self, sequence: &mut Sequence, tokens: &[u32], logits: Logits) {
        let used = self.engine.layout().blocks_for(sequence.done + tokens.len());
        let (id, blocks) = (SequenceId(sequence.id), &sequence.blocks[..used]);
        match logits {
            Logits::None => self.plan.push(id, sequence.done, tokens, blocks, &[]),
            Logits::Last(sampling) => self.plan.push(id, sequence.done, tokens, blocks, &[sampling]),
            Logits::All => self.plan.push_all_logits(id, sequence.done, tokens, blocks),
        }
        sequence.done += tokens.len();
    }

    /// Computes the plan and empties it.
    pub fn step(&mut self) {
        self.engine.step(&self.plan, &mut self.output, &mut |_| Flow::Continue).unwrap();
        self.plan.clear();
    }

    /// All logits of `tokens`, computed in steps of `chunk` tokens.
    pub fn logits(&mut self, sequence: &mut Sequence, tokens: &[u32], chunk: usize) -> Vec<f32> {
        let mut all = Vec::new();
        for tokens in tokens.chunks(chunk) {
            self.add(sequence, tokens, Logits::All);
            self.step();
            all.extend_from_slice(&self.output.logits);
        }
        all
    }

    /// Computes `tokens` in steps of `chunk` and draws the next one.
    pub fn prefill(&mut self, sequence: &mut Sequence, tokens: &[u32], chunk: usize) -> Sampled {
        let last = tokens.len().div_ceil(chunk) - 1;
        for (n, tokens) in tokens.chunks(chunk).enumerate() {
            let logits = if n == last { greedy(sequence.done + tokens.len()) } else { Logits::None };
            self.add(sequence, tokens, logits);
            self.step();
        }
        self.output.sampled[0]
    }
}

pub fn greedy(position: usize) -> Logits {
    Logits::Last(RowSampling { params: SamplingParams::GREEDY, sequence: 0, position: position as u32 })
}

/// The bits, so that equality is that of bits and not of values.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
