//! A Decode call whose prompt is computed here.

use baton_handoff::{Cause, SampledToken, Time};
use baton_proto::v1;
use baton_scheduler::Origin;
use baton_worker::{LegRequest, Loaded, Sequence, SequenceEvent, Stamped, refusal_cause};

use crate::group::{Numbers, Stops};
use crate::kv_cost::micros;
use crate::output::Output;

/// Runs the call to its end; returns what later questions about its key are answered with.
pub(crate) async fn run(
    loaded: &Loaded,
    request: LegRequest,
    output: &Output,
    stops: &Stops,
    accepted: Time,
) -> Cause {
    let open = Numbers::new(request.first_sequence, request.num_sequences);
    let sequence = match loaded.steps.submit(request.submission(Origin::Local, None)).await {
        Ok(sequence) => sequence,
        Err(cause) => {
            output.failed(cause, "").await;
            return cause;
        }
    };
    let leg = Leg { sequence, open, output, accepted };
    tokio::select! {
        cause = leg.follow(stops) => cause,
        () = output.closed() => Cause::Cancelled,
        () = output.expired() => {
            output.failed(Cause::Deadline, "").await;
            Cause::Deadline
        }
    }
}

struct Leg<'a> {
    sequence: Sequence,
    /// Sequences that are not over.
    open: Numbers,
    output: &'a Output,
    accepted: Time,
}

impl Leg<'_> {
    async fn follow(mut self, stops: &Stops) -> Cause {
        while !self.open.is_empty() {
            tokio::select! {
                event = self.sequence.next() => match event {
                    Some(stamped) => {
                        if let Err(cause) = self.event(stamped).await {
                            return cause;
                        }
                    }
                    None => {
                        let cause = self.sequence.ended_by();
                        self.output.failed(cause, "").await;
                        return cause;
                    }
                },
                stopped = stops.next() => {
                    for sequence in stopped.iter() {
                        self.open.remove(sequence);
                        self.sequence.stop(sequence).await;
                    }
                }
            }
        }
        Cause::Duplicate
    }

    /// An error ends the leg; the router knows it then.
    async fn event(&mut self, Stamped { at, event }: Stamped) -> Result<(), Cause> {
        match event {
            SequenceEvent::Started { first_step, cached_tokens } => {
                let queue = first_step.unwrap_or(at).saturating_sub(self.accepted);
                let started = v1::Started {
                    kv: Some(v1::KvCost::default()),
                    cached_tokens: u32::try_from(cached_tokens).unwrap_or(u32::MAX),
                    queue_us: micros(queue),
                };
                self.output.started(started).await;
            }
            // One that was stopped may have been on its way.
            SequenceEvent::Token { sequence, .. } if !self.open.contains(sequence) => {}
            SequenceEvent::Token { sequence, token, logprob, index, finish } => {
                self.output.token(sequence, SampledToken { id: token, logprob, index }, finish).await;
                if finish.is_some() {
                    self.open.remove(sequence);
                }
            }
            SequenceEvent::Refused(refusal) => {
                let cause = refusal_cause(&refusal);
                self.output.failed(cause, &refusal.to_string()).await;
                return Err(cause);
            }
            SequenceEvent::Preempted { sequence, gone: true } => {
                if self.open.remove(sequence) {
                    self.output.preempted(sequence).await;
                }
            }
            // Mostly what was computed here is computed again here.
            SequenceEvent::Preempted { gone: false, .. }
            | SequenceEvent::NearHead
            | SequenceEvent::Opened { .. }
            | SequenceEvent::Computed { .. }
            | SequenceEvent::Reserved { .. }
            | SequenceEvent::Boundary => {}
        }
        Ok(())
    }
}
