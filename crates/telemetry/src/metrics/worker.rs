//! What a worker counts.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::gauges::{Sample, Scraped, SourceSlot};
use super::profile::StepKindGauges;
use super::spans::SpanMetrics;
use super::{Counter, LateMessages, Seconds, TracedHistogram};
use crate::scrape::{
    BLOCKS_CONFIGURED, PART, STEP_COST, STEP_COST_RESIDUAL, STEP_PROFILE, STEP_PROFILE_RATIO,
};
use crate::trace::Tracing;

const VLLM_RUNNING: &str = "vllm:num_requests_running";
const VLLM_WAITING: &str = "vllm:num_requests_waiting";
const VLLM_KV_USAGE: &str = "vllm:kv_cache_usage_perc";

/// Blocks of the pool by state; `free + cached + held + draining = total` always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// On the free list.
    pub free: u64,
    /// Only in the prefix cache: free after eviction.
    pub cached: u64,
    /// Held by sequences.
    pub held: u64,
    /// Given back but still pinned by a lease.
    pub draining: u64,
    /// All blocks of the pool.
    pub total: u64,
}

/// Sequences by stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageGauges {
    /// Accepted, nothing computed.
    pub waiting: u64,
    /// Prompt partly computed.
    pub prefilling: u64,
    /// Prompt computed; a prefill worker keeps the blocks until the handoff is done.
    pub held: u64,
    /// A decode worker's blocks are reserved or being written.
    pub receiving: u64,
    /// Decoding.
    pub running: u64,
}

/// What a step is expected to cost: `fixed_s + per_token_s * tokens + per_context_token_s * context`, where context is, summed over all new tokens,
/// the number of tokens each attends over.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCostGauges {
    /// Seconds of every step.
    pub fixed_s: f64,
    /// Seconds of a new token.
    pub per_token_s: f64,
    /// Seconds of one token that a new one attends over.
    pub per_context_token_s: f64,
    /// Mean of |expected - measured| / measured over recent steps.
    pub residual: f64,
}

