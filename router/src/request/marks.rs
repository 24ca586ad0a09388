//! What becomes of the calls of one attempt, as spans below the root.

use std::sync::Arc;
use std::time::Instant;

use baton_dispatch::{DecodeFact, Legs, PrefillFact, RequestFact, Role};
use baton_handoff::Cause;
use baton_proto::v1::{decode_server, prefill_server};
use baton_telemetry::names;
use baton_telemetry::trace::{CallContext, Span, SpanKind, TraceContext, after, new_span_id};

use super::spans::Root;
use crate::fleet::{Found, Member};

/// An attempt while it is under way. Only with tracing on.
pub(super) struct Marks {
    group: u32,
    attempt: u32,
    /// When its calls were made.
    opened_at: Instant,
    /// When the first token was heard.
    first_at: Option<Instant>,
    /// Until its span is recorded.
    prefill: Option<Call>,
    decode: Option<DecodeCall>,
}

struct Call {
    id: [u8; 8],
    member: Arc<Member>,
}

struct DecodeCall {
    call: Call,
    opened_at: Instant,
    /// Of the span up to the worker's answer, until that is recorded; none when the worker computes the prompt itself.
    reserve: Option<[u8; 8]>,
    /// When the worker took the call.
    taken_at: Option<Instant>,
    /// The worker computes the prompt itself.
    is_local: bool,
}

impl Marks {
    /// An attempt that begins now, where it was placed.
    pub(super) fn begin(root: &mut Root, opened: &Legs, found: &Found) -> Self {
        let opened_at = placed(root, opened, found);
        let prefill = found.prefill.as_ref().filter(|_| !opened.local);
        let mut marks = Self {
            group: opened.key.group,
            attempt: opened.key.attempt,
            opened_at,
            first_at: None,
            prefill: prefill.map(|member| Call::new(root, member)),
            decode: None,
        };
        if opened.decode {
            marks.decode = Some(DecodeCall::new(root, opened, found, opened_at));
        }
        marks
    }

    /// Goes on as this attempt, whose Decode call begins now.
    pub(super) fn redirect(&mut self, root: &mut Root, opened: &Legs, found: &Found) {
        let opened_at = placed(root, opened, found);
        self.attempt = opened.key.attempt;
        self.decode = Some(DecodeCall::new(root, opened, found, opened_at));
    }

    /// What the prefill worker is told, if the trace is this one.
    pub(super) fn prefill_context(&self, root: TraceContext) -> Option<CallContext> {
        let call = self.prefill.as_ref()?;
        let parent = TraceContext { span_id: call.id, ..root };
        Some(CallContext { parent, root: root.span_id, reserve: [0; 8] })
    }

    /// What the decode worker is told, if the trace is this one.
    pub(super) fn decode_context(&self, root: TraceContext) -> Option<CallContext> {
        let decode = self.decode.as_ref()?;
        let parent = TraceContext { span_id: decode.call.id, ..root };
        Some(CallContext { parent, root: root.span_id, reserve: decode.reserve.unwrap_or_default() })
    }

    /// The decode worker took the call.
    pub(super) fn taken(&mut self, root: &mut Root) {
        let now = Instant::now();
        if let Some(decode) = &mut self.decode {
            decode.taken_at = Some(now);
            if let Some(id) = decode.reserve.take() {
                let span = decode.call.span(root, names::span::RESERVE, (decode.opened_at, now)).with_id(id);
                root.record(span.with(names::ATTEMPT, self.attempt));
            }
        }
    }

    /// The first token was heard.
    pub(super) fn first_token(&mut self, root: &mut Root, cached_tokens: u32) {
        let now = Instant::now();
        self.first_at.get_or_insert(now);
        if let Some(call) = self.prefill.take() {
            let span = call.span(root, names::span::PREFILL, (self.opened_at, now)).with_id(call.id);
            root.record(span.with(names::ATTEMPT, self.attempt).with(names::CACHED_TOKENS, cached_tokens));
        }
    }

    /// The Decode call ends: the group is done, or lost its place because of `why`.
    pub(super) fn close_decode(&mut self, root: &mut Root, why: Option<&'static str>) {
        let now = Instant::now();
        root.placing.begin(self.group, after(now));
        let Some(decode) = self.decode.take() else { return };
        if let Some(id) = decode.reserve {
            let span = decode.call.span(root, names::span::RESERVE, (decode.opened_at, now)).with_id(id);
            root.record(span.with(names::ATTEMPT, self.attempt).failed_if(why));
        }
        if let Some(start) = decode.goes_on_at(self.first_at) {
            let span = decode.call.span(root, names::span::DECODE, (start, now)).with_id(decode.call.id);
            root.record(span.with(names::ATTEMPT, self.attempt).failed_if(why));
        }
    }

