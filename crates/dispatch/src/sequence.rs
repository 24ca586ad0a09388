//! What the client has of one sequence.

use baton_handoff::{FinishReason, SampledToken};

/// One sequence: which tokens were delivered, and who may deliver the next.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequence {
    /// Number of the group whose attempt speaks for it.
    pub(crate) group: u32,
    pub(crate) delivered: u32,
    last_token: Option<u32>,
    pub(crate) finished: bool,
}

/// What a token is to a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The next one: it was counted as delivered.
    Next,
    /// It was delivered before.
    Old,
    /// Tokens before it are missing.
    Hole,
}

impl Sequence {
    /// Takes in the next token, if it is that.
    pub(crate) fn take(&mut self, token: SampledToken) -> Order {
        if token.index < self.delivered {
            return Order::Old;
        }
        if token.index > self.delivered {
            return Order::Hole;
        }
        self.delivered += 1;
        self.last_token = Some(token.id);
        Order::Next
    }

    /// Why it needs nothing more, though its last word is missing.
    pub(crate) fn complete(&self, stop_tokens: &[u32], max_new_tokens: u32) -> Option<FinishReason> {
        let last = self.last_token?;
        if stop_tokens.contains(&last) {
            return Some(FinishReason::Stop);
        }
        (self.delivered >= max_new_tokens).then_some(FinishReason::Length)
    }
}
