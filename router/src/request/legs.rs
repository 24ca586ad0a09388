//! The streams of an attempt: what workers send, as facts.

use std::pin::Pin;

use baton_dispatch::{DecodeFact, PrefillFact};
use baton_handoff::{Cause, FinishReason, SampledToken};
use baton_proto::v1;
use baton_proto::v1::decode_client::DecodeClient;
use baton_proto::v1::prefill_client::PrefillClient;
use baton_telemetry::trace::{TRACEPARENT, TraceContext};
use futures::{Stream, StreamExt};
use tonic::{Code, Request, Response, Status, Streaming};

use super::Kv;
use crate::fleet::{InFlight, Member};

/// A leg; dropping it cancels what still runs on the worker.
pub(super) struct Leg<Event> {
    events: Pin<Box<dyn Stream<Item = Event> + Send>>,
    ended: bool,
    _in_flight: InFlight,
}

impl<Event: LegEvent> Leg<Event> {
    /// The next event. `None` when the stream breaks or the worker is lost; after that, and after an event that is the
    /// leg's last word, nothing ever follows.
    pub(super) async fn next(&mut self) -> Option<Event> {
        if self.ended {
            return std::future::pending().await;
        }
        let event = self.events.next().await;
        self.ended = event.as_ref().is_none_or(LegEvent::is_last);
        event
    }
}

/// What both kinds of leg have in common.
pub(super) trait LegEvent {
    /// Whether the worker ends the stream behind this one.
    fn is_last(&self) -> bool;
}

/// What a Prefill leg says.
pub(super) enum PrefillEvent {
    Fact(PrefillFact),
    FirstToken { token: SampledToken, finish: Option<FinishReason>, cached_tokens: u32 },
}

impl LegEvent for PrefillEvent {
    fn is_last(&self) -> bool {
        match self {
            Self::FirstToken { finish, .. } => finish.is_some(),
            Self::Fact(PrefillFact::FirstToken { finish, .. }) => finish.is_some(),
            Self::Fact(
                PrefillFact::Done | PrefillFact::Failed(_) | PrefillFact::Unreachable | PrefillFact::Lost,
            ) => true,
        }
    }
}

/// What a Decode leg says; a message may hold several tokens.
pub(super) enum DecodeEvent {
    Fact(DecodeFact),
    Started { kv: Option<Kv>, cached_tokens: u32 },
    Tokens(Vec<SampledToken>),
}

impl LegEvent for DecodeEvent {
    fn is_last(&self) -> bool {
        match self {
            Self::Started { .. }
            | Self::Tokens(_)
            | Self::Fact(DecodeFact::Started | DecodeFact::Token(_)) => false,
            Self::Fact(
                DecodeFact::Finished(_) | DecodeFact::Failed(_) | DecodeFact::Unreachable | DecodeFact::Lost,
            ) => true,
        }
    }
}

/// Opens a Prefill leg.
pub(super) fn prefill(
    member: &Member,
    request: v1::PrefillRequest,
    trace: TraceContext,
) -> Leg<PrefillEvent> {
    let mut client = PrefillClient::new(member.channel()).max_decoding_message_size(MAX_EVENT_BYTES);
    let request = traced(request, trace);
    let address = member.address.clone();
    let events = opened(async move { client.prefill(request).await })
        .map(move |event| match event {
            Ok(event) => prefill_event(event, &address),
            Err(broken) => PrefillEvent::Fact(match broken.reason(&address) {
                Reason::Said(cause) => PrefillFact::Failed(cause),
                Reason::Unreachable => PrefillFact::Unreachable,
                Reason::Lost => PrefillFact::Lost,
            }),
        })
        .take_until(member.lost());
    Leg { events: Box::pin(events), ended: false, _in_flight: member.enter() }
}

/// Opens a Decode leg.
pub(super) fn decode(member: &Member, request: v1::DecodeRequest, trace: TraceContext) -> Leg<DecodeEvent> {
    let mut client = DecodeClient::new(member.channel()).max_decoding_message_size(MAX_EVENT_BYTES);
    let request = traced(request, trace);
    let address = member.address.clone();
    let events = opened(async move { client.decode(request).await })
        .map(move |event| match event {
            Ok(event) => decode_event(event, &address),
            Err(broken) => DecodeEvent::Fact(match broken.reason(&address) {
                Reason::Said(cause) => DecodeFact::Failed(cause),
                Reason::Unreachable => DecodeFact::Unreachable,
                Reason::Lost => DecodeFact::Lost,
            }),
        })
        .take_until(member.lost());
    Leg { events: Box::pin(events), ended: false, _in_flight: member.enter() }
}

/// Events are small; a larger one is no event of ours.
const MAX_EVENT_BYTES: usize = 1 << 20;

fn traced<Message>(message: Message, trace: TraceContext) -> Request<Message> {
    let mut request = Request::new(message);
    if let Ok(value) = trace.to_header().parse() {
        request.metadata_mut().insert(TRACEPARENT, value);
    }
    request
}

/// A status in place of an event.
struct Broken {
    status: Status,
    /// The stream had been opened.
    opened: bool,
}

/// What a status means.
enum Reason {
    /// The worker's own word.
    Said(Cause),
    /// It never had the request.
    Unreachable,
    /// The stream broke.
    Lost,
}

