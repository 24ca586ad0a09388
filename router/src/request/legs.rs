//! The streams of an attempt.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use baton_dispatch::{DecodeFact, PrefillFact};
use baton_handoff::{Cause, FinishReason, FirstToken, InstanceId, SampledToken};
use baton_proto::v1;
use baton_proto::v1::decode_client::DecodeClient;
use baton_proto::v1::prefill_client::PrefillClient;
use baton_telemetry::trace::CallContext;
use futures::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use super::cost::{AvoidedStall, Kv, RunStats, Stall};
use super::wire::{Broken, decode_event, prefill_event};
use crate::fleet::{InFlight, Member};

/// A leg; dropping it cancels what still runs on the worker.
pub(super) struct Leg<Event> {
    events: Pin<Box<dyn Stream<Item = Event> + Send>>,
    /// Sequences whose last word has not come; none: nothing follows.
    live: Live,
    member: Arc<Member>,
    /// Whom the leg was opened with, whoever answers at that address later.
    process: InstanceId,
    /// Counts as a request there, on a prefill worker until its prompt is computed.
    in_flight: Option<InFlight>,
    answered: bool,
}

/// Numbers of sequences, as bits: there are [`baton_handoff::MAX_SEQUENCES`] at most.
#[derive(Clone, Copy)]
pub(super) struct Live(u32);

impl Live {
    /// `num` sequences from `first` on.
    pub(super) fn new(first: u32, num: u32) -> Self {
        let mut live = Self(0);
        for sequence in first..first.saturating_add(num).min(u32::BITS) {
            live.0 |= Self::bit(sequence);
        }
        live
    }

    fn bit(sequence: u32) -> u32 {
        1_u32.checked_shl(sequence).unwrap_or(0)
    }

    fn remove(&mut self, sequence: u32) {
        self.0 &= !Self::bit(sequence);
    }

    fn clear(&mut self) {
        self.0 = 0;
    }
}

/// How an event bears on its leg.
pub(super) enum Ends {
    /// More follows of every sequence.
    Nothing,
    /// Nothing more follows of this sequence.
    Sequence(u32),
    /// The worker ends the stream behind this event.
    Leg,
}

/// What both kinds of leg have in common.
pub(super) trait LegEvent {
    fn ends(&self) -> Ends;

    /// Whether the stream could not be opened, or broke.
    fn is_broken(&self) -> bool;

    /// Whether the worker only took the call.
    fn is_opened(&self) -> bool;

    /// Whether a worker that said this has no more to compute for the leg.
    fn is_computed(&self) -> bool;
}

impl<Event: LegEvent> Leg<Event> {
    fn new(events: impl Stream<Item = Event> + Send + 'static, live: Live, member: &Arc<Member>) -> Self {
        Self {
            events: Box::pin(events.take_until(member.lost())),
            live,
            member: Arc::clone(member),
            process: member.instance(),
            in_flight: Some(member.enter()),
            answered: false,
        }
    }

    /// The next event. `None` when the stream breaks or the worker is lost; after that, and after an event that is the
    /// leg's last word, nothing ever follows.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.live.0 == 0 {
            return Poll::Pending;
        }
        let event = ready!(self.events.poll_next_unpin(context));
        match event.as_ref().map_or(Ends::Leg, LegEvent::ends) {
            Ends::Nothing => {}
            Ends::Sequence(sequence) => self.live.remove(sequence),
            Ends::Leg => self.live.clear(),
        }
        if event.as_ref().is_none_or(LegEvent::is_computed) {
            self.in_flight = None;
        }
        if event.as_ref().is_none_or(LegEvent::is_broken) {
            self.member.broke(self.process);
        } else if !self.answered && !event.as_ref().is_some_and(LegEvent::is_opened) {
            self.answered = true;
            self.member.answered(self.process);
        }
        Poll::Ready(event)
    }

    /// The process it was opened with, and where.
    pub(super) fn worker(&self) -> (InstanceId, String) {
        (self.process, self.member.address.clone())
    }

    /// Nothing more is wanted of this sequence; the worker is told elsewhere.
    pub(super) fn stop(&mut self, sequence: u32) {
        self.live.remove(sequence);
    }
}

