//! The root span of a request in this process, and what is below it.
//!
//! The root goes along with the request: from its arrival to the task that runs it, and with the end of the answer back to the face,
//! which drops it once the last byte is handed over. So it ends last, whatever becomes of the request.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_dispatch::PlaceError;
use baton_handoff::Cause;
use baton_telemetry::trace::{MAX_SPANS, Recorder, Span, SpanKind, TraceContext, Value, after};
use baton_telemetry::{StallCause, names};

use super::cost::Stall;
use crate::api_error::ApiError;
use crate::app::App;
use crate::fleet::Member;
use crate::keep::Keeper;

/// The spans of a request; none, at no cost, when tracing is off.
#[derive(Default)]
pub(crate) struct RequestSpans(Option<Box<Root>>);

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Chat,
    TextCompletion,
}

impl Operation {
    /// The word of OpenTelemetry's conventions.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::TextCompletion => "text_completion",
        }
    }
}

/// The door a request came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http,
    Grpc,
}

/// How a request came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) at: Instant,
    /// The caller's span.
    pub(crate) parent: Option<TraceContext>,
    pub(crate) protocol: Protocol,
    pub(crate) operation: Operation,
}

/// A root that has not ended; dropping it ends it.
pub(crate) struct Root {
    recorder: Recorder,
    keeper: Keeper,
    arrival: Arrival,
    model: Option<String>,
    attributes: Vec<(&'static str, Value)>,
    failure: Option<&'static str>,
    /// Somebody said how it ended.
    has_ended: bool,
    /// It is exported even if the trace is not sampled.
    due: bool,
    num_spans: usize,
    /// Until when something below it ran.
    busy_until: Instant,
    /// All is known; what remains is to hand it over.
    responds: bool,
    first_handed_at: Option<Instant>,
    stalls: Stalls,
    workers: Vec<Arc<Member>>,
    /// What bits depend on beside the input, of the last worker.
    numerics_id: Option<String>,
    is_exact: bool,
    reading: Reading,
    pub(super) placing: Placing,
}

/// From the message to its tokens.
#[derive(Clone, Copy)]
struct Reading {
    /// When the message was there.
    since: Instant,
    /// When it came to the door.
    at_door: Option<Instant>,
    let_in: Option<Instant>,
    done: bool,
}

/// A shorter time for the body, or at the door, is no wait.
const MIN_WAIT: Duration = Duration::from_millis(1);

#[derive(Default)]
struct Stalls {
    longest: Option<Stall>,
    blocked_ms: f64,
    /// Sequences that have not gone on since they were preempted.
    preempted: Vec<u32>,
}

/// A shorter gap behind a preemption is no stall.
const MIN_STALL: Duration = Duration::from_millis(20);

/// Since when a group has no place.
pub(super) struct Placing {
    since: BTreeMap<u32, Instant>,
    /// Of a group that was part of another.
    since_any: Instant,
    /// Of the group that was refused a place last, until any has one.
    refused: Option<Instant>,
}

impl Placing {
    /// A group lost its place.
    pub(super) fn begin(&mut self, group: u32, at: Instant) {
        self.since.insert(group, at);
        self.since_any = at;
    }

    /// No place was found for the group.
    pub(super) fn refused(&mut self, group: u32) {
        self.refused = Some(self.since.get(&group).copied().unwrap_or(self.since_any));
    }

    /// The group has a place.
    pub(super) fn end(&mut self, group: u32) -> Instant {
        self.refused = None;
        self.since.remove(&group).unwrap_or(self.since_any)
    }
}

/// Spans below a root; the rest are not recorded, so that there is always room for the root.
const MAX_CHILDREN: usize = MAX_SPANS - 1;

impl RequestSpans {
    /// A request came.
    pub(crate) fn begin(app: &App, trace: TraceContext, arrival: Arrival) -> Self {
        if !app.tracing.is_on() {
            return Self(None);
        }
        Self(Some(Box::new(Root {
            recorder: app.tracing.recorder(trace),
            keeper: app.keeper.clone(),
            arrival,
            model: app.served().ok().map(|served| served.name.clone()),
            attributes: Vec::new(),
            failure: None,
            has_ended: false,
            due: false,
            num_spans: 0,
            busy_until: arrival.at,
            responds: false,
            first_handed_at: None,
            stalls: Stalls::default(),
            workers: Vec::new(),
            numerics_id: None,
            is_exact: true,
            reading: Reading { since: arrival.at, at_door: None, let_in: None, done: false },
            placing: Placing { since: BTreeMap::new(), since_any: arrival.at, refused: None },
        })))
    }

    /// The root, when tracing is on.
    pub(crate) fn on(&mut self) -> Option<&mut Root> {
        self.0.as_deref_mut()
    }

