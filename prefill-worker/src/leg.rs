//! One Prefill call: drives the source's machine until the handoff is over.

use std::sync::Arc;
use std::time::Duration;

use baton_handoff::{
    Cause, DestinationMessage, FinishReason, FirstToken, SampledToken, Source, SourceAction, SourceConfig,
    SourceEnd, SourceFact, SourceMessage, Time,
};
use baton_kv::ReadLease;
use baton_proto::v1;
use baton_proto::v1::prefill_event::Event as Wire;
use baton_scheduler::{Finish, Origin};
use baton_transfer::{Peers, Progress, Sender, SenderConfig, SenderEvent, SentTotals, TokenSpan, wire};
use baton_worker::{Core, LegRequest, Sequence, SequenceEvent, Stamped, refusal_cause};
use tokio::sync::mpsc;
use tonic::Status;

use crate::link::{Link, LinkEvent, Target};
use crate::outstanding::Outstanding;
use crate::redirect::Redirect;
use crate::service::Shared;
use crate::sink::ProgressSink;
use crate::spans::{Caller, Spans};
use crate::times::Times;

/// A checked call.
pub(crate) struct Order {
    pub(crate) core: Arc<Core>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) request: LegRequest,
    pub(crate) caller: Caller,
    pub(crate) target: Option<Target>,
    pub(crate) redirects: mpsc::Receiver<Redirect>,
    pub(crate) events: mpsc::Sender<Result<v1::PrefillEvent, Status>>,
}

/// The driver. Everything it holds is given back when it is dropped: the sequence ends, the sender stops, the
/// control stream closes.
pub(crate) struct Leg {
    pub(crate) core: Arc<Core>,
    pub(crate) shared: Arc<Shared>,
    peers: Arc<Peers>,
    events: mpsc::Sender<Result<v1::PrefillEvent, Status>>,
    redirects: mpsc::Receiver<Redirect>,
    pub(crate) target: Option<Target>,
    pub(crate) machine: Source,
    sequence: Option<Sequence>,
    /// All blocks of the prompt, while they may have to be sent again.
    pub(crate) lease: Option<ReadLease>,
    pub(crate) progress: Progress,
    pub(crate) link: Link,
    pub(crate) sender: Option<Sender>,
    /// It will tell nothing more; its totals still count.
    pub(crate) sender_ended: bool,
    pub(crate) prompt_tokens: usize,
    num_sequences: usize,
    /// Of the sequences so far, in order; they come together.
    first_tokens: Vec<FirstToken>,
    /// From the grant.
    skip_tokens: usize,
    first_credit: u64,
    times: Times,
    pub(crate) spans: Spans,
    /// When the first tokens were sampled.
    pub(crate) sampled_at: Option<Time>,
    pub(crate) totals: SentTotals,
    pub(crate) num_sent: u64,
    pub(crate) outstanding: Outstanding,
    /// The end of this handoff is in the metrics.
    pub(crate) is_counted: bool,
    /// When the request's own time is up; none once it was.
    deadline: Option<Time>,
    /// The router dropped its stream.
    is_gone: bool,
    /// What went wrong, for people.
    pub(crate) detail: String,
    end: Option<SourceEnd>,
}

/// What the driver hears next.
enum Heard {
    Sequence(Option<Stamped>),
    Link(LinkEvent),
    Sender(Option<SenderEvent>),
    RouterGone,
    Redirect(Redirect),
    Time,
}

impl Leg {
    /// Runs a call to its end.
    pub(crate) async fn run(order: Order) {
        let Order { core, shared, peers, request, caller, target, redirects, events } = order;
        let machine = Source::new(SourceConfig {
            key: request.key,
            source: core.instance,
            // Without a destination the machine never offers.
            destination: target.as_ref().map_or(core.instance, |target| target.instance),
            prompt_tokens: u32::try_from(request.prompt.len()).unwrap_or(u32::MAX),
            timers: shared.timers,
        });
        let leg = Self {
            times: Times::accepted(core.clock.now()),
            spans: Spans::new(&core.tracing, core.clock, caller, request.key),
            sampled_at: None,
            deadline: request.timeout.map(|timeout| core.clock.now() + timeout),
            core,
            shared,
            peers,
            events,
            redirects,
            target,
            machine,
            sequence: None,
            lease: None,
            progress: Progress::new(),
            link: Link::Closed,
            sender: None,
            sender_ended: false,
            prompt_tokens: request.prompt.len(),
            num_sequences: request.num_sequences as usize,
            first_tokens: Vec::new(),
            skip_tokens: 0,
            first_credit: 0,
            totals: SentTotals::default(),
            num_sent: 0,
            outstanding: Outstanding::default(),
            is_counted: false,
            is_gone: false,
            detail: String::new(),
            end: None,
        };
        leg.drive(request).await;
    }

