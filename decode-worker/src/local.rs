//! A Decode call whose prompt is computed here.

use baton_handoff::{Cause, SampledToken, Time};
use baton_proto::v1;
use baton_scheduler::Origin;
use baton_worker::{Core, LegRequest, Loaded, Sequence, SequenceEvent, Stamped, refusal_cause};

use crate::group::{Numbers, Stops};
use crate::kv_cost::micros;
use crate::output::{Ended, Output};
use crate::spans::LegSpans;

/// A checked call.
pub(crate) struct Order<'a> {
    pub(crate) core: &'a Core,
    pub(crate) loaded: &'a Loaded,
    pub(crate) request: LegRequest,
    pub(crate) output: &'a Output,
    pub(crate) stops: &'a Stops,
    pub(crate) accepted: Time,
    pub(crate) spans: LegSpans,
}

/// Runs the call to its end; returns what later questions about its key are answered with.
pub(crate) async fn run(order: Order<'_>) -> Cause {
    let Order { core, loaded, request, output, stops, accepted, mut spans } = order;
    let open = Numbers::new(request.first_sequence, request.num_sequences);
    spans.begin(accepted);
    let mut submission = request.submission(Origin::Local, None);
    submission.trace = spans.served_by();
    let sequence = match loaded.steps.submit(submission).await {
        Ok(sequence) => sequence,
        Err(cause) => {
            output.failed(cause, "").await;
            spans.end(core.clock.now(), cause);
            return cause;
        }
    };
    let mut leg = Leg { core, sequence, open, output, accepted, spans };
    let cause = tokio::select! {
        cause = leg.follow(stops) => cause,
        () = output.closed() => Cause::Cancelled,
        () = output.expired() => {
            output.failed(Cause::Deadline, "").await;
            Cause::Deadline
        }
    };
    leg.end(cause);
    cause
}

struct Leg<'a> {
    core: &'a Core,
    sequence: Sequence,
    /// Sequences that are not over.
    open: Numbers,
    output: &'a Output,
    accepted: Time,
    spans: LegSpans,
}

impl Leg<'_> {
    async fn follow(&mut self, stops: &Stops) -> Cause {
        while !self.open.is_empty() {
            tokio::select! {
                event = self.sequence.next() => match event {
                    Some(stamped) => {
                        if let Err(cause) = self.event(stamped, stops).await {
                            return cause;
                        }
                    }
                    None => {
                        let cause = self.sequence.ended_by();
                        self.output.failed(cause, "").await;
                        return cause;
                    }
                },
                stopped = stops.next() => self.stop(stopped).await,
            }
        }
        Cause::Duplicate
    }

    async fn stop(&mut self, stopped: Numbers) {
        for sequence in stopped.iter() {
            if self.open.remove(sequence) {
                self.end_run(sequence, self.core.clock.now());
            }
            self.sequence.stop(sequence).await;
        }
    }

    /// A sequence ran, if it did, until `at`.
    fn end_run(&mut self, sequence: u32, at: Time) {
        self.spans.ran(sequence, at, &self.sequence.stats(sequence));
    }

    /// The leg is over; whatever still runs ends now.
    fn end(mut self, cause: Cause) {
        let now = self.core.clock.now();
        for sequence in self.open.iter() {
            self.end_run(sequence, now);
        }
        self.spans.end(now, cause);
    }

    /// An error ends the leg; the router knows it then.
    async fn event(&mut self, Stamped { at, event }: Stamped, stops: &Stops) -> Result<(), Cause> {
        match event {
            SequenceEvent::Started { first_step, cached_tokens, .. } => {
                let first_step = first_step.unwrap_or(at);
                let queue = first_step.saturating_sub(self.accepted);
                self.core.metrics.queue.observe_traced(queue.as_secs_f64(), &self.spans.trace());
                self.spans.run_computed(at, first_step, cached_tokens);
                let started = v1::Started {
                    kv: Some(v1::KvCost::default()),
                    cached_tokens: u32::try_from(cached_tokens).unwrap_or(u32::MAX),
                    queue_us: micros(queue),
                    avoided: None,
                };
                self.output.started(started).await;
            }
            SequenceEvent::Token { sequence, token, logprob, index, finish } => {
                // A router that reads slowly may still want sequences to end.
                while let Some(stopped) = self.output.room(stops).await {
                    self.stop(stopped).await;
                }
                // One that was stopped may have been on its way.
                if !self.open.contains(sequence) {
                    return Ok(());
                }
                let ended = finish.map(|finish| Ended { finish, stats: self.sequence.stats(sequence) });
                self.output.token(sequence, SampledToken { id: token, logprob, index }, ended).await;
                if finish.is_some() {
                    // Handing over its last token is part of a run.
                    self.end_run(sequence, self.core.clock.now());
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
                    self.end_run(sequence, at);
                    self.output.preempted(sequence).await;
                }
            }
            // One that was stopped may have been on its way.
            SequenceEvent::Stall(stall) if !self.open.contains(stall.sequence) => {}
            SequenceEvent::Stall(stall) => {
                self.spans.stall(&stall);
                self.output.stall(&stall);
            }
            SequenceEvent::Computed { num_tokens, began } => self.spans.chunk((began, at), num_tokens),
            // Mostly what was computed here is computed again here.
            SequenceEvent::Preempted { gone: false, .. }
            | SequenceEvent::NearHead
            | SequenceEvent::Opened { .. }
            | SequenceEvent::Reserved { .. }
            | SequenceEvent::Boundary => {}
        }
        Ok(())
    }
}
