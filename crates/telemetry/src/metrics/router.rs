//! What a router counts.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::gauges::{Sample, ScrapedGauge, SourceSlot};
use super::{Counter, Gauge, Histogram};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    mode: &'static str,
    outcome: &'static str,
}

/// Workers of one role in one state, as the router sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerCount {
    /// `prefill` or `decode`.
    pub role: &'static str,
    /// `ready`, `loading`, `draining`, `failed`, `unreachable` or `refused`.
    pub state: &'static str,
    /// How many.
    pub num: u64,
}

/// Metrics of one router process. Clones share the same counts.
#[derive(Clone)]
pub struct RouterMetrics {
    registry: Arc<Registry>,
    workers: SourceSlot,
    requests: Family<RequestLabels, Counter>,
    /// Requests accepted and not yet ended.
    pub num_requests_in_flight: Gauge,
    /// Requests computed wholly on a decode worker although the cluster is disaggregated.
    pub local_fallbacks: Counter,
    /// Seconds from the request's arrival to its first token.
    pub ttft: Histogram,
    /// Seconds between consecutive tokens of a request.
    pub itl: Histogram,
    /// Seconds per output token after the first, one observation per request.
    pub tpot: Histogram,
    /// Seconds from the request's arrival to its end.
    pub e2e: Histogram,
}

impl RouterMetrics {
    /// All counts at zero.
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let (collector, workers) =
            ScrapedGauge::new("baton_workers", "Workers by role and state, as this router sees them.");
        registry.register_collector(Box::new(collector));
        let mut metrics = Self {
            registry: Arc::default(),
            workers,
            requests: Family::default(),
            num_requests_in_flight: Gauge::default(),
            local_fallbacks: Counter::default(),
            ttft: super::latency(),
            itl: super::latency(),
            tpot: super::latency(),
            e2e: super::latency(),
        };
        metrics.register(&mut registry);
        metrics.registry = Arc::new(registry);
        metrics
    }

    fn register(&self, registry: &mut Registry) {
        let requests = self.requests.clone();
        registry.register("baton_requests", "Requests that ended, by mode and outcome", requests);
        let in_flight = self.num_requests_in_flight.clone();
        registry.register("baton_num_requests_in_flight", "Requests accepted and not yet ended", in_flight);
        registry.register(
            "baton_local_fallbacks",
            "Requests computed wholly on a decode worker for want of a prefill worker",
            self.local_fallbacks.clone(),
        );
        let histograms = [
            ("baton_ttft_seconds", "Time to first token", &self.ttft),
            ("baton_itl_seconds", "Time between consecutive tokens", &self.itl),
            ("baton_tpot_seconds", "Mean time per output token after the first, per request", &self.tpot),
            ("baton_e2e_seconds", "Duration of whole requests", &self.e2e),
        ];
        for (name, help, histogram) in histograms {
            registry.register(name, help, histogram.clone());
        }
    }

    /// Counts a request that ended: its mode (`none` when it was never placed), and `stop`, `length`,
    /// `cancelled`, or the name of what refused or failed it.
    pub fn request_ended(&self, mode: &'static str, outcome: &'static str) {
        self.requests.get_or_create(&RequestLabels { mode, outcome }).inc();
    }

    /// How many requests ended so.
    pub fn num_requests_ended(&self, mode: &'static str, outcome: &'static str) -> u64 {
        self.requests.get_or_create(&RequestLabels { mode, outcome }).get()
    }

    /// Workers are read through `counts` at each scrape; it must not block.
    pub fn read_workers(&self, counts: impl Fn() -> Vec<WorkerCount> + Send + Sync + 'static) {
        self.workers.set(move || {
            let sample = |count: WorkerCount| {
                Sample::new(vec![("role", count.role), ("state", count.state)], count.num)
            };
            counts().into_iter().map(sample).collect()
        });
    }

    /// OpenMetrics text of everything.
    pub fn encode(&self) -> String {
        super::encode(&self.registry)
    }
}

impl Default for RouterMetrics {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_documented_ones() {
        let metrics = RouterMetrics::new();
        metrics.request_ended("disaggregated", "stop");
        metrics.num_requests_in_flight.inc();
        metrics.local_fallbacks.inc();
        metrics.ttft.observe(0.1);
        metrics.read_workers(|| vec![WorkerCount { role: "decode", state: "ready", num: 2 }]);
        let text = metrics.encode();
        for line in [
            "baton_requests_total{mode=\"disaggregated\",outcome=\"stop\"} 1",
            "baton_num_requests_in_flight 1",
            "baton_local_fallbacks_total 1",
            "baton_ttft_seconds_count 1",
            "baton_itl_seconds_count 0",
            "baton_tpot_seconds_count 0",
            "baton_e2e_seconds_count 0",
            "baton_workers{role=\"decode\",state=\"ready\"} 2",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }
}
