//! What goes into a [`crate::Request`] and what comes out of it.

use baton_handoff::{Cause, FinishReason, HandoffKey, InstanceId, SampledToken};

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
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RequestFact {
    /// It passed the door.
    Start,
    /// A placement was found.
    Placed(Placed),
    /// None was found.
    NotPlaced(PlaceError),
    /// An event of the Prefill leg of this attempt.
    Prefill {
        /// Whose leg.
        attempt: u32,
        /// What came.
        event: PrefillFact,
    },
    /// An event of the Decode leg of this attempt.
    Decode {
        /// Whose leg.
        attempt: u32,
        /// What came.
        event: DecodeFact,
    },
    /// The client hung up.
    ClientGone,
    /// The router found a stop string in the text: nothing after it is wanted.
    StopMatched,
    /// Time passed; see [`crate::Request::deadline`].
    Tick,
}

/// An event of a Prefill leg.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PrefillFact {
    /// The first token of this attempt.
    FirstToken {
        /// The token.
        token: SampledToken,
        /// Set when it ends the sequence.
        finish: Option<FinishReason>,
    },
    /// The handoff is done.
    Done,
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
    /// The sequence runs.
    Started,
    /// The next token.
    Token(SampledToken),
    /// The sequence is complete; follows its last token.
    Finished(FinishReason),
    /// The worker ended the leg.
    Failed(Cause),
    /// The stream could not be opened: the worker never had the request.
    Unreachable,
    /// The stream broke: perhaps the worker fell over because of this request.
    Lost,
}

/// The legs of one attempt, on the workers of the last [`Placed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Legs {
    /// Of this attempt.
    pub key: HandoffKey,
    /// No Prefill leg: the decode worker computes the prompt and emits every token.
    pub local: bool,
    /// Whether there is a Decode leg: not when one token is all that is wanted of a Prefill leg.
    pub decode: bool,
    /// Tokens delivered by earlier attempts, to be appended to the prompt; they count as generated.
    pub num_forced: u32,
    /// Tokens still to generate, the first one included; at least 1.
    pub max_new_tokens: u32,
}

/// What the router is to do, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestAction {
    /// Find a placement; answered by `Placed` or `NotPlaced`.
    Place {
        /// Workers that failed this request; used only when there is no other.
        avoid: Vec<InstanceId>,
    },
    /// Open both legs at once.
    OpenLegs(Legs),
    /// Drop the streams of this attempt: the drop cancels what still runs. Comes before the next `OpenLegs`.
    CloseLegs {
        /// Which attempt.
        attempt: u32,
    },
    /// Hand this token to the client: each index once, in order.
    Deliver(SampledToken),
    /// Nothing more follows.
    End(RequestEnd),
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEnd {
    /// Complete.
    Finished(FinishReason),
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
        /// Of the last attempt.
        cause: Cause,
        /// Set when it was shed: nothing was delivered and the client may come again then.
        retry_after_ms: Option<u64>,
    },
}
