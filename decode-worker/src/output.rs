//! What a leg tells the router.

use std::time::Duration;

use baton_handoff::{Cause, FinishReason, SampledToken};
use baton_proto::v1;
use baton_proto::v1::decode_event::Event as Wire;
use baton_scheduler::Finish;
use baton_telemetry::StallCause;
use baton_transfer::wire;
use baton_worker::{RunStats, Stall};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;

use crate::group::{Numbers, Stops};
use crate::kv_cost::micros;

/// Messages that wait for the transport; then the step loop's own buffer fills, and at last the sequence is cancelled.
const EVENT_BUFFER: usize = 32;

/// How a sequence ended.
pub(crate) struct Ended {
    pub(crate) finish: Finish,
    pub(crate) stats: RunStats,
}

fn encode_stats(stats: &RunStats) -> v1::RunStats {
    v1::RunStats {
        steps: stats.steps,
        batch_max: stats.batch_max,
        itl_p50_us: micros(stats.itl_p50),
        itl_p99_us: micros(stats.itl_p99),
        itl_max_us: micros(stats.itl_max),
        num_stalls: stats.num_stalls,
        stalled_us: micros(stats.stalled),
        avoided_us: stats.avoided_us,
        avoided_prefills: stats.avoided_prefills,
    }
}

const fn encode_stall_cause(cause: StallCause) -> v1::StallCause {
    match cause {
        StallCause::LocalPrefill => v1::StallCause::LocalPrefill,
        StallCause::Preemption => v1::StallCause::Preemption,
        StallCause::Resume => v1::StallCause::Resume,
        StallCause::Copy => v1::StallCause::Copy,
        StallCause::SlowStep => v1::StallCause::SlowStep,
    }
}

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

    /// Waits until one more event does not have to wait, or nothing waits for room any more; sooner if sequences are to end.
    pub(crate) async fn room(&self, stops: &Stops) -> Option<Numbers> {
        let room = async { drop(self.events.reserve().await) };
        tokio::select! {
            biased;
            stopped = stops.next() => Some(stopped),
            () = room => None,
            () = self.expired() => None,
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
    pub(crate) async fn token(&self, sequence: u32, token: SampledToken, ended: Option<Ended>) {
        self.send(Wire::Tokens(v1::Tokens { tokens: vec![wire::encode_token(token)], sequence })).await;
        if let Some(Ended { finish, stats }) = ended {
            let reason = match finish {
                Finish::Stop => FinishReason::Stop,
                Finish::Length => FinishReason::Length,
            };
            let num_tokens = token.index + 1;
            tracing::debug!(sequence, num_tokens, "finished");
            let reason = wire::encode_finish(Some(reason)).into();
            self.send(Wire::Finished(v1::Finished {
                reason,
                num_tokens,
                sequence,
                stats: Some(encode_stats(&stats)),
            }))
            .await;
        }
    }

    /// A sequence stalled. Nothing waits for that to be told: without room it is not.
    pub(crate) fn stall(&self, stall: &Stall) {
        let event = Wire::Stall(v1::Stall {
            sequence: stall.sequence,
            cause: encode_stall_cause(stall.cause).into(),
            blocked_us: micros(stall.blocked),
            blocker_request_id: stall.blocker.map_or_else(Vec::new, |by| by.request.0.to_vec()).into(),
        });
        let _ = self.events.try_send(Ok(v1::DecodeEvent { event: Some(event) }));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_wait_for_a_slow_router_ends_with_room_a_stop_or_the_requests_own_time() {
        let stops = Stops::new(0, 2);
        let (output, mut events) = Output::new(None);
        assert_eq!(output.room(&stops).await, None);
        for _ in 0..EVENT_BUFFER {
            output.started(v1::Started::default()).await;
        }
        stops.ask(1);
        assert_eq!(output.room(&stops).await.map(|stopped| stopped.iter().collect()), Some(vec![1]));
        let mut full = std::pin::pin!(output.room(&stops));
        assert!(tokio::time::timeout(Duration::from_millis(20), &mut full).await.is_err(), "heard once");
        events.recv().await;
        assert_eq!(full.await, None);
        // Full again, until the router is gone.
        output.started(v1::Started::default()).await;
        drop(events);
        assert_eq!(output.room(&stops).await, None);

        let (output, _events) = Output::new(Some(Duration::from_millis(5)));
        for _ in 0..EVENT_BUFFER {
            output.started(v1::Started::default()).await;
        }
        assert_eq!(output.room(&stops).await, None);
    }
}
