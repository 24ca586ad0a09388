//! How much fits on a worker.

/// KV memory of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Capacity {
    pub(crate) blocks: u64,
    /// Tokens of a block.
    pub(crate) block_size: u64,
}

impl Capacity {
    /// Tokens that all blocks hold.
    pub(crate) const fn tokens(self) -> u64 {
        self.blocks * self.block_size
    }

    /// Tokens of each of `n` answers to a prompt of so many tokens, at most: they share the prompt's full blocks.
    pub(crate) fn answer_tokens(self, prompt: u64, n: u32) -> u64 {
        let shared = prompt.checked_div(self.block_size).unwrap_or(0).min(self.blocks);
        let each = shared + (self.blocks - shared) / u64::from(n.max(1));
        (each * self.block_size).saturating_sub(prompt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_share_the_full_blocks_of_their_prompt() {
        let capacity = Capacity { blocks: 20, block_size: 16 };
        assert_eq!((capacity.tokens(), capacity.answer_tokens(100, 1)), (320, 220));
        // 6 full blocks are shared and each has 7 of the other 14: 13 blocks are 208 tokens, 100 of them the prompt's.
        assert_eq!(capacity.answer_tokens(100, 2), 108);
        assert_eq!(capacity.answer_tokens(100, 15), 0, "the partly filled block of each is its own");
        assert_eq!(capacity.answer_tokens(400, 2), 0);
        assert_eq!(Capacity::default().answer_tokens(100, 2), 0);
    }
}