/// What is also shown under the names that vLLM gives it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VllmGauges {
    /// Sequences that are computed.
    pub running: u64,
    /// Sequences that wait.
    pub waiting: u64,
    /// Share of the blocks in use, 0 to 1.
    pub kv_usage: f64,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Cause {
    cause: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

/// Metrics of one worker process. Clones share the same counts.
#[derive(Clone)]
pub struct WorkerMetrics {
    registry: Arc<Registry>,
    blocks: SourceSlot,
    blocks_configured: SourceSlot,
    requests: SourceSlot,
    step_cost: SourceSlot,
    step_cost_residual: SourceSlot,
    step_profile: SourceSlot,
    step_profile_ratio: SourceSlot,
    vllm_running: SourceSlot,
    vllm_waiting: SourceSlot,
    vllm_kv_usage: SourceSlot,
    spans: SpanMetrics,
    handoffs: Family<Outcome, Counter>,
    stalls: Family<Cause, Counter>,
    blocked: Family<Cause, Seconds>,
    /// Prompt tokens run through the model here.
    pub prompt_tokens_computed: Counter,
    /// Leading prompt tokens found in the prefix cache: not computed on a prefill worker or by a local run, not transferred to a
    /// decode worker.
    pub prefix_hit_tokens: Counter,
    /// Tokens sampled here.
    pub generated_tokens: Counter,
    /// Sequences that began as a fork of another one's prompt.
    pub forks: Counter,
    /// Shared blocks that were copied because one of their holders wrote.
    pub block_copies: Counter,
    /// Steps that computed some layers of a newcomer's row.
    pub row_parts: Counter,
    /// Sequences that gave up their blocks to others.
    pub preemptions: Counter,
    /// Those of them that left to be resumed elsewhere.
    pub preempted_gone: Counter,
    /// KV payload bytes handed to the transport, resends included.
    pub kv_sent_bytes: Counter,
    /// KV payload bytes received and verified.
    pub kv_received_bytes: Counter,
    /// Frames whose checksum was wrong.
    pub kv_frames_corrupt: Counter,
    /// Frames sent a second time.
    pub kv_frames_resent: Counter,
    /// Messages and KV frames that no handoff had a use for.
    pub late_messages: LateMessages,
    /// Modelled seconds that sequences that ran here would have been blocked by prompts that others computed.
    pub hol_avoided: Seconds,
    /// Seconds from a prompt's acceptance to its first step.
    pub queue: TracedHistogram,
    /// Seconds of one engine step.
    pub step_duration: TracedHistogram,
    /// Seconds of transfer that a client waited for.
    pub kv_exposed: TracedHistogram,
    /// Seconds of transfer that went by while the prompt was still computed.
    pub kv_hidden: TracedHistogram,
    /// Seconds of whole transfers.
    pub kv_transfer: TracedHistogram,
}

impl WorkerMetrics {
    /// All counts at zero.
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let mut gauge = |name, help| {
            let (collector, slot) = Scraped::gauge(name, help);
            registry.register_collector(Box::new(collector));
            slot
        };
        let mut metrics = Self {
            blocks: gauge("baton_blocks", "Blocks of the KV pool by state."),
            blocks_configured: gauge(BLOCKS_CONFIGURED, "Blocks of the KV pool."),
            requests: gauge("baton_num_requests", "Sequences by stage."),
            step_cost: gauge(
                STEP_COST,
                "Seconds of a step, of each of its tokens and of each token attended over, as fitted.",
            ),
            step_cost_residual: gauge(
                STEP_COST_RESIDUAL,
                "How far off the fitted cost is, as a share of a step.",
            ),
            step_profile: gauge(
                STEP_PROFILE,
                "Seconds of a turn with a step of this kind, of each of its tokens and of each token attended over.",
            ),
            step_profile_ratio: gauge(
                STEP_PROFILE_RATIO,
                "How many times its expected time a share of the steps of this kind takes at most.",
            ),
            vllm_running: gauge(VLLM_RUNNING, "Sequences that are computed."),
            vllm_waiting: gauge(VLLM_WAITING, "Sequences that wait."),
            vllm_kv_usage: gauge(VLLM_KV_USAGE, "Share of the KV blocks in use; 1 is all."),
            spans: SpanMetrics::register(&mut registry),
            registry: Arc::default(),
            handoffs: Family::default(),
            stalls: Family::default(),
            blocked: Family::default(),
            hol_avoided: Seconds::default(),
            queue: super::latency(),
            kv_hidden: super::fine(),
            prompt_tokens_computed: Counter::default(),
            prefix_hit_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            forks: Counter::default(),
            block_copies: Counter::default(),
            row_parts: Counter::default(),
            preemptions: Counter::default(),
            preempted_gone: Counter::default(),
            kv_sent_bytes: Counter::default(),
            kv_received_bytes: Counter::default(),
            kv_frames_corrupt: Counter::default(),
            kv_frames_resent: Counter::default(),
            late_messages: LateMessages::default(),
            step_duration: super::fine(),
            kv_exposed: super::fine(),
            kv_transfer: super::fine(),
        };
        metrics.register(&mut registry);
        metrics.registry = Arc::new(registry);
        metrics
    }

    fn register(&self, registry: &mut Registry) {
        let (computed, hits) = (&self.prompt_tokens_computed, &self.prefix_hit_tokens);
        let counters = [
            ("baton_prompt_tokens_computed", "Prompt tokens run through the model here", computed),
            ("baton_prefix_hit_tokens", "Prompt tokens found in the prefix cache", hits),
            ("baton_generated_tokens", "Tokens sampled here", &self.generated_tokens),
            ("baton_forks", "Sequences forked from another one's prompt", &self.forks),
            ("baton_block_copies", "Shared blocks copied before a write", &self.block_copies),
            ("baton_row_parts", "Steps that computed some layers of a long newcomer's row", &self.row_parts),
            ("baton_preemptions", "Sequences that gave up their blocks", &self.preemptions),
            ("baton_preempted_gone", "Preempted sequences that left this worker", &self.preempted_gone),
            ("baton_kv_sent_bytes", "KV payload bytes sent, resends included", &self.kv_sent_bytes),
            ("baton_kv_received_bytes", "KV payload bytes received and verified", &self.kv_received_bytes),
            ("baton_kv_frames_corrupt", "KV frames whose checksum was wrong", &self.kv_frames_corrupt),
            ("baton_kv_frames_resent", "KV frames sent a second time", &self.kv_frames_resent),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        self.late_messages.register(registry);
        registry.register("baton_handoffs", "Handoffs that ended, by outcome", self.handoffs.clone());
        let help = "Gaps between tokens of running sequences that decoding alone does not explain, by cause";
        registry.register("baton_decode_stalls", help, self.stalls.clone());
        let help = "Time by which steps with prompts were longer than without, summed over running sequences";
        registry.register("baton_decode_blocked_seconds", help, self.blocked.clone());
        let help =
            "Modelled time that running sequences would have been blocked by prompts that others computed";
        registry.register("baton_hol_avoided_seconds", help, self.hol_avoided.clone());
        let histograms = [
            ("baton_queue_seconds", "Time from a prompt's acceptance to its first step", &self.queue),
            ("baton_kv_hidden_seconds", "Transfer time while the prompt was still computed", &self.kv_hidden),
            ("baton_step_duration_seconds", "Duration of one engine step", &self.step_duration),
            ("baton_kv_exposed_seconds", "Transfer time that a client waited for", &self.kv_exposed),
            ("baton_kv_transfer_seconds", "Duration of whole KV transfers", &self.kv_transfer),
        ];
        for (name, help, histogram) in histograms {
            registry.register(name, help, histogram.metric());
        }
    }

    /// Counts a handoff that ended: `committed`, or the name of the cause it failed for.
    pub fn handoff_ended(&self, outcome: &'static str) {
        self.handoffs.get_or_create(&Outcome { outcome }).inc();
    }

    /// How many handoffs ended with this outcome.
    pub fn num_handoffs(&self, outcome: &'static str) -> u64 {
        self.handoffs.get_or_create(&Outcome { outcome }).get()
    }

    /// Counts a stall by its cause.
    pub fn stalled(&self, cause: &'static str) {
        self.stalls.get_or_create(&Cause { cause }).inc();
    }

    /// How many stalls had this cause.
    pub fn num_stalls(&self, cause: &'static str) -> u64 {
        self.stalls.get_or_create(&Cause { cause }).get()
    }

    /// Adds seconds for which running sequences were blocked, summed over them.
    pub fn blocked(&self, cause: &'static str, seconds: f64) {
        self.blocked.get_or_create(&Cause { cause }).inc_by(seconds);
    }

    /// Seconds blocked by a cause so far.
    pub fn blocked_seconds(&self, cause: &'static str) -> f64 {
        self.blocked.get_or_create(&Cause { cause }).get()
    }

    /// Shows what became of this process's spans, if it traces.
    pub fn read_spans(&self, tracing: &Tracing) {
        self.spans.read(tracing);
    }

    /// Also shows some gauges under vLLM's names, read through `gauges` at each scrape; it must not block.
    pub fn read_vllm(&self, gauges: impl Fn() -> VllmGauges + Clone + Send + Sync + 'static) {
        let (running, waiting) = (gauges.clone(), gauges.clone());
        self.vllm_running.set(move || vec![Sample::new(Vec::new(), running().running)]);
        self.vllm_waiting.set(move || vec![Sample::new(Vec::new(), waiting().waiting)]);
        self.vllm_kv_usage.set(move || vec![Sample::real(gauges().kv_usage)]);
    }

    /// The fitted cost of a step is read through `cost` at each scrape; `None` before enough steps ran. It must not block.
    pub fn read_step_cost(&self, cost: impl Fn() -> Option<StepCostGauges> + Clone + Send + Sync + 'static) {
        let of_residual = cost.clone();
        self.step_cost_residual
            .set(move || of_residual().map(|cost| Sample::real(cost.residual)).into_iter().collect());
        self.step_cost.set(move || {
            let parts = |cost: StepCostGauges| {
                [
                    ("fixed", cost.fixed_s),
                    ("token", cost.per_token_s),
                    ("context_token", cost.per_context_token_s),
                ]
            };
            let sample = |(part, seconds)| Sample { labels: vec![(PART, part)], ..Sample::real(seconds) };
            cost().map(|cost| parts(cost).map(sample).into()).unwrap_or_default()
        });
    }

    /// What turns take by kind of step is read through `kinds` at each scrape; it must not block for long.
    pub fn read_step_profile(&self, kinds: impl Fn() -> Vec<StepKindGauges> + Clone + Send + Sync + 'static) {
        let of_ratios = kinds.clone();
        self.step_profile.set(move || kinds().iter().flat_map(StepKindGauges::seconds).collect());
        self.step_profile_ratio.set(move || of_ratios().iter().flat_map(StepKindGauges::shares).collect());
    }

    /// Blocks are read through `counts` at each scrape; it must not block.
    pub fn read_blocks(&self, counts: impl Fn() -> BlockCounts + Clone + Send + Sync + 'static) {
        let of_total = counts.clone();
        self.blocks_configured.set(move || vec![Sample::new(Vec::new(), of_total().total)]);
        self.blocks.set(move || {
            let counts = counts();
            [
                ("free", counts.free),
                ("cached", counts.cached),
                ("held", counts.held),
                ("draining", counts.draining),
            ]
            .map(|(state, num)| Sample::new(vec![("state", state)], num))
            .into()
        });
    }

    /// Sequences by stage are read through `counts` at each scrape; it must not block.
    pub fn read_requests(&self, counts: impl Fn() -> StageGauges + Send + Sync + 'static) {
        self.requests.set(move || {
            let counts = counts();
            [
                ("waiting", counts.waiting),
                ("prefilling", counts.prefilling),
                ("held", counts.held),
                ("receiving", counts.receiving),
                ("running", counts.running),
            ]
            .map(|(stage, num)| Sample::new(vec![("stage", stage)], num))
            .into()
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

impl Default for WorkerMetrics {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_documented_ones() {
        let metrics = WorkerMetrics::new();
        metrics.prompt_tokens_computed.inc_by(5);
        metrics.handoff_ended("committed");
        metrics.handoff_ended("busy");
        metrics.step_duration.observe(0.012);
        metrics.read_blocks(|| BlockCounts { free: 4, cached: 3, held: 2, draining: 1, total: 10 });
        metrics.read_requests(|| StageGauges { running: 3, ..StageGauges::default() });
        metrics.stalled("local_prefill");
        metrics.blocked("local_prefill", 0.5);
        metrics.hol_avoided.inc_by(1.5);
        assert!(!metrics.encode().contains("vllm:"));
        metrics.read_step_cost(|| {
            Some(StepCostGauges {
                fixed_s: 0.5,
                per_token_s: 0.25,
                per_context_token_s: 0.125,
                residual: 0.0625,
            })
        });
        metrics.read_step_profile(|| {
            let gauges = StepKindGauges { kind: "few", per_token_s: 0.25, ..StepKindGauges::default() };
            vec![StepKindGauges { ratios: [1.5; 13], ..gauges }]
        });
        metrics.read_vllm(|| VllmGauges { running: 2, waiting: 1, kv_usage: 0.25 });
        let text = metrics.encode();
        for line in [
            "baton_decode_stalls_total{cause=\"local_prefill\"} 1",
            "baton_decode_blocked_seconds_total{cause=\"local_prefill\"} 0.5",
            "baton_hol_avoided_seconds_total 1.5",
            "baton_queue_seconds_count 0",
            "baton_kv_hidden_seconds_count 0",
            "vllm:num_requests_running 2",
            "vllm:num_requests_waiting 1",
            "vllm:kv_cache_usage_perc 0.25",
            "baton_blocks{state=\"free\"} 4",
            "baton_blocks{state=\"cached\"} 3",
            "baton_blocks{state=\"held\"} 2",
            "baton_blocks{state=\"draining\"} 1",
            "baton_blocks_total_configured 10",
            "baton_step_cost_seconds{part=\"fixed\"} 0.5",
            "baton_step_cost_seconds{part=\"context_token\"} 0.125",
            "baton_step_cost_residual 0.0625",
            "baton_step_profile_seconds{kind=\"few\",part=\"token\"} 0.25",
            "baton_step_profile_ratio{kind=\"few\",share=\"0.99\"} 1.5",
            "baton_num_requests{stage=\"running\"} 3",
            "baton_num_requests{stage=\"waiting\"} 0",
            "baton_prompt_tokens_computed_total 5",
            "baton_prefix_hit_tokens_total 0",
            "baton_generated_tokens_total 0",
            "baton_forks_total 0",
            "baton_block_copies_total 0",
            "baton_preemptions_total 0",
            "baton_preempted_gone_total 0",
            "baton_kv_sent_bytes_total 0",
            "baton_kv_received_bytes_total 0",
            "baton_kv_frames_corrupt_total 0",
            "baton_kv_frames_resent_total 0",
            "baton_handoffs_total{outcome=\"committed\"} 1",
            "baton_handoffs_total{outcome=\"busy\"} 1",
            "baton_step_duration_seconds_count 1",
            "baton_kv_exposed_seconds_count 0",
            "baton_kv_transfer_seconds_count 0",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn clones_share_counts_and_gauges_follow_their_source() {
        use std::sync::atomic::{AtomicU64, Ordering};
        let metrics = WorkerMetrics::new();
        let clone = metrics.clone();
        clone.generated_tokens.inc();
        assert_eq!(metrics.generated_tokens.get(), 1);
        let free = Arc::new(AtomicU64::new(1));
        let read = Arc::clone(&free);
        clone.read_blocks(move || BlockCounts {
            free: read.load(Ordering::Relaxed),
            ..BlockCounts::default()
        });
        assert!(metrics.encode().contains("baton_blocks{state=\"free\"} 1\n"));
        free.store(9, Ordering::Relaxed);
        assert!(metrics.encode().contains("baton_blocks{state=\"free\"} 9\n"));
    }
}