    /// The attempt ends, because of `why` unless it is done.
    pub(super) fn close(mut self, root: &mut Root, why: Option<&'static str>) {
        if let Some(call) = self.prefill.take() {
            let span = call.span(root, names::span::PREFILL, (self.opened_at, Instant::now()));
            let span = span.with_id(call.id).with(names::ATTEMPT, self.attempt);
            root.record(span.failed(why.unwrap_or(CLOSED)));
        }
        self.close_decode(root, why);
    }
}

/// Why a call ended that nothing was wrong with.
const CLOSED: &str = "closed";

impl Call {
    fn new(root: &mut Root, member: &Arc<Member>) -> Self {
        root.involve(member);
        Self { id: new_span_id(), member: Arc::clone(member) }
    }

    fn span(&self, root: &Root, name: &'static str, (start, end): (Instant, Instant)) -> Span {
        let (service, method) = match self.member.role {
            Role::Prefill => (prefill_server::SERVICE_NAME, "Prefill"),
            Role::Decode => (decode_server::SERVICE_NAME, "Decode"),
        };
        root.child(name, SpanKind::Client, start, end)
            .of_call(service, method)
            .with(names::SERVER_ADDRESS, self.member.address.clone())
    }
}

impl DecodeCall {
    fn new(root: &mut Root, opened: &Legs, found: &Found, opened_at: Instant) -> Self {
        Self {
            call: Call::new(root, &found.decode),
            opened_at,
            reserve: (!opened.local).then(new_span_id),
            taken_at: None,
            is_local: opened.local,
        }
    }

    /// When the sequence could have gone on: once its first token was heard, or, if that was before this call, once the worker
    /// took it. A worker that computes the prompt itself is at work from the beginning.
    fn goes_on_at(&self, first_at: Option<Instant>) -> Option<Instant> {
        if self.is_local {
            return Some(self.opened_at);
        }
        match first_at? {
            first if first >= self.opened_at => Some(after(first)),
            _ => self.taken_at.map(after),
        }
    }
}

/// Records where the attempt runs; answers when its calls begin.
fn placed(root: &mut Root, opened: &Legs, found: &Found) -> Instant {
    let now = Instant::now();
    let start = root.placing.end(opened.key.group);
    let prefill = found.prefill.as_ref().filter(|_| !opened.local);
    // The first group has all sequences; a later one is a sequence that goes on apart from the others.
    let sequence = (opened.key.group > 0).then_some(opened.first_sequence);
    let span = root
        .child(names::span::ROUTE, SpanKind::Internal, start, now)
        .with(names::ATTEMPT, opened.key.attempt)
        .with(names::ROUTE_POLICY, found.policy)
        .with(names::MODE, found.mode.name())
        .with(names::REASON, found.reason)
        .with_some(names::ROUTE_PREFILL, prefill.map(|member| member.address.clone()))
        .with(names::ROUTE_DECODE, found.decode.address.clone())
        .with(names::PREFIX_HIT_TOKENS, found.prefix_hit_tokens)
        .with_some(names::SEQUENCE, sequence);
    root.record(span);
    after(now.max(start))
}

/// Why the attempts end that end of this fact, if it is no good one.
pub(super) fn failure(fact: &RequestFact) -> Option<&'static str> {
    const LOST: &str = "lost";
    const UNREACHABLE: &str = "unreachable";
    match fact {
        RequestFact::Prefill { event, .. } => match event {
            PrefillFact::Failed(cause) | PrefillFact::HandoffFailed(cause) => Some(cause.name()),
            PrefillFact::NotRedirected => Some("not_redirected"),
            PrefillFact::Unreachable => Some(UNREACHABLE),
            PrefillFact::Lost => Some(LOST),
            PrefillFact::FirstTokens(_) | PrefillFact::Done => None,
        },
        RequestFact::Decode { event, .. } => match event {
            DecodeFact::Failed(cause) => Some(cause.name()),
            DecodeFact::Preempted { .. } => Some(Cause::Preempted.name()),
            DecodeFact::Unreachable => Some(UNREACHABLE),
            DecodeFact::Lost => Some(LOST),
            DecodeFact::Started | DecodeFact::Token { .. } | DecodeFact::Finished { .. } => None,
        },
        RequestFact::ClientGone => Some(Cause::Cancelled.name()),
        // No attempt ends of time but by the request's deadline.
        RequestFact::Tick => Some(Cause::Deadline.name()),
        RequestFact::Start
        | RequestFact::Placed { .. }
        | RequestFact::NotPlaced { .. }
        | RequestFact::StopMatched { .. } => None,
    }
}
