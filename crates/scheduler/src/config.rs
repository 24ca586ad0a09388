//! A scheduler's bounds, and what it refuses because of them.

/// Bounds of one scheduler.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Tokens of a block.
    pub block_size: usize,
    /// Tokens of prompt and output together, at most.
    pub context: usize,
    /// Sequences that hold blocks, at most.
    pub max_num_seqs: usize,
    /// Sequences that wait, at most.
    pub max_queue: usize,
    /// Tokens of one step, at most: the prefill chunk on a prefill worker.
    pub max_step_tokens: usize,
    /// Prompt tokens of one step while other sequences decode, at most.
    pub local_prefill_tokens: usize,
    /// Partly prefilled prompts on a prefill worker, at most.
    pub max_open_prompts: usize,
    /// Prompts offered ahead of being computed, at most.
    pub lookahead: usize,
    /// Share of all blocks that may be receiving KV; one sequence may always.
    pub max_receiving_share: f32,
    /// Everything besides tokens that KV depends on (model digest, numerics id); `None` turns the prefix cache off.
    pub cache_salt: Option<Vec<u8>>,
    /// A waiting prompt counts as this many tokens shorter per second of waiting, so that none starves.
    pub ageing_tokens_per_s: f64,
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
