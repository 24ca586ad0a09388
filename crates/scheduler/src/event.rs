//! What a scheduler tells its shell.

use baton_kv::{ReadLease, WriteLease};

use crate::plan::SequenceId;
use crate::sequence::Finish;

/// What happened inside the scheduler, for the shell.
#[derive(Debug)]
pub enum Event {
    /// Prefill: offer this sequence to its destination now.
    NearHead {
        /// The sequence.
        id: SequenceId,
    },
    /// Prefill: blocks are allocated and computing begins; the lease reads them as layers complete.
    Opened {
        /// The sequence.
        id: SequenceId,
        /// Over the whole prompt's blocks.
        lease: ReadLease,
        /// Leading tokens that need not be computed: complete in every layer already.
        cached_tokens: usize,
    },
    /// This many tokens are in the blocks: a multiple of the block size, or all.
    Computed {
        /// The sequence.
        id: SequenceId,
        /// From the sequence's first token.
        num_tokens: usize,
    },
    /// A token was sampled. With `finish`, the sequence is over and no block is held for it any more. A prefill worker tells the first
    /// tokens of all sequences of a group at once, the head's first; unless all are over, it holds the group's blocks under the
    /// head's id.
    Token {
        /// The sequence, by its own id.
        id: SequenceId,
        /// Token id.
        token: u32,
        /// Natural logarithm of its probability.
        logprob: f32,
        /// 0 for the request's first generated token.
        index: u32,
        /// Set on the last one.
        finish: Option<Finish>,
    },
    /// Remote: the prompt's blocks are reserved and may be written.
    Reserved {
        /// The sequence.
        id: SequenceId,
        /// Over the prompt's blocks; those that hold the first `skip_tokens` tokens are skipped.
        lease: WriteLease,
        /// Leading tokens whose KV is here already; a multiple of the block size.
        skip_tokens: usize,
    },
    /// The sequence is running: committed, or its prompt computed. Once a group.
    Started {
        /// The sequence; of a group the head, even if its first token ended it.
        id: SequenceId,
        /// Leading prompt tokens whose KV the prefix cache had: neither computed nor transferred.
        cached_tokens: usize,
    },
    /// The sequence gave up its blocks to older ones. Once for each sequence of a group that had no token yet, the head first.
    Preempted {
        /// The sequence.
        id: SequenceId,
        /// It has left and is to be resumed elsewhere; otherwise it waits here to be computed again.
        gone: bool,
    },
}

/// Sequences by stage; a group counts as its sequences, on a prefill worker as one once it is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageCounts {
    /// Without blocks.
    pub waiting: usize,
    /// Partly computed.
    pub prefilling: usize,
    /// Computed, not yet handed off.
    pub held: usize,
    /// KV under way to here.
    pub receiving: usize,
    /// Decoding.
    pub running: usize,
}
