//! What a Prefill leg says of itself: marks while it runs, spans when something ended. Without tracing all of it is nothing.

use std::time::{Duration, Instant};

use baton_handoff::{HandoffKey, Time};
use baton_telemetry::names;
use baton_telemetry::trace::{CallContext, Recorder, Span, SpanKind, TraceContext, Tracing, new_span_id};
use baton_transfer::{SentTotals, Transport};
use baton_worker::Clock;

/// Chunks with a span of their own; the last one stands for all that follow.
const MAX_CHUNKS: usize = 16;

/// A follower starts this much after its predecessor ends, so that a trace's critical path walks from one to the other.
const APART: Duration = Duration::from_micros(1);

/// Marks of one leg.
pub(crate) struct Spans {
    recorder: Recorder,
    clock: Clock,
    context: CallContext,
    key: HandoffKey,
    /// Id of the SERVER span.
    server: [u8; 8],
    called: Instant,
    accepted: Time,
    opened: Option<Time>,
    cached_tokens: usize,
    num_computed: usize,
    chunks: Vec<Chunk>,
    is_told: bool,
    handoff: Option<Handoff>,
}

/// Who calls, and when.
#[derive(Clone, Copy)]
pub(crate) struct Caller {
    /// None: a caller that does not trace.
    pub(crate) context: Option<CallContext>,
    pub(crate) called: Instant,
}

struct Chunk {
    began: Time,
    ended: Time,
    tokens: usize,
    /// Tokens before it.
    context: usize,
    num: u32,
}

struct Handoff {
    id: [u8; 8],
    begun: Instant,
    transfer: Option<Transfer>,
}

struct Transfer {
    id: [u8; 8],
    transport: Transport,
    num_blocks: usize,
    first_frame_at: Option<Instant>,
    credit_wait: Duration,
    delivered_at: Option<Instant>,
}

impl Spans {
    pub(crate) fn new(tracing: &Tracing, clock: Clock, caller: Caller, key: HandoffKey) -> Self {
        let nobody = TraceContext { trace_id: [0; 16], span_id: [0; 8], sampled: false };
        let nobody = CallContext { parent: nobody, root: [0; 8], reserve: [0; 8] };
        let recorder =
            caller.context.map_or_else(Recorder::default, |context| tracing.recorder(context.parent));
        Self {
            server: if recorder.is_on() { new_span_id() } else { [0; 8] },
            recorder,
            clock,
            context: caller.context.unwrap_or(nobody),
            key,
            called: caller.called,
            accepted: clock.now(),
            opened: None,
            cached_tokens: 0,
            num_computed: 0,
            chunks: Vec::new(),
            is_told: false,
            handoff: None,
        }
    }

    /// The trace's context as of one of this leg's spans; `None` when nothing is traced.
    fn of(&self, span_id: [u8; 8]) -> Option<TraceContext> {
        self.recorder.is_on().then_some(TraceContext { span_id, ..self.context.parent })
    }

    /// The SERVER span.
    pub(crate) fn server(&self) -> Option<TraceContext> {
        self.of(self.server)
    }

    /// The prompt's first chunk is next.
    pub(crate) fn opened(&mut self, at: Time, cached_tokens: usize) {
        self.opened = Some(at);
        self.cached_tokens = cached_tokens;
        self.num_computed = cached_tokens;
    }

    /// How long the prompt waited for that.
    pub(crate) fn queued(&self) -> Duration {
        self.opened.map_or(Duration::ZERO, |opened| opened.saturating_sub(self.accepted))
    }

    /// The prompt is computed up to `num_tokens`.
    pub(crate) fn computed(&mut self, began: Time, ended: Time, num_tokens: usize) {
        let context = std::mem::replace(&mut self.num_computed, num_tokens);
        let tokens = num_tokens.saturating_sub(context);
        if !self.recorder.is_on() || tokens == 0 {
            return;
        }
        let is_full = self.chunks.len() == MAX_CHUNKS;
        match self.chunks.last_mut() {
            Some(last) if is_full => last.take_in(ended, tokens),
            _ => self.chunks.push(Chunk { began, ended, tokens, context, num: 1 }),
        }
    }

    /// The first token is on its way to the router.
    pub(crate) fn told(&mut self) {
        self.end_server(None);
    }

