//! `POST /v1/chat/completions` and `POST /v1/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use baton_handoff::FinishReason;
use baton_telemetry::trace::TRACEPARENT;
use http::{HeaderMap, HeaderValue};
use tokio::sync::mpsc;

use super::choice::{Choice, Face, Shape};
use super::{LABEL_HEADER, MODE_HEADER, REASON_HEADER, REQUEST_ID_HEADER, body, stream};
use crate::accept::{Accepted, Caller, accept};
use crate::api_error::ApiError;
use crate::app::App;
use crate::ask::{Ask, Form, read_chat, read_completion};
use crate::deadline::{Deadline, TIMEOUT_HEADER, from_http};
use crate::request::{Output, Summary, Where};

/// What a request says before the first byte of its answer goes out.
pub(crate) struct Head {
    pub(crate) placed: Option<Where>,
    /// The first piece or the end, unless it takes so long that the answer begins without it.
    pub(crate) first: Option<Output>,
}

/// Answers one request.
pub(super) async fn respond(app: Arc<App>, request: Request, face: Face) -> Response {
    let caller = match caller(&app, request.headers()) {
        Ok(caller) => caller,
        Err(error) => return refuse(&app, error),
    };
    let mut response = match caller.deadline.bound(begin(&app, request, face, &caller)).await {
        Ok((ask, form)) => answer(&app, ask, form, face, &caller).await,
        Err(error) => refuse(&app, error),
    };
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&caller.id.to_string()) {
        headers.insert(REQUEST_ID_HEADER, id);
    }
    if let Some(label) = caller.label.as_deref().and_then(|label| HeaderValue::from_str(label).ok()) {
        headers.insert(LABEL_HEADER, label);
    }
    response
}

fn caller(app: &App, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let header = |name: &str| headers.get(name).map(HeaderValue::as_bytes);
    let waits = header(TIMEOUT_HEADER).map(from_http).transpose()?;
    let arrived = Instant::now();
    let deadline = Deadline::new(arrived, waits, app.request_timeout);
    Caller::new(header(LABEL_HEADER), header(TRACEPARENT), arrived, deadline)
}

/// Refused before it ran.
fn refuse(app: &App, error: ApiError) -> Response {
    app.metrics.request_ended("none", error.code());
    error.into_response()
}

async fn begin(app: &App, request: Request, face: Face, caller: &Caller) -> Result<(Ask, Form), ApiError> {
    let read = async {
        let body = body::read(request, app.max_body_bytes).await?;
        match face {
            Face::Chat => read_chat(&body, &app.limits),
            Face::Completion => read_completion(&body, &app.limits),
        }
    };
    let read = read.await;
    if let Err(error) = &read {
        tracing::debug!(request_id = %caller.id, code = error.code(), param = error.param(), "request refused");
    }
    read
}

async fn answer(app: &Arc<App>, ask: Ask, form: Form, face: Face, caller: &Caller) -> Response {
    let num_choices = ask.n;
    let Accepted { model, mut outputs } = match accept(app, ask, caller).await {
        Ok(accepted) => accepted,
        Err(error) => return refuse(app, error),
    };
    let shape = Shape::new(face, form, caller.id, model);
    let mut placed = None;
    let mut response = if form.stream {
        let head = head(&mut outputs, app.keep_alive).await;
        placed = head.placed;
        match head.first {
            Some(Output::End(Err(error))) => error.into_response(),
            first => stream::response(shape, num_choices, first, outputs, app.keep_alive),
        }
    } else {
        let mut choices: Vec<Choice> = (0..num_choices).map(|_| Choice::default()).collect();
        match whole(&mut outputs, &mut placed, &mut choices).await {
            Ok(summary) => axum::Json(shape.whole(&choices, &summary)).into_response(),
            Err(error) => error.into_response(),
        }
    };
    if let Some(placed) = placed {
        let headers = response.headers_mut();
        headers.insert(MODE_HEADER, HeaderValue::from_static(placed.mode.name()));
        headers.insert(REASON_HEADER, HeaderValue::from_static(placed.reason));
    }
    response
}

/// Waits for the first piece or the end, so that a request that fails before it has a status of its own; no longer
/// than `patience`, after which the client is to see that the connection lives.
pub(crate) async fn head(outputs: &mut mpsc::Receiver<Output>, patience: std::time::Duration) -> Head {
    let deadline = tokio::time::Instant::now() + patience;
    let mut placed = None;
    loop {
        match tokio::time::timeout_at(deadline, outputs.recv()).await {
            Err(_) => return Head { placed, first: None },
            Ok(Some(Output::Placed(found))) => placed = Some(found),
            Ok(first) => return Head { placed, first: Some(first.unwrap_or_else(cut)) },
        }
    }
}

/// A channel that closed without an end: the task behind it is gone.
pub(super) fn cut() -> Output {
    Output::End(Err(ApiError::Internal("the request's task ended early".to_owned())))
}

/// Collects a whole answer into its choices.
async fn whole(
    outputs: &mut mpsc::Receiver<Output>,
    placed: &mut Option<Where>,
    choices: &mut [Choice],
) -> Result<Summary, ApiError> {
    loop {
        match outputs.recv().await.unwrap_or_else(cut) {
            Output::Placed(found) => *placed = Some(found),
            Output::Piece { index, text, token_ids } => {
                if let Some(choice) = choices.get_mut(index as usize) {
                    choice.text.push_str(&text);
                    choice.token_ids.extend(token_ids);
                }
            }
            Output::Finished { index, reason } => finish(choices, index, reason),
            Output::End(result) => {
                let summary = result?;
                finish(choices, summary.index, summary.reason);
                return Ok(summary);
            }
        }
    }
}

fn finish(choices: &mut [Choice], index: u32, reason: FinishReason) {
    if let Some(choice) = choices.get_mut(index as usize) {
        choice.reason = Some(reason);
    }
}