/// What a Prefill leg says.
pub(super) enum PrefillEvent {
    /// The worker took the call.
    Opened,
    Fact(PrefillFact),
    /// Of the attempt with this number.
    HandoffFailed {
        attempt: u32,
        cause: Cause,
    },
    FirstTokens {
        tokens: Vec<FirstToken>,
        cached_tokens: u32,
    },
}

impl LegEvent for PrefillEvent {
    fn ends(&self) -> Ends {
        match self {
            Self::FirstTokens { tokens: first, .. } | Self::Fact(PrefillFact::FirstTokens(first)) => {
                // With sequences that go on there is a handoff, whose end is told.
                if first.iter().all(|first| first.finish.is_some()) { Ends::Leg } else { Ends::Nothing }
            }
            Self::Opened
            | Self::HandoffFailed { .. }
            | Self::Fact(PrefillFact::HandoffFailed(_) | PrefillFact::NotRedirected) => Ends::Nothing,
            Self::Fact(
                PrefillFact::Done | PrefillFact::Failed(_) | PrefillFact::Unreachable | PrefillFact::Lost,
            ) => Ends::Leg,
        }
    }

    fn is_broken(&self) -> bool {
        matches!(self, Self::Fact(PrefillFact::Unreachable | PrefillFact::Lost))
    }

    fn is_opened(&self) -> bool {
        matches!(self, Self::Opened)
    }

    fn is_computed(&self) -> bool {
        !self.is_opened()
    }
}

/// What a Decode leg says; a message may hold several tokens.
pub(super) enum DecodeEvent {
    Fact(DecodeFact),
    /// The worker took the call.
    Opened,
    Started(Started),
    Tokens {
        sequence: u32,
        tokens: Vec<SampledToken>,
    },
    Stalled(Stall),
    Finished {
        sequence: u32,
        reason: FinishReason,
        stats: Option<RunStats>,
    },
}

/// What is known once a group runs.
pub(super) struct Started {
    pub(super) kv: Option<Kv>,
    pub(super) cached_tokens: u32,
    /// What computing the prompt on the decode worker would have cost others there.
    pub(super) avoided: Option<AvoidedStall>,
}

impl LegEvent for DecodeEvent {
    fn ends(&self) -> Ends {
        match self {
            Self::Opened
            | Self::Started(_)
            | Self::Stalled(_)
            | Self::Tokens { .. }
            | Self::Fact(DecodeFact::Started | DecodeFact::Token { .. }) => Ends::Nothing,
            Self::Finished { sequence, .. }
            | Self::Fact(DecodeFact::Finished { sequence, .. } | DecodeFact::Preempted { sequence }) => {
                Ends::Sequence(*sequence)
            }
            Self::Fact(DecodeFact::Failed(_) | DecodeFact::Unreachable | DecodeFact::Lost) => Ends::Leg,
        }
    }

    fn is_broken(&self) -> bool {
        matches!(self, Self::Fact(DecodeFact::Unreachable | DecodeFact::Lost))
    }

    fn is_opened(&self) -> bool {
        matches!(self, Self::Opened)
    }

    fn is_computed(&self) -> bool {
        false
    }
}

/// Opens a Prefill leg.
pub(super) fn prefill(
    member: &Arc<Member>,
    request: v1::PrefillRequest,
    live: Live,
    call: CallContext,
) -> Leg<PrefillEvent> {
    let mut client = PrefillClient::new(member.channel()).max_decoding_message_size(MAX_EVENT_BYTES);
    let request = traced(request, &call);
    let address = member.address.clone();
    let events = opened(async move { client.prefill(request).await }).map(move |event| match event {
        Ok(None) => PrefillEvent::Opened,
        Ok(Some(event)) => prefill_event(event, &address),
        Err((status, opened)) => PrefillEvent::Fact(match Broken::new(&status, opened, &address) {
            Broken::Said(cause) => PrefillFact::Failed(cause),
            Broken::Unreachable => PrefillFact::Unreachable,
            Broken::Lost => PrefillFact::Lost,
        }),
    });
    Leg::new(events, live, member)
}

