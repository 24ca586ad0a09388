//! How many KV blocks a worker has.

use baton_engine::MemoryNeeded;

use crate::size::ByteSize;
use crate::{WorkerConfig, WorkerError, limits};

/// Tokens of KV that the default plans for each sequence.
pub const DEFAULT_TOKENS_PER_SEQUENCE: usize = 1024;

/// The share of the memory limit, and of the memory available, that the default takes at most: one in this many. Several workers may
/// share a machine.
pub const DEFAULT_SHARE: u64 = 4;

/// What the plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct MemoryNeed {
    /// Bytes of one KV block over all layers.
    pub block_bytes: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Bytes that the engine takes beside the blocks: packed weights and scratch.
    pub other_bytes: usize,
    /// Tokens of prompt and output together.
    pub context: usize,
    /// Sequences that hold blocks at once.
    pub max_num_seqs: usize,
    /// `--kv-memory`.
    pub kv_memory: Option<ByteSize>,
}

impl MemoryNeed {
    /// From a worker's options, the tokens of prompt and output together, and what its engine takes.
    pub const fn new(config: &WorkerConfig, context: usize, engine: MemoryNeeded) -> Self {
        Self {
            block_bytes: engine.block_bytes,
            block_size: config.block_size,
            other_bytes: engine.weights_bytes + engine.scratch_bytes,
            context,
            max_num_seqs: config.max_num_seqs as usize,
            kv_memory: config.kv_memory,
        }
    }

    /// The largest context, in tokens and whole blocks, one sequence of which could be held here: by all the memory that is left beside the model,
    /// or by `--kv-memory` if that is less. `free` is the memory in bytes; `None` where nobody tells.
    pub fn largest_context(&self, free: Option<u64>) -> Option<u64> {
        let left = free.map(|bytes| bytes.saturating_sub(self.other_bytes as u64));
        let bytes = left.into_iter().chain(self.kv_memory.map(|ByteSize(bytes)| bytes)).min()?;
        Some(bytes / self.block_bytes as u64 * self.block_size as u64)
    }
}

/// The outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Blocks of the pool; at least one whole context.
    pub num_blocks: usize,
    /// Bytes they take.
    pub bytes: u64,
}

impl MemoryPlan {
    /// Plans with this machine's limits.
    ///
    /// # Errors
    /// [`WorkerError::Memory`] when not one whole context fits; says the largest context that does.
    pub fn new(need: MemoryNeed) -> Result<Self, WorkerError> {
        Self::within(need, limits::memory_limit_bytes(), limits::memory_available_bytes())
    }

