//! From a checked request to a running one: model, door, tokens, context.

use std::sync::Arc;
use std::time::Instant;

use baton_handoff::RequestId;
use baton_proto::v1;
use baton_telemetry::metrics::Gauge;
use baton_telemetry::trace::TraceContext;
use baton_text::{StopStrings, TextError};
use tokio::sync::mpsc;
use tracing::Instrument;

use crate::api_error::ApiError;
use crate::app::{App, unavailable};
use crate::ask::{Ask, Input, MaxTokens};
use crate::gate::Ticket;
use crate::labels::LabelGuard;
use crate::request::{Order, Output, run};
use crate::served::Served;

/// Text up to this length is tokenized where it stands; longer text on a thread of its own, so that nobody's tokens
/// wait for it.
const INLINE_BYTES: usize = 2048;

/// Who asks, whatever is asked.
pub(crate) struct Caller {
    pub(crate) id: RequestId,
    pub(crate) trace: TraceContext,
    pub(crate) label: Option<String>,
    pub(crate) arrived: Instant,
}

impl Caller {
    /// A new request with the caller's own label and trace, where it sent them.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] when the label can't be used, [`ApiError::Internal`] without randomness.
    pub(crate) fn new(label: Option<&[u8]>, traceparent: Option<&[u8]>) -> Result<Self, ApiError> {
        let label = label.map(crate::labels::check).transpose()?;
        let trace = match traceparent.and_then(TraceContext::parse) {
            Some(parent) => TraceContext { span_id: random()?, ..parent },
            None => TraceContext { trace_id: random()?, span_id: random()?, sampled: false },
        };
        Ok(Self { id: RequestId(random()?), trace, label, arrived: Instant::now() })
    }
}

fn random<const N: usize>() -> Result<[u8; N], ApiError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| ApiError::Internal(format!("no randomness: {error}")))?;
    Ok(bytes)
}

/// What a request holds while it lives.
pub(crate) struct Held {
    _ticket: Ticket,
    _label: Option<LabelGuard>,
    _counted: Counted,
}

/// Counts a request in flight until it is dropped.
struct Counted(Gauge);

