//! Answers as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use http::header::CACHE_CONTROL;
use http::{HeaderValue, StatusCode};
use serde_json::Value;
use tokio::sync::mpsc;

use super::choice::Shape;
use super::generate::cut;
use crate::api_error::ApiError;
use crate::request::{Output, RequestSpans, Summary};

/// What is still to be sent.
struct Streamed {
    shape: Shape,
    outputs: mpsc::Receiver<Output>,
    ready: VecDeque<Event>,
    /// When the first piece was handed over.
    first_at: Option<Instant>,
    /// Of the request, once it ended; they end with the last byte, when this is dropped.
    ended: Option<RequestSpans>,
}

/// Streams an answer whose first output may have been taken already. Dropping the body cancels the request.
pub(super) fn response(
    shape: Shape,
    num_choices: u32,
    first: Option<Output>,
    outputs: mpsc::Receiver<Output>,
    keep_alive: Duration,
) -> Response {
    let mut streamed = Streamed { shape, outputs, ready: VecDeque::new(), first_at: None, ended: None };
    for index in 0..num_choices {
        if let Some(chunk) = streamed.shape.role_chunk(index) {
            streamed.push(&chunk);
        }
    }
    if let Some(first) = first {
        streamed.take(first);
    }
    let events = futures::stream::unfold(streamed, |mut streamed| async move {
        let event = streamed.next().await?;
        Some((Ok::<_, Infallible>(event), streamed))
    });
    let mut response =
        Sse::new(events).keep_alive(KeepAlive::new().interval(keep_alive).text("keep-alive")).into_response();
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // A proxy that buffers would make a stream of it no more.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl Streamed {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.ended.is_some() {
                return None;
            }
            let output = self.outputs.recv().await.unwrap_or_else(cut);
            self.take(output);
        }
    }

    fn take(&mut self, output: Output) {
        match output {
            Output::Placed(_) => {}
            Output::Piece { index, text, token_ids } => {
                self.first_at.get_or_insert_with(Instant::now);
                if let Some(chunk) = self.shape.text_chunk(index, &text, &token_ids) {
                    self.push(&chunk);
                }
            }
            Output::Finished { index, reason } => {
                let chunk = self.shape.finish_chunk(index, reason);
                self.push(&chunk);
            }
            Output::End { result, spans } => self.end(result, spans),
        }
    }

    fn end(&mut self, result: Result<Summary, ApiError>, mut spans: RequestSpans) {
        match result {
            Ok(summary) => {
                for chunk in self.shape.last_chunks(&summary) {
                    self.push(&chunk);
                }
                self.ready.push_back(Event::default().data("[DONE]"));
            }
            // The status is out already: the error is said in the stream, which then ends without [DONE].
            Err(error) => {
                self.ready.push_back(Event::default().event("error").data(error.body().to_string()));
            }
        }
        spans.answered(StatusCode::OK);
        spans.first_handed(self.first_at);
        self.ended = Some(spans);
    }

    fn push(&mut self, chunk: &Value) {
        self.ready.push_back(Event::default().data(chunk.to_string()));
    }
}
