//! The fields that chat and plain completions share.

use serde_json::Value;

use super::fields::{Fields, wrong_type};
use super::{Ask, Form, Input, Limits, MaxTokens, checks};
use crate::api_error::ApiError;

/// What differs between the paths.
pub(super) struct Path {
    /// The field of the input.
    pub(super) input_field: &'static str,
    /// The names of the number of tokens; more than one may stand there if they agree.
    pub(super) names: &'static [&'static str],
    /// Tokens without any of them.
    pub(super) default: u32,
}

/// Takes everything but the input, and refuses what is left.
pub(super) fn read(
    mut fields: Fields,
    input: Input,
    limits: &Limits,
    path: &Path,
) -> Result<(Ask, Form), ApiError> {
    let model = fields.take_string("model")?;
    let max_tokens = max_tokens(&mut fields, path)?;
    let temperature = fields.take_number("temperature")?.map_or(Ok(1.0), checks::temperature)?;
    let top_p = fields.take_number("top_p")?.map_or(Ok(1.0), checks::top_p)?;
    let seed = seed(&mut fields)?;
    let stop = checks::stop(stop(&mut fields)?, limits)?;
    let ignore_eos = fields.take_bool("ignore_eos")?.unwrap_or(false);
    let n = fields.take_count("n", 1)?.map_or(Ok(1), |n| checks::num_choices(n, limits))?;
    let priority = priority(&mut fields)?;
    let no_prefix_cache = fields.take_bool("no_prefix_cache")?.unwrap_or(false);
    let form = form(&mut fields)?;
    fields.finish()?;
    Ok((
        Ask {
            model,
            input,
            input_field: path.input_field,
            max_tokens,
            temperature,
            top_p,
            seed,
            stop,
            ignore_eos,
            n,
            priority,
            no_prefix_cache,
        },
        form,
    ))
}

fn max_tokens(fields: &mut Fields, path: &Path) -> Result<MaxTokens, ApiError> {
    let mut found: Option<(u32, &'static str)> = None;
    for &field in path.names {
        let Some(value) = fields.take_count(field, 1)? else { continue };
        let num = checks::max_tokens(field, value)?;
        match found {
            Some((earlier, name)) if earlier != num => {
                let message = format!("{name} is {earlier} and {field} is {num}: send one of them");
                return Err(ApiError::invalid(field, message));
            }
            _ => found = Some((num, field)),
        }
    }
    Ok(found.map_or(MaxTokens::AtMost(path.default), |(num, field)| MaxTokens::Exactly { num, field }))
}

/// Any 64-bit integer; a negative one counts as its two's complement.
fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else { return Ok(None) };
    match (value.as_u64(), value.as_i64()) {
        (Some(seed), _) => Ok(Some(seed)),
        (None, Some(seed)) => Ok(Some(seed.cast_unsigned())),
        (None, None) => Err(wrong_type("seed", "a 64-bit integer", &value)),
    }
}

fn stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    match fields.take("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(stop)) => Ok(vec![stop]),
        Some(Value::Array(items)) => items
            .into_iter()
            .map(|item| match item {
                Value::String(stop) => Ok(stop),
                other => Err(wrong_type("stop", "a string or an array of strings", &other)),
            })
            .collect(),
        Some(other) => Err(wrong_type("stop", "a string or an array of strings", &other)),
    }
}

fn priority(fields: &mut Fields) -> Result<i32, ApiError> {
    let Some(value) = fields.take("priority") else { return Ok(0) };
    let integer = value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
    checks::priority(integer.ok_or_else(|| wrong_type("priority", "an integer", &value))?)
}

fn form(fields: &mut Fields) -> Result<Form, ApiError> {
    let stream = fields.take_bool("stream")?.unwrap_or(false);
    let return_token_ids = fields.take_bool("return_token_ids")?.unwrap_or(false);
    let mut include_usage = false;
    if let Some(value) = fields.take("stream_options") {
        if !stream {
            return Err(ApiError::invalid("stream_options", "stream_options needs stream to be true"));
        }
        let mut options = Fields::nested("stream_options".to_owned(), value)?;
        include_usage = options.take_bool("include_usage")?.unwrap_or(false);
        options.finish_without(&["include_obfuscation", "continuous_usage_stats"])?;
    }
    Ok(Form { stream, include_usage, return_token_ids })
}
