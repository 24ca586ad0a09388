//! Ranges, the same for JSON and protobuf. Each message names the field and the limit.

use super::Limits;
use crate::api_error::ApiError;

pub(super) fn temperature(value: f64) -> Result<f32, ApiError> {
    if (0.0..=2.0).contains(&value) {
        return Ok(value as f32);
    }
    Err(ApiError::invalid("temperature", format!("temperature must be from 0 to 2, not {value}")))
}

pub(super) fn top_p(value: f64) -> Result<f32, ApiError> {
    // A number so small that it rounds to 0 would keep no token at all.
    if value > 0.0 && value <= 1.0 && value as f32 > 0.0 {
        return Ok(value as f32);
    }
    Err(ApiError::invalid("top_p", format!("top_p must be above 0 and at most 1, not {value}")))
}

pub(super) fn max_tokens(field: &'static str, value: u64) -> Result<u32, ApiError> {
    match u32::try_from(value) {
        Ok(num) if num >= 1 => Ok(num),
        Ok(_) => Err(ApiError::invalid(field, format!("{field} must be at least 1, not {value}"))),
        Err(_) => Err(ApiError::invalid(field, format!("{field} must be at most {}, not {value}", u32::MAX))),
    }
}

pub(super) fn num_choices(n: u64, limits: &Limits) -> Result<u32, ApiError> {
    let max = limits.max_n;
    match u32::try_from(n) {
        Ok(n) if (1..=max).contains(&n) => Ok(n),
        _ => Err(ApiError::invalid("n", format!("n must be at least 1 and at most {max}, not {n}"))),
    }
}

/// Classes of requests; each step weighs as much as a fixed time of waiting.
const PRIORITIES: std::ops::RangeInclusive<i32> = -100..=100;

pub(super) fn priority(value: i128) -> Result<i32, ApiError> {
    match i32::try_from(value) {
        Ok(priority) if PRIORITIES.contains(&priority) => Ok(priority),
        _ => {
            let (least, most) = (PRIORITIES.start(), PRIORITIES.end());
            Err(ApiError::invalid(
                "priority",
                format!("priority must be from {least} to {most}, not {value}"),
            ))
        }
    }
}

pub(super) fn stop(stops: Vec<String>, limits: &Limits) -> Result<Vec<String>, ApiError> {
    if stops.len() > limits.max_stop_strings {
        let message = format!("{} stop strings; at most {}", stops.len(), limits.max_stop_strings);
        return Err(ApiError::invalid("stop", message));
    }
    for stop in &stops {
        if stop.is_empty() {
            return Err(ApiError::invalid("stop", "a stop string can't be empty"));
        }
        if stop.len() > limits.max_stop_bytes {
            let message = format!("a stop string of {} bytes; at most {}", stop.len(), limits.max_stop_bytes);
            return Err(ApiError::invalid("stop", message));
        }
    }
    Ok(stops)
}

pub(super) fn num_messages(num: usize, limits: &Limits) -> Result<(), ApiError> {
    if num == 0 {
        return Err(ApiError::invalid("messages", "messages must hold at least 1 message"));
    }
    if num > limits.max_messages {
        let message = format!("{num} messages; at most {}", limits.max_messages);
        return Err(ApiError::invalid("messages", message));
    }
    Ok(())
}

/// The role that the template hears.
pub(super) fn role(role: &str, param: impl Fn() -> String) -> Result<&'static str, ApiError> {
    match role {
        "system" => Ok("system"),
        // The newer name of the same thing; templates know the older one.
        "developer" => Ok("system"),
        "user" => Ok("user"),
        "assistant" => Ok("assistant"),
        "tool" | "function" => Err(ApiError::invalid(
            param(),
            format!("role '{role}' is not supported: there are no tools here"),
        )),
        other => {
            let shown: String = other.chars().take(32).collect();
            let message = format!("role must be system, developer, user or assistant, not '{shown}'");
            Err(ApiError::invalid(param(), message))
        }
    }
}
