//! One request: what `baton_dispatch` decides, carried out.

mod answer;
mod legs;
mod outbox;
mod run;
mod warnings;

use std::time::Instant;

use baton_dispatch::Mode;
use baton_handoff::{FinishReason, RequestId};
use baton_proto::v1;
use baton_telemetry::trace::TraceContext;
use baton_text::{Detokenizer, StopStrings};

use crate::accept::Held;
use crate::api_error::ApiError;

pub(crate) use run::run;
pub(crate) use warnings::Warnings;

/// A request that passed the door, ready to be placed.
pub(crate) struct Order {
    pub(crate) id: RequestId,
    pub(crate) trace: TraceContext,
    pub(crate) arrived: Instant,
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: v1::Sampling,
    /// Tokens that end the sequence.
    pub(crate) stop_tokens: Vec<u32>,
    pub(crate) max_new_tokens: u32,
    pub(crate) detokenizer: Detokenizer,
    pub(crate) stops: StopStrings,
    pub(crate) held: Held,
}

/// What a face hears of a running request: `Placed` perhaps, then pieces, then `End`. A channel that closes before
/// `End` is an internal error.
#[derive(Debug)]
pub(crate) enum Output {
    /// Where it runs; again when a later attempt runs in another mode.
    Placed(Mode),
    /// Text that became final, and the tokens it came with.
    Piece { text: String, token_ids: Vec<u32> },
    /// Nothing follows.
    End(Result<Summary, ApiError>),
}

/// How a request ended well.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Summary {
    pub(crate) reason: FinishReason,
    pub(crate) mode: Mode,
    pub(crate) usage: Usage,
    /// From arrival to first token.
    pub(crate) ttft_ms: f64,
    /// What the transfer cost, if KV moved.
    pub(crate) kv: Option<Kv>,
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    /// Of the prompt, not computed because a cache held them.
    pub(crate) cached_tokens: u32,
}

/// What a transfer cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Kv {
    pub(crate) bytes: u64,
    pub(crate) total_ms: f64,
    pub(crate) exposed_ms: f64,
}

/// The word that clients know.
pub(crate) const fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}
