//! A pool that forgets to count holders, and the wrong token that follows. The pool that serves can't be made to do this, so the careless one is a
//! model of the demonstration's own; the engine that reads the wrong block is the real timing engine.

use baton_kv::{BlockPool, BlockTable};
use baton_scheduler::{Engine, Flow, RowSampling, SamplingParams, SequenceId, StepOutput, StepPlan};
use baton_timing::{TimingEngine, pseudo_token};

use crate::LabError;
use crate::random::Random;
use crate::serving::{PSEUDO_LAYERS, ServingConfig, VOCAB};

const BLOCK_SIZE: usize = 4;
const NUM_BLOCKS: usize = 6;
const PROMPT: usize = 8;

/// A free list without counts: who is done puts its blocks back, whoever else reads them.
struct CarelessPool {
    free: Vec<u32>,
}

impl CarelessPool {
    fn take(&mut self, num: usize) -> Vec<u32> {
        self.free.split_off(self.free.len().saturating_sub(num))
    }

    fn give(&mut self, blocks: &[u32]) {
        self.free.extend_from_slice(blocks);
    }
}

/// The second reader's next token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Read {
    /// Blocks that the newcomer was given.
    pub(crate) given: Vec<u32>,
    /// Blocks that the second reader reads.
    pub(crate) reads: Vec<u32>,
    /// The token that it drew.
    pub(crate) token: u32,
    /// Slots that no longer hold what was computed into them.
    pub(crate) num_overwritten: usize,
}

/// What both pools make of the same story.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Guard {
    /// The token of a run that nothing disturbs.
    pub(crate) expected: u32,
    pub(crate) counted: Read,
    pub(crate) careless: Read,
}

const fn sampling(position: usize) -> RowSampling {
    RowSampling { params: SamplingParams::GREEDY, sequence: 0, position: position as u32 }
}

struct Story {
    engine: TimingEngine,
    /// The prompt of both readers and the token behind it, and the newcomer's prompt.
    tokens: Vec<u32>,
    newcomer: Vec<u32>,
}

impl Story {
    fn new() -> Self {
        let mut random = Random::new(3);
        let engine = ServingConfig::roomy(NUM_BLOCKS, BLOCK_SIZE).engine();
        Self { engine, tokens: random.tokens(PROMPT + 1), newcomer: random.tokens(PROMPT) }
    }

    fn compute(&mut self, position: usize, tokens: &[u32], blocks: &[u32]) -> Result<u32, LabError> {
        let mut plan = StepPlan::default();
        plan.push(SequenceId(1), position, tokens, blocks, &[sampling(position + tokens.len())]);
        let mut output = StepOutput::default();
        self.engine.step(&plan, &mut output, &mut |_| Flow::Continue)?;
        Ok(output.sampled.first().map_or(0, |sampled| sampled.token))
    }

    fn prompt(&mut self, blocks: &[u32]) -> Result<Vec<Vec<u64>>, LabError> {
        let tokens = self.tokens[..PROMPT].to_vec();
        self.compute(0, &tokens, blocks)?;
        Ok(self.contents(blocks))
    }

    fn contents(&self, blocks: &[u32]) -> Vec<Vec<u64>> {
        let memory = self.engine.memory();
        blocks.iter().filter_map(|block| memory.block(0, *block).map(<[u64]>::to_vec)).collect()
    }

    /// The newcomer computes its prompt into what it was given; then the second reader goes on.
    fn read(&mut self, given: Vec<u32>, reads: Vec<u32>, before: &[Vec<u64>]) -> Result<Read, LabError> {
        let newcomer = self.newcomer.clone();
        self.compute(0, &newcomer, &given)?;
        let after = self.contents(&reads[..before.len()]);
        let pairs = before.iter().flatten().zip(after.iter().flatten());
        let num_overwritten = pairs.filter(|(before, after)| before != after).count();
        let last = self.tokens[PROMPT..].to_vec();
        let token = self.compute(PROMPT, &last, &reads)?;
        Ok(Read { given, reads, token, num_overwritten })
    }
}

/// Two readers of one prompt; the first leaves, a newcomer takes blocks, the second reads on.
fn counted() -> Result<Read, LabError> {
    let (mut story, pool) = (Story::new(), BlockPool::new(NUM_BLOCKS));
    let allocate = |num| pool.allocate(num).ok_or(LabError::Standstill { what: "break", num_left: 1 });
    let mut first = BlockTable::new();
    first.extend(allocate(PROMPT / BLOCK_SIZE)?);
    let before = story.prompt(first.ids())?;
    let mut second = first.fork(1);
    first.clear();
    let mut newcomer = BlockTable::new();
    newcomer.extend(allocate(PROMPT / BLOCK_SIZE)?);
    second.extend(allocate(1)?);
    story.read(newcomer.ids().to_vec(), second.ids().to_vec(), &before)
}

fn careless() -> Result<Read, LabError> {
    let mut story = Story::new();
    let mut pool = CarelessPool { free: (0..NUM_BLOCKS as u32).rev().collect() };
    let first = pool.take(PROMPT / BLOCK_SIZE);
    let before = story.prompt(&first)?;
    let mut second = first.clone();
    pool.give(&first);
    let newcomer = pool.take(PROMPT / BLOCK_SIZE);
    second.extend(pool.take(1));
    story.read(newcomer, second, &before)
}

pub(crate) fn shown() -> Result<Guard, LabError> {
    let expected = pseudo_token(&Story::new().tokens, &sampling(PROMPT + 1), PSEUDO_LAYERS, VOCAB);
    Ok(Guard { expected, counted: counted()?, careless: careless()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_counts_a_live_block_is_given_away_and_the_next_token_is_wrong() {
        let guard = shown().unwrap();
        assert_eq!((guard.counted.token, guard.counted.num_overwritten), (guard.expected, 0));
        assert!(guard.counted.given.iter().all(|block| !guard.counted.reads.contains(block)));
        assert_ne!(guard.careless.token, guard.expected);
        assert_eq!(guard.careless.num_overwritten, PROMPT);
        assert_eq!(guard.careless.given, guard.careless.reads[..2]);
    }
}