    async fn drive(mut self, request: LegRequest) {
        if let Err(cause) = self.submit(request).await {
            self.fact(SourceFact::Cancelled(cause));
        }
        loop {
            self.act().await;
            if let Some(end) = self.end {
                self.finish(end).await;
                return;
            }
            let heard = self.hear().await;
            self.take_in(heard).await;
        }
    }

    async fn submit(&mut self, request: LegRequest) -> Result<(), Cause> {
        let loaded = self.core.loaded().map_err(|_| Cause::Engine)?;
        let sink = Arc::new(ProgressSink(self.progress.clone()));
        let mut submission = request.submission(Origin::Prefill, Some(sink));
        submission.trace = self.spans.server();
        self.sequence = Some(loaded.steps.submit(submission).await?);
        Ok(())
    }

    async fn hear(&mut self) -> Heard {
        let next = self.machine.deadline().into_iter().chain(self.deadline).min();
        let wait = next.map(|at| at.saturating_sub(self.core.clock.now()));
        // In this order: what has come counts before what is late, also after the process stood still, and what comes often last.
        tokio::select! {
            biased;
            () = self.events.closed(), if !self.is_gone => Heard::RouterGone,
            Some(redirect) = self.redirects.recv() => Heard::Redirect(redirect),
            event = self.link.next() => Heard::Link(event),
            event = next_of_sender(&mut self.sender), if !self.sender_ended => Heard::Sender(event),
            event = next_of_sequence(&mut self.sequence) => Heard::Sequence(event),
            () = sleep(wait) => Heard::Time,
        }
    }

    async fn take_in(&mut self, heard: Heard) {
        match heard {
            Heard::RouterGone => {
                self.is_gone = true;
                self.fact(SourceFact::Cancelled(Cause::Cancelled));
            }
            Heard::Sequence(Some(Stamped { at, event })) => self.sequence_event(at, event).await,
            Heard::Sequence(None) => {
                let cause = self.sequence.take().map_or(Cause::Engine, |sequence| sequence.ended_by());
                self.lease = None;
                self.fact(SourceFact::Cancelled(cause));
            }
            Heard::Link(LinkEvent::Received(message)) => {
                if let DestinationMessage::Grant { credit, .. } = message {
                    self.first_credit = credit;
                }
                if message == DestinationMessage::Committed {
                    self.measure_link();
                }
                self.fact(SourceFact::Received(message));
            }
            Heard::Link(LinkEvent::Lost(error)) => self.link_lost(&error),
            Heard::Sender(event) => self.sender_event(event),
            Heard::Redirect(redirect) => self.redirect(redirect),
            Heard::Time => match self.deadline.take_if(|at| *at <= self.core.clock.now()) {
                Some(_) => self.fact(SourceFact::Cancelled(Cause::Deadline)),
                None => self.fact(SourceFact::Tick),
            },
        }
    }

    pub(crate) fn fact(&mut self, fact: SourceFact) {
        self.machine.handle(self.core.clock.now(), fact);
    }

    fn link_lost(&mut self, error: &baton_transfer::TransferError) {
        if self.detail.is_empty() {
            self.detail = error.to_string();
        }
        match error.cause() {
            Cause::PeerLost => self.fact(SourceFact::ControlLost),
            cause => self.unusable(cause),
        }
    }

    /// The decode worker can't be used: the same as if it had said so.
    fn unusable(&mut self, cause: Cause) {
        self.fact(SourceFact::Received(DestinationMessage::Gone(cause)));
    }

