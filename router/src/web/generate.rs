//! `POST /v1/chat/completions` and `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use baton_dispatch::Mode;
use baton_telemetry::trace::TRACEPARENT;
use http::{HeaderMap, HeaderValue};
use tokio::sync::mpsc;

use super::choice::{Face, Shape};
use super::{LABEL_HEADER, MODE_HEADER, REQUEST_ID_HEADER, body, stream};
use crate::accept::{Accepted, Caller, accept};
use crate::api_error::ApiError;
use crate::app::App;
use crate::ask::{Ask, Form, read_chat, read_completion};
use crate::request::{Output, Summary};

/// What a request says before the first byte of its answer goes out.
pub(crate) struct Head {
    pub(crate) mode: Option<Mode>,
    /// The first piece or the end, unless it takes so long that the answer begins without it.
    pub(crate) first: Option<Output>,
}

/// Answers one request.
pub(super) async fn respond(app: Arc<App>, request: Request, face: Face) -> Response {
    let caller = match caller(request.headers()) {
        Ok(caller) => caller,
        Err(error) => return refuse(&app, error),
    };
    let mut response = match begin(&app, request, face, &caller).await {
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

fn caller(headers: &HeaderMap) -> Result<Caller, ApiError> {
    let header = |name: &str| headers.get(name).map(HeaderValue::as_bytes);
    Caller::new(header(LABEL_HEADER), header(TRACEPARENT))
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
    let Accepted { model, mut outputs } = match accept(app, ask, caller).await {
        Ok(accepted) => accepted,
        Err(error) => return refuse(app, error),
    };
    let shape = Shape::new(face, form, caller.id, model);
    let mut mode = None;
    let mut response = if form.stream {
        match head(&mut outputs, app.keep_alive).await {
            Head { mode: placed, first: Some(Output::End(Err(error))) } => {
                mode = placed;
                error.into_response()
            }
            head => {
                mode = head.mode;
                stream::response(shape, head.first, outputs, app.keep_alive)
            }
        }
    } else {
        match whole(&mut outputs, &mut mode).await {
            Ok(Whole { text, token_ids, summary }) => {
                mode = Some(summary.mode);
                axum::Json(shape.whole(&text, &token_ids, &summary)).into_response()
            }
            Err(error) => error.into_response(),
        }
    };
    if let Some(mode) = mode {
        response.headers_mut().insert(MODE_HEADER, HeaderValue::from_static(mode.name()));
    }
    response
}

/// Waits for the first piece or the end, so that a request that fails before it has a status of its own; no longer
/// than `patience`, after which the client is to see that the connection lives.
pub(crate) async fn head(outputs: &mut mpsc::Receiver<Output>, patience: std::time::Duration) -> Head {
    let deadline = tokio::time::Instant::now() + patience;
    let mut mode = None;
    loop {
        match tokio::time::timeout_at(deadline, outputs.recv()).await {
            Err(_) => return Head { mode, first: None },
            Ok(Some(Output::Placed(placed))) => mode = Some(placed),
            Ok(first) => return Head { mode, first: Some(first.unwrap_or_else(cut)) },
        }
    }
}

/// A channel that closed without an end: the task behind it is gone.
pub(super) fn cut() -> Output {
    Output::End(Err(ApiError::Internal("the request's task ended early".to_owned())))
}

struct Whole {
    text: String,
    token_ids: Vec<u32>,
    summary: Summary,
}

async fn whole(outputs: &mut mpsc::Receiver<Output>, mode: &mut Option<Mode>) -> Result<Whole, ApiError> {
    let (mut text, mut token_ids) = (String::new(), Vec::new());
    loop {
        match outputs.recv().await.unwrap_or_else(cut) {
            Output::Placed(placed) => *mode = Some(placed),
            Output::Piece { text: piece, token_ids: ids } => {
                text.push_str(&piece);
                token_ids.extend(ids);
            }
            Output::End(result) => return result.map(|summary| Whole { text, token_ids, summary }),
        }
    }
}
