//! `POST /v1/completions`.

use serde_json::Value;

use super::fields::{Fields, wrong_type};
use super::options::{self, Path};
use super::{Ask, COMPLETION_TOKENS, Form, Input, Limits};
use crate::api_error::ApiError;

const PATH: Path = Path { input_field: "prompt", names: &["max_tokens"], default: COMPLETION_TOKENS };

const EXPECTED: &str = "a string or an array of token ids";

/// Reads and checks a body.
pub(crate) fn read(body: &[u8], limits: &Limits) -> Result<(Ask, Form), ApiError> {
    let mut fields = Fields::parse(body)?;
    let input = prompt(fields.require("prompt")?)?;
    options::read(fields, input, limits, &PATH)
}

/// Text, token ids, or either as the only element of an array.
fn prompt(value: Value) -> Result<Input, ApiError> {
    match value {
        Value::String(text) => text_prompt(text),
        Value::Array(mut items) => match items.first() {
            None => Err(ApiError::invalid("prompt", "prompt must not be empty")),
            Some(Value::Number(_)) => token_prompt(items),
            Some(Value::String(_) | Value::Array(_)) if items.len() > 1 => {
                let message = format!("{} prompts in one request; not yet supported: at most 1", items.len());
                Err(ApiError::invalid("prompt", message))
            }
            Some(_) => match items.pop() {
                Some(Value::String(text)) => text_prompt(text),
                Some(Value::Array(ids)) => token_prompt(ids),
                Some(other) => Err(wrong_type("prompt", EXPECTED, &other)),
                None => Err(ApiError::invalid("prompt", "prompt must not be empty")),
            },
        },
        other => Err(wrong_type("prompt", EXPECTED, &other)),
    }
}

fn text_prompt(text: String) -> Result<Input, ApiError> {
    if text.is_empty() {
        return Err(ApiError::invalid("prompt", "prompt must not be empty"));
    }
    Ok(Input::Text(text))
}

fn token_prompt(items: Vec<Value>) -> Result<Input, ApiError> {
    if items.is_empty() {
        return Err(ApiError::invalid("prompt", "prompt must not be empty"));
    }
    let ids = items.iter().enumerate().map(|(index, item)| {
        item.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            ApiError::invalid(
                format!("prompt[{index}]"),
                format!("prompt[{index}] is not a token id: {}", brief(item)),
            )
        })
    });
    Ok(Input::TokenIds(ids.collect::<Result<_, _>>()?))
}

fn brief(value: &Value) -> String {
    value.to_string().chars().filter(|character| !character.is_control()).take(32).collect()
}
