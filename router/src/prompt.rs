//! From what a client sent to tokens, and how many may follow them.

use std::sync::Arc;

use baton_kv::BlockHash;
use baton_text::TextError;

use crate::api_error::ApiError;
use crate::app::App;
use crate::ask::{Input, MaxTokens};
use crate::fleet::Capacity;
use crate::served::Served;

/// Text up to this length is tokenized where it stands; longer text on a thread of its own, so that nobody's tokens
/// wait for it.
const INLINE_BYTES: usize = 2048;

/// The tokens of `input`, which came in `field`.
///
/// # Errors
/// [`ApiError::Invalid`] naming the field.
pub(crate) async fn tokens(app: &Arc<App>, input: Input, field: &'static str) -> Result<Vec<u32>, ApiError> {
    let served = app.served()?;
    let num_bytes = match &input {
        Input::TokenIds(_) => 0,
        Input::Text(text) => text.len(),
        Input::Chat(messages) => messages.iter().map(|message| message.content.len()).sum(),
    };
    if num_bytes <= INLINE_BYTES {
        return encode(served, input, field);
    }
    let app = Arc::clone(app);
    tokio::task::spawn_blocking(move || encode(app.served()?, input, field))
        .await
        .map_err(|error| ApiError::Internal(format!("tokenizing: {error}")))?
}

fn encode(served: &Served, input: Input, field: &'static str) -> Result<Vec<u32>, ApiError> {
    let failed = |error: TextError| text_error(field, &error);
    let ids = match input {
        Input::TokenIds(ids) => return check_ids(served, ids, field),
        Input::Text(text) => served.text.encode(&text, true).map_err(failed)?,
        Input::Chat(messages) => {
            let rendered = served.text.chat(&messages, true).map_err(failed)?;
            served.text.encode(&rendered, false).map_err(failed)?
        }
    };
    if ids.is_empty() {
        return Err(ApiError::invalid(field, format!("{field} gives no tokens")));
    }
    Ok(ids)
}

/// Prompts up to this length are hashed where they stand.
const INLINE_TOKENS: usize = 4096;

/// A prompt with the hashes of its full blocks, which placement compares with what workers have cached.
///
/// # Errors
/// [`ApiError::Internal`] when the thread that hashes fails.
pub(crate) async fn hashed(app: &Arc<App>, prompt: Vec<u32>) -> Result<(Vec<u32>, Vec<BlockHash>), ApiError> {
    if prompt.len() <= INLINE_TOKENS {
        let hashes = app.fleet.hashes(&prompt);
        return Ok((prompt, hashes));
    }
    let app = Arc::clone(app);
    let hash = move || {
        let hashes = app.fleet.hashes(&prompt);
        (prompt, hashes)
    };
    tokio::task::spawn_blocking(hash)
        .await
        .map_err(|error| ApiError::Internal(format!("hashing the prompt: {error}")))
}

fn check_ids(served: &Served, ids: Vec<u32>, field: &'static str) -> Result<Vec<u32>, ApiError> {
    let num_ids = served.text.vocab_size();
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= num_ids) {
        None => Ok(ids),
        Some((index, id)) => {
            let param = format!("{field}[{index}]");
            let message = format!("{param} is token id {id}; the model's ids are below {num_ids}");
            Err(ApiError::invalid(param, message))
        }
    }
}

fn text_error(field: &'static str, error: &TextError) -> ApiError {
    match error {
        TextError::NoChatTemplate
        | TextError::BadChatTemplate { .. }
        | TextError::Template { .. }
        | TextError::Encode { .. }
        | TextError::EmptyStop => ApiError::invalid(field, error.to_string()),
        TextError::Unsupported { .. } | TextError::Corrupt { .. } => ApiError::Internal(error.to_string()),
    }
}

/// A prompt's length and where it came from, and how many answers share it.
#[derive(Clone, Copy)]
pub(crate) struct Length {
    pub(crate) num_tokens: usize,
    pub(crate) field: &'static str,
    pub(crate) n: u32,
}

/// Tokens of each answer at most behind a prompt in a context of so many tokens; `largest` is the largest worker, if
/// there is one.
///
/// # Errors
/// [`ApiError::TooLong`] with both numbers: a prompt that leaves no room for a token, or a `max_tokens` that was asked
/// for and does not fit behind the prompt. A default is clipped instead, also to what lets all answers fit on a worker.
pub(crate) fn max_new_tokens(
    prompt: Length,
    asked: MaxTokens,
    context: u32,
    largest: Option<Capacity>,
) -> Result<u32, ApiError> {
    let num_prompt = u32::try_from(prompt.num_tokens).unwrap_or(u32::MAX);
    let left = context.saturating_sub(num_prompt);
    if left == 0 {
        let message = format!(
            "the prompt has {num_prompt} tokens; the context of {context} tokens must hold it and at least 1 more"
        );
        return Err(ApiError::TooLong { param: prompt.field, message });
    }
    match asked {
        MaxTokens::AtMost(num) => {
            let fits =
                largest.map_or(u64::MAX, |largest| largest.answer_tokens(u64::from(num_prompt), prompt.n));
            Ok(num.min(left).min(u32::try_from(fits).unwrap_or(u32::MAX)).max(1))
        }
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
        let prompt = |num_tokens| Length { num_tokens, field: "messages", n: 1 };
        let max_new_tokens = |prompt, asked, context| max_new_tokens(prompt, asked, context, None);
        assert_eq!(max_new_tokens(prompt(90), MaxTokens::AtMost(u32::MAX), 100).expect("fits"), 10);
        assert_eq!(max_new_tokens(prompt(90), MaxTokens::AtMost(16), 100).expect("fits"), 10);
        assert_eq!(max_new_tokens(prompt(99), MaxTokens::AtMost(16), 100).expect("fits"), 1);
        let exactly = |num| MaxTokens::Exactly { num, field: "max_tokens" };
        assert_eq!(max_new_tokens(prompt(90), exactly(10), 100).expect("fits"), 10);
        let error = max_new_tokens(prompt(90), exactly(11), 100).expect_err("too long");
        assert_eq!(error.param(), Some("max_tokens"));
        for number in ["11", "90", "100"] {
            assert!(error.to_string().contains(number), "{error}");
        }
        let error = max_new_tokens(prompt(100), MaxTokens::AtMost(16), 100).expect_err("no room");
        assert_eq!((error.param(), error.status().as_u16()), (Some("messages"), 400));
    }
    #[test]
    fn a_default_lets_all_answers_fit_on_the_largest_worker() {
        let largest = Some(Capacity { blocks: 20, block_size: 16 });
        let answers = |n, asked| {
            let prompt = Length { num_tokens: 100, field: "messages", n };
            max_new_tokens(prompt, asked, 1000, largest).expect("a number")
        };
        let default = MaxTokens::AtMost(u32::MAX);
        assert_eq!((answers(1, default), answers(2, default)), (220, 108));
        assert_eq!(answers(2, MaxTokens::AtMost(16)), 16);
        assert_eq!(answers(15, default), 1, "refused where it is placed");
        let exactly = MaxTokens::Exactly { num: 109, field: "max_tokens" };
        assert_eq!(answers(2, exactly), 109, "refused where it is placed, with what fits");
    }
}
