//! A Decode call whose KV arrives from a prefill worker: drives the destination's machine until the sequence runs, and the
//! sequence until it ends.

mod receiving;
mod running;

use std::sync::Arc;
use std::time::Duration;

use baton_handoff::{
    Cause, Commit, Destination, DestinationAction, DestinationConfig, DestinationEnd, DestinationFact,
    DestinationMessage, SampledToken, SourceMessage, Time, Timers,
};
use baton_proto::v1;
use baton_scheduler::{FirstToken, Origin};
use baton_transfer::{Receiver, ReceiverEvent, Receivers, TransferError, wire};
use baton_worker::{Core, LegRequest, Sequence, SequenceEvent, Stamped, prefill_seconds, refusal_cause};
use tokio::sync::mpsc;
use tonic::Status;

use crate::directory::ControlStream;
use crate::group::{Numbers, Stops};
use crate::kv_cost::{Marks, Waits};
use crate::output::{Ended, Output};
use crate::spans::LegSpans;
use crate::told::{LearntCost, Told};

/// A checked call.
pub(crate) struct Order {
    pub(crate) core: Arc<Core>,
    pub(crate) receivers: Receivers,
    pub(crate) timers: Timers,
    pub(crate) request: LegRequest,
    pub(crate) control: mpsc::Receiver<Box<ControlStream>>,
    pub(crate) stops: Arc<Stops>,
    pub(crate) output: Output,
    pub(crate) spans: LegSpans,
}

/// The driver. Everything it holds is given back when it is dropped: the sequence ends, the receiver's lease is fenced, the
/// control stream closes.
pub(crate) struct Leg {
    core: Arc<Core>,
    receivers: Receivers,
    output: Output,
    machine: Destination,
    sequence: Option<Sequence>,
    attaching: mpsc::Receiver<Box<ControlStream>>,
    control: Option<Box<ControlStream>>,
    receiver: Option<Receiver>,
    prompt_tokens: usize,
    /// Leading tokens whose KV was here already.
    skip_tokens: usize,
    /// Number of the first sequence, and how many there are.
    first_sequence: u32,
    num_sequences: usize,
    /// Sequences that are not over. When none is left, nobody waits for anything.
    open: Numbers,
    stops: Arc<Stops>,
    /// The sequences run.
    is_started: bool,
    marks: Marks,
    waits: Waits,
    spans: LegSpans,
    /// What the source's steps cost, once it was told.
    step_cost: Option<LearntCost>,
    /// When the request's own time is up; none once it was.
    deadline: Option<Time>,
    /// The router dropped its stream.
    is_gone: bool,
    /// What went wrong, for people.
    detail: String,
    end: Option<DestinationEnd>,
    /// The leg is over; answers later questions about its key.
    over: Option<Cause>,
}

/// What the driver hears next.
enum Heard {
    Attached(Box<ControlStream>),
    Control(Result<Option<v1::SourceMessage>, Status>),
    Sequence(Option<Stamped>),
    Receiver(Option<ReceiverEvent>),
    /// These sequences are to end.
    Stopped(Numbers),
    RouterGone,
    Time,
}

impl Leg {
    /// Runs a call to its end; returns what later questions about its key are answered with.
    pub(crate) async fn run(order: Order) -> Cause {
        let Order { core, receivers, timers, request, control, stops, output, spans } = order;
        let machine = Destination::new(DestinationConfig {
            key: request.key,
            instance: core.instance,
            prompt_tokens: u32::try_from(request.prompt.len()).unwrap_or(u32::MAX),
            credit_window: receivers.credit_window(),
            timers,
        });
        let leg = Self {
            deadline: request.timeout.map(|timeout| core.clock.now() + timeout),
            core,
            receivers,
            output,
            machine,
            sequence: None,
            attaching: control,
            control: None,
            receiver: None,
            prompt_tokens: request.prompt.len(),
            skip_tokens: 0,
            first_sequence: request.first_sequence,
            num_sequences: request.num_sequences as usize,
            open: Numbers::new(request.first_sequence, request.num_sequences),
            stops,
            is_started: false,
            marks: Marks::default(),
            waits: Waits::default(),
            spans,
            step_cost: None,
            is_gone: false,
            detail: String::new(),
            end: None,
            over: None,
        };
        leg.drive(request).await
    }

    async fn drive(mut self, request: LegRequest) -> Cause {
        if let Err(cause) = self.submit(request).await {
            self.fact(DestinationFact::Cancelled(cause));
        }
        loop {
            self.act().await;
            if let Some(cause) = self.over {
                self.core.metrics.late_messages.add("destination", self.machine.ignored());
                self.end_spans(cause);
                return cause;
            }
            let heard = self.hear().await;
            self.take_in(heard).await;
        }
    }

    async fn submit(&mut self, request: LegRequest) -> Result<(), Cause> {
        let loaded = self.core.loaded().map_err(|_| Cause::Engine)?;
        let mut submission = request.submission(Origin::Remote, None);
        submission.trace = self.spans.served_by();
        self.sequence = Some(loaded.steps.submit(submission).await?);
        Ok(())
    }

