//! The switch: whether this process traces, and where finished spans go.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use tokio::sync::mpsc;

use super::config::MAX_QUEUED;
use super::waiting::Waiting;
use super::{Recorder, Span, TraceContext, new_span_id, new_trace_id};

/// A finished span and its trace.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The trace.
    pub trace_id: [u8; 16],
    /// Whether the caller's decision was to sample it.
    pub sampled: bool,
    /// The span.
    pub span: Span,
}

/// Spans counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanCounts {
    /// A collector or a file took them.
    pub exported: u64,
    /// The queue to the exporter was full.
    pub dropped_queue_full: u64,
    /// They waited for a decision to keep them, and none came.
    pub dropped_not_kept: u64,
    /// They had to make room for others that wait for a decision.
    pub dropped_store_full: u64,
    /// Their recorder had as many as it may.
    pub dropped_over_limit: u64,
    /// An export failed.
    pub dropped_export_failed: u64,
    /// They came after the exporter had ended.
    pub dropped_shut_down: u64,
    /// Exports that failed, of several spans each.
    pub failed_exports: u64,
}

/// The same, while it counts.
#[derive(Debug, Default)]
pub(super) struct Counts {
    exported: AtomicU64,
    queue_full: AtomicU64,
    not_kept: AtomicU64,
    store_full: AtomicU64,
    over_limit: AtomicU64,
    export_failed: AtomicU64,
    shut_down: AtomicU64,
    failed_exports: AtomicU64,
}

fn add(counter: &AtomicU64, num: usize) {
    counter.fetch_add(num as u64, Ordering::Relaxed);
}

impl Counts {
    pub(super) fn over_limit(&self, num: usize) {
        add(&self.over_limit, num);
    }

    pub(super) fn exported(&self, num: usize) {
        add(&self.exported, num);
    }

    pub(super) fn export_failed(&self, num: usize) {
        add(&self.export_failed, num);
        add(&self.failed_exports, 1);
    }

    pub(super) fn read(&self) -> SpanCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SpanCounts {
            exported: of(&self.exported),
            dropped_queue_full: of(&self.queue_full),
            dropped_not_kept: of(&self.not_kept),
            dropped_store_full: of(&self.store_full),
            dropped_over_limit: of(&self.over_limit),
            dropped_export_failed: of(&self.export_failed),
            dropped_shut_down: of(&self.shut_down),
            failed_exports: of(&self.failed_exports),
        }
    }
}

/// Which traces without a caller's decision are sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// Whether a caller's own decision counts.
    pub parent_based: bool,
    /// Of those without one: 0 to 1.
    pub ratio: f64,
}

impl Default for Sampler {
    fn default() -> Self {
        Self { parent_based: true, ratio: 1.0 }
    }
}

impl Sampler {
    fn samples(&self, trace_id: [u8; 16], caller: Option<TraceContext>) -> bool {
        if let Some(caller) = caller.filter(|_| self.parent_based) {
            return caller.sampled;
        }
        let [.., a, b, c, d, e, f, g, h] = trace_id;
        // 63 bits of the id, as OpenTelemetry does, so that all who see one trace with one ratio agree.
        let drawn = u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 1;
        (drawn as f64) < self.ratio * (1_u64 << 63) as f64
    }
}

/// Where finished spans of this process go. Cheap to clone; off by default.
#[derive(Clone, Default)]
pub struct Tracing(Option<Arc<Shared>>);

pub(super) struct Shared {
    sampler: Sampler,
    queue: mpsc::Sender<Vec<Finished>>,
    max_queued: usize,
    /// Spans in the queue.
    num_queued: AtomicUsize,
    waiting: Mutex<Waiting>,
    counts: Counts,
    instance: OnceLock<String>,
}

impl Tracing {
    /// Records nothing.
    pub const fn off() -> Self {
        Self(None)
    }

    /// Whether spans go anywhere.
    pub const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// For tests: spans end up in the receiver instead of a collector, in the batches in which recorders gave them.
    pub fn collecting(sampler: Sampler) -> (Self, mpsc::Receiver<Vec<Finished>>) {
        let (tracing, queue, _) = Self::open(sampler, MAX_QUEUED);
        (tracing, queue)
    }