    /// What comes belongs to a later attempt.
    pub(crate) fn renamed(&mut self, key: HandoffKey) {
        self.key = key;
    }

    /// An offer is made: the context that goes with it.
    pub(crate) fn offering(&mut self) -> Option<TraceContext> {
        let context = self.of(new_id(&self.recorder))?;
        self.handoff = Some(Handoff { id: context.span_id, begun: Instant::now(), transfer: None });
        Some(context)
    }

    /// A transfer of so many blocks begins: the context that goes with it.
    pub(crate) fn sending(&mut self, transport: Transport, num_blocks: usize) -> Option<TraceContext> {
        let context = self.of(new_id(&self.recorder))?;
        let handoff = self.handoff.as_mut()?;
        handoff.transfer = Some(Transfer {
            id: context.span_id,
            transport,
            num_blocks,
            first_frame_at: None,
            credit_wait: Duration::ZERO,
            delivered_at: None,
        });
        Some(context)
    }

    /// What the sender knows up to now.
    pub(crate) fn sent(&mut self, first_frame_at: Option<Instant>, credit_wait: Duration) {
        if let Some(transfer) = self.handoff.as_mut().and_then(|handoff| handoff.transfer.as_mut()) {
            transfer.first_frame_at = first_frame_at;
            transfer.credit_wait = credit_wait;
        }
    }

    /// The destination has every byte.
    pub(crate) fn delivered(&mut self) {
        if let Some(transfer) = self.handoff.as_mut().and_then(|handoff| handoff.transfer.as_mut()) {
            transfer.delivered_at = Some(Instant::now());
        }
    }

    /// The handoff is over, well or for a reason.
    pub(crate) fn handed_off(&mut self, totals: SentTotals, failure: Option<&'static str>) {
        let Some(Handoff { id, begun, transfer }) = self.handoff.take() else { return };
        let ended = Instant::now();
        if let Some(span) = transfer.and_then(|transfer| transfer.span(id, ended, totals, failure)) {
            self.recorder.record(span);
        }
        let span = Span::new(names::span::HANDOFF, SpanKind::Internal, Some(self.context.root), begun, ended)
            .with_id(id)
            .with(names::ATTEMPT, self.key.attempt);
        self.recorder.record(failing(span, failure));
    }

    /// The leg is over; without a first token for a reason.
    pub(crate) fn ended(&mut self, failure: Option<&'static str>) {
        if !self.is_told {
            self.end_server(failure);
        }
    }

    fn end_server(&mut self, failure: Option<&'static str>) {
        self.is_told = true;
        if !self.recorder.is_on() {
            return;
        }
        let now = self.clock.now();
        self.record_parts(now);
        let (start, end) = (self.called, self.clock.instant(now));
        let span =
            Span::new(names::span::PREFILL, SpanKind::Server, Some(self.context.parent.span_id), start, end)
                .with_id(self.server)
                .with(names::BATON_REQUEST_ID, self.key.request.to_string())
                .with(names::ATTEMPT, self.key.attempt)
                .with(names::CACHED_TOKENS, self.cached_tokens)
                .with(names::RPC_SYSTEM, "grpc")
                .with(names::RPC_SERVICE, "baton.v1.Prefill")
                .with(names::RPC_METHOD, "Prefill");
        self.recorder.record(failing(span, failure));
    }

    /// The queue and the chunks.
    fn record_parts(&mut self, now: Time) {
        let part = |name, from: Time, to: Time| {
            let (start, end) = (self.clock.instant(from), self.clock.instant(to));
            Span::new(name, SpanKind::Internal, Some(self.server), start, end)
        };
        let mut free = self.opened.unwrap_or(now);
        let mut parts = vec![part(names::span::PREFILL_QUEUE, self.accepted, free)];
        for (nth, chunk) in self.chunks.iter().enumerate() {
            let began = chunk.began.max(free + APART);
            free = chunk.ended.max(began);
            let span = part(names::span::PREFILL_CHUNK, began, free)
                .with(names::TOKENS, chunk.tokens)
                .with(names::CONTEXT, chunk.context)
                .with_some(names::CACHED_TOKENS, (nth == 0).then_some(self.cached_tokens))
                .with_some(names::CHUNKS, (chunk.num > 1).then_some(chunk.num));
            parts.push(span);
        }
        self.chunks = Vec::new();
        parts.into_iter().for_each(|span| self.recorder.record(span));
    }
}

