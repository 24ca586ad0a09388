//! What goes in and out of the step loop.

use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use baton_handoff::Cause;
use baton_kv::{ReadLease, WriteLease};
use baton_scheduler::{Finish, FirstToken, NewSequence, Refusal, SequenceId, StageCounts, Time};
use tokio::sync::{mpsc, oneshot};

use super::cache_feed::CacheView;
use super::ledger::AvoidedStall;
use super::stall::{Owner, Stall};
use super::stats::RunBoard;

/// Hears, on a prefill worker, which KV of a sequence is complete in block memory.
pub trait LayerSink: Send + Sync {
    /// In `layer` the tokens `chunk` are complete; layers come in order, and every token before the chunk is complete in
    /// all layers. Called on the step thread between two layers: must not block.
    fn layer_done(&self, chunk: Range<usize>, layer: usize);

    /// The first `num_tokens` tokens are complete in all layers: computed, or found in the prefix cache. Called on the
    /// step thread between steps: must not block.
    fn tokens_done(&self, num_tokens: usize);
}

/// What happened to a sequence, or to a group of them until it is forked.
#[derive(Debug)]
pub enum SequenceEvent {
    /// It was not accepted; the last event.
    Refused(Refusal),
    /// Prefill: offer it to its destination now.
    NearHead,
    /// Prefill: computing begins; the lease reads the prompt's blocks as layers complete.
    Opened {
        /// Over the whole prompt's blocks.
        lease: ReadLease,
        /// Leading tokens that need not be computed: complete in every layer already.
        cached_tokens: usize,
    },
    /// This many tokens are computed in all layers.
    Computed {
        /// From the sequence's first token.
        num_tokens: usize,
        /// When the step that computed the last of them began; it ended at the event's own time.
        began: Time,
    },
    /// A token was sampled; with `finish` this is the sequence's last event. After the last event of all there are no more.
    Token {
        /// Number of the sequence within its request.
        sequence: u32,
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
        /// Over the prompt's blocks from that of token `skip_tokens` on.
        lease: WriteLease,
        /// Leading tokens whose KV is here already; a multiple of the block size.
        skip_tokens: usize,
    },
    /// It runs: committed, or its prompt was computed here.
    Started {
        /// When the first step with it began; `None` when there was none yet.
        first_step: Option<Time>,
        /// Leading prompt tokens whose KV was here already: neither computed nor transferred.
        cached_tokens: usize,
        /// Remote: what computing its prompt here would have cost others, if it is known.
        avoided: Option<AvoidedStall>,
    },
    /// Answers [`crate::Sequence::notice`]: the event's time is that of the first step boundary at or after it.
    Boundary,
    /// A gap between two tokens was longer than decoding alone explains; told before the token that ended it. Not told to a reader that
    /// is far behind.
    Stall(Stall),
    /// A sequence gave up its blocks to others.
    Preempted {
        /// Number of the sequence within its request.
        sequence: u32,
        /// It left, to be resumed elsewhere: its last event, and the last of its whole group if that had not started. Otherwise
        /// it waits here to be computed again.
        gone: bool,
    },
}

/// An event and when it happened, on the worker's clock.
#[derive(Debug)]
pub struct Stamped {
    /// Time of the step boundary.
    pub at: Time,
    /// What happened.
    pub event: SequenceEvent,
}

/// How busy the loop is; published when it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Sequences by stage.
    pub counts: StageCounts,
    /// Prompt tokens accepted and not yet computed.
    pub queued_tokens: u64,
    /// Nothing can be computed now.
    pub idle: bool,
}

impl Default for Load {
    /// Of a loop that has not begun.
    fn default() -> Self {
        Self { counts: StageCounts::default(), queued_tokens: 0, idle: true }
    }
}

pub(super) enum Command {
    Submit(Box<Submit>),
    Grant(SequenceId, usize),
    Reserve(SequenceId),
    /// With the seconds that computing the prompt here would have added to steps.
    Commit(SequenceId, Vec<FirstToken>, Option<f64>),
    /// The prompt was done at that time.
    Notice(SequenceId, Time),
    /// Ends one sequence of a group.
    Stop(SequenceId),
    /// Asks for what the prefix cache holds, and for what changes from then on.
    WatchCache(oneshot::Sender<CacheView>),
}

pub(super) struct Submit {
    pub(super) sequence: NewSequence,
    pub(super) live: Live,
}

/// The loop's end of a submission.
pub(super) struct Live {
    pub(super) slot: Arc<Slot>,
    pub(super) events: mpsc::Sender<Stamped>,
    pub(super) sink: Option<Arc<dyn LayerSink>>,
    pub(super) owner: Owner,
    /// One for each sequence; none where nothing runs.
    pub(super) boards: Vec<Arc<RunBoard>>,
}

/// Id of the `nth` sequence of the group that begins with `head`.
pub(super) const fn nth_id(head: SequenceId, nth: u32) -> SequenceId {
    SequenceId(head.0 + nth as u64)
}

/// What both ends of a submission share.
#[derive(Default)]
pub(super) struct Slot {
    /// The holder dropped it.
    pub(super) cancelled: AtomicBool,
    /// Why the loop ended it early.
    pub(super) end: OnceLock<Cause>,
}

/// The cause with which a leg ends because its sequence was not accepted.
pub const fn refusal_cause(refusal: &Refusal) -> Cause {
    match refusal {
        Refusal::TooLarge { .. } | Refusal::TooMany { .. } => Cause::TooLarge,
        Refusal::QueueFull { .. } => Cause::Busy,
        Refusal::Duplicate => Cause::Duplicate,
        Refusal::Empty => Cause::Protocol,
    }
}
