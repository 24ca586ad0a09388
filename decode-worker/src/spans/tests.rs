use baton_handoff::RequestId;
use baton_telemetry::StallCause;
use baton_telemetry::names::span as name;
use baton_telemetry::trace::{Finished, Sampler, Value, after};
use baton_worker::Owner;

use super::*;
use crate::kv_cost::Waits;

const fn ms(n: u64) -> Time {
    Duration::from_millis(n)
}

fn context(span: u8) -> TraceContext {
    TraceContext { trace_id: [7; 16], span_id: [span; 8], sampled: true }
}

const PARENT: [u8; 8] = [1; 8];
const ROOT: [u8; 8] = [2; 8];
const RESERVE: [u8; 8] = [3; 8];

fn called(reserve: [u8; 8]) -> Called {
    let key = HandoffKey { request: RequestId([9; 16]), group: 0, attempt: 1 };
    Called { call: Some(CallContext { parent: context(1), root: ROOT, reserve }), key, accepted: ms(100) }
}

/// What the leg records, and the clock of its times.
fn record(called: Called, leg: impl FnOnce(&mut LegSpans)) -> (Vec<Span>, Clock) {
    let (tracing, mut finished) = Tracing::collecting(Sampler::default());
    let clock = Clock::start();
    let mut spans = LegSpans::new(&tracing, clock, called);
    leg(&mut spans);
    drop(spans);
    let spans = finished.try_recv().unwrap_or_default();
    assert!(spans.iter().all(|of: &Finished| of.trace_id == [7; 16]));
    (spans.into_iter().map(|of| of.span).collect(), clock)
}

fn one<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let found: Vec<&Span> = spans.iter().filter(|span| span.name() == name).collect();
    assert_eq!(found.len(), 1, "{name}");
    found[0]
}

fn millis(span: &Span, clock: Clock) -> (u128, u128) {
    (clock.at(span.start()).as_millis(), clock.at(span.end()).as_millis())
}

fn number(span: &Span, name: &str) -> f64 {
    match span.attribute(name) {
        Some(Value::Float(value)) => *value,
        Some(Value::Int(value)) => *value as f64,
        other => panic!("{name} is {other:?}"),
    }
}

fn stall(sequence: u32, from: u64, blocked: u64) -> Stall {
    let blocker = Some(Owner { request: RequestId([4; 16]), trace: Some(context(6)) });
    let (from, to) = (ms(from), ms(from + blocked + 10));
    Stall { sequence, from, to, cause: StallCause::LocalPrefill, blocked: ms(blocked), blocker }
}

fn marks() -> Marks {
    Marks {
        first_frame: Some(ms(120)),
        noticed: Some(ms(200)),
        boundary: Some(ms(210)),
        verified: Some(ms(250)),
        wire: ms(90),
        bytes: 4096,
        frames: 3,
        ..Marks::default()
    }
}

#[test]
fn a_handed_off_leg_has_its_spans_where_they_belong_and_none_touches_the_next() {
    let marks = marks();
    let (spans, clock) = record(called(RESERVE), |spans| {
        spans.registered(ms(105));
        spans.sent_by(Some(context(5)));
        spans.begin(ms(200));
        spans.received(&marks, None);
        spans.run_received(ms(262), &marks, &marks.cost(ms(262), &Waits::default()));
        spans.stall(&stall(0, 300, 40));
        let stats = RunStats { steps: 12, batch_max: 3, itl_p50: ms(7), ..RunStats::default() };
        spans.ran(0, ms(400), &stats);
        spans.end(ms(401), Cause::Duplicate);
    });
    assert_eq!(spans.len(), 8);
    let decode = one(&spans, "decode");
    let run = one(&spans, name::DECODE_RUN);
    let wanted = [
        ("reserve", SpanKind::Server, RESERVE, (100, 105)),
        (name::KV_RECV, SpanKind::Consumer, [5; 8], (120, 250)),
        ("decode", SpanKind::Server, PARENT, (200, 401)),
        (name::DECODE_QUEUE, SpanKind::Internal, decode.id(), (200, 210)),
        (name::KV_WAIT, SpanKind::Internal, decode.id(), (210, 250)),
        (name::DECODE_COMMIT, SpanKind::Internal, decode.id(), (250, 262)),
        (name::DECODE_RUN, SpanKind::Internal, decode.id(), (262, 400)),
        (name::DECODE_STALL, SpanKind::Internal, run.id(), (300, 350)),
    ];
    for (name, kind, parent, times) in wanted {
        let span = one(&spans, name);
        assert_eq!((span.kind(), span.parent(), span.failure()), (kind, Some(parent), None), "{name}");
        assert_eq!(millis(span, clock), times, "{name}");
    }
    let chain = [name::DECODE_QUEUE, name::KV_WAIT, name::DECODE_COMMIT, name::DECODE_RUN];
    for pair in chain.windows(2) {
        let [before, next] = [pair[0], pair[1]].map(|name| one(&spans, name));
        assert_eq!(next.start(), after(before.end()), "{} and {}", before.name(), next.name());
    }
    let wait = one(&spans, name::KV_WAIT);
    assert_eq!((number(wait, names::KV_EXPOSED_MS), number(wait, names::KV_WIRE_MS)), (40.0, 40.0));
    assert_eq!(number(one(&spans, name::KV_RECV), names::KV_BYTES), 4096.0);
    assert_eq!((number(run, names::STEPS), number(run, names::ITL_P50_MS)), (12.0, 7.0));
    let stall = one(&spans, name::DECODE_STALL);
    assert_eq!(stall.links(), [context(6)]);
    assert_eq!(stall.attribute(names::STALL_CAUSE), Some(&Value::from("local_prefill")));
    assert_eq!(stall.attribute(names::STALL_BLOCKER), Some(&Value::from("04".repeat(16))));
}

