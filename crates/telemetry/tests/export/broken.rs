//! Collectors that do not do their part: nobody waits for them, and what is lost is counted.

use std::time::{Duration, Instant};

use baton_telemetry::TelemetryError;
use baton_telemetry::trace::{Protocol, Span, SpanKind, Tracing, TracingConfig};

use crate::collector::{self, SERVICE};

/// What recording may take that waits for nothing, on a machine with other work.
const AT_ONCE: Duration = Duration::from_millis(500);

fn record(tracing: &Tracing, num_traces: usize) -> Duration {
    let start = Instant::now();
    for _ in 0..num_traces {
        let mut recorder = tracing.recorder(tracing.root(None));
        for _ in 0..25 {
            recorder
                .record(Span::new("s", SpanKind::Internal, None, start, start).with("baton.steps", 1_u64));
        }
    }
    start.elapsed()
}

/// Every span is somewhere.
fn accounted(tracing: &Tracing) -> u64 {
    let counts = tracing.counts();
    counts.exported + counts.dropped_queue_full + counts.dropped_export_failed + counts.dropped_shut_down
}

#[tokio::test]
async fn a_dead_collector_costs_spans_and_nothing_else() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let config = collector::config(&collector::dead().await, protocol);
        let (tracing, guard) = Tracing::start(config, SERVICE).expect("starts");
        assert!(record(&tracing, 40) < AT_ONCE);
        collector::eventually("a failed export", || tracing.counts().failed_exports > 0).await;
        assert!(record(&tracing, 40) < AT_ONCE);
        let start = Instant::now();
        guard.shutdown(Duration::from_secs(1)).await;
        assert!(start.elapsed() < Duration::from_millis(1500), "{:?}", start.elapsed());
        assert_eq!((accounted(&tracing), tracing.counts().exported), (2000, 0));
    }
}

#[tokio::test]
async fn a_hanging_collector_fills_the_queue_and_holds_up_neither_recording_nor_the_end() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let config = collector::config(&collector::hanging().await, protocol);
        let (tracing, guard) = Tracing::start(config, SERVICE).expect("starts");
        assert!(record(&tracing, 1) < AT_ONCE);
        // Until the exporter hangs in its first export.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let took = record(&tracing, 400);
        assert!(took < Duration::from_secs(2), "{took:?}");
        let dropped = tracing.counts().dropped_queue_full;
        assert!((10_000 - 4096 - 25..=10_000 - 4096 + 25).contains(&dropped), "{dropped}");
        let start = Instant::now();
        guard.shutdown(Duration::from_millis(500)).await;
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        collector::eventually("all spans accounted for", || accounted(&tracing) == 10_025).await;
        assert_eq!(tracing.counts().exported, 0);
    }
}

#[tokio::test]
async fn an_export_ends_with_its_timeout_and_the_next_one_is_tried() {
    let mut config = collector::config(&collector::hanging().await, Protocol::Grpc);
    config.timeout = Duration::from_millis(50);
    let (tracing, guard) = Tracing::start(config, SERVICE).expect("starts");
    record(&tracing, 1);
    collector::eventually("the first timeout", || tracing.counts().failed_exports == 1).await;
    record(&tracing, 1);
    collector::eventually("the second timeout", || tracing.counts().failed_exports == 2).await;
    guard.shutdown(Duration::from_secs(1)).await;
}

#[tokio::test]
async fn a_collector_that_closes_in_mid_export_costs_that_export_alone() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let mut received = match protocol {
            Protocol::Grpc => collector::grpc().await,
            Protocol::Http => collector::http().await,
        };
        let endpoint = collector::closing_first(&received.endpoint).await;
        let (tracing, guard) =
            Tracing::start(collector::config(&endpoint, protocol), SERVICE).expect("starts");
        record(&tracing, 1);
        collector::eventually("the end of the first export", || accounted(&tracing) == 25).await;
        record(&tracing, 2);
        collector::eventually("the end of the second", || accounted(&tracing) == 75).await;
        let (exported, mut num) = (tracing.counts().exported, 0);
        assert!(exported >= 50, "{:?}", tracing.counts());
        while num < exported {
            num += received.next().await.1.len() as u64;
        }
        assert_eq!(num, exported);
        guard.shutdown(Duration::from_secs(1)).await;
    }
}

#[tokio::test]
async fn a_file_that_can_not_be_opened_is_named() {
    let config = collector::config("unused", Protocol::Grpc);
    let folder = tempfile::tempdir().expect("a folder");
    let missing = folder.path().join("no/such/folder/spans.jsonl");
    let config = TracingConfig { collector: None, file: Some(missing.clone()), ..config };
    let error = Tracing::start(config, SERVICE).map(|_| ()).expect_err("no such folder");
    assert!(matches!(&error, TelemetryError::File { path, .. } if *path == missing), "{error}");
    assert!(error.to_string().contains("spans.jsonl"), "{error}");
}

#[tokio::test]
async fn spans_after_the_end_are_counted() {
    let config = collector::config(&collector::dead().await, Protocol::Grpc);
    let (tracing, guard) = Tracing::start(config, SERVICE).expect("starts");
    guard.shutdown(Duration::from_secs(1)).await;
    record(&tracing, 2);
    assert_eq!(tracing.counts().dropped_shut_down, 50);
}