/// Opens a stream and goes through it.
fn opened<Event: Send + 'static>(
    open: impl Future<Output = Result<Response<Streaming<Event>>, Status>> + Send,
) -> impl Stream<Item = Result<Event, Broken>> + Send {
    futures::stream::once(open).flat_map(|opened| match opened {
        Ok(response) => {
            let broken = |status| Broken { status, opened: true };
            response.into_inner().map(move |event| event.map_err(broken)).left_stream()
        }
        Err(status) => futures::stream::iter([Err(Broken { status, opened: false })]).right_stream(),
    })
}

impl Broken {
    fn reason(&self, address: &str) -> Reason {
        let (code, detail) = (self.status.code(), self.status.message());
        tracing::warn!(worker = address, %code, detail, "a worker refused or dropped a leg");
        match code {
            Code::AlreadyExists => Reason::Said(Cause::Duplicate),
            Code::ResourceExhausted => Reason::Said(Cause::Busy),
            Code::FailedPrecondition => Reason::Said(Cause::Layout),
            Code::DeadlineExceeded => Reason::Said(Cause::Deadline),
            Code::InvalidArgument | Code::OutOfRange | Code::Unimplemented => Reason::Said(Cause::Protocol),
            Code::NotFound => Reason::Said(Cause::NotFound),
            Code::Unavailable if !self.opened => Reason::Unreachable,
            Code::Ok
            | Code::Cancelled
            | Code::Unknown
            | Code::PermissionDenied
            | Code::Aborted
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss
            | Code::Unauthenticated => Reason::Lost,
        }
    }
}

fn failed(failed: &v1::Failed, address: &str) -> Cause {
    let cause = cause(failed.cause());
    let detail = &failed.detail;
    tracing::warn!(worker = address, cause = cause.name(), detail, "a worker ended a leg");
    cause
}

fn prefill_event(event: v1::PrefillEvent, address: &str) -> PrefillEvent {
    use v1::prefill_event::Event;
    let broken = PrefillEvent::Fact(PrefillFact::Failed(Cause::Protocol));
    match event.event {
        None => broken,
        Some(Event::FirstToken(first)) => {
            let finish = finish(first.finish());
            let Some(token) = first.token.as_ref().map(token) else { return broken };
            PrefillEvent::FirstToken {
                token,
                finish,
                cached_tokens: first.times.map_or(0, |times| times.cached_tokens),
            }
        }
        Some(Event::HandoffDone(_)) => PrefillEvent::Fact(PrefillFact::Done),
        Some(Event::Failed(reason)) => PrefillEvent::Fact(PrefillFact::Failed(failed(&reason, address))),
    }
}

fn decode_event(event: v1::DecodeEvent, address: &str) -> DecodeEvent {
    use v1::decode_event::Event;
    match event.event {
        None => DecodeEvent::Fact(DecodeFact::Failed(Cause::Protocol)),
        Some(Event::Started(started)) => {
            let ms = |us: u64| us as f64 / 1e3;
            let kv = started.kv.filter(|kv| kv.bytes > 0).map(|kv| Kv {
                bytes: kv.bytes,
                total_ms: ms(kv.total_us),
                exposed_ms: ms(kv.exposed_us),
            });
            DecodeEvent::Started { kv, cached_tokens: started.cached_tokens }
        }
        Some(Event::Tokens(tokens)) => DecodeEvent::Tokens(tokens.tokens.iter().map(token).collect()),
        Some(Event::Finished(finished)) => DecodeEvent::Fact(match finish(finished.reason()) {
            Some(reason) => DecodeFact::Finished(reason),
            None => DecodeFact::Failed(Cause::Protocol),
        }),
        Some(Event::Failed(reason)) => DecodeEvent::Fact(DecodeFact::Failed(failed(&reason, address))),
    }
}

fn token(token: &v1::SampledToken) -> SampledToken {
    SampledToken { id: token.id, logprob: token.logprob, index: token.index }
}

fn finish(reason: v1::FinishReason) -> Option<FinishReason> {
    match reason {
        v1::FinishReason::Unspecified => None,
        v1::FinishReason::Stop => Some(FinishReason::Stop),
        v1::FinishReason::Length => Some(FinishReason::Length),
    }
}

fn cause(wire: v1::Cause) -> Cause {
    match wire {
        v1::Cause::Unspecified | v1::Cause::Protocol => Cause::Protocol,
        v1::Cause::Cancelled => Cause::Cancelled,
        v1::Cause::Deadline => Cause::Deadline,
        v1::Cause::Duplicate => Cause::Duplicate,
        v1::Cause::WrongInstance => Cause::WrongInstance,
        v1::Cause::Busy => Cause::Busy,
        v1::Cause::TooLarge => Cause::TooLarge,
        v1::Cause::Layout => Cause::Layout,
        v1::Cause::Corrupt => Cause::Corrupt,
        v1::Cause::PeerLost => Cause::PeerLost,
        v1::Cause::NotFound => Cause::NotFound,
        v1::Cause::Draining => Cause::Draining,
        v1::Cause::Expired => Cause::Expired,
        v1::Cause::Engine => Cause::Engine,
        v1::Cause::NotNeeded => Cause::NotNeeded,
        v1::Cause::SlowReader => Cause::SlowReader,
    }
}