    async fn hear(&mut self) -> Heard {
        let next = self.machine.deadline().into_iter().chain(self.deadline).min();
        let wait = next.map(|at| at.saturating_sub(self.core.clock.now()));
        // In this order: what has come counts before what is late, also after the process stood still, and what comes often last.
        tokio::select! {
            biased;
            () = self.output.closed(), if !self.is_gone => Heard::RouterGone,
            stopped = self.stops.next() => Heard::Stopped(stopped),
            Some(stream) = self.attaching.recv() => Heard::Attached(stream),
            message = next_of_control(&mut self.control) => Heard::Control(message),
            event = next_of_receiver(&mut self.receiver) => Heard::Receiver(event),
            event = next_of_sequence(&mut self.sequence) => Heard::Sequence(event),
            () = sleep(wait) => Heard::Time,
        }
    }

    async fn take_in(&mut self, heard: Heard) {
        match heard {
            Heard::Attached(stream) => {
                let offer = stream.offer;
                self.control = Some(stream);
                self.fact(DestinationFact::Offered {
                    source: offer.source,
                    destination: offer.destination,
                    prompt_tokens: offer.prompt_tokens,
                });
            }
            Heard::Control(Ok(Some(message))) => self.control_message(message).await,
            Heard::Control(Ok(None) | Err(_)) => {
                self.control = None;
                self.fact(DestinationFact::ControlLost);
            }
            Heard::Sequence(Some(Stamped { at, event })) => self.sequence_event(at, event).await,
            Heard::Sequence(None) => {
                let cause = self.sequence.as_ref().map_or(Cause::Engine, Sequence::ended_by);
                self.let_go();
                self.give_up(cause).await;
            }
            Heard::Receiver(event) => self.receiver_event(event),
            Heard::Stopped(stopped) => self.stop(stopped).await,
            Heard::RouterGone => {
                self.is_gone = true;
                self.give_up(Cause::Cancelled).await;
            }
            Heard::Time => match self.deadline.take_if(|at| *at <= self.core.clock.now()) {
                Some(_) => self.give_up(Cause::Deadline).await,
                None => self.fact(DestinationFact::Tick),
            },
        }
    }

    fn fact(&mut self, fact: DestinationFact) {
        self.machine.handle(self.core.clock.now(), fact);
    }

    /// Ends the leg early: the machine does while the handoff is under way, after it nothing but the sequence is left.
    async fn give_up(&mut self, cause: Cause) {
        if self.end == Some(DestinationEnd::Committed) {
            self.let_go();
            if !self.is_gone {
                self.output.failed(cause, &self.detail).await;
            }
            self.over = Some(cause);
        } else {
            self.fact(DestinationFact::Cancelled(cause));
        }
    }

    async fn stop(&mut self, stopped: Numbers) {
        for sequence in stopped.iter().filter(|&sequence| self.open.remove(sequence)).collect::<Vec<_>>() {
            self.end_run(sequence, self.core.clock.now());
            if let Some(group) = &self.sequence {
                group.stop(sequence).await;
            }
        }
        self.end_when_all_are_over();
    }

    fn end_when_all_are_over(&mut self) {
        if !self.open.is_empty() {
            return;
        }
        if self.end == Some(DestinationEnd::Committed) {
            self.over = Some(Cause::Duplicate);
        } else {
            self.fact(DestinationFact::Cancelled(Cause::NotNeeded));
        }
    }

    async fn control_message(&mut self, message: v1::SourceMessage) {
        let told = Told::read(&message);
        let message = match wire::decode_source(message) {
            Ok(message) => message,
            Err(error) => return self.broken(&error),
        };
        if let SourceMessage::Commit(commit) = &message
            && !self.is_of_this_group(&commit.first_tokens)
        {
            let (num, first) = (self.num_sequences, self.first_sequence);
            let what = format!("commit.first_tokens are not those of {num} sequences from {first} on");
            return self.broken(&TransferError::Protocol(what));
        }
        if matches!(message, SourceMessage::Notice | SourceMessage::Commit(_)) && self.marks.noticed.is_none()
        {
            let offered_at = self.control.as_ref().map(|control| control.offered_at);
            let at = told.done_at(offered_at, self.core.clock.now());
            self.marks.noticed = Some(at);
            self.spans.begin(at);
            if let Some(sequence) = &self.sequence {
                sequence.notice(at).await;
            }
        }
        self.step_cost = self.step_cost.or(told.step_cost);
        self.fact(DestinationFact::Received(message));
    }

    /// Whether there is one for each sequence; that they count on is the machine's to check.
    fn is_of_this_group(&self, first: &[baton_handoff::FirstToken]) -> bool {
        first.len() == self.num_sequences
            && first.first().map(|one| one.sequence) == Some(self.first_sequence)
    }

    fn broken(&mut self, error: &TransferError) {
        self.detail = error.to_string();
        self.fact(DestinationFact::Cancelled(error.cause()));
    }

