//! The gRPC face: `baton.v1.Inference`.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use baton_proto::v1;
use baton_proto::v1::inference_server::Inference;
use baton_telemetry::trace::{TRACEPARENT, TraceContext};
use futures::{Stream, StreamExt};
use tokio::sync::mpsc;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Request, Response, Status};

use crate::accept::{Caller, accept, check_model, enter};
use crate::api_error::ApiError;
use crate::app::App;
use crate::ask::{Input, read_generate, read_messages};
use crate::deadline::{Deadline, GRPC_TIMEOUT, from_grpc};
use crate::prompt::tokens;
use crate::request::{Arrival, Operation, Output, Protocol, RequestSpans, Summary, finish_name};
use crate::web::{LABEL_HEADER, MODE_HEADER, REASON_HEADER, REQUEST_ID_HEADER, TRACE_ID_HEADER};

/// Serves clients.
pub(crate) struct InferenceService {
    app: Arc<App>,
}

impl InferenceService {
    pub(crate) fn new(app: Arc<App>) -> Self {
        Self { app }
    }
}

/// When the head of a call came; its message may take a while.
#[derive(Clone, Copy)]
struct Arrived(Instant);

/// Stamps a call whose message was not read yet.
pub(crate) fn stamp(mut call: Request<()>) -> Result<Request<()>, Status> {
    call.extensions_mut().insert(Arrived(Instant::now()));
    Ok(call)
}

impl From<ApiError> for Status {
    fn from(error: ApiError) -> Self {
        let message = match error.param() {
            Some(param) if !error.to_string().contains(param) => format!("{param}: {error}"),
            _ => error.to_string(),
        };
        let mut metadata = MetadataMap::new();
        if let Some(seconds) = error.retry_after_seconds() {
            metadata.insert("retry-after", MetadataValue::from(seconds));
        }
        Self::with_metadata(error.grpc_code(), message, metadata)
    }
}

type Responses = Pin<Box<dyn Stream<Item = Result<v1::GenerateResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Inference for InferenceService {
    type GenerateStream = Responses;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Responses>, Status> {
        let parent = request.metadata().get(TRACEPARENT);
        let arrival = Arrival {
            at: request.extensions().get().map_or_else(Instant::now, |Arrived(at)| *at),
            parent: parent.and_then(|value| TraceContext::parse(value.as_encoded_bytes())),
            protocol: Protocol::Grpc,
            operation: match request.get_ref().input {
                Some(v1::generate_request::Input::Chat(_)) => Operation::Chat,
                _ => Operation::TextCompletion,
            },
        };
        let mut caller = Caller::new(&self.app, arrival)?;
        let mut outputs = match self.begin(request, &mut caller).await {
            Ok(outputs) => outputs,
            Err(error) => {
                caller.refuse(&self.app, &error);
                return Err(named(error, &caller));
            }
        };
        let head = async { Ok(crate::web::head(&mut outputs, self.app.keep_alive).await) };
        // Said here and not only by the request's task, which the transport would not wait for.
        let head = caller.deadline.bound(head).await.map_err(|error| named(error, &caller))?;
        if let Some(Output::End { result: Err(error), .. }) = head.first {
            return Err(named(error, &caller));
        }
        let mut response = Response::new(messages(&caller, head.first, outputs));
        let metadata = response.metadata_mut();
        name(metadata, &caller);
        if let Some(placed) = head.placed {
            metadata.insert(MODE_HEADER, MetadataValue::from_static(placed.mode.name()));
            metadata.insert(REASON_HEADER, MetadataValue::from_static(placed.reason));
        }
        if let Some(label) = caller.label.and_then(|label| label.parse().ok()) {
            metadata.insert(LABEL_HEADER, label);
        }
        Ok(response)
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        use v1::tokenize_request::Input as Wire;
        let request = request.into_inner();
        check_model(self.app.served()?, Some(&request.model))?;
        let (input, field) = match request.input {
            None => return Err(ApiError::invalid("input", "one of text and chat is required").into()),
            Some(Wire::Text(text)) if text.is_empty() => {
                return Ok(Response::new(v1::TokenizeResponse::default()));
            }
            Some(Wire::Text(text)) => (Input::Text(text), "text"),
            Some(Wire::Chat(chat)) => (Input::Chat(read_messages(chat, &self.app.limits)?), "chat"),
        };
        let _ticket = enter(&self.app).await?;
        let token_ids = tokens(&self.app, input, field).await?;
        Ok(Response::new(v1::TokenizeResponse { token_ids }))
    }

    async fn list_models(
        &self,
        _: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let served = self.app.served()?;
        let model = v1::Model { id: served.name.clone(), context: self.app.context(served) };
        Ok(Response::new(v1::ListModelsResponse { models: vec![model] }))
    }
}