    pub(super) fn open(
        sampler: Sampler,
        max_queued: usize,
    ) -> (Self, mpsc::Receiver<Vec<Finished>>, Arc<Shared>) {
        let (queue, queued) = mpsc::channel(max_queued);
        let shared = Arc::new(Shared {
            sampler,
            queue,
            max_queued,
            num_queued: AtomicUsize::new(0),
            waiting: Mutex::default(),
            counts: Counts::default(),
            instance: OnceLock::new(),
        });
        (Self(Some(Arc::clone(&shared))), queued, shared)
    }

    /// Trace and id of a request's root span: of the caller's trace if there is one. Whether it is sampled is decided here.
    pub fn root(&self, caller: Option<TraceContext>) -> TraceContext {
        let trace_id = caller.map_or_else(new_trace_id, |caller| caller.trace_id);
        let sampled = match &self.0 {
            Some(shared) => shared.sampler.samples(trace_id, caller),
            // Who traces behind this process goes by its caller's decision.
            None => caller.is_some_and(|caller| caller.sampled),
        };
        TraceContext { trace_id, span_id: new_span_id(), sampled }
    }

    /// For the spans of one request in this process.
    pub fn recorder(&self, trace: TraceContext) -> Recorder {
        match &self.0 {
            Some(shared) => Recorder::new(Arc::clone(shared), trace),
            None => Recorder::default(),
        }
    }

    /// A router decided to keep these traces: what waits of them is exported, and what comes later too.
    pub fn keep(&self, trace_ids: &[[u8; 16]]) {
        let Some(shared) = &self.0 else { return };
        for trace_id in trace_ids {
            let spans = shared.waiting().keep(*trace_id, Instant::now());
            shared.enqueue(TraceContext { trace_id: *trace_id, span_id: [0; 8], sampled: false }, spans);
        }
    }

    /// Says which process this is, before its first span: the instance id that other processes know it by.
    pub fn identify(&self, instance: &str) {
        if let Some(shared) = &self.0 {
            // The first name stays: a process is one instance.
            let _ = shared.instance.set(instance.to_owned());
        }
    }

    /// What became of spans so far.
    pub fn counts(&self) -> SpanCounts {
        self.0.as_ref().map_or_else(SpanCounts::default, |shared| shared.counts.read())
    }
}

impl std::fmt::Debug for Tracing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracing").field("is_on", &self.is_on()).finish()
    }
}

impl Shared {
    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Waiting> {
        // It is whole between calls.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn finish(&self, trace: TraceContext, spans: Vec<Span>, kept: bool) {
        if spans.is_empty() {
            return;
        }
        if trace.sampled || kept {
            return self.enqueue(trace, spans);
        }
        let put = self.waiting().put(trace.trace_id, spans, Instant::now());
        add(&self.counts.not_kept, put.num_expired);
        add(&self.counts.store_full, put.num_evicted);
        if let Some(spans) = put.wanted {
            self.enqueue(trace, spans);
        }
    }

    fn enqueue(&self, trace: TraceContext, spans: Vec<Span>) {
        let num = spans.len();
        if num == 0 {
            return;
        }
        if self.num_queued.fetch_add(num, Ordering::Relaxed) + num > self.max_queued {
            self.num_queued.fetch_sub(num, Ordering::Relaxed);
            add(&self.counts.queue_full, num);
            return;
        }
        let TraceContext { trace_id, sampled, .. } = trace;
        let finished = spans.into_iter().map(|span| Finished { trace_id, sampled, span }).collect();
        if let Err(error) = self.queue.try_send(finished) {
            self.num_queued.fetch_sub(num, Ordering::Relaxed);
            let counter = match error {
                mpsc::error::TrySendError::Full(_) => &self.counts.queue_full,
                mpsc::error::TrySendError::Closed(_) => &self.counts.shut_down,
            };
            add(counter, num);
        }
    }

    /// Lets go of spans that waited too long for a decision.
    pub(super) fn expire(&self, now: Instant) {
        let num_expired = self.waiting().expire(now);
        add(&self.counts.not_kept, num_expired);
    }

    /// The exporter took this many out of the queue.
    pub(super) fn dequeued(&self, num: usize) {
        self.num_queued.fetch_sub(num, Ordering::Relaxed);
    }