    async fn sequence_event(&mut self, at: Time, event: SequenceEvent) {
        match event {
            SequenceEvent::Reserved { lease, skip_tokens } => self.reserved(lease, skip_tokens),
            SequenceEvent::Boundary => self.marks.boundary = Some(at),
            SequenceEvent::Started { cached_tokens, avoided, .. } => {
                self.started(at, cached_tokens, avoided).await;
            }
            // One that was stopped may have been on its way.
            SequenceEvent::Stall(stall) if !self.open.contains(stall.sequence) => {}
            SequenceEvent::Stall(stall) => {
                self.spans.stall(&stall);
                self.output.stall(&stall);
            }
            SequenceEvent::Token { sequence, token, logprob, index, finish } => {
                // A router that reads slowly may still want sequences to end.
                while let Some(stopped) = self.output.room(&self.stops).await {
                    self.stop(stopped).await;
                }
                // One that was stopped may have been on its way.
                if self.open.contains(sequence) {
                    let token = SampledToken { id: token, logprob, index };
                    let ended = finish.map(|finish| Ended { finish, stats: self.stats(sequence) });
                    self.output.token(sequence, token, ended).await;
                    if finish.is_some() {
                        // Handing over its last token is part of a run.
                        self.end_run(sequence, self.core.clock.now());
                        self.open.remove(sequence);
                        self.end_when_all_are_over();
                    }
                }
            }
            SequenceEvent::Refused(refusal) => {
                self.detail = refusal.to_string();
                self.fact(DestinationFact::Cancelled(refusal_cause(&refusal)));
            }
            SequenceEvent::Preempted { sequence, gone: true } if self.is_started => {
                if self.open.remove(sequence) {
                    self.end_run(sequence, at);
                    self.output.preempted(sequence).await;
                    self.end_when_all_are_over();
                }
            }
            // The group was still receiving, or its commit came too late.
            SequenceEvent::Preempted { gone: true, .. } => self.give_up(Cause::Preempted).await,
            SequenceEvent::Preempted { sequence, gone: false } => {
                tracing::info!(sequence, "preempted; it will be computed again here");
            }
            // Not told to remote sequences, or of no matter to them.
            SequenceEvent::NearHead | SequenceEvent::Opened { .. } | SequenceEvent::Computed { .. } => {}
        }
    }

    /// Does what the machine wants, until it wants nothing.
    async fn act(&mut self) {
        while let Some(action) = self.machine.poll() {
            match action {
                DestinationAction::Reserve => {
                    if let Some(sequence) = &self.sequence {
                        sequence.reserve().await;
                    }
                }
                DestinationAction::Send(message) => self.answer(&message).await,
                DestinationAction::Fence => match &self.receiver {
                    Some(receiver) => receiver.fence(),
                    None => self.fact(DestinationFact::WriterEnded),
                },
                DestinationAction::Run(commit) => self.run_group(&commit).await,
                DestinationAction::Free => {
                    self.receiver = None;
                    self.let_go();
                }
                DestinationAction::End(end) => self.ended(end).await,
            }
        }
    }

    async fn run_group(&mut self, commit: &Commit) {
        for first in commit.first_tokens.iter().filter(|first| first.finish.is_some()) {
            self.open.remove(first.sequence);
        }
        let first = |first: &baton_handoff::FirstToken| FirstToken {
            token: first.token.id,
            finished: first.finish.is_some(),
        };
        let prefill_s = self
            .step_cost
            .and_then(|learnt| prefill_seconds(&learnt.cost, self.prompt_tokens, self.skip_tokens));
        if let Some(sequence) = &self.sequence {
            sequence.commit(commit.first_tokens.iter().map(first).collect(), prefill_s).await;
        }
    }

    async fn answer(&mut self, message: &DestinationMessage) {
        if let Some(control) = &self.control {
            // A stream that is gone is noticed when its next message is waited for.
            let _ = control.outgoing.send(Ok(wire::encode_destination(message))).await;
        }
    }

    async fn ended(&mut self, end: DestinationEnd) {
        self.end = Some(end);
        match end {
            DestinationEnd::Committed => {
                self.core.metrics.handoff_ended("committed");
                self.end_when_all_are_over();
            }
            DestinationEnd::Failed(cause) => {
                self.core.metrics.handoff_ended(cause.name());
                if !self.is_gone && !self.open.is_empty() {
                    self.output.failed(cause, &self.detail).await;
                }
                self.over = Some(cause);
            }
        }
    }
}

async fn next_of_control(
    control: &mut Option<Box<ControlStream>>,
) -> Result<Option<v1::SourceMessage>, Status> {
    match control {
        Some(control) => control.incoming.message().await,
        None => std::future::pending().await,
    }
}

async fn next_of_sequence(sequence: &mut Option<Sequence>) -> Option<Stamped> {
    match sequence {
        Some(sequence) => sequence.next().await,
        None => std::future::pending().await,
    }
}

async fn next_of_receiver(receiver: &mut Option<Receiver>) -> Option<ReceiverEvent> {
    match receiver {
        Some(receiver) => receiver.next().await,
        None => std::future::pending().await,
    }
}

async fn sleep(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}
