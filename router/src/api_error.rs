//! What a client hears when its request is refused or fails, the same on both faces.

use baton_handoff::Cause;
use http::StatusCode;
use serde_json::{Value, json};
use tonic::Code;

/// Why a request is not, or not wholly, answered. Every message is one line for the client's user.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum ApiError {
    /// The client changes its request; `param` is the field.
    #[error("{message}")]
    Invalid { param: Option<String>, message: String },
    /// Prompt, or prompt and answer, are longer than the context.
    #[error("{message}")]
    TooLong { param: &'static str, message: String },
    /// The client names a model that is served.
    #[error("the model '{name}' is not served here; served: '{served}'")]
    UnknownModel { name: String, served: String },
    /// The client asks for a path that exists.
    #[error("{message}")]
    NotFound { message: String },
    /// The client uses the method that the path has.
    #[error("{method} is not allowed here; use {allowed}")]
    MethodNotAllowed { method: String, allowed: &'static str },
    /// The client sends JSON and says so.
    #[error("{message}")]
    UnsupportedMedia { message: String },
    /// The client sends less.
    #[error("the body is larger than {limit} bytes")]
    BodyTooLarge { limit: u64 },
    /// The client sends its body faster.
    #[error("the body did not arrive within {seconds} s")]
    BodyTimeout { seconds: u64 },
    /// The client waits for its other request, or picks another id.
    #[error("a request with X-Request-Id '{label}' is still running")]
    Duplicate { label: String },
    /// The client comes back later.
    #[error("too many requests: come back in {} s", retry_seconds(*.retry_after_ms))]
    Shed { retry_after_ms: u64 },
    /// The client comes back when the cluster can serve.
    #[error("{message}")]
    Unavailable { message: String, retry_after_ms: Option<u64> },
    /// The client waits longer, or asks for less.
    #[error("the request's time was up before its answer was complete")]
    DeadlineExceeded,
    /// The client may try again; the operator looks at the logs.
    #[error("the request failed: {cause}")]
    Failed { cause: Cause },
    /// The operator looks at the logs.
    #[error("internal error: {0}")]
    Internal(String),
}

impl ApiError {
    /// A field that can't be used.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { param: Some(param.into()), message: message.into() }
    }

    /// From the end of a request that workers could not serve.
    pub(crate) fn from_cause(cause: Cause, retry_after_ms: Option<u64>) -> Self {
        let unavailable = |message: &str| Self::Unavailable { message: message.to_owned(), retry_after_ms };
        match cause {
            Cause::Busy => Self::Shed { retry_after_ms: retry_after_ms.unwrap_or(1000) },
            Cause::TooLarge => Self::TooLong {
                param: "max_tokens",
                message: "prompt and max_tokens need more KV memory than any worker has".to_owned(),
            },
            Cause::PeerLost | Cause::WrongInstance | Cause::NotFound | Cause::Expired | Cause::Preempted => {
                unavailable(&format!("no worker could finish the request: {cause}"))
            }
            Cause::Draining => unavailable("the workers are shutting down"),
            Cause::Deadline => Self::DeadlineExceeded,
            Cause::Cancelled
            | Cause::Duplicate
            | Cause::Layout
            | Cause::Corrupt
            | Cause::Protocol
            | Cause::Engine
            | Cause::NotNeeded
            | Cause::SlowReader => Self::Failed { cause },
        }
    }

    /// The HTTP status.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. } | Self::TooLong { .. } => StatusCode::BAD_REQUEST,
            Self::UnknownModel { .. } | Self::NotFound { .. } => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::UnsupportedMedia { .. } => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::Duplicate { .. } => StatusCode::CONFLICT,
            Self::Shed { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Self::Failed { .. } | Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The gRPC code.
    pub(crate) fn grpc_code(&self) -> Code {
        match self {
            Self::Invalid { .. } | Self::TooLong { .. } | Self::UnsupportedMedia { .. } => {
                Code::InvalidArgument
            }
            Self::BodyTooLarge { .. } => Code::OutOfRange,
            Self::UnknownModel { .. } | Self::NotFound { .. } => Code::NotFound,
            Self::MethodNotAllowed { .. } => Code::Unimplemented,
            Self::Duplicate { .. } => Code::AlreadyExists,
            Self::Shed { .. } => Code::ResourceExhausted,
            Self::Unavailable { .. } => Code::Unavailable,
            Self::BodyTimeout { .. } | Self::DeadlineExceeded => Code::DeadlineExceeded,
            Self::Failed { cause: Cause::Cancelled } => Code::Cancelled,
            Self::Failed { .. } | Self::Internal(_) => Code::Internal,
        }
    }

    /// A stable word for programs; also the outcome in metrics.
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::Invalid { .. } => "invalid_value",
            Self::TooLong { .. } => "context_length_exceeded",
            Self::UnknownModel { .. } => "model_not_found",
            Self::NotFound { .. } => "not_found",
            Self::MethodNotAllowed { .. } => "method_not_allowed",
            Self::UnsupportedMedia { .. } => "unsupported_media_type",
            Self::BodyTooLarge { .. } => "body_too_large",
            Self::BodyTimeout { .. } => "body_timeout",
            Self::Duplicate { .. } => "duplicate_request_id",
            Self::Shed { .. } => "overloaded",
            Self::Unavailable { .. } => "unavailable",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Failed { cause } => cause.name(),
            Self::Internal(_) => "internal",
        }
    }

    /// The field at fault.
    pub(crate) fn param(&self) -> Option<&str> {
        match self {
            Self::Invalid { param, .. } => param.as_deref(),
            Self::TooLong { param, .. } => Some(param),
            Self::UnknownModel { .. } => Some("model"),
            _ => None,
        }
    }

    /// Whole seconds for `Retry-After`, where coming back makes sense.
    pub(crate) fn retry_after_seconds(&self) -> Option<u64> {
        match self {
            Self::Shed { retry_after_ms } => Some(retry_seconds(*retry_after_ms)),
            Self::Unavailable { retry_after_ms, .. } => Some(retry_seconds(retry_after_ms.unwrap_or(1000))),
            _ => None,
        }
    }

    /// The body that OpenAI's clients read.
    pub(crate) fn body(&self) -> Value {
        let kind = match self.status().as_u16() {
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        json!({"error": {"message": self.to_string(), "type": kind, "param": self.param(), "code": self.code()}})
    }
}