/// Not drawn when nobody will see it.
fn new_id(recorder: &Recorder) -> [u8; 8] {
    if recorder.is_on() { new_span_id() } else { [0; 8] }
}

fn failing(span: Span, failure: Option<&'static str>) -> Span {
    match failure {
        Some(cause) => span.with(names::ERROR_TYPE, cause).failed(cause),
        None => span,
    }
}

impl Chunk {
    fn take_in(&mut self, ended: Time, tokens: usize) {
        self.ended = ended;
        self.tokens += tokens;
        self.num += 1;
    }
}

impl Transfer {
    fn span(
        self,
        handoff: [u8; 8],
        ended: Instant,
        totals: SentTotals,
        failure: Option<&'static str>,
    ) -> Option<Span> {
        // A transfer that never began is not one.
        let begun = self.first_frame_at?;
        let end = self.delivered_at.unwrap_or(ended);
        let failure = failure.filter(|_| self.delivered_at.is_none());
        let span = Span::new(names::span::KV_SEND, SpanKind::Producer, Some(handoff), begun, end)
            .with_id(self.id)
            .with(names::KV_BYTES, totals.bytes)
            .with(names::KV_FRAMES, totals.frames)
            .with(names::KV_RESENT_FRAMES, totals.resent_frames)
            .with(names::KV_BLOCKS, self.num_blocks)
            .with(names::KV_TRANSPORT, self.transport.to_string())
            .with(names::KV_CREDIT_WAIT_MS, self.credit_wait.as_secs_f64() * 1e3);
        Some(failing(span, failure))
    }
}

#[cfg(test)]
mod tests {
    use baton_handoff::RequestId;
    use baton_telemetry::names::span as name;
    use baton_telemetry::trace::{Finished, Sampler, Value};

    use super::*;

    const fn ms(n: u64) -> Time {
        Duration::from_millis(n)
    }

    fn context() -> CallContext {
        let parent = TraceContext { trace_id: [1; 16], span_id: [2; 8], sampled: true };
        CallContext { parent, root: [3; 8], reserve: [0; 8] }
    }

    fn start(tracing: &Tracing, context: Option<CallContext>) -> Spans {
        let caller = Caller { context, called: Instant::now() };
        let key = HandoffKey { request: RequestId([7; 16]), group: 0, attempt: 2 };
        Spans::new(tracing, Clock::start(), caller, key)
    }

    /// Runs `work` on a leg's marks and returns its spans.
    fn spans(work: impl FnOnce(&mut Spans)) -> Vec<Span> {
        let (tracing, mut delivered) = Tracing::collecting(Sampler::default());
        let mut spans = start(&tracing, Some(context()));
        work(&mut spans);
        drop(spans);
        let finished = delivered.try_recv().expect("spans");
        assert!(finished.iter().all(|Finished { trace_id, .. }| *trace_id == [1; 16]));
        finished.into_iter().map(|finished| finished.span).collect()
    }

