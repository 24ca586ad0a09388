//! What a leg tells the router.

use std::time::Duration;

use baton_handoff::{Cause, FinishReason, SampledToken};
use baton_proto::v1;
use baton_proto::v1::decode_event::Event as Wire;
use baton_scheduler::Finish;
use baton_transfer::wire;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;

/// Messages that wait for the transport; then the step loop's own buffer fills, and at last the sequence is cancelled.
const EVENT_BUFFER: usize = 32;

/// The writing end of a Decode stream.
pub(crate) struct Output {
    events: mpsc::Sender<Result<v1::DecodeEvent, Status>>,
    /// When the request's own time is up: nothing waits for room any more.
    deadline: Option<Instant>,
}

impl Output {
    /// Of a request that has so much time left.
    pub(crate) fn new(timeout: Option<Duration>) -> (Self, mpsc::Receiver<Result<v1::DecodeEvent, Status>>) {
        let (events, receiver) = mpsc::channel(EVENT_BUFFER);
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        (Self { events, deadline }, receiver)
    }

    /// Waits until the request's own time is up; for ever when it has no end.
    pub(crate) async fn expired(&self) {
        match self.deadline {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// Waits until the router dropped the stream.
    pub(crate) async fn closed(&self) {
        self.events.closed().await;
    }

    pub(crate) async fn started(&self, started: v1::Started) {
        self.send(Wire::Started(started)).await;
    }

    /// A token of a sequence, and its end with it if it is the last one.
    pub(crate) async fn token(&self, sequence: u32, token: SampledToken, finish: Option<Finish>) {
        self.send(Wire::Tokens(v1::Tokens { tokens: vec![wire::encode_token(token)], sequence })).await;
        if let Some(finish) = finish {
            let reason = match finish {
                Finish::Stop => FinishReason::Stop,
                Finish::Length => FinishReason::Length,
            };
            let num_tokens = token.index + 1;
            tracing::debug!(sequence, num_tokens, "finished");
            let reason = wire::encode_finish(Some(reason)).into();
            self.send(Wire::Finished(v1::Finished { reason, num_tokens, sequence })).await;
        }
    }

    /// A sequence left, to be resumed elsewhere.
    pub(crate) async fn preempted(&self, sequence: u32) {
        tracing::info!(sequence, "preempted: it gave up its blocks and leaves");
        self.send(Wire::Preempted(v1::Preempted { sequence })).await;
    }

    pub(crate) async fn failed(&self, cause: Cause, detail: &str) {
        tracing::info!(cause = cause.name(), detail, "the decode leg failed");
        self.send(Wire::Failed(wire::encode_failed(cause, detail))).await;
    }

    async fn send(&self, event: Wire) {
        let sent = self.events.send(Ok(v1::DecodeEvent { event: Some(event) }));
        // A router that is gone is noticed by `closed`, one that stands still by the deadline.
        match self.deadline {
            Some(at) => {
                let _ = tokio::time::timeout_at(at, sent).await;
            }
            None => {
                let _ = sent.await;
            }
        }
    }
}