    async fn sequence_event(&mut self, at: Time, event: SequenceEvent) {
        match event {
            SequenceEvent::NearHead => self.fact(SourceFact::NearHead),
            SequenceEvent::Opened { lease, cached_tokens } => {
                self.times.opened(at, cached_tokens);
                self.spans.opened(at, cached_tokens);
                self.count_queue();
                if self.target.is_some() {
                    self.lease = Some(lease.clone());
                    self.start_sender(lease);
                }
            }
            SequenceEvent::Computed { num_tokens, began } => {
                self.times.chunk();
                self.spans.computed(began, at, num_tokens);
            }
            SequenceEvent::Token { sequence, token, logprob, index, finish } => {
                let token = SampledToken { id: token, logprob, index };
                self.first_tokens.push(FirstToken { sequence, token, finish: finish.map(reason) });
                if self.first_tokens.len() == self.num_sequences {
                    self.sampled(at).await;
                }
            }
            SequenceEvent::Refused(refusal) => {
                self.detail = refusal.to_string();
                self.fact(SourceFact::Cancelled(refusal_cause(&refusal)));
            }
            // Not told to prefill sequences.
            SequenceEvent::Reserved { .. }
            | SequenceEvent::Started { .. }
            | SequenceEvent::Boundary
            | SequenceEvent::Stall { .. }
            | SequenceEvent::Preempted { .. } => {}
        }
    }

    pub(crate) fn start_sender(&mut self, lease: ReadLease) {
        let Some(peer) = self.link.peer() else { return };
        let Ok(loaded) = self.core.loaded() else { return };
        let channel = peer.bulk();
        let layout = loaded.memory.layout();
        let num_blocks = layout.blocks_for(self.prompt_tokens) - self.skip_tokens / layout.block_size;
        let config = SenderConfig {
            key: self.machine.key(),
            span: TokenSpan { prompt_tokens: self.prompt_tokens, skip_tokens: self.skip_tokens },
            lease,
            memory: Arc::clone(&loaded.memory),
            progress: self.progress.clone(),
            trace: self.spans.sending(channel.transport(), num_blocks),
            channel,
            first_credit: self.first_credit,
        };
        match baton_transfer::sender(config) {
            Ok((sender, task)) => {
                self.core.bulk.spawn(task);
                self.sender = Some(sender);
            }
            Err(error) => {
                self.detail = error.to_string();
                self.fact(SourceFact::Cancelled(error.cause()));
            }
        }
    }

    /// The first tokens go to the router at once; the handoff goes on.
    async fn sampled(&mut self, at: Time) {
        let tokens = wire::encode_first_tokens(&self.first_tokens);
        let times = Some(self.times.sampled(at));
        self.sampled_at = Some(at);
        self.tell(Wire::FirstTokens(v1::FirstTokens { tokens, times })).await;
        self.spans.told();
        if self.first_tokens.iter().all(|first| first.finish.is_some()) {
            // Its blocks are back already.
            self.sequence = None;
            self.lease = None;
        }
        if self.target.is_none() {
            self.end = Some(SourceEnd::NotNeeded);
            return;
        }
        self.commit();
    }

    /// The prompt is computed: what belongs to its commit is known.
    pub(crate) fn commit(&mut self) {
        let first = self.first_tokens.clone();
        match self.sender.as_ref().and_then(Sender::totals) {
            Some(totals) => {
                self.totals = totals;
                let SentTotals { bytes, frames, .. } = totals;
                self.fact(SourceFact::Sampled { first, bytes, frames });
            }
            // A fenced sender: the machine is aborting and waits for nothing of this.
            None => self.fact(SourceFact::Cancelled(Cause::Engine)),
        }
    }

    fn sender_event(&mut self, event: Option<SenderEvent>) {
        match event {
            Some(SenderEvent::Encoded { bytes }) => {
                self.outstanding.computed(self.core.clock.now(), bytes);
                self.fact(SourceFact::Encoded { bytes });
            }
            Some(SenderEvent::Sent { bytes }) => {
                self.outstanding.sent(self.core.clock.now(), bytes);
                self.core.metrics.kv_sent_bytes.inc_by(bytes.saturating_sub(self.num_sent));
                self.num_sent = self.num_sent.max(bytes);
                self.fact(SourceFact::Sent { bytes });
            }
            Some(SenderEvent::Resent) => {
                self.core.metrics.kv_frames_resent.inc();
                self.totals.resent_frames += 1;
                self.fact(SourceFact::Resent);
            }
            Some(SenderEvent::Lost { detail }) => {
                self.detail = detail;
                self.fact(SourceFact::BulkLost);
            }
            Some(SenderEvent::Refused { cause, detail }) => {
                self.detail = detail;
                if cause.is_of_destination() {
                    self.unusable(cause);
                } else {
                    self.fact(SourceFact::Cancelled(cause));
                }
            }
            // `Committed` on the control stream is what counts.
            Some(SenderEvent::Delivered) => self.spans.delivered(),
            None => self.sender_ended = true,
        }
    }

