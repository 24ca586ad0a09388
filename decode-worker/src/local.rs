//! A Decode call whose prompt is computed here.

use baton_handoff::{Cause, SampledToken, Time};
use baton_proto::v1;
use baton_scheduler::Origin;
use baton_worker::{LegRequest, Loaded, Sequence, SequenceEvent, refusal_cause};

use crate::kv_cost::micros;
use crate::output::Output;

/// Runs the call to its end; returns what later questions about its key are answered with.
pub(crate) async fn run(loaded: &Loaded, request: LegRequest, output: &Output, accepted: Time) -> Cause {
    let mut sequence = match loaded.steps.submit(request.submission(Origin::Local, None)).await {
        Ok(sequence) => sequence,
        Err(cause) => {
            output.failed(cause, "").await;
            return cause;
        }
    };
    tokio::select! {
        cause = follow(&mut sequence, output, accepted) => cause,
        () = output.closed() => Cause::Cancelled,
    }
}

async fn follow(sequence: &mut Sequence, output: &Output, accepted: Time) -> Cause {
    while let Some(stamped) = sequence.next().await {
        match stamped.event {
            SequenceEvent::Started { first_step, cached_tokens } => {
                let queue = first_step.unwrap_or(stamped.at).saturating_sub(accepted);
                let started = v1::Started {
                    kv: Some(v1::KvCost::default()),
                    cached_tokens: u32::try_from(cached_tokens).unwrap_or(u32::MAX),
                    queue_us: micros(queue),
                };
                output.started(started).await;
            }
            SequenceEvent::Token { token, logprob, index, finish } => {
                output.token(SampledToken { id: token, logprob, index }, finish).await;
                if finish.is_some() {
                    return Cause::Duplicate;
                }
            }
            SequenceEvent::Refused(refusal) => {
                let cause = refusal_cause(&refusal);
                output.failed(cause, &refusal.to_string()).await;
                return cause;
            }
            SequenceEvent::NearHead
            | SequenceEvent::Opened { .. }
            | SequenceEvent::Computed { .. }
            | SequenceEvent::Reserved { .. }
            | SequenceEvent::Boundary
            | SequenceEvent::Preempted => {}
        }
    }
    let cause = sequence.ended_by();
    output.failed(cause, "").await;
    cause
}