    /// Takes the root out, to go elsewhere.
    pub(crate) fn take(&mut self) -> Self {
        Self(self.0.take())
    }

    /// Whether anything is recorded.
    pub(crate) const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The answer's first piece went out then.
    pub(crate) fn first_handed(&mut self, at: Option<Instant>) {
        if let (Some(root), Some(at)) = (self.on(), at) {
            root.first_handed_at = Some(at);
        }
    }

    /// The status of an HTTP answer.
    pub(crate) fn answered(&mut self, status: http::StatusCode) {
        if let Some(root) = self.on() {
            root.set(names::HTTP_STATUS, u32::from(status.as_u16()));
        }
    }

    /// Refused before it ran.
    pub(crate) fn refused(&mut self, error: &ApiError) {
        if let Some(root) = self.on() {
            root.tokenized(Some(error));
            root.ended(Some(error));
        }
    }
}

impl std::fmt::Debug for RequestSpans {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestSpans").field("is_on", &self.is_on()).finish()
    }
}

impl Root {
    /// A span right below the root.
    pub(crate) fn child(&self, name: &'static str, kind: SpanKind, start: Instant, end: Instant) -> Span {
        Span::new(name, kind, Some(self.recorder.trace().span_id), start, end)
    }

    /// Adds a finished span.
    pub(crate) fn record(&mut self, span: Span) {
        self.busy_until = self.busy_until.max(span.end());
        if self.num_spans < MAX_CHILDREN {
            self.num_spans += 1;
            self.recorder.record(span);
        }
    }

