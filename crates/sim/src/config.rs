//! What a run is made of.

use std::fmt;
use std::str::FromStr;

use crate::random::Random;

/// Which faults are injected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Faults {
    /// None.
    None,
    /// Delays, lost connections, damaged and repeated messages, cancels, killed and paused workers, killed routers.
    #[default]
    All,
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::All => "all",
        })
    }
}

impl FromStr for Faults {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "all" => Ok(Self::All),
            _ => Err(format!("unknown faults '{text}': none or all")),
        }
    }
}

/// One run; equal configurations give equal runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimConfig {
    /// Everything random follows from it.
    pub seed: u64,
    /// Which faults are injected.
    pub faults: Faults,
    /// The cluster; `None`: drawn by the seed.
    pub shape: Option<Shape>,
}

/// A cluster and its load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Routers; at least 1.
    pub num_routers: usize,
    /// Prefill workers.
    pub num_prefill_workers: usize,
    /// Decode workers; at least 1.
    pub num_decode_workers: usize,
    /// Requests, over all routers.
    pub num_requests: usize,
    /// Mean time between two requests.
    pub interval_ms: u64,
    /// Tokens of a block.
    pub block_size: usize,
    /// Blocks of a prefill worker.
    pub prefill_blocks: usize,
    /// Blocks of a decode worker.
    pub decode_blocks: usize,
    /// Tokens of the longest prompt.
    pub max_prompt: usize,
    /// Most tokens that a request asks for.
    pub max_new_tokens: u32,
    /// Tokens of one step.
    pub max_step_tokens: usize,
    /// Bytes of credit.
    pub credit_window: u64,
    /// Whether timers are short enough to run out.
    pub hasty: bool,
    /// Whether workers keep a prefix cache.
    pub cache: bool,
    /// Whether decode workers do everything.
    pub colocated: bool,
}

impl Shape {
    /// Tokens of prompt and output together, as configured on the workers.
    pub const fn context(&self) -> usize {
        self.max_prompt + self.max_new_tokens as usize + 1
    }

    pub(crate) fn draw(random: &mut Random) -> Self {
        let block_size = [1, 2, 4, 8][random.index(4)];
        let max_prompt = random.between(4..=80) as usize;
        // Long outputs grow out of what admission foresaw, so that sequences are preempted.
        let longest_output = if random.chance(200) { 150 } else { 40 };
        let max_new_tokens = random.between(1..=longest_output) as u32;
        // From room for one request to room for many.
        let longest = (max_prompt + max_new_tokens as usize + 1).div_ceil(block_size);
        let blocks = |random: &mut Random| {
            let more = if random.chance(400) { 1 } else { 6 };
            longest + random.index(longest * more)
        };
        Self {
            num_routers: random.between(1..=2) as usize,
            num_prefill_workers: random.between(0..=3) as usize,
            num_decode_workers: random.between(1..=3) as usize,
            num_requests: random.between(2..=24) as usize,
            interval_ms: [1, 20, 200][random.index(3)],
            block_size,
            prefill_blocks: blocks(random),
            decode_blocks: blocks(random),
            max_prompt,
            max_new_tokens,
            max_step_tokens: block_size * random.between(1..=8) as usize,
            credit_window: random.between(1..=40) * (block_size as u64) * 8,
            hasty: random.chance(300),
            cache: random.chance(600),
            colocated: random.chance(60),
        }
    }
}
