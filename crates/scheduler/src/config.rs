//! A scheduler's bounds, and what it refuses because of them.

use crate::cost::StepCost;

/// Bounds of one scheduler.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Tokens of a block.
    pub block_size: usize,
    /// Tokens of prompt and output together, at most.
    pub context: usize,
    /// Sequences that hold blocks, at most.
    pub max_num_seqs: usize,
    /// Sequences that wait: with so many, no more are accepted.
    pub max_queue: usize,
    /// Tokens of one step, at most: the prefill chunk on a prefill worker.
    pub max_step_tokens: usize,
    /// Prompt tokens of one step while other sequences decode, at most.
    pub local_prefill_tokens: usize,
    /// Prompts that hold blocks and are not computed yet on a prefill worker, at most. One that a step has no tokens for is not opened.
    pub max_open_prompts: usize,
    /// Prompts offered ahead of being computed, the most urgent ones; at most twice as many while more urgent ones come.
    pub lookahead: usize,
    /// Share of all blocks that may be receiving KV; one sequence may always.
    pub max_receiving_share: f32,
    /// Everything besides tokens that KV depends on (model digest, numerics id); `None` turns the prefix cache off.
    pub cache_salt: Option<Vec<u8>>,
    /// A waiting prompt counts as this many tokens shorter per second of waiting, so that none starves.
    pub ageing_tokens_per_s: f64,
    /// What a step is expected to take; `None`: tokens alone bound it.
    pub step_cost: Option<StepCost>,
    /// Expected milliseconds of a step, at most, where prompts decide: a step of decode rows alone takes what it takes, and one
    /// block of a prompt is computed always.
    pub max_step_ms: f64,
    /// By what share of itself a step of decode rows may grow, as expected, for the row of a newcomer: a longer one is computed in parts (see
    /// [`crate::RowPart`]). 0 turns that off; an engine that does not split rows needs 0.
    pub max_step_growth: f64,
    /// Layers of the model; for rows in parts.
    pub num_layers: usize,
}

impl SchedulerConfig {
    /// Whether every accepted sequence can make progress under these bounds.
    ///
    /// # Errors
    /// Names the bound that is too small.
    pub fn check(&self) -> Result<(), String> {
        let least = [
            ("block_size", self.block_size, 1),
            ("context", self.context, 2),
            ("max_num_seqs", self.max_num_seqs, 1),
            ("max_queue", self.max_queue, 1),
            ("max_step_tokens", self.max_step_tokens, self.block_size),
            ("local_prefill_tokens", self.local_prefill_tokens, self.block_size),
            ("max_open_prompts", self.max_open_prompts, 1),
            ("lookahead", self.lookahead, 1),
        ];
        if self.max_step_ms.is_nan() || self.max_step_ms <= 0.0 {
            return Err(format!("max_step_ms is {}, more than 0 is needed", self.max_step_ms));
        }
        if !(self.max_step_growth >= 0.0 && self.max_step_growth.is_finite()) {
            return Err(format!(
                "max_step_growth is {}, a share of 0 or more is needed",
                self.max_step_growth
            ));
        }
        match least.iter().find(|(_, value, least)| value < least) {
            Some((name, value, least)) => Err(format!("{name} is {value}, at least {least} is needed")),
            None => Ok(()),
        }
    }
}

/// Why a sequence was not accepted; nothing is held for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It can never fit here.
    #[error("needs room for {needed_tokens} tokens, at most {max_tokens} fit")]
    TooLarge {
        /// Tokens of prompt and output that need room.
        needed_tokens: usize,
        /// The largest number that fits.
        max_tokens: usize,
    },
    /// Its group can never wait or run here together.
    #[error("{num_sequences} sequences of one prompt, at most {max_num_seqs} can run")]
    TooMany {
        /// Sequences of the group.
        num_sequences: usize,
        /// Sequences that can be here at once, at most.
        max_num_seqs: usize,
    },
    /// Later, or elsewhere.
    #[error("the queue of {max_queue} is full")]
    QueueFull {
        /// The queue's bound.
        max_queue: usize,
    },
    /// A live sequence has this id.
    #[error("a live sequence has this id")]
    Duplicate,
    /// There is no token to compute or none to generate.
    #[error("the prompt, or the number of tokens to generate, is zero")]
    Empty,
}
