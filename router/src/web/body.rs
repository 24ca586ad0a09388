//! Reading a request's body, within bounds.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use futures::StreamExt;
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};

use crate::api_error::ApiError;

/// A client that sends its body slower than this is not waited for.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The whole body of a JSON request.
///
/// # Errors
/// [`ApiError::UnsupportedMedia`], [`ApiError::BodyTooLarge`], [`ApiError::BodyTimeout`].
pub(super) async fn read(request: Request, max_bytes: u64) -> Result<Vec<u8>, ApiError> {
    check_media(request.headers())?;
    let declared =
        request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|bytes| bytes > max_bytes) {
        return Err(ApiError::BodyTooLarge { limit: max_bytes });
    }
    let timeout = ApiError::BodyTimeout { seconds: BODY_TIMEOUT.as_secs() };
    tokio::time::timeout(BODY_TIMEOUT, collect(request.into_body(), max_bytes)).await.map_err(|_| timeout)?
}

async fn collect(body: Body, max_bytes: u64) -> Result<Vec<u8>, ApiError> {
    let mut chunks = body.into_data_stream();
    let mut whole = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk: Bytes = chunk.map_err(|_| ApiError::Invalid {
            param: None,
            message: "the body ended before it was complete".to_owned(),
        })?;
        if (whole.len() + chunk.len()) as u64 > max_bytes {
            return Err(ApiError::BodyTooLarge { limit: max_bytes });
        }
        whole.extend_from_slice(&chunk);
    }
    Ok(whole)
}

fn check_media(headers: &HeaderMap) -> Result<(), ApiError> {
    let refuse = |message: &str| Err(ApiError::UnsupportedMedia { message: message.to_owned() });
    let Some(kind) = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()) else {
        return refuse("Content-Type must be application/json");
    };
    let (kind, parameters) = kind.split_once(';').unwrap_or((kind, ""));
    if !kind.trim().eq_ignore_ascii_case("application/json") {
        return refuse("Content-Type must be application/json");
    }
    let charset = parameters.split(';').filter_map(|parameter| parameter.trim().split_once('='));
    for (name, value) in charset {
        let value = value.trim().trim_matches('"');
        if name.trim().eq_ignore_ascii_case("charset") && !value.eq_ignore_ascii_case("utf-8") {
            return refuse("the charset must be UTF-8");
        }
    }
    if headers.get(CONTENT_ENCODING).is_some_and(|value| value.as_bytes() != b"identity") {
        return refuse("a compressed body is not supported: send it without Content-Encoding");
    }
    Ok(())
}