/// Opens a Decode leg.
pub(super) fn decode(
    member: &Arc<Member>,
    request: v1::DecodeRequest,
    live: Live,
    call: CallContext,
) -> Leg<DecodeEvent> {
    let mut client = DecodeClient::new(member.channel()).max_decoding_message_size(MAX_EVENT_BYTES);
    let request = traced(request, &call);
    let address = member.address.clone();
    let events = opened(async move { client.decode(request).await }).map(move |event| match event {
        Ok(None) => DecodeEvent::Opened,
        Ok(Some(event)) => decode_event(event, &address),
        Err((status, opened)) => DecodeEvent::Fact(match Broken::new(&status, opened, &address) {
            Broken::Said(cause) => DecodeFact::Failed(cause),
            Broken::Unreachable => DecodeFact::Unreachable,
            Broken::Lost => DecodeFact::Lost,
        }),
    });
    Leg::new(events, live, member)
}

/// A worker that was not told within this time hears of it when the leg is dropped.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Tells a decode worker that nothing more is wanted of a sequence. Nobody waits for the answer.
pub(super) fn stop(member: &Member, request: v1::StopRequest, call: CallContext) {
    let mut client = DecodeClient::new(member.channel());
    let (request, sequence, address) =
        (traced(request.clone(), &call), request.sequence, member.address.clone());
    tokio::spawn(async move {
        match tokio::time::timeout(STOP_TIMEOUT, client.stop(request)).await {
            Ok(Ok(_)) => {}
            Ok(Err(status)) => {
                tracing::debug!(worker = address, sequence, code = %status.code(), "a sequence could not be stopped");
            }
            Err(_) => tracing::warn!(worker = address, sequence, "a worker did not take a stop in time"),
        }
    });
}

/// A prefill worker that does not answer within this time does not redirect; it holds nothing for longer anyway.
const REDIRECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Has a prefill worker send elsewhere what it holds; answers whether it does.
pub(super) fn redirect(
    member: &Member,
    request: v1::RedirectRequest,
    call: CallContext,
) -> impl Future<Output = bool> + Send + use<> {
    let mut client = PrefillClient::new(member.channel());
    let (request, address) = (traced(request, &call), member.address.clone());
    async move {
        match tokio::time::timeout(REDIRECT_TIMEOUT, client.redirect(request)).await {
            Ok(Ok(_)) => true,
            Ok(Err(status)) => {
                let detail = status.message();
                tracing::info!(worker = address, code = %status.code(), detail, "a worker did not redirect KV");
                false
            }
            Err(_) => {
                tracing::warn!(worker = address, "a worker did not take a redirect in time");
                false
            }
        }
    }
}

/// Events are small; a larger one is no event of ours.
const MAX_EVENT_BYTES: usize = 1 << 20;

fn traced<Message>(message: Message, call: &CallContext) -> Request<Message> {
    let mut request = Request::new(message);
    for (name, value) in call.headers() {
        if let Ok(value) = value.parse() {
            request.metadata_mut().insert(name, value);
        }
    }
    request
}

/// Opens a stream and goes through it: `None` once it is open, then its events; an error says whether it had been opened.
fn opened<Event: Send + 'static>(
    open: impl Future<Output = Result<Response<Streaming<Event>>, Status>> + Send,
) -> impl Stream<Item = Result<Option<Event>, (Status, bool)>> + Send {
    futures::stream::once(open).flat_map(|opened| match opened {
        Ok(response) => {
            let events = response.into_inner().map(|event| event.map(Some).map_err(|status| (status, true)));
            futures::stream::iter([Ok(None)]).chain(events).left_stream()
        }
        Err(status) => futures::stream::iter([Err((status, false))]).right_stream(),
    })
}