    pub(super) fn instance(&self) -> Option<&str> {
        self.instance.get().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{MAX_SPANS, SpanKind};

    fn span() -> Span {
        let now = Instant::now();
        Span::new("s", SpanKind::Internal, None, now, now)
    }

    fn none_sampled() -> Sampler {
        Sampler { parent_based: true, ratio: 0.0 }
    }

    fn num_received(queue: &mut mpsc::Receiver<Vec<Finished>>) -> usize {
        std::iter::from_fn(|| queue.try_recv().ok()).map(|finished| finished.len()).sum()
    }

    #[test]
    fn the_ratio_is_kept_and_a_callers_decision_counts() {
        let num_sampled = |ratio| {
            let (tracing, _queue) = Tracing::collecting(Sampler { parent_based: true, ratio });
            (0..10_000).filter(|_| tracing.root(None).sampled).count()
        };
        assert_eq!((num_sampled(0.0), num_sampled(1.0)), (0, 10_000));
        assert!((2_700..3_300).contains(&num_sampled(0.3)));

        let caller = |sampled| TraceContext { trace_id: [7; 16], span_id: [8; 8], sampled };
        for (parent_based, ratio, sampled, expected) in [
            (true, 0.0, true, true),
            (true, 1.0, false, false),
            (false, 0.0, true, false),
            (false, 1.0, false, true),
        ] {
            let (tracing, _queue) = Tracing::collecting(Sampler { parent_based, ratio });
            let root = tracing.root(Some(caller(sampled)));
            assert_eq!((root.trace_id, root.sampled), ([7; 16], expected));
            assert_ne!(root.span_id, [8; 8]);
        }
        assert!(Tracing::off().root(Some(caller(true))).sampled && !Tracing::off().root(None).sampled);
    }

    #[test]
    fn sampled_and_kept_recorders_deliver_and_others_wait() {
        let (tracing, mut queue) = Tracing::collecting(none_sampled());
        let trace = tracing.root(None);
        let mut recorder = tracing.recorder(trace);
        recorder.record(span());
        drop(recorder);
        assert_eq!(num_received(&mut queue), 0);
        tracing.keep(&[trace.trace_id]);
        assert_eq!(num_received(&mut queue), 1);
        let mut late = tracing.recorder(trace);
        late.record(span());
        drop(late);
        assert_eq!(num_received(&mut queue), 1, "spans of a trace that is kept follow");

        let mut recorder = tracing.recorder(tracing.root(None));
        recorder.record(span());
        assert!(recorder.is_on() && !recorder.is_sampled());
        recorder.keep();
        assert!(recorder.is_sampled());
        drop(recorder);
        assert_eq!(num_received(&mut queue), 1);

        let mut recorder = tracing.recorder(TraceContext { sampled: true, ..tracing.root(None) });
        recorder.record(span());
        drop(recorder);
        assert_eq!(num_received(&mut queue), 1);
    }

    #[test]
    fn a_recorder_and_the_queue_are_bounded_and_say_what_they_dropped() {
        let (tracing, mut queue) = Tracing::collecting(Sampler::default());
        let mut recorder = tracing.recorder(tracing.root(None));
        for _ in 0..MAX_SPANS + 5 {
            recorder.record(span());
        }
        drop(recorder);
        assert_eq!(num_received(&mut queue), MAX_SPANS);
        assert_eq!(tracing.counts().dropped_over_limit, 5);

        // The receiver of a test does not tell that it took something, so those above still count.
        for _ in 0..MAX_QUEUED + 100 {
            let mut recorder = tracing.recorder(tracing.root(None));
            recorder.record(span());
        }
        assert_eq!(tracing.counts().dropped_queue_full, (100 + MAX_SPANS) as u64);
        drop(queue);
        let (tracing, queue) = Tracing::collecting(Sampler::default());
        drop(queue);
        tracing.recorder(tracing.root(None)).record(span());
        assert_eq!(tracing.counts().dropped_shut_down, 1);
    }

    #[test]
    fn without_tracing_nothing_is_held() {
        let mut recorder = Tracing::off().recorder(Tracing::off().root(None));
        recorder.record(span());
        recorder.keep();
        assert!(!recorder.is_on() && !recorder.is_sampled());
        assert_eq!(recorder.trace().trace_id, [0; 16]);
        assert_eq!(Tracing::off().counts(), SpanCounts::default());
    }
}