    fn of<'a>(spans: &'a [Span], name: &str) -> Vec<&'a Span> {
        spans.iter().filter(|span| span.name() == name).collect()
    }

    fn int(span: &Span, key: &str) -> Option<i64> {
        match span.attribute(key) {
            Some(Value::Int(value)) => Some(*value),
            _ => None,
        }
    }

    #[test]
    fn a_leg_that_went_well_has_all_its_parts_in_order_and_in_place() {
        let spans = spans(|spans| {
            spans.accepted = ms(1);
            spans.opened(ms(10), 32);
            spans.computed(ms(9), ms(20), 96);
            spans.computed(ms(20), ms(30), 112);
            let handoff = spans.offering().expect("traced");
            let transfer = spans.sending(Transport::Shm, 5).expect("traced");
            assert!(handoff.trace_id == transfer.trace_id && handoff.span_id != transfer.span_id);
            let first = Instant::now();
            spans.sent(Some(first), ms(4));
            spans.told();
            spans.delivered();
            spans.handed_off(SentTotals { bytes: 640, frames: 8, resent_frames: 1 }, None);
            spans.ended(None);
        });
        assert_eq!(spans.len(), 6);
        let [server] = of(&spans, "prefill")[..] else { panic!("{spans:?}") };
        assert_eq!((server.kind(), server.parent()), (SpanKind::Server, Some([2; 8])));
        assert_eq!(server.attribute("baton.request_id"), Some(&Value::from("07".repeat(16))));
        assert!(server.failure().is_none());
        let parts: Vec<_> =
            [name::PREFILL_QUEUE, name::PREFILL_CHUNK].iter().flat_map(|name| of(&spans, name)).collect();
        assert_eq!(parts.len(), 3);
        for pair in parts.windows(2) {
            assert!(pair[0].end() < pair[1].start(), "{pair:?}");
        }
        assert!(parts.iter().all(|part| part.parent() == Some(server.id())));
        let chunk = |nth: usize| {
            [names::TOKENS, names::CONTEXT, names::CACHED_TOKENS].map(|key| int(parts[nth], key))
        };
        assert_eq!(chunk(1), [Some(64), Some(32), Some(32)]);
        assert_eq!(chunk(2), [Some(16), Some(96), None]);

        let ([handoff], [transfer]) = (&of(&spans, "handoff")[..], &of(&spans, name::KV_SEND)[..]) else {
            panic!("{spans:?}")
        };
        assert_eq!((handoff.kind(), handoff.parent()), (SpanKind::Internal, Some([3; 8])));
        assert_eq!((transfer.kind(), transfer.parent()), (SpanKind::Producer, Some(handoff.id())));
        assert!(handoff.start() <= transfer.start() && transfer.end() <= handoff.end());
        assert_eq!((int(transfer, names::KV_BYTES), int(transfer, names::KV_BLOCKS)), (Some(640), Some(5)));
        assert_eq!(transfer.attribute(names::KV_TRANSPORT), Some(&Value::from("shm")));
        assert_eq!(transfer.attribute(names::KV_CREDIT_WAIT_MS), Some(&Value::Float(4.0)));
    }

    #[test]
    fn many_chunks_share_the_last_span() {
        let spans = spans(|spans| {
            spans.opened(ms(0), 0);
            (1..=40).for_each(|nth| spans.computed(ms(nth as u64), ms(nth as u64 + 1), nth * 16));
            spans.told();
        });
        let chunks = of(&spans, name::PREFILL_CHUNK);
        assert_eq!(chunks.len(), MAX_CHUNKS);
        assert_eq!((int(chunks[0], names::CHUNKS), int(chunks[14], names::TOKENS)), (None, Some(16)));
        assert_eq!((int(chunks[15], names::CHUNKS), int(chunks[15], names::TOKENS)), (Some(25), Some(400)));
        assert_eq!(chunks[15].end() - chunks[0].start(), ms(40));
    }

    #[test]
    fn what_failed_says_so_and_a_transfer_that_never_began_is_none() {
        let spans = spans(|spans| {
            spans.offering();
            spans.sending(Transport::Grpc, 1);
            spans.handed_off(SentTotals::default(), Some("peer_lost"));
            spans.offering();
            spans.sending(Transport::Grpc, 1);
            spans.sent(Some(Instant::now()), ms(0));
            spans.handed_off(SentTotals::default(), Some("cancelled"));
            spans.ended(Some("cancelled"));
        });
        let failures = |name| of(&spans, name).iter().map(|span| span.failure()).collect::<Vec<_>>();
        assert_eq!(failures("handoff"), [Some("peer_lost"), Some("cancelled")]);
        assert_eq!(failures(name::KV_SEND), [Some("cancelled")]);
        assert_eq!((failures("prefill"), failures(name::PREFILL_CHUNK).len()), (vec![Some("cancelled")], 0));
    }

    #[test]
    fn nothing_is_recorded_without_tracing_or_for_a_caller_without_a_trace() {
        let (tracing, mut delivered) = Tracing::collecting(Sampler::default());
        for (tracing, context) in [(Tracing::off(), Some(context())), (tracing, None)] {
            let mut spans = start(&tracing, context);
            spans.opened(ms(0), 0);
            spans.computed(ms(1), ms(2), 16);
            assert_eq!(
                (spans.offering(), spans.sending(Transport::Grpc, 1), spans.server()),
                (None, None, None)
            );
            spans.told();
            spans.handed_off(SentTotals::default(), None);
            assert_eq!(spans.chunks.capacity(), 0);
        }
        assert!(delivered.try_recv().is_err());
    }
}
