//! What the two sides of a handoff say to each other on the control stream.

use crate::{Cause, HandoffKey, InstanceId};

/// Why a sequence is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was sampled.
    Stop,
    /// The token limit or the context was reached.
    Length,
}

/// A token that a worker sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledToken {
    /// Token id.
    pub id: u32,
    /// Natural logarithm of its probability before temperature.
    pub logprob: f32,
    /// 0 for the first generated token of the request.
    pub index: u32,
}

/// Sequences that one request may have, and so first tokens of one handoff.
pub const MAX_SEQUENCES: usize = 16;

/// The first token of one sequence, sampled by the source from the prompt's last logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FirstToken {
    /// Number of the sequence within its request.
    pub sequence: u32,
    /// The token.
    pub token: SampledToken,
    /// Set when it already ends the sequence.
    pub finish: Option<FinishReason>,
}

/// The end of the source's work, with what decoding needs to go on.
#[derive(Clone, Debug, PartialEq)]
pub struct Commit {
    /// One of each sequence of the group, in the order of their numbers: 1 to [`MAX_SEQUENCES`] of them.
    pub first_tokens: Vec<FirstToken>,
    /// Bytes of KV in the handoff's byte stream, resends not counted.
    pub bytes: u64,
    /// Frames they were cut into.
    pub frames: u64,
}

impl Commit {
    /// Whether no sequence goes on: the destination has nothing to do.
    pub fn is_finished(&self) -> bool {
        self.first_tokens.iter().all(|first| first.finish.is_some())
    }

    /// Whether the first tokens are those of a group: at least one, not too many, numbered without a gap.
    pub fn is_well_formed(&self) -> bool {
        let follows = |pair: &[FirstToken]| pair[0].sequence.checked_add(1) == Some(pair[1].sequence);
        (1..=MAX_SEQUENCES).contains(&self.first_tokens.len()) && self.first_tokens.windows(2).all(follows)
    }
}

/// From the prefill worker.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceMessage {
    /// Asks for room; zero credit.
    Offer {
        /// The handoff.
        key: HandoffKey,
        /// Who offers.
        source: InstanceId,
        /// Whom the router meant.
        destination: InstanceId,
        /// Tokens of the prompt.
        prompt_tokens: u32,
    },
    /// Prefill is done; sent at sampling, ahead of bulk still under way.
    Notice,
    /// Everything was sent.
    Commit(Commit),
    /// The handoff is over.
    Abort(Cause),
}

/// From the decode worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationMessage {
    /// All blocks are reserved.
    Grant {
        /// Leading tokens not to send; a multiple of the block size.
        skip_tokens: u32,
        /// Absolute byte offset up to which the source may send.
        credit: u64,
    },
    /// No room; nothing is reserved.
    Busy {
        /// When to offer again at the earliest.
        retry_after_ms: u64,
    },
    /// The handoff can't happen here.
    Gone(Cause),
    /// Absolute byte offset; repeating it changes nothing.
    Credit(u64),
    /// The frame failed its checksum.
    Resend(u64),
    /// Every byte verified; the sequence runs here. The handoff is done.
    Committed,
    /// Answers an abort.
    Aborted {
        /// The commit had come first: the sequence lives on.
        committed: bool,
    },
}
