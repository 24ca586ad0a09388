//! What a Prefill leg says of itself: marks while it runs, spans when something ended. Without tracing all of it is nothing.

use std::time::{Duration, Instant};

use baton_handoff::{Cause, HandoffKey, Time};
use baton_proto::v1::prefill_server;
use baton_telemetry::names;
use baton_telemetry::trace::{CallContext, Chunks, Recorder, Span, SpanKind, TraceContext, Tracing};
use baton_transfer::{SentTotals, Transport};
use baton_worker::Clock;

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
    chunks: Chunks,
    /// When the router was told of the first token, or that there is none.
    told_at: Option<Instant>,
    handoff: Option<Handoff>,
}

/// Who calls, and when.
#[derive(Clone, Copy)]
pub(crate) struct Caller {
    /// None: a caller that does not trace.
    pub(crate) context: Option<CallContext>,
    pub(crate) called: Instant,
}

struct Handoff {
    id: [u8; 8],
    begun: Instant,
    transfer: Option<Transfer>,
    /// When the last byte had been handed to the transport, and the commit followed.
    committed_at: Option<Instant>,
}

struct Transfer {
    id: [u8; 8],
    transport: Transport,
    num_blocks: usize,
    first_frame_at: Option<Instant>,
    credit_wait: Duration,
    is_delivered: bool,
}

impl Spans {
    pub(crate) fn new(tracing: &Tracing, clock: Clock, caller: Caller, key: HandoffKey) -> Self {
        let nobody = TraceContext { trace_id: [0; 16], span_id: [0; 8], sampled: false };
        let nobody = CallContext { parent: nobody, root: [0; 8], reserve: [0; 8] };
        let recorder =
            caller.context.map_or_else(Recorder::default, |context| tracing.recorder(context.parent));
        Self {
            server: recorder.draw_id(),
            recorder,
            clock,
            context: caller.context.unwrap_or(nobody),
            key,
            called: caller.called,
            accepted: clock.now(),
            opened: None,
            cached_tokens: 0,
            num_computed: 0,
            chunks: Chunks::default(),
            told_at: None,
            handoff: None,
        }
    }

