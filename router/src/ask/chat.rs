//! `POST /v1/chat/completions`.

use baton_text::Message;
use serde_json::Value;

use super::fields::{Fields, wrong_type};
use super::options::{self, Path};
use super::{Ask, Form, Input, Limits, checks};
use crate::api_error::ApiError;

const PATH: Path =
    Path { input_field: "messages", names: &["max_completion_tokens", "max_tokens"], default: u32::MAX };

/// Fields of a message that mean nothing when empty.
const EMPTY_IN_MESSAGE: &[&str] =
    &["tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations", "reasoning_content"];

/// Reads and checks a body.
pub(crate) fn read(body: &[u8], limits: &Limits) -> Result<(Ask, Form), ApiError> {
    let mut fields = Fields::parse(body)?;
    let messages = match fields.require("messages")? {
        Value::Array(items) => items,
        other => return Err(wrong_type("messages", "an array of messages", &other)),
    };
    checks::num_messages(messages.len(), limits)?;
    let messages = messages
        .into_iter()
        .enumerate()
        .map(|(index, value)| message(index, value))
        .collect::<Result<_, _>>()?;
    options::read(fields, Input::Chat(messages), limits, &PATH)
}

fn message(index: usize, value: Value) -> Result<Message, ApiError> {
    let mut fields = Fields::nested(format!("messages[{index}]"), value)?;
    let role = match fields.require("role")? {
        Value::String(role) => checks::role(&role, || fields.param("role"))?,
        other => return Err(wrong_type(&fields.param("role"), "a string", &other)),
    };
    let at = fields.param("content");
    let content = content(fields.require("content")?, &at)?;
    let name = fields.take_string("name")?;
    fields.finish_without(EMPTY_IN_MESSAGE)?;
    Ok(Message { role: role.to_owned(), content, name })
}

/// A string, or text parts joined by line feeds.
fn content(value: Value, at: &str) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Array(parts) if parts.is_empty() => {
            Err(ApiError::invalid(at, format!("{at} must hold at least 1 part")))
        }
        Value::Array(parts) => {
            let parts =
                parts.into_iter().enumerate().map(|(index, part)| text_part(part, format!("{at}[{index}]")));
            Ok(parts.collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        other => Err(wrong_type(at, "a string or an array of text parts", &other)),
    }
}

fn text_part(value: Value, at: String) -> Result<String, ApiError> {
    let mut fields = Fields::nested(at, value)?;
    let kind = fields.param("type");
    match fields.require("type")? {
        Value::String(found) if found == "text" => {}
        Value::String(found) => {
            let found: String = found.chars().filter(|character| !character.is_control()).take(32).collect();
            return Err(ApiError::invalid(
                kind,
                format!("parts of type '{found}' are not supported: only text"),
            ));
        }
        other => return Err(wrong_type(&kind, "a string", &other)),
    }
    let text = match fields.require("text")? {
        Value::String(text) => text,
        other => return Err(wrong_type(&fields.param("text"), "a string", &other)),
    };
    fields.finish_without(&["annotations", "cache_control"])?;
    Ok(text)
}
