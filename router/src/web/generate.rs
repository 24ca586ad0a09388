//! `POST /v1/chat/completions` and `POST /v1/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use baton_handoff::FinishReason;
use baton_telemetry::trace::{TRACEPARENT, TraceContext};
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt;
use tokio::sync::mpsc;

use super::choice::{Choice, Face, Shape};
use super::{LABEL_HEADER, MODE_HEADER, REASON_HEADER, REQUEST_ID_HEADER, TRACE_ID_HEADER, body, stream};
use crate::accept::{Accepted, Caller, accept};
use crate::api_error::ApiError;
use crate::app::App;
use crate::ask::{Ask, Form, read_chat, read_completion};
use crate::deadline::{Deadline, TIMEOUT_HEADER, from_http};
use crate::request::{Arrival, Output, Protocol, RequestSpans, Summary, Where};

/// What a request says before the first byte of its answer goes out.
pub(crate) struct Head {
    pub(crate) placed: Option<Where>,
    /// The first piece or the end, unless it takes so long that the answer begins without it.
    pub(crate) first: Option<Output>,
}

/// Answers one request.
pub(super) async fn respond(app: Arc<App>, request: Request, face: Face) -> Response {
    let arrival = Arrival {
        at: Instant::now(),
        parent: request.headers().get(TRACEPARENT).and_then(|value| TraceContext::parse(value.as_bytes())),
        protocol: Protocol::Http,
        operation: face.operation(),
    };
    let mut caller = match Caller::new(&app, arrival) {
        Ok(caller) => caller,
        Err(error) => return error.into_response(),
    };
    let begun = match introduce(&mut caller, &app, request.headers()) {
        Ok(()) => caller.deadline.bound(begin(&app, request, face, &mut caller)).await,
        Err(error) => Err(error),
    };
    let mut response = match begun {
        Ok((ask, form)) => answer(&app, ask, form, face, &mut caller).await,
        Err(error) => refuse(&app, error, &mut caller),
    };
    let headers = response.headers_mut();
    let label = caller.label.take();
    let ids = [
        (REQUEST_ID_HEADER, Some(caller.id.to_string())),
        (TRACE_ID_HEADER, Some(caller.trace.trace_id_hex())),
        (LABEL_HEADER, label),
    ];
    for (name, id) in ids {
        if let Some(id) = id.and_then(|id| HeaderValue::from_str(&id).ok()) {
            headers.insert(name, id);
        }
    }
    response
}

/// What the caller says of itself: its label, and how long it waits.
fn introduce(caller: &mut Caller, app: &App, headers: &HeaderMap) -> Result<(), ApiError> {
    let header = |name: &str| headers.get(name).map(HeaderValue::as_bytes);
    if let Some(waits) = header(TIMEOUT_HEADER) {
        caller.deadline = Deadline::new(caller.arrived, Some(from_http(waits)?), app.request_timeout);
    }
    header(LABEL_HEADER).map_or(Ok(()), |label| caller.set_label(label))
}

/// Refused before it ran.
fn refuse(app: &App, error: ApiError, caller: &mut Caller) -> Response {
    let spans = caller.refuse(app, &error);
    ending(error.into_response(), spans)
}

/// A whole answer, with which the request's spans end.
fn ending(response: Response, mut spans: RequestSpans) -> Response {
    spans.answered(response.status());
    if !spans.is_on() {
        return response;
    }
    // A body lives until it is written out or its reader has left, and so do the spans it holds.
    response.map(|body| {
        Body::new(body.map_err(move |error| {
            let _held = &spans;
            error
        }))
    })
}

async fn begin(
    app: &App,
    request: Request,
    face: Face,
    caller: &mut Caller,
) -> Result<(Ask, Form), ApiError> {
    let read = async {
        let body = body::read(request, app.max_body_bytes).await?;
        if let Some(root) = caller.spans.on() {
            root.read();
        }
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

async fn answer(app: &Arc<App>, ask: Ask, form: Form, face: Face, caller: &mut Caller) -> Response {
    let num_choices = ask.n;
    let Accepted { model, mut outputs } = match accept(app, ask, caller).await {
        Ok(accepted) => accepted,
        Err(error) => return refuse(app, error, caller),
    };
    let shape = Shape::new(face, form, caller.id, model);
    let mut placed = None;
    let mut response = if form.stream {
        let head = head(&mut outputs, app.keep_alive).await;
        placed = head.placed;
        match head.first {
            Some(Output::End { result: Err(error), spans }) => ending(error.into_response(), spans),
            first => stream::response(shape, num_choices, first, outputs, app.keep_alive),
        }
    } else {
        let mut choices: Vec<Choice> = (0..num_choices).map(|_| Choice::default()).collect();
        let (result, spans) = whole(&mut outputs, &mut placed, &mut choices).await;
        let response = match result {
            Ok(summary) => axum::Json(shape.whole(&choices, &summary)).into_response(),
            Err(error) => error.into_response(),
        };
        ending(response, spans)
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
pub(crate) fn cut() -> Output {
    let result = Err(ApiError::Internal("the request's task ended early".to_owned()));
    Output::End { result, spans: RequestSpans::default() }
}

/// Collects a whole answer into its choices.
async fn whole(
    outputs: &mut mpsc::Receiver<Output>,
    placed: &mut Option<Where>,
    choices: &mut [Choice],
) -> (Result<Summary, ApiError>, RequestSpans) {
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
            Output::End { result, spans } => {
                if let Ok(summary) = &result {
                    finish(choices, summary.index, summary.reason);
                }
                return (result, spans);
            }
        }
    }
}

fn finish(choices: &mut [Choice], index: u32, reason: FinishReason) {
    if let Some(choice) = choices.get_mut(index as usize) {
        choice.reason = Some(reason);
    }
}