#[test]
fn what_was_hidden_has_no_wait_and_a_source_of_another_trace_is_no_parent() {
    let marks = Marks { verified: Some(ms(190)), ..marks() };
    let (spans, _) = record(called([0; 8]), |spans| {
        spans.registered(ms(105));
        spans.sent_by(Some(TraceContext { trace_id: [8; 16], ..context(5) }));
        spans.begin(ms(200));
        spans.received(&marks, None);
        spans.run_received(ms(212), &marks, &marks.cost(ms(212), &Waits::default()));
        spans.ran(0, ms(300), &RunStats::default());
        spans.end(ms(300), Cause::Duplicate);
    });
    let names: Vec<&str> = spans.iter().map(Span::name).collect();
    assert_eq!(names, [name::KV_RECV, name::DECODE_QUEUE, name::DECODE_COMMIT, name::DECODE_RUN, "decode"]);
    assert_eq!(spans[0].parent(), Some(ROOT));
}

#[test]
fn a_local_leg_shows_its_prompt() {
    let (spans, clock) = record(called([0; 8]), |spans| {
        spans.begin(ms(100));
        spans.chunk((ms(130), ms(140)), 48);
        spans.chunk((ms(140), ms(160)), 70);
        spans.run_computed(ms(160), ms(130), 16);
        // Computed again after it gave up its blocks: that is a stall, and no prefill.
        spans.chunk((ms(170), ms(180)), 70);
        for sequence in [0, 1] {
            spans.ran(sequence, ms(190), &RunStats::default());
        }
        spans.end(ms(190), Cause::Duplicate);
    });
    let decode = one(&spans, "decode");
    assert_eq!(millis(one(&spans, name::PREFILL_QUEUE), clock), (100, 130));
    let chunks: Vec<&Span> = spans.iter().filter(|span| span.name() == name::PREFILL_CHUNK).collect();
    let told =
        |chunk: &Span| (millis(chunk, clock), number(chunk, names::TOKENS), number(chunk, names::CONTEXT));
    assert_eq!(told(chunks[0]), ((130, 140), 32.0, 16.0));
    assert_eq!(told(chunks[1]), ((140, 160), 22.0, 48.0));
    assert!(chunks.len() == 2 && chunks[0].end() < chunks[1].start());
    assert_eq!(number(chunks[0], names::CACHED_TOKENS), 16.0);
    let runs: Vec<&Span> = spans.iter().filter(|span| span.name() == name::DECODE_RUN).collect();
    assert!(runs.len() == 2 && runs.iter().all(|run| run.start() > chunks[1].end()));
    assert!(spans.iter().filter(|span| span.id() != decode.id()).all(|s| s.parent() == Some(decode.id())));
    assert!(spans.iter().all(|span| span.start() >= decode.start() && span.end() <= decode.end()));
}

