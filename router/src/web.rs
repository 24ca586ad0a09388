//! The HTTP face: OpenAI's API, health and metrics.

mod body;
mod choice;
mod generate;
mod stream;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::header::{ACCEPT, ALLOW, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use serde_json::json;

use crate::api_error::ApiError;
use crate::app::App;
use choice::Face;
pub(crate) use generate::{cut, head};

/// Header with the router's id of a request.
pub(crate) const REQUEST_ID_HEADER: &str = "x-baton-request-id";
/// Header that says how a request ran.
pub(crate) const MODE_HEADER: &str = "x-baton-mode";
/// Header that says why it ran so.
pub(crate) const REASON_HEADER: &str = "x-baton-reason";
/// A client's own id, echoed.
pub(crate) const LABEL_HEADER: &str = "x-request-id";

/// Header with the trace of a request, to look it up by: 32 hexadecimal digits.
pub(crate) const TRACE_ID_HEADER: &str = "x-baton-trace-id";

/// Where chats are answered.
pub(crate) const CHAT_PATH: &str = "/v1/chat/completions";
/// Where plain texts are continued.
pub(crate) const COMPLETIONS_PATH: &str = "/v1/completions";

/// Every path.
pub(crate) fn routes(app: Arc<App>) -> Router {
    Router::new()
        .route(CHAT_PATH, post(chat).fallback(only_post))
        .route(COMPLETIONS_PATH, post(completions).fallback(only_post))
        .route("/v1/models", get(models).fallback(only_get))
        .route("/health", get(health).fallback(only_get))
        .route("/metrics", get(metrics).fallback(only_get))
        .fallback(nowhere)
        .with_state(app)
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Response {
    generate::respond(app, request, Face::Chat).await
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    generate::respond(app, request, Face::Completion).await
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let served = match app.served() {
        Ok(served) => served,
        Err(error) => return error.into_response(),
    };
    let model = json!({
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "baton",
        "max_model_len": app.context(served),
    });
    axum::Json(json!({"object": "list", "data": [model]})).into_response()
}

/// 200 only if a chat would be answered now; the body says what is missing.
async fn health(State(app): State<Arc<App>>) -> Response {
    let missing = app.missing();
    let served = app.served().ok();
    let workers: Vec<_> = app
        .fleet
        .reports()
        .into_iter()
        .map(|report| {
            json!({
                "address": report.address,
                "role": report.role,
                "state": report.state,
                "reason": report.reason,
            })
        })
        .collect();
    let ready = missing.is_empty();
    let body = json!({
        "status": if ready { "ok" } else { "unavailable" },
        "missing": missing,
        "model": served.map(|served| &served.name),
        "context": served.map(|served| app.context(served)),
        "workers": workers,
    });
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, axum::Json(body)).into_response()
}

async fn metrics(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    let (content_type, text) = app.metrics.encode_for(accept);
    ([(CONTENT_TYPE, content_type)], text).into_response()
}

async fn only_post(request: Request) -> Response {
    ApiError::MethodNotAllowed { method: request.method().to_string(), allowed: "POST" }.into_response()
}

async fn only_get(request: Request) -> Response {
    ApiError::MethodNotAllowed { method: request.method().to_string(), allowed: "GET" }.into_response()
}

async fn nowhere(uri: Uri) -> Response {
    let path: String = uri.path().chars().take(128).collect();
    let message = format!(
        "there is no {path}; there are /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics"
    );
    ApiError::NotFound { message }.into_response()
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), axum::Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_seconds() {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Self::MethodNotAllowed { allowed, .. } = self {
            headers.insert(ALLOW, HeaderValue::from_static(allowed));
        }
        response
    }
}
