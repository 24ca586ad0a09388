//! What goes into a [`crate::Request`] and what comes out of it.

use baton_handoff::{Cause, FinishReason, FirstToken, HandoffKey, InstanceId, SampledToken};

use crate::PlaceError;

/// Where an attempt runs; the answer to [`RequestAction::Place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The decode worker.
    pub decode: InstanceId,
    /// The prefill worker; `None`: the decode worker computes the prompt.
    pub prefill: Option<InstanceId>,
}

/// What happened to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestFact {
    /// It passed the door.
    Start,
    /// A placement was found.
    Placed {
        /// For which group.
        group: u32,
        /// Where.
        placed: Placed,
    },
    /// None was found.
    NotPlaced {
        /// For which group.
        group: u32,
        /// Why.
        error: PlaceError,
    },
    /// An event of the Prefill leg of this attempt.
    Prefill {
        /// Whose leg.
        group: u32,
        /// Whose leg.
        attempt: u32,
        /// What came.
        event: PrefillFact,
    },
    /// An event of the Decode leg of this attempt.
    Decode {
        /// Whose leg.
        group: u32,
        /// Whose leg.
        attempt: u32,
        /// What came.
        event: DecodeFact,
    },
    /// The client hung up.
    ClientGone,
    /// The router found a stop string in the text: nothing after it is wanted.
    StopMatched {
        /// Of this sequence.
        sequence: u32,
    },
    /// Time passed; see [`crate::Request::deadline`].
    Tick,
}

/// An event of a Prefill leg.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillFact {
    /// The first token of every sequence of the group in this attempt, in the order of their numbers.
    FirstTokens(Vec<FirstToken>),
    /// The handoff is done.
    Done,
    /// The handoff of this attempt failed; the worker holds the KV for a while, in case it can go elsewhere.
    HandoffFailed(Cause),
    /// The worker did not take the [`RequestAction::Redirect`] that began this attempt.
    NotRedirected,
    /// The worker ended the leg.
    Failed(Cause),
    /// The stream could not be opened: the worker never had the request.
    Unreachable,
    /// The stream broke: perhaps the worker fell over because of this request.
    Lost,
}

/// An event of a Decode leg.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DecodeFact {
    /// The group runs.
    Started,
    /// The next token of a sequence.
    Token {
        /// Of this sequence.
        sequence: u32,
        /// The token.
        token: SampledToken,
    },
    /// A sequence is complete; follows its last token.
    Finished {
        /// Which one.
        sequence: u32,
        /// Why.
        reason: FinishReason,
    },
    /// A sequence gave up its blocks and left the worker: it is to be resumed. Before `Started` the whole group did.
    Preempted {
        /// Which one.
        sequence: u32,
    },
    /// The worker ended the leg.
    Failed(Cause),
    /// The stream could not be opened: the worker never had the request.
    Unreachable,
    /// The stream broke: perhaps the worker fell over because of this request.
    Lost,
}

/// The legs of one attempt of a group, on the workers of the group's last [`Placed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Legs {
    /// Of this attempt.
    pub key: HandoffKey,
    /// No Prefill leg: the decode worker computes the prompt and emits every token.
    pub local: bool,
    /// Whether there is a Decode leg: not when one token is all that is wanted of a Prefill leg.
    pub decode: bool,
    /// Number of the group's first sequence.
    pub first_sequence: u32,
    /// Sequences of the group; the others count on from the first.
    pub num_sequences: u32,
    /// Tokens of the one sequence that were delivered by earlier attempts, to be appended to the prompt; they count as
    /// generated. 0 for a group of several.
    pub num_forced: u32,
    /// Tokens still to generate for each sequence, the first one included; at least 1.
    pub max_new_tokens: u32,
    /// It was preempted, and did not run since.
    pub preempted: bool,
}

/// What the router is to do, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestAction {
    /// Find a placement for a group; answered by `Placed` or `NotPlaced`. Replaces a question of the group that is not answered yet.
    Place {
        /// Which group.
        group: u32,
        /// Workers that failed this request; used only when there is no other.
        avoid: Vec<InstanceId>,
        /// Number of the group's first sequence.
        first_sequence: u32,
        /// Sequences of the group.
        num_sequences: u32,
        /// Delivered tokens of the one sequence, which the prompt grows by.
        num_forced: u32,
        /// Set when only a decode worker is to be found: this prefill worker holds the KV, and the answer must name it.
        keep_prefill: Option<InstanceId>,
    },
    /// Open both legs at once.
    OpenLegs(Legs),
    /// Open the Decode leg, and have the prefill worker send what it holds there. The Prefill leg of the group's last attempt goes on
    /// as that of this one; [`PrefillFact::NotRedirected`] says that it does not.
    Redirect(Legs),
    /// Drop the Decode stream of this attempt. Its Prefill leg stays open until a `Redirect` or `CloseLegs`.
    CloseDecode {
        /// Which group.
        group: u32,
        /// Which attempt.
        attempt: u32,
    },
    /// Drop the streams of this attempt: the drop cancels what still runs. Comes before the group's next `OpenLegs`.
    CloseLegs {
        /// Which group.
        group: u32,
        /// Which attempt.
        attempt: u32,
    },
    /// Tell the decode worker of this attempt that nothing more of one sequence is wanted; the others go on.
    StopSequence {
        /// Which group.
        group: u32,
        /// Which attempt.
        attempt: u32,
        /// Which sequence.
        sequence: u32,
    },
    /// Hand this token to the client: each index of a sequence once, in order.
    Deliver {
        /// Of this sequence.
        sequence: u32,
        /// The token.
        token: SampledToken,
    },
    /// A sequence is complete: no token of it follows. Once for each sequence of a request that finishes.
    Finished {
        /// Which one.
        sequence: u32,
        /// Why.
        reason: FinishReason,
    },
    /// Nothing more follows.
    End(RequestEnd),
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEnd {
    /// Every sequence is complete.
    Finished,
    /// The client left.
    Cancelled,
    /// No worker could be found; nothing ran at the end.
    Unplaced {
        /// Why.
        error: PlaceError,
        /// When to come again; `None`: never.
        retry_after_ms: Option<u64>,
    },
    /// It failed for good.
    Failed {
        /// Of the attempt that failed last.
        cause: Cause,
        /// Set when it was shed: nothing was delivered and the client may come again then.
        retry_after_ms: Option<u64>,
    },
}