    /// Plans for memory of a device's own, of which `free` bytes can be had.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(crate) fn on_device(need: MemoryNeed, free: Option<u64>) -> Result<Self, WorkerError> {
        Self::within(need, None, free)
    }

    fn within(need: MemoryNeed, limit: Option<u64>, available: Option<u64>) -> Result<Self, WorkerError> {
        let block_bytes = need.block_bytes as u64;
        let blocks_of = |tokens: usize| tokens.div_ceil(need.block_size) as u64;
        let least = blocks_of(need.context);
        let (num_blocks, source) = match need.kv_memory {
            Some(ByteSize(bytes)) => (bytes / block_bytes, "--kv-memory"),
            None => {
                let per_sequence = blocks_of(need.context.min(DEFAULT_TOKENS_PER_SEQUENCE));
                let wanted = per_sequence.saturating_mul(need.max_num_seqs as u64).max(least);
                let least_memory = limit.into_iter().chain(available).min();
                let bound = least_memory.map_or(u64::MAX, |bytes| bytes / DEFAULT_SHARE / block_bytes);
                (wanted.min(bound), "a quarter of the memory to be had here")
            }
        };
        if num_blocks < least {
            let fits = num_blocks.saturating_mul(need.block_size as u64);
            return Err(WorkerError::Memory(format!(
                "KV memory of {} ({source}) is too small for a context of {} tokens, which needs {}: \
                 the largest context that fits is {fits} tokens; pass --context {fits} or a larger --kv-memory",
                ByteSize(num_blocks * block_bytes),
                need.context,
                ByteSize(least * block_bytes),
            )));
        }
        let bytes = num_blocks * block_bytes;
        let available = available.map(|bytes| bytes.saturating_sub(need.other_bytes as u64));
        if let Some(free) = available.filter(|&free| bytes > free) {
            let fits = free / block_bytes * need.block_size as u64;
            return Err(WorkerError::Memory(format!(
                "KV memory of {} does not fit into the {} that are available beside the model: the largest context that fits is \
                 {fits} tokens; pass a smaller --kv-memory",
                ByteSize(bytes),
                ByteSize(free),
            )));
        }
        let num_blocks = usize::try_from(num_blocks.min(u64::from(u32::MAX))).unwrap_or(usize::MAX);
        Ok(Self { num_blocks, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The default model: 360 KiB a block.
    const NEED: MemoryNeed = MemoryNeed {
        block_bytes: 360 << 10,
        block_size: 16,
        other_bytes: 100 << 20,
        context: 8192,
        max_num_seqs: 8,
        kv_memory: None,
    };

    fn plan(kv_memory: Option<&str>, seqs: usize, limit_gib: u64) -> Result<MemoryPlan, String> {
        let kv_memory = kv_memory.map(|text| text.parse().unwrap());
        let need = MemoryNeed { max_num_seqs: seqs, kv_memory, ..NEED };
        MemoryPlan::within(need, Some(limit_gib << 30), Some(limit_gib << 29))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_default_holds_a_moderate_context_for_each_sequence() {
        assert_eq!(plan(None, 16, 64).unwrap().num_blocks, 16 * 1024 / 16);
        // One sequence still gets a whole context.
        assert_eq!(plan(None, 1, 64).unwrap().num_blocks, 8192 / 16);
    }

    #[test]
    fn the_default_takes_at_most_a_quarter() {
        // Half of the limit is available.
        let plan = plan(None, 4096, 8).unwrap();
        assert!(plan.bytes <= 1 << 30 && plan.bytes > (1 << 30) - 2 * 360 * 1024, "{plan:?}");
    }

    #[test]
    fn too_little_memory_says_the_largest_context_that_fits() {
        // 64 MiB hold 182 blocks of 360 KiB.
        let error = plan(Some("64M"), 8, 64).unwrap_err();
        assert!(error.contains("8192") && error.contains("2912") && error.contains("--kv-memory"), "{error}");
        assert!(!error.contains('\n'), "{error}");
        let need = MemoryNeed { context: 2912, kv_memory: Some(ByteSize(64 << 20)), ..NEED };
        assert_eq!(MemoryPlan::within(need, None, None).unwrap().num_blocks, 182);
        // The default on a small machine: 512 MiB / 4 is less than one context of 180 MiB.
        let error = MemoryPlan::within(NEED, Some(512 << 20), None).unwrap_err().to_string();
        assert!(error.contains("5824") && error.contains("--context"), "{error}");
    }

    #[test]
    fn the_largest_context_is_what_the_memory_beside_the_model_holds() {
        // 100 MiB of the gigabyte are the model's; a block of 16 tokens takes 360 KiB.
        assert_eq!(NEED.largest_context(Some(1 << 30)), Some(((1 << 30) - (100 << 20)) / (360 << 10) * 16));
        assert_eq!(NEED.largest_context(Some(50 << 20)), Some(0));
        assert_eq!(NEED.largest_context(None), None);
        let asked = MemoryNeed { kv_memory: Some(ByteSize(64 << 20)), ..NEED };
        assert_eq!(asked.largest_context(Some(1 << 30)), Some(2912));
        assert_eq!(asked.largest_context(None), Some(2912));
        assert_eq!(asked.largest_context(Some(110 << 20)), Some((10 << 20) / (360 << 10) * 16));
    }

    #[test]
    fn memory_that_is_not_there_is_refused_before_it_is_touched() {
        let error = plan(Some("40G"), 8, 64).unwrap_err();
        assert!(error.contains("31.8 GiB") && error.contains("--kv-memory"), "{error}");
    }
}
