//! One attempt: what its legs have said so far.

use std::collections::VecDeque;

use baton_handoff::{FinishReason, SampledToken};

use crate::{Legs, Placed};

/// The live attempt of a request.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) placed: Placed,
    pub(crate) legs: Legs,
    /// The Prefill leg said its token.
    pub(crate) first_token: bool,
    /// The Decode leg said `Started`: what becomes of the Prefill leg does not matter, once its token is here.
    pub(crate) started: bool,
    /// Tokens of the Decode leg that wait for the first token.
    pub(crate) early: VecDeque<SampledToken>,
    /// The Decode leg's last word, which waits for the first token too.
    pub(crate) finished: Option<FinishReason>,
}

impl Attempt {
    pub(crate) fn new(placed: Placed, legs: Legs) -> Self {
        Self { placed, legs, first_token: legs.local, started: false, early: VecDeque::new(), finished: None }
    }

    /// Whether the sequence goes on without the Prefill leg.
    pub(crate) const fn is_past_prefill(&self) -> bool {
        self.first_token && self.started
    }
}