impl InferenceService {
    /// Starts the request, if nothing is wrong with it.
    async fn begin(
        &self,
        request: Request<v1::GenerateRequest>,
        caller: &mut Caller,
    ) -> Result<mpsc::Receiver<Output>, ApiError> {
        let header = |name: &str| request.metadata().get(name).map(|value| value.as_encoded_bytes());
        let waits = header(GRPC_TIMEOUT).map(from_grpc).transpose()?;
        caller.deadline = Deadline::new(caller.arrived, waits, self.app.request_timeout);
        if let Some(label) = header(LABEL_HEADER) {
            caller.set_label(label)?;
        }
        let ask = read_generate(request.into_inner(), &self.app.limits)?;
        Ok(accept(&self.app, ask, caller).await?.outputs)
    }
}

/// Says which request and which trace it is.
fn name(metadata: &mut MetadataMap, caller: &Caller) {
    let ids = [(REQUEST_ID_HEADER, caller.id.to_string()), (TRACE_ID_HEADER, caller.trace.trace_id_hex())];
    for (name, id) in ids {
        if let Ok(id) = id.parse() {
            metadata.insert(name, id);
        }
    }
}

fn named(error: ApiError, caller: &Caller) -> Status {
    let mut status = Status::from(error);
    name(status.metadata_mut(), caller);
    status
}

/// What is still to be sent.
struct Messages {
    ready: Option<Output>,
    outputs: mpsc::Receiver<Output>,
    first_at: Option<Instant>,
    /// Of the request, once it ended; they end with the last message, when this is dropped.
    ended: Option<RequestSpans>,
}

/// The answer, of which the first output may have been taken already. Dropping it cancels the request.
fn messages(caller: &Caller, ready: Option<Output>, outputs: mpsc::Receiver<Output>) -> Responses {
    let first = v1::GenerateResponse { request_id: caller.id.to_string(), ..v1::GenerateResponse::default() };
    let messages = Messages { ready, outputs, first_at: None, ended: None };
    let rest = futures::stream::unfold(messages, |mut messages| async move {
        let message = messages.next().await?;
        Some((message, messages))
    });
    Box::pin(futures::stream::iter([Ok(first)]).chain(rest))
}

impl Messages {
    async fn next(&mut self) -> Option<Result<v1::GenerateResponse, Status>> {
        loop {
            if self.ended.is_some() {
                return None;
            }
            let output = match self.ready.take() {
                Some(output) => output,
                None => self.outputs.recv().await.unwrap_or_else(crate::web::cut),
            };
            if let Some(message) = self.take(output) {
                return Some(message);
            }
        }
    }

    fn take(&mut self, output: Output) -> Option<Result<v1::GenerateResponse, Status>> {
        match output {
            Output::Placed(_) => None,
            Output::Piece { index, text, token_ids } => {
                self.first_at.get_or_insert_with(Instant::now);
                Some(Ok(v1::GenerateResponse { index, text, token_ids, ..v1::GenerateResponse::default() }))
            }
            Output::Finished { index, reason } => Some(Ok(v1::GenerateResponse {
                index,
                finish_reason: finish_name(reason).to_owned(),
                ..v1::GenerateResponse::default()
            })),
            Output::End { result, mut spans } => {
                spans.first_handed(self.first_at);
                self.ended = Some(spans);
                Some(result.map(|summary| last(&summary)).map_err(Status::from))
            }
        }
    }
}

fn last(summary: &Summary) -> v1::GenerateResponse {
    v1::GenerateResponse {
        index: summary.index,
        finish_reason: finish_name(summary.reason).to_owned(),
        usage: Some(v1::Usage {
            prompt_tokens: summary.usage.prompt_tokens,
            completion_tokens: summary.usage.completion_tokens,
            cached_tokens: summary.usage.cached_tokens,
        }),
        kv_transfer: summary.kv.map(|kv| v1::KvTransfer {
            bytes: kv.bytes,
            total_ms: kv.total_ms,
            exposed_ms: kv.exposed_ms,
        }),
        ..v1::GenerateResponse::default()
    }
}
