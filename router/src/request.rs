//! One request: what `baton_dispatch` decides, carried out.

mod answer;
mod cost;
mod groups;
mod legs;
mod marks;
mod outbox;
mod outcome;
mod root;
mod run;
mod spans;
mod start;
mod warnings;
mod wire;

use std::time::Instant;

use baton_dispatch::Mode;
use baton_handoff::{FinishReason, RequestId};
use baton_kv::BlockHash;
use baton_proto::v1;
use baton_telemetry::trace::TraceContext;
use baton_text::{Detokenizer, StopStrings};

use crate::accept::Held;
use crate::api_error::ApiError;
use crate::deadline::Deadline;

pub(crate) use cost::Kv;
pub(crate) use run::run;
pub(crate) use spans::{Arrival, Operation, Protocol, RequestSpans, short};
pub(crate) use warnings::Warnings;

/// A request that passed the door, ready to be placed.
pub(crate) struct Order {
    pub(crate) id: RequestId,
    pub(crate) trace: TraceContext,
    pub(crate) arrived: Instant,
    pub(crate) deadline: Deadline,
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: v1::Sampling,
    /// Tokens that end the sequence.
    pub(crate) stop_tokens: Vec<u32>,
    /// For each sequence.
    pub(crate) max_new_tokens: u32,
    /// Lower is served earlier.
    pub(crate) priority: i32,
    /// Neither use nor fill the prefix cache.
    pub(crate) no_prefix_cache: bool,
    /// Of the prompt's full blocks, where workers say what they have cached.
    pub(crate) hashes: Vec<BlockHash>,
    /// What turns each sequence's tokens to text; as many as there are sequences.
    pub(crate) choices: Vec<(Detokenizer, StopStrings)>,
    pub(crate) held: Held,
    pub(crate) spans: RequestSpans,
}

/// Where a request runs, and why there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Where {
    pub(crate) mode: Mode,
    pub(crate) reason: &'static str,
}

/// What a face hears of a running request: `Placed` perhaps, then pieces of its choices and the end of each but the last,
/// then `End`. A channel that closes before `End` is an internal error.
#[derive(Debug)]
pub(crate) enum Output {
    /// Where it runs; again when a later attempt runs in another mode.
    Placed(Where),
    /// Text of a choice that became final, and the tokens it came with.
    Piece { index: u32, text: String, token_ids: Vec<u32> },
    /// A choice is complete while others go on.
    Finished { index: u32, reason: FinishReason },
    /// Nothing follows. Whoever hands it on drops the spans once the last byte is out.
    End { result: Result<Summary, ApiError>, spans: RequestSpans },
}

/// How a request ended well.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Summary {
    /// The choice that ended last.
    pub(crate) index: u32,
    /// Why it ended.
    pub(crate) reason: FinishReason,
    /// Of the last placement.
    pub(crate) mode: Mode,
    pub(crate) usage: Usage,
    /// From arrival to first token.
    pub(crate) ttft_ms: f64,
    /// What transfers cost, over all attempts, if KV moved.
    pub(crate) kv: Option<Kv>,
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u32,
    /// Over all choices.
    pub(crate) completion_tokens: u32,
    /// Of the prompt, not computed because a cache held them; a resume adds nothing.
    pub(crate) cached_tokens: u32,
}

/// The word that clients know.
pub(crate) const fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}