    /// An attribute of the root; set once.
    pub(crate) fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        self.attributes.push((key, value.into()));
    }

    /// Its message is there.
    pub(crate) fn read(&mut self) {
        self.reading.since = Instant::now();
    }

    /// It came to the door.
    pub(crate) fn at_door(&mut self) {
        self.reading.at_door = Some(Instant::now());
    }

    /// It passed the door.
    pub(crate) fn let_in(&mut self) {
        self.reading.let_in = Some(Instant::now());
    }

    /// Its prompt is tokens now, or never will be. A wait for the body, or at the door, is a span of its own.
    pub(crate) fn tokenized(&mut self, error: Option<&ApiError>) {
        let Reading { since, at_door, let_in, done } = self.reading;
        if done {
            return;
        }
        self.reading.done = true;
        let now = Instant::now();
        let arrived = self.arrival.at;
        let is_slow = since.saturating_duration_since(arrived) >= MIN_WAIT;
        if is_slow {
            self.record(self.child(names::span::READ, SpanKind::Internal, arrived, since));
        }
        let since = if is_slow { after(since) } else { arrived };
        let waited = at_door
            .map(|from| (from, let_in.unwrap_or(now)))
            .filter(|(from, to)| to.saturating_duration_since(*from) >= MIN_WAIT);
        let (tokenize, door) = match (waited, let_in) {
            (None, _) => ((since, now), None),
            (Some((_, to)), Some(_)) => ((after(to), now), Some((since, to))),
            (Some((from, to)), None) => ((since, from), Some((after(from), to))),
        };
        let failed_at_door = at_door.is_some() && let_in.is_none();
        let mut add = |name, (start, end), failed: bool| {
            let span = self.child(name, SpanKind::Internal, start, end);
            self.record(match error.filter(|_| failed) {
                Some(error) => span.failed(error.code()),
                None => span,
            });
        };
        if let Some(door) = door {
            add(names::span::DOOR, door, failed_at_door);
        }
        add(names::span::TOKENIZE, tokenize, !failed_at_door);
        self.placing.since_any = after(now);
    }

    /// This worker has spans of the request.
    pub(super) fn involve(&mut self, member: &Arc<Member>) {
        if !self.workers.iter().any(|known| Arc::ptr_eq(known, member)) {
            self.workers.push(Arc::clone(member));
        }
        // Asked each time: another process may answer there now.
        let numerics_id = member.numerics_id();
        self.is_exact &= self.numerics_id.is_none() || self.numerics_id == numerics_id;
        self.numerics_id = numerics_id;
    }

    /// Whether all of the answer is of one numerics id.
    pub(super) fn is_exact(&self) -> bool {
        self.is_exact
    }

    /// A sequence waited.
    pub(super) fn stalled(&mut self, stall: Stall) {
        self.stalls.blocked_ms += stall.blocked_ms;
        if self.stalls.longest.is_none_or(|longest| longest.blocked_ms < stall.blocked_ms) {
            self.stalls.longest = Some(stall);
        }
    }

    /// The first token came so long after the request.
    pub(super) fn first_token(&mut self, ttft: Option<Duration>) {
        self.first_handed_at = ttft.map(|ttft| self.arrival.at + ttft);
    }

    /// This sequence gave up its blocks and is to be resumed.
    pub(super) fn preempted(&mut self, sequence: u32) {
        self.stalls.preempted.push(sequence);
        // If others of its group go on, it needs a place of its own from now on.
        self.placing.since_any = Instant::now();
    }

    /// A token is delivered, the one before it was then. What preemption cost is known here alone: the sequence goes on elsewhere.
    pub(super) fn delivered(&mut self, sequence: u32, last: Option<Instant>, now: Instant) {
        let Some(at) = self.stalls.preempted.iter().position(|of| *of == sequence) else { return };
        self.stalls.preempted.swap_remove(at);
        let gap = last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        if gap >= MIN_STALL {
            self.stalled(Stall { cause: StallCause::Preemption, blocked_ms: gap.as_secs_f64() * 1e3 });
        }
    }

    /// All that the answer says is known now.
    pub(super) fn responds(&mut self) {
        self.responds = true;
    }

    /// The trace is exported, sampled or not.
    pub(super) fn keep(&mut self) {
        self.due = true;
    }

    /// The request ended for want of a place.
    pub(super) fn unplaced(&mut self, error: PlaceError) {
        let start = self.placing.refused.unwrap_or(self.placing.since_any);
        let span = self.child(names::span::ROUTE, SpanKind::Internal, start, Instant::now());
        self.record(span.failed(error.to_string()));
    }

    /// The request ended, with this error.
    pub(super) fn ended(&mut self, error: Option<&ApiError>) {
        self.has_ended = true;
        if self.arrival.protocol == Protocol::Grpc {
            let code = error.map_or(tonic::Code::Ok, ApiError::grpc_code);
            self.set(names::RPC_STATUS, i32::from(code));
        }
        let Some(error) = error else { return };
        self.failure = Some(error.code());
        self.set(names::ERROR_TYPE, error.code());
        // What a client can mend by itself, or has given up, is nothing to look into.
        let ours = error.status().is_server_error();
        self.due |= ours && *error != ApiError::Failed { cause: Cause::Cancelled };
    }

    fn finish(&mut self) -> Span {
        let Arrival { at, parent, protocol, operation } = self.arrival;
        let name = self
            .model
            .as_ref()
            .map_or_else(|| operation.name().to_owned(), |model| format!("{} {model}", operation.name()));
        if self.responds {
            let (start, end) = (after(self.busy_until), Instant::now());
            self.record(self.child(names::span::RESPOND, SpanKind::Internal, start, end));
        }
        let end = Instant::now().max(after(self.busy_until));
        let parent = parent.map(|caller| caller.span_id);
        let mut span = Span::new(operation.name(), SpanKind::Server, parent, at, end)
            .named(name)
            .with_id(self.recorder.trace().span_id)
            .with(names::GEN_AI_OPERATION, operation.name());
        span = match protocol {
            Protocol::Http => {
                let route = match operation {
                    Operation::Chat => crate::web::CHAT_PATH,
                    Operation::TextCompletion => crate::web::COMPLETIONS_PATH,
                };
                span.with(names::HTTP_METHOD, "POST").with(names::HTTP_ROUTE, route)
            }
            Protocol::Grpc => span.of_call(baton_proto::v1::inference_server::SERVICE_NAME, "Generate"),
        };
        span = span.with(names::STALLED, self.stalls.longest.is_some());
        if let Some(longest) = self.stalls.longest {
            span = span
                .with(names::STALL_CAUSE, longest.cause.name())
                .with(names::STALL_BLOCKED_MS, self.stalls.blocked_ms);
        }
        let ttft = self.first_handed_at.map(|first| first.saturating_duration_since(at).as_secs_f64() * 1e3);
        span = span.with_some(names::TTFT_MS, ttft);
        for (key, value) in std::mem::take(&mut self.attributes) {
            span = span.with(key, value);
        }
        span.failed_if(self.failure)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        if !self.has_ended {
            // Its client left before it ran, or its task fell over.
            let error = match std::thread::panicking() {
                true => ApiError::Internal(String::new()),
                false => ApiError::Failed { cause: Cause::Cancelled },
            };
            self.tokenized(Some(&error));
            self.ended(Some(&error));
        }
        let span = self.finish();
        if self.due || self.stalls.longest.is_some() {
            if !self.recorder.is_sampled() {
                self.keeper.keep(self.recorder.trace().trace_id, std::mem::take(&mut self.workers));
            }
            self.recorder.keep();
        }
        self.recorder.record(span);
    }
}

/// Text of a client within bounds.
pub(crate) fn short(text: &str) -> Value {
    let short: String = text.chars().filter(|character| !character.is_control()).take(128).collect();
    Value::String(Cow::Owned(short))
}