    /// Does what the machine wants, until it wants nothing.
    async fn act(&mut self) {
        while let Some(action) = self.machine.poll() {
            match action {
                SourceAction::Send(offer @ SourceMessage::Offer { .. }) => {
                    if let Some(target) = self.target.clone() {
                        let trace = self.spans.offering();
                        self.link = Link::open(Arc::clone(&self.peers), target, offer, trace);
                    }
                }
                SourceAction::Send(message) => {
                    let message = self.with_measures(wire::encode_source(&message));
                    if !self.link.send(message).await {
                        self.fact(SourceFact::ControlLost);
                    }
                }
                SourceAction::Compute { skip_tokens } => {
                    self.skip_tokens = skip_tokens as usize;
                    if !self.first_tokens.is_empty() {
                        self.send_held();
                    } else if let Some(sequence) = &self.sequence {
                        sequence.grant(self.skip_tokens).await;
                    }
                }
                SourceAction::Transmit { up_to } => {
                    if let Some(sender) = &self.sender {
                        sender.transmit(up_to);
                    }
                }
                SourceAction::Resend { frame } => self.resend(frame),
                SourceAction::Reopen { from } => {
                    if let Some(sender) = &mut self.sender {
                        sender.reopen(from);
                    }
                }
                SourceAction::Fence => self.drop_sender(),
                SourceAction::Hold(cause) => self.hold(cause).await,
                SourceAction::Release => {
                    self.sequence = None;
                    self.lease = None;
                }
                SourceAction::End(end) => self.end = Some(end),
            }
        }
    }

    fn resend(&mut self, frame: u64) {
        let Some(sender) = &self.sender else { return };
        if let Err(error) = sender.resend(frame) {
            self.detail = error.to_string();
            self.fact(SourceFact::Cancelled(error.cause()));
        }
    }

    async fn finish(mut self, end: SourceEnd) {
        let (outcome, cause) = match end {
            SourceEnd::Committed => ("committed", Cause::Duplicate),
            SourceEnd::NotNeeded => (Cause::NotNeeded.name(), Cause::NotNeeded),
            SourceEnd::Failed(cause) => (cause.name(), cause),
        };
        self.core.metrics.late_messages.add("source", self.machine.ignored());
        if self.target.is_some() && !self.is_counted {
            self.core.metrics.handoff_ended(outcome);
        }
        let failure = matches!(end, SourceEnd::Failed(_)).then_some(outcome);
        self.drop_sender();
        self.spans.handed_off(self.totals, failure);
        self.spans.ended(failure);
        match end {
            SourceEnd::Committed => {
                let SentTotals { bytes, frames, resent_frames } = self.totals;
                tracing::debug!(bytes, frames, resent_frames, "handed off");
                self.tell(Wire::HandoffDone(v1::HandoffDone { bytes, frames, resent_frames })).await;
            }
            SourceEnd::NotNeeded => {}
            SourceEnd::Failed(cause) => {
                let detail = std::mem::take(&mut self.detail);
                tracing::info!(cause = cause.name(), %detail, "the prefill leg failed");
                self.tell(Wire::Failed(wire::encode_failed(cause, &detail))).await;
            }
        }
        // Answers later questions about the key.
        self.shared.finish(self.machine.key(), cause, self.core.clock.now());
    }

    pub(crate) async fn tell(&mut self, event: Wire) {
        // A router that is gone is noticed by `closed`.
        let _ = self.events.send(Ok(v1::PrefillEvent { event: Some(event) })).await;
    }
}

const fn reason(finish: Finish) -> FinishReason {
    match finish {
        Finish::Stop => FinishReason::Stop,
        Finish::Length => FinishReason::Length,
    }
}

async fn next_of_sequence(sequence: &mut Option<Sequence>) -> Option<Stamped> {
    match sequence {
        Some(sequence) => sequence.next().await,
        None => std::future::pending().await,
    }
}

async fn next_of_sender(sender: &mut Option<Sender>) -> Option<SenderEvent> {
    match sender {
        Some(sender) => sender.next().await,
        None => std::future::pending().await,
    }
}

async fn sleep(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}