    /// The SERVER span; `None` when nothing is traced.
    pub(crate) fn server(&self) -> Option<TraceContext> {
        self.recorder.context_of(self.server)
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
        let known = std::mem::replace(&mut self.num_computed, num_tokens);
        if self.recorder.is_on() && num_tokens > known {
            self.chunks.add((self.clock.instant(began), self.clock.instant(ended)), num_tokens);
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
        let context = self.recorder.context_of(self.recorder.draw_id())?;
        let (id, begun) = (context.span_id, Instant::now());
        self.handoff = Some(Handoff { id, begun, transfer: None, committed_at: None });
        Some(context)
    }

    /// A transfer of so many blocks begins: the context that goes with it.
    pub(crate) fn sending(&mut self, transport: Transport, num_blocks: usize) -> Option<TraceContext> {
        let context = self.recorder.context_of(self.recorder.draw_id())?;
        let handoff = self.handoff.as_mut()?;
        handoff.transfer = Some(Transfer {
            id: context.span_id,
            transport,
            num_blocks,
            first_frame_at: None,
            credit_wait: Duration::ZERO,
            is_delivered: false,
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
            transfer.is_delivered = true;
        }
    }

    /// The transport has taken every byte, and the commit is next.
    pub(crate) fn committing(&mut self) {
        if let Some(handoff) = &mut self.handoff {
            handoff.committed_at = Some(Instant::now());
        }
    }

    /// The handoff is over, well or for a reason. What went well ended when this worker had no more to say: with the commit or, when nobody
    /// needs one, with word of the last token. A short answer can be over, and the router have hung up, before the decode worker's `Committed`
    /// has come back.
    pub(crate) fn handed_off(&mut self, totals: SentTotals, failure: Option<&'static str>) {
        let Some(Handoff { id, begun, transfer, committed_at }) = self.handoff.take() else { return };
        let failure = failure.filter(|cause| committed_at.is_none() || *cause != Cause::Cancelled.name());
        let said = committed_at.or(self.told_at).filter(|_| failure.is_none());
        let ended = said.unwrap_or_else(Instant::now);
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
        if self.told_at.is_none() {
            self.end_server(failure);
        }
    }

    fn end_server(&mut self, failure: Option<&'static str>) {
        let end = Instant::now();
        self.told_at = Some(end);
        if !self.recorder.is_on() {
            return;
        }
        self.record_parts(end);
        let start = self.called;
        let span =
            Span::new(names::span::PREFILL, SpanKind::Server, Some(self.context.parent.span_id), start, end)
                .with_id(self.server)
                .with(names::BATON_REQUEST_ID, self.key.request.to_string())
                .with(names::ATTEMPT, self.key.attempt)
                .with(names::CACHED_TOKENS, self.cached_tokens)
                .of_call(prefill_server::SERVICE_NAME, "Prefill");
        self.recorder.record(failing(span, failure));
    }

    /// The queue and the chunks.
    fn record_parts(&mut self, end: Instant) {
        let opened = self.opened.map_or(end, |opened| self.clock.instant(opened));
        let (name, accepted) = (names::span::PREFILL_QUEUE, self.clock.instant(self.accepted));
        self.recorder.record(Span::new(name, SpanKind::Internal, Some(self.server), accepted, opened));
        for span in std::mem::take(&mut self.chunks).spans(self.server, opened, self.cached_tokens) {
            self.recorder.record(span);
        }
    }
}

fn failing(span: Span, failure: Option<&'static str>) -> Span {
    match failure {
        Some(cause) => span.with(names::ERROR_TYPE, cause).failed(cause),
        None => span,
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
        let failure = failure.filter(|_| !self.is_delivered);
        let span = Span::new(names::span::KV_SEND, SpanKind::Producer, Some(handoff), begun, ended)
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
        let committed = std::cell::Cell::new(None);
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
            spans.committing();
            committed.set(Some(Instant::now()));
            std::thread::sleep(ms(2));
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
        assert!(Some(handoff.end()) <= committed.get(), "the answer to the commit is not waited for");
        assert_eq!((int(transfer, names::KV_BYTES), int(transfer, names::KV_BLOCKS)), (Some(640), Some(5)));
        assert_eq!(transfer.attribute(names::KV_TRANSPORT), Some(&Value::from("shm")));
        assert_eq!(transfer.attribute(names::KV_CREDIT_WAIT_MS), Some(&Value::Float(4.0)));
    }

    #[test]
    fn a_router_that_hangs_up_behind_the_commit_is_no_failure_and_one_that_does_before_it_is() {
        for commits in [true, false] {
            let committed = std::cell::Cell::new(Instant::now());
            let spans = spans(|spans| {
                spans.opened(ms(0), 0);
                spans.offering();
                spans.sending(Transport::Shm, 5);
                spans.sent(Some(Instant::now()), ms(0));
                spans.told();
                if commits {
                    spans.committing();
                }
                committed.set(Instant::now());
                std::thread::sleep(ms(2));
                spans.handed_off(SentTotals::default(), Some("cancelled"));
            });
            for name in ["handoff", name::KV_SEND] {
                let [span] = of(&spans, name)[..] else { panic!("{spans:?}") };
                assert_eq!(span.failure(), (!commits).then_some("cancelled"));
                assert_eq!(span.end() <= committed.get(), commits, "{span:?}");
            }
        }
    }

    #[test]
    fn a_handoff_that_nobody_needs_ends_with_word_of_the_last_token() {
        let told = std::cell::Cell::new(None);
        let spans = spans(|spans| {
            spans.opened(ms(0), 0);
            spans.offering();
            spans.sending(Transport::Shm, 5);
            spans.sent(Some(Instant::now()), ms(0));
            spans.told();
            told.set(Some(Instant::now()));
            std::thread::sleep(ms(2));
            spans.handed_off(SentTotals::default(), None);
        });
        for name in ["handoff", name::KV_SEND] {
            let [span] = of(&spans, name)[..] else { panic!("{spans:?}") };
            assert!(Some(span.end()) <= told.get() && span.failure().is_none(), "{span:?}");
        }
    }

    #[test]
    fn what_was_computed_before_makes_no_chunk() {
        let spans = spans(|spans| {
            spans.opened(ms(0), 32);
            spans.computed(ms(1), ms(2), 32);
            spans.computed(ms(2), ms(3), 48);
            spans.told();
        });
        let chunks = of(&spans, name::PREFILL_CHUNK);
        assert_eq!((chunks.len(), int(chunks[0], names::TOKENS)), (1, Some(16)));
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
            assert_eq!(std::mem::take(&mut spans.chunks).spans([0; 8], Instant::now(), 0).count(), 0);
        }
        assert!(delivered.try_recv().is_err());
    }
}