/// Rounded up, at least 1: a client that comes back at once would only be refused again.
fn retry_seconds(ms: u64) -> u64 {
    ms.div_ceil(1000).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_becomes_an_error_status_and_no_cause_becomes_success() {
        for cause in Cause::ALL {
            let error = ApiError::from_cause(cause, None);
            assert!(error.status().as_u16() >= 400, "{cause:?}");
            assert_ne!(error.grpc_code(), Code::Ok, "{cause:?}");
            assert!(!error.to_string().contains('\n'));
        }
        assert_eq!(ApiError::from_cause(Cause::Busy, Some(1500)).status(), 429);
        assert_eq!(ApiError::from_cause(Cause::TooLarge, None).status(), 400);
        assert_eq!(ApiError::from_cause(Cause::PeerLost, None).status(), 503);
        assert_eq!(ApiError::from_cause(Cause::Engine, None).status(), 500);
        let late = ApiError::from_cause(Cause::Deadline, None);
        assert_eq!((late.status().as_u16(), late.code()), (504, "deadline_exceeded"));
        assert_eq!(late.grpc_code(), Code::DeadlineExceeded);
    }

    #[test]
    fn retry_after_is_in_whole_seconds_rounded_up() {
        assert_eq!(ApiError::Shed { retry_after_ms: 1 }.retry_after_seconds(), Some(1));
        assert_eq!(ApiError::Shed { retry_after_ms: 1001 }.retry_after_seconds(), Some(2));
        assert_eq!(ApiError::invalid("n", "x").retry_after_seconds(), None);
    }

    #[test]
    fn the_body_has_the_four_fields() {
        let body = ApiError::invalid("top_p", "top_p must be above 0").body();
        assert_eq!(body["error"]["param"], "top_p");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        assert_eq!(body["error"]["code"], "invalid_value");
        assert_eq!(body["error"]["message"], "top_p must be above 0");
    }
}
