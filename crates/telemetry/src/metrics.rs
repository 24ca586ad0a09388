//! Metrics of workers and router, as Prometheus reads them.
//!
//! Handles are cheap to clone and lock-free to count with. What is a state rather than an event (blocks of the
//! pool, requests by stage) is read at scrape through a closure, so that nobody has to keep a gauge in step.

mod format;
mod gauges;
mod late;
mod profile;
mod router;
mod spans;
mod traced;
mod worker;

pub use prometheus_client::metrics::counter::Counter;
pub use prometheus_client::metrics::gauge::Gauge;
pub use prometheus_client::metrics::histogram::Histogram;

/// Counts seconds.
pub type Seconds = prometheus_client::metrics::counter::Counter<f64, std::sync::atomic::AtomicU64>;

pub use format::{OPEN_METRICS, PLAIN};
pub use late::LateMessages;
pub use profile::{STEP_SHARES, StepKindGauges};
pub use router::{RouterMetrics, WorkerCount};
pub use traced::TracedHistogram;
pub use worker::{BlockCounts, StageGauges, StepCostGauges, VllmGauges, WorkerMetrics};

fn encode(registry: &prometheus_client::registry::Registry) -> String {
    let mut text = String::new();
    // Writing to a String can't fail; a collector that did would only shorten the scrape.
    let _ = prometheus_client::encoding::text::encode(&mut text, registry);
    text
}

/// From 0.5 ms to about 65 s, by factors of about 1.6.
fn latency_buckets() -> impl Iterator<Item = f64> {
    prometheus_client::metrics::histogram::exponential_buckets_range(0.000_5, 65.0, 26)
}

/// From 10 us to about 10 s: steps and transfers.
fn fine_buckets() -> impl Iterator<Item = f64> {
    prometheus_client::metrics::histogram::exponential_buckets_range(0.000_01, 10.0, 25)
}

/// Content type and text for somebody who accepts this.
fn encode_for(
    registry: &prometheus_client::registry::Registry,
    accept: Option<&str>,
) -> (&'static str, String) {
    let open = encode(registry);
    match format::wants_open_metrics(accept) {
        true => (OPEN_METRICS, open),
        false => (PLAIN, format::plain(&open)),
    }
}

fn latency() -> TracedHistogram {
    TracedHistogram::new(latency_buckets())
}

fn fine() -> TracedHistogram {
    TracedHistogram::new(fine_buckets())
}
