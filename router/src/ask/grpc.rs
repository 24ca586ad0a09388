//! `baton.v1.Inference`: the same checks on protobuf.

use baton_proto::v1;
use baton_text::Message;

use super::{Ask, Input, Limits, MaxTokens, checks};
use crate::api_error::ApiError;

/// Checks a request.
pub(crate) fn read_generate(request: v1::GenerateRequest, limits: &Limits) -> Result<Ask, ApiError> {
    use v1::generate_request::Input as Wire;
    let (input, input_field) = match request.input {
        None => return Err(ApiError::invalid("input", "one of prompt, token_ids and chat is required")),
        Some(Wire::Prompt(text)) if text.is_empty() => {
            return Err(ApiError::invalid("prompt", "prompt must not be empty"));
        }
        Some(Wire::Prompt(text)) => (Input::Text(text), "prompt"),
        Some(Wire::TokenIds(ids)) if ids.ids.is_empty() => {
            return Err(ApiError::invalid("token_ids", "token_ids must not be empty"));
        }
        Some(Wire::TokenIds(ids)) => (Input::TokenIds(ids.ids), "token_ids"),
        Some(Wire::Chat(chat)) => (Input::Chat(read_messages(chat, limits)?), "chat"),
    };
    let max_tokens = match request.max_tokens {
        Some(num) => {
            let num = checks::max_tokens("max_tokens", u64::from(num))?;
            MaxTokens::Exactly { num, field: "max_tokens" }
        }
        None => MaxTokens::AtMost(u32::MAX),
    };
    Ok(Ask {
        model: Some(request.model),
        input,
        input_field,
        max_tokens,
        temperature: request.temperature.map_or(Ok(1.0), |value| checks::temperature(f64::from(value)))?,
        top_p: request.top_p.map_or(Ok(1.0), |value| checks::top_p(f64::from(value)))?,
        seed: request.seed,
        stop: checks::stop(request.stop, limits)?,
        ignore_eos: request.ignore_eos,
        n: request.n.map_or(Ok(1), |n| checks::num_choices(u64::from(n), limits))?,
        priority: checks::priority(i128::from(request.priority))?,
        no_prefix_cache: request.no_prefix_cache,
    })
}

/// Checks a conversation.
pub(crate) fn read_messages(chat: v1::ChatMessages, limits: &Limits) -> Result<Vec<Message>, ApiError> {
    checks::num_messages(chat.messages.len(), limits)?;
    let message = |(index, message): (usize, v1::ChatMessage)| {
        let role = checks::role(&message.role, || format!("chat.messages[{index}].role"))?;
        Ok(Message::new(role, message.content))
    };
    chat.messages.into_iter().enumerate().map(message).collect()
}