#[test]
fn of_many_stalls_the_longest_of_each_sequence_are_shown() {
    let (spans, _) = record(called([0; 8]), |spans| {
        spans.begin(ms(100));
        spans.run_computed(ms(110), ms(100), 0);
        for n in 0..40 {
            spans.stall(&stall(0, 200 + n, 20 + (n * 7) % 40));
            if n < 3 {
                spans.stall(&stall(1, 200 + n, 20));
            }
        }
        spans.ran(0, ms(900), &RunStats::default());
        spans.ran(1, ms(900), &RunStats::default());
        spans.end(ms(900), Cause::Duplicate);
    });
    let of = |run: &Span| {
        let stalls = spans.iter().filter(|span| span.parent() == Some(run.id()));
        let mut blocked: Vec<u64> = stalls.map(|span| number(span, names::STALL_BLOCKED_MS) as u64).collect();
        blocked.sort_unstable();
        blocked
    };
    let runs: Vec<&Span> = spans.iter().filter(|span| span.name() == name::DECODE_RUN).collect();
    assert_eq!(of(runs[0]), (44..60).collect::<Vec<u64>>());
    assert_eq!(of(runs[1]), [20; 3]);
}

/// Sixteen sequences with sixteen stalls each are more than a recorder holds: what they lie below is in it all the same.
#[test]
fn however_many_sequences_stall_nothing_is_left_without_its_parent() {
    let (spans, _) = record(called(RESERVE), |spans| {
        spans.registered(ms(100));
        spans.begin(ms(100));
        for n in 0..16 {
            spans.chunk((ms(100 + n), ms(101 + n)), 16 * (n as usize + 1));
        }
        spans.run_computed(ms(120), ms(100), 0);
        for sequence in 0..16 {
            for n in 0..16 {
                spans.stall(&stall(sequence, 200 + 50 * n, 20 + n));
            }
        }
        for sequence in 0..16 {
            spans.ran(sequence, ms(2_000), &RunStats::default());
        }
        spans.end(ms(2_000), Cause::Duplicate);
    });
    let decode = one(&spans, name::DECODE);
    let runs: Vec<&Span> = spans.iter().filter(|span| span.name() == name::DECODE_RUN).collect();
    assert_eq!(runs.len(), 16);
    assert!(runs.iter().all(|run| run.parent() == Some(decode.id())));
    let stalls: Vec<&Span> = spans.iter().filter(|span| span.name() == name::DECODE_STALL).collect();
    assert!(stalls.iter().all(|stall| runs.iter().any(|run| stall.parent() == Some(run.id()))));
    // The four longest of each.
    assert_eq!(stalls.len(), 64);
    assert!(stalls.iter().all(|stall| number(stall, names::STALL_BLOCKED_MS) >= 32.0));
}

#[test]
fn a_failed_leg_says_so_and_one_that_could_never_go_on_has_no_decode() {
    let failed = |begun: bool| {
        let marks = Marks { verified: Some(ms(130)), ..marks() };
        record(called([0; 8]), |spans| {
            if begun {
                spans.begin(ms(200));
            }
            spans.received(&marks, Some(Cause::PeerLost));
            spans.ran(0, ms(300), &RunStats::default());
            spans.end(ms(300), Cause::PeerLost);
        })
        .0
    };
    let spans = failed(true);
    assert_eq!(spans.iter().map(Span::name).collect::<Vec<_>>(), [name::KV_RECV, "decode"]);
    for span in &spans {
        assert_eq!(span.attribute(names::ERROR_TYPE), Some(&Value::from(Cause::PeerLost.name())));
        assert!(span.failure().is_some());
    }
    assert_eq!(failed(false).iter().map(Span::name).collect::<Vec<_>>(), [name::KV_RECV]);
}

#[test]
fn without_tracing_or_without_a_caller_that_traces_nothing_is_recorded() {
    let leg = |spans: &mut LegSpans| {
        assert_eq!(spans.served_by(), None);
        spans.registered(ms(105));
        spans.begin(ms(200));
        spans.chunk((ms(200), ms(210)), 16);
        spans.received(&marks(), None);
        spans.run_received(ms(250), &marks(), &marks().cost(ms(250), &Waits::default()));
        spans.stall(&stall(0, 300, 40));
        spans.ran(0, ms(400), &RunStats::default());
        spans.end(ms(401), Cause::PeerLost);
    };
    assert!(record(Called { call: None, ..called(RESERVE) }, leg).0.is_empty());
    let mut off = LegSpans::new(&Tracing::off(), Clock::start(), called(RESERVE));
    leg(&mut off);
    assert!(off.stalls.is_empty() && off.id == [0; 8]);
}
