//! What a worker counts.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::gauges::{Sample, ScrapedGauge, SourceSlot};
use super::{Counter, Histogram, LateMessages};

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
    handoffs: Family<Outcome, Counter>,
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
    /// Seconds of one engine step.
    pub step_duration: Histogram,
    /// Seconds of transfer that a client waited for.
    pub kv_exposed: Histogram,
    /// Seconds of whole transfers.
    pub kv_transfer: Histogram,
}

impl WorkerMetrics {
    /// All counts at zero.
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let mut gauge = |name, help| {
            let (collector, slot) = ScrapedGauge::new(name, help);
            registry.register_collector(Box::new(collector));
            slot
        };
        let mut metrics = Self {
            blocks: gauge("baton_blocks", "Blocks of the KV pool by state."),
            blocks_configured: gauge("baton_blocks_total_configured", "Blocks of the KV pool."),
            requests: gauge("baton_num_requests", "Sequences by stage."),
            registry: Arc::default(),
            handoffs: Family::default(),
            prompt_tokens_computed: Counter::default(),
            prefix_hit_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            forks: Counter::default(),
            block_copies: Counter::default(),
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
        let histograms = [
            ("baton_step_duration_seconds", "Duration of one engine step", &self.step_duration),
            ("baton_kv_exposed_seconds", "Transfer time that a client waited for", &self.kv_exposed),
            ("baton_kv_transfer_seconds", "Duration of whole KV transfers", &self.kv_transfer),
        ];
        for (name, help, histogram) in histograms {
            registry.register(name, help, histogram.clone());
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
        let text = metrics.encode();
        for line in [
            "baton_blocks{state=\"free\"} 4",
            "baton_blocks{state=\"cached\"} 3",
            "baton_blocks{state=\"held\"} 2",
            "baton_blocks{state=\"draining\"} 1",
            "baton_blocks_total_configured 10",
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