impl Counted {
    fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// A request that runs; dropping `outputs` cancels it.
pub(crate) struct Accepted {
    pub(crate) model: String,
    pub(crate) outputs: mpsc::Receiver<Output>,
}

/// Admits a request and starts it.
///
/// # Errors
/// Everything that can be said before any worker hears of it.
pub(crate) async fn accept(app: &Arc<App>, ask: Ask, caller: &Caller) -> Result<Accepted, ApiError> {
    if app.draining.is_cancelled() {
        return Err(unavailable("this router is shutting down"));
    }
    let served = app.served()?;
    check_model(served, ask.model.as_deref())?;
    let label = caller.label.as_deref().map(|label| app.labels.take(label)).transpose()?;
    let ticket =
        app.gate.enter().await.map_err(|shed| ApiError::Shed { retry_after_ms: shed.retry_after_ms })?;
    let counted = Counted::new(&app.metrics.num_requests_in_flight);
    let prompt = prompt(app, ask.input, ask.max_tokens).await?;
    let max_new_tokens = max_new_tokens(prompt.len(), ask.max_tokens, app.context(served))?;
    let stops = StopStrings::new(&ask.stop).map_err(|error| ApiError::invalid("stop", error.to_string()))?;
    let seed = ask.seed.map_or_else(|| random().map(u64::from_le_bytes), Ok)?;
    let order = Order {
        id: caller.id,
        trace: caller.trace,
        arrived: caller.arrived,
        prompt,
        sampling: v1::Sampling { temperature: ask.temperature, top_p: ask.top_p, top_k: 0, min_p: 0.0, seed },
        stop_tokens: if ask.ignore_eos { Vec::new() } else { served.end_tokens.clone() },
        max_new_tokens,
        detokenizer: served.text.detokenizer(),
        stops,
        held: Held { _ticket: ticket, _label: label, _counted: counted },
    };
    // One more than tokens may wait: there is always room for the end.
    let (sender, outputs) = mpsc::channel(app.max_output_buffer + 1);
    let span = baton_telemetry::log::request_span(&caller.id.to_string(), &caller.trace.trace_id_hex());
    tokio::spawn(run(Arc::clone(app), order, sender).instrument(span));
    Ok(Accepted { model: served.name.clone(), outputs })
}

/// # Errors
/// [`ApiError::UnknownModel`] naming the one that is served.
pub(crate) fn check_model(served: &Served, name: Option<&str>) -> Result<(), ApiError> {
    match name {
        Some(name) if !served.is_called(name) => {
            let name = name.chars().filter(|character| !character.is_control()).take(128).collect();
            Err(ApiError::UnknownModel { name, served: served.name.clone() })
        }
        _ => Ok(()),
    }
}

/// The prompt's tokens.
///
/// # Errors
/// [`ApiError::Invalid`] naming the field, [`ApiError::TooLong`] for text that can't fit whatever its tokens are.
pub(crate) async fn prompt(
    app: &Arc<App>,
    input: Input,
    max_tokens: MaxTokens,
) -> Result<Vec<u32>, ApiError> {
    let served = app.served()?;
    let num_bytes = match &input {
        Input::TokenIds(ids) => {
            // A fast look first: nothing is computed for a prompt that is too long anyway.
            max_new_tokens(ids.len(), max_tokens, app.context(served))?;
            return check_ids(served, input);
        }
        Input::Text(text) => text.len(),
        Input::Chat(messages) => messages.iter().map(|message| message.content.len()).sum(),
    };
    if num_bytes <= INLINE_BYTES {
        return encode(served, input);
    }
    let app = Arc::clone(app);
    tokio::task::spawn_blocking(move || encode(app.served()?, input))
        .await
        .map_err(|error| ApiError::Internal(format!("tokenizing: {error}")))?
}

fn check_ids(served: &Served, input: Input) -> Result<Vec<u32>, ApiError> {
    let Input::TokenIds(ids) = input else { return Ok(Vec::new()) };
    let num_ids = served.text.vocab_size();
    match ids.iter().position(|id| *id as usize >= num_ids) {
        None => Ok(ids),
        Some(index) => {
            let id = ids.get(index).copied().unwrap_or_default();
            let param = format!("prompt[{index}]");
            Err(ApiError::invalid(
                &*param,
                format!("{param} is token id {id}; the model's ids are below {num_ids}"),
            ))
        }
    }
}

fn encode(served: &Served, input: Input) -> Result<Vec<u32>, ApiError> {
    let (ids, field) = match input {
        Input::TokenIds(ids) => (ids, "prompt"),
        Input::Text(text) => {
            (served.text.encode(&text, true).map_err(|error| text_error("prompt", &error))?, "prompt")
        }
        Input::Chat(messages) => {
            let rendered =
                served.text.chat(&messages, true).map_err(|error| text_error("messages", &error))?;
            (
                served.text.encode(&rendered, false).map_err(|error| text_error("messages", &error))?,
                "messages",
            )
        }
    };
    if ids.is_empty() {
        return Err(ApiError::invalid(field, format!("{field} gives no tokens")));
    }
    Ok(ids)
}

fn text_error(param: &'static str, error: &TextError) -> ApiError {
    match error {
        TextError::NoChatTemplate
        | TextError::BadChatTemplate { .. }
        | TextError::Template { .. }
        | TextError::Encode { .. }
        | TextError::EmptyStop => ApiError::invalid(param, error.to_string()),
        TextError::Unsupported { .. } | TextError::Corrupt { .. } => ApiError::Internal(error.to_string()),
    }
}

/// Tokens to generate at most.
///
/// # Errors
/// [`ApiError::TooLong`] with both numbers: a prompt that leaves no room for a token, or a `max_tokens` that was asked
/// for and does not fit behind the prompt. A default is clipped instead.
fn max_new_tokens(num_prompt: usize, asked: MaxTokens, context: u32) -> Result<u32, ApiError> {
    let num_prompt = u32::try_from(num_prompt).unwrap_or(u32::MAX);
    let left = context.saturating_sub(num_prompt);
    if left == 0 {
        let message = format!(
            "the prompt has {num_prompt} tokens; the context of {context} tokens must hold it and at least 1 more"
        );
        return Err(ApiError::TooLong { param: "prompt", message });
    }
    match asked {
        MaxTokens::AtMost(num) => Ok(num.min(left)),
        MaxTokens::Exactly { num, .. } if num <= left => Ok(num),
        MaxTokens::Exactly { num, field } => {
            let message = format!(
                "{field} is {num} and the prompt has {num_prompt} tokens: together more than the context of {context} tokens"
            );
            Err(ApiError::TooLong { param: field, message })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_is_clipped_and_a_wish_is_refused_with_both_numbers() {
        assert_eq!(max_new_tokens(90, MaxTokens::AtMost(u32::MAX), 100).expect("fits"), 10);
        assert_eq!(max_new_tokens(90, MaxTokens::AtMost(16), 100).expect("fits"), 10);
        assert_eq!(max_new_tokens(99, MaxTokens::AtMost(16), 100).expect("fits"), 1);
        let exactly = |num| MaxTokens::Exactly { num, field: "max_tokens" };
        assert_eq!(max_new_tokens(90, exactly(10), 100).expect("fits"), 10);
        let error = max_new_tokens(90, exactly(11), 100).expect_err("too long");
        assert_eq!(error.param(), Some("max_tokens"));
        for number in ["11", "90", "100"] {
            assert!(error.to_string().contains(number), "{error}");
        }
        let error = max_new_tokens(100, MaxTokens::AtMost(16), 100).expect_err("no room");
        assert_eq!((error.param(), error.status().as_u16()), (Some("prompt"), 400));
    }
}
