//! What a router counts.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::gauges::{Sample, Scraped, SourceSlot};
use super::spans::SpanMetrics;
use super::{Counter, Gauge, LateMessages, Seconds, TracedHistogram};
use crate::trace::Tracing;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    mode: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PlacementLabels {
    mode: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct SloLabels {
    slo: &'static str,
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
    open_breakers: SourceSlot,
    requests: Family<RequestLabels, Counter>,
    placements: Family<PlacementLabels, Counter>,
    slo: Family<SloLabels, Counter>,
    spans: SpanMetrics,
    /// Requests accepted and not yet ended.
    pub num_requests_in_flight: Gauge,
    /// Requests computed wholly on a decode worker although the cluster is disaggregated.
    pub local_fallbacks: Counter,
    /// Attempts that followed a failed one.
    pub retries: Counter,
    /// Attempts that went on behind delivered tokens, after a failure or a preemption.
    pub resumes: Counter,
    /// Attempts that went on with KV that an earlier one had computed.
    pub redirects: Counter,
    /// Requests of which at least one sequence was preempted.
    pub preempted_requests: Counter,
    /// Modelled seconds that running sequences would have been blocked by prompts in a colocated cluster.
    pub hol_avoided: Seconds,
    /// Traces that workers were asked to keep although they were not sampled.
    pub kept_traces: Counter,
    /// Traces that a worker could not be asked to keep.
    pub kept_traces_failed: Counter,
    /// Messages that no request had a use for.
    pub late_messages: LateMessages,
    /// Seconds that requests waited at the door for their first placement.
    pub queue: TracedHistogram,
    /// Seconds from the request's arrival to its first token.
    pub ttft: TracedHistogram,
    /// Seconds between consecutive tokens of a request.
    pub itl: TracedHistogram,
    /// Seconds per output token after the first, one observation per request.
    pub tpot: TracedHistogram,
    /// Seconds from the request's arrival to its end.
    pub e2e: TracedHistogram,
}

impl RouterMetrics {
    /// All counts at zero.
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let mut gauge = |name, help| {
            let (collector, slot) = Scraped::gauge(name, help);
            registry.register_collector(Box::new(collector));
            slot
        };
        let workers = gauge("baton_workers", "Workers by role and state, as this router sees them.");
        let open_breakers =
            gauge("baton_open_breakers", "Workers that get no requests because they kept failing them.");
        let spans = SpanMetrics::register(&mut registry);
        let mut metrics = Self {
            registry: Arc::default(),
            workers,
            spans,
            slo: Family::default(),
            hol_avoided: Seconds::default(),
            kept_traces: Counter::default(),
            kept_traces_failed: Counter::default(),
            queue: super::latency(),
            open_breakers,
            requests: Family::default(),
            placements: Family::default(),
            num_requests_in_flight: Gauge::default(),
            local_fallbacks: Counter::default(),
            retries: Counter::default(),
            resumes: Counter::default(),
            redirects: Counter::default(),
            preempted_requests: Counter::default(),
            late_messages: LateMessages::default(),
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
        let placements = self.placements.clone();
        registry.register("baton_placements", "Placements of attempts, by mode and reason", placements);
        let help = "Requests with a latency objective, by objective and whether they met it";
        registry.register("baton_slo", help, self.slo.clone());
        let help =
            "Modelled time that running sequences would have been blocked by prompts in a colocated cluster";
        registry.register("baton_hol_avoided_seconds", help, self.hol_avoided.clone());
        let counters = [
            (
                "baton_local_fallbacks",
                "Requests computed wholly on a decode worker for want of a prefill worker",
                &self.local_fallbacks,
            ),
            ("baton_retries", "Attempts that followed a failed one", &self.retries),
            ("baton_resumes", "Attempts that went on behind delivered tokens", &self.resumes),
            (
                "baton_redirects",
                "Attempts whose KV an earlier attempt had computed, sent to another decode worker",
                &self.redirects,
            ),
            (
                "baton_preempted_requests",
                "Requests of which at least one sequence was preempted",
                &self.preempted_requests,
            ),
            (
                "baton_kept_traces",
                "Traces that workers were asked to keep although they were not sampled",
                &self.kept_traces,
            ),
            (
                "baton_kept_traces_failed",
                "Traces that a worker could not be asked to keep",
                &self.kept_traces_failed,
            ),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        self.late_messages.register(registry);
        let histograms = [
            ("baton_queue_seconds", "Time that requests waited at the door", &self.queue),
            ("baton_ttft_seconds", "Time to first token", &self.ttft),
            ("baton_itl_seconds", "Time between consecutive tokens", &self.itl),
            ("baton_tpot_seconds", "Mean time per output token after the first, per request", &self.tpot),
            ("baton_e2e_seconds", "Duration of whole requests", &self.e2e),
        ];
        for (name, help, histogram) in histograms {
            registry.register(name, help, histogram.metric());
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

    /// Counts a placement: its mode, and why it is that one.
    pub fn placed(&self, mode: &'static str, reason: &'static str) {
        self.placements.get_or_create(&PlacementLabels { mode, reason }).inc();
    }

    /// How many placements came out so.
    pub fn num_placed(&self, mode: &'static str, reason: &'static str) -> u64 {
        self.placements.get_or_create(&PlacementLabels { mode, reason }).get()
    }

    /// Counts a request with a latency objective (`ttft` or `itl`): `met` or `missed`.
    pub fn slo(&self, slo: &'static str, outcome: &'static str) {
        self.slo.get_or_create(&SloLabels { slo, outcome }).inc();
    }

    /// Shows what became of this process's spans, if it traces.
    pub fn read_spans(&self, tracing: &Tracing) {
        self.spans.read(tracing);
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

    /// Workers whose circuit breaker is open, by role, are read through `counts` at each scrape; it must not block.
    pub fn read_open_breakers(&self, counts: impl Fn() -> Vec<(&'static str, u64)> + Send + Sync + 'static) {
        self.open_breakers.set(move || {
            counts().into_iter().map(|(role, num)| Sample::new(vec![("role", role)], num)).collect()
        });
    }

    /// OpenMetrics text of everything.
    pub fn encode(&self) -> String {
        super::encode(&self.registry)
    }

    /// Everything for a client with this `Accept` header: the content type, and text in the format that it reads.
    pub fn encode_for(&self, accept: Option<&str>) -> (&'static str, String) {
        super::encode_for(&self.registry, accept)
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
        metrics.resumes.inc();
        metrics.placed("disaggregated", "cost");
        let trace = crate::trace::TraceContext { trace_id: [0xab; 16], span_id: [1; 8], sampled: true };
        metrics.ttft.observe_traced(0.1, &trace);
        metrics.slo("ttft", "missed");
        metrics.hol_avoided.inc_by(0.25);
        metrics.read_spans(&Tracing::collecting(crate::trace::Sampler::default()).0);
        metrics.read_workers(|| vec![WorkerCount { role: "decode", state: "ready", num: 2 }]);
        metrics.read_open_breakers(|| vec![("decode", 1)]);
        metrics.late_messages.add("router", 3);
        let text = metrics.encode();
        for line in [
            "baton_requests_total{mode=\"disaggregated\",outcome=\"stop\"} 1",
            "baton_num_requests_in_flight 1",
            "baton_local_fallbacks_total 1",
            "baton_retries_total 0",
            "baton_resumes_total 1",
            "baton_redirects_total 0",
            "baton_preempted_requests_total 0",
            "baton_placements_total{mode=\"disaggregated\",reason=\"cost\"} 1",
            "baton_slo_total{slo=\"ttft\",outcome=\"missed\"} 1",
            "baton_hol_avoided_seconds_total 0.25",
            "baton_kept_traces_total 0",
            "baton_kept_traces_failed_total 0",
            "baton_spans_exported_total 0",
            "baton_span_exports_failed_total 0",
            "baton_spans_dropped_total{reason=\"queue_full\"} 0",
            "baton_spans_dropped_total{reason=\"not_kept\"} 0",
            "baton_queue_seconds_count 0",
            "baton_ttft_seconds_count 1",
            "baton_itl_seconds_count 0",
            "baton_tpot_seconds_count 0",
            "baton_e2e_seconds_count 0",
            "baton_workers{role=\"decode\",state=\"ready\"} 2",
            "baton_open_breakers{role=\"decode\"} 1",
            "baton_late_messages_total{where=\"router\"} 3",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
        let exemplar = format!("# {{trace_id=\"{}\"}} 0.1", "ab".repeat(16));
        assert!(text.lines().any(|line| line.contains(&exemplar)), "{exemplar} is missing in\n{text}");
    }
}
