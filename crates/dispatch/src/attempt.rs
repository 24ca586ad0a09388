//! One attempt: what its legs have said so far.

use std::collections::VecDeque;

use baton_handoff::{FinishReason, InstanceId, SampledToken};

use crate::{Legs, Placed};

/// The live attempt of a group.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) placed: Placed,
    pub(crate) legs: Legs,
    /// Which of the request's attempts this is, counted over all groups.
    pub(crate) nth: u32,
    /// The Prefill leg said its tokens.
    pub(crate) first_tokens: bool,
    /// The Decode leg said `Started`: what becomes of the Prefill leg does not matter, once its tokens are here.
    pub(crate) started: bool,
    /// The Prefill leg is open: it has not said its last word.
    pub(crate) prefill_open: bool,
    /// It began with KV that an earlier attempt had computed.
    pub(crate) redirected: bool,
    /// What the Decode leg said ahead of the first tokens, one entry a sequence.
    pub(crate) early: Vec<Early>,
}

/// What waits for the first token of a sequence.
#[derive(Debug, Default)]
pub(crate) struct Early {
    pub(crate) tokens: VecDeque<SampledToken>,
    pub(crate) last: Option<LastWord>,
}

/// After this a Decode leg says nothing more of a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LastWord {
    Finished(FinishReason),
    Preempted,
}

impl Attempt {
    pub(crate) fn new(placed: Placed, legs: Legs, nth: u32) -> Self {
        let early = (0..legs.num_sequences).map(|_| Early::default()).collect();
        Self {
            placed,
            legs,
            nth,
            first_tokens: legs.local,
            started: false,
            prefill_open: !legs.local,
            redirected: false,
            early,
        }
    }

    /// One that goes on with the KV and the Prefill leg of another.
    pub(crate) fn redirected(placed: Placed, legs: Legs, nth: u32) -> Self {
        Self { first_tokens: true, redirected: true, ..Self::new(placed, legs, nth) }
    }

    /// Whether the prompt is computed and its KV has not left the prefill worker.
    pub(crate) const fn is_held(&self) -> bool {
        self.prefill_open && self.first_tokens && !self.started
    }

    /// Whether the sequences go on without the Prefill leg.
    pub(crate) const fn is_past_prefill(&self) -> bool {
        self.first_tokens && self.started
    }

    /// Whether the Decode leg has nothing more to say, and waits for the first tokens.
    pub(crate) fn has_decode_ended(&self) -> bool {
        !self.first_tokens && self.early.iter().all(|early| early.last.is_some())
    }

    /// What waits of a sequence; `None` when it is not of this attempt.
    pub(crate) fn early(&mut self, sequence: u32) -> Option<&mut Early> {
        let nth = sequence.checked_sub(self.legs.first_sequence)?;
        self.early.get_mut(usize::try_from(nth).ok()?)
    }

    /// The worker that computes the prompt.
    pub(crate) fn computes(&self) -> InstanceId {
        self.placed.prefill.unwrap_or(self.placed.decode)
    }
}
