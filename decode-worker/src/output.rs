//! What a leg tells the router.

use baton_handoff::{Cause, FinishReason, SampledToken};
use baton_proto::v1;
use baton_proto::v1::decode_event::Event as Wire;
use baton_scheduler::Finish;
use baton_transfer::wire;
use tokio::sync::mpsc;
use tonic::Status;

/// Messages that wait for the transport; then the step loop's own buffer fills, and at last the sequence is cancelled.
const EVENT_BUFFER: usize = 32;

/// The writing end of a Decode stream.
pub(crate) struct Output {
    events: mpsc::Sender<Result<v1::DecodeEvent, Status>>,
}

impl Output {
    pub(crate) fn new() -> (Self, mpsc::Receiver<Result<v1::DecodeEvent, Status>>) {
        let (events, receiver) = mpsc::channel(EVENT_BUFFER);
        (Self { events }, receiver)
    }

    /// Waits until the router dropped the stream.
    pub(crate) async fn closed(&self) {
        self.events.closed().await;
    }

    pub(crate) async fn started(&self, started: v1::Started) {
        self.send(Wire::Started(started)).await;
    }

    /// A token, and the end with it if it is the last one.
    pub(crate) async fn token(&self, token: SampledToken, finish: Option<Finish>) {
        self.send(Wire::Tokens(v1::Tokens { tokens: vec![wire::encode_token(token)] })).await;
        if let Some(finish) = finish {
            let reason = match finish {
                Finish::Stop => FinishReason::Stop,
                Finish::Length => FinishReason::Length,
            };
            self.finished(reason, token.index + 1).await;
        }
    }

    pub(crate) async fn finished(&self, reason: FinishReason, num_tokens: u32) {
        let reason = wire::encode_finish(Some(reason)).into();
        tracing::debug!(num_tokens, "finished");
        self.send(Wire::Finished(v1::Finished { reason, num_tokens })).await;
    }

    pub(crate) async fn failed(&self, cause: Cause, detail: &str) {
        tracing::info!(cause = cause.name(), detail, "the decode leg failed");
        self.send(Wire::Failed(wire::encode_failed(cause, detail))).await;
    }

    async fn send(&self, event: Wire) {
        // A router that is gone is noticed by `closed`.
        let _ = self.events.send(Ok(v1::DecodeEvent { event: Some(event) })).await;
    }
}
