//! How much memory the workers may take for KV, given that they share one machine.

use baton_engine::EnginePlan;
use baton_model::Model;
use baton_worker::{
    ByteSize, MemoryNeed, MemoryPlan, WorkerConfig, WorkerError, memory_available_bytes, memory_limit_bytes,
};

use crate::exit::Failure;

/// What a worker needs beside weights, activations and KV, at a guess: buffers, stacks, the program itself.
const BASE_BYTES: usize = 48 << 20;

/// What every worker gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryShare {
    /// Bytes of KV of one worker.
    pub(super) kv_bytes: u64,
    /// Tokens they hold.
    pub(super) num_tokens: u64,
    /// Tokens of prompt and output together.
    pub(super) context: usize,
    /// Bytes that could be had before.
    pub(super) available_bytes: Option<u64>,
}

/// Plans for `num_workers` workers that run the same model here.
///
/// # Errors
/// [`Failure::Memory`] when not every worker can hold one whole context; says what fits. [`Failure::Usage`] when more
/// context is asked for than the model has, [`Failure::Model`] when the engine can't run it.
pub(super) fn plan(model: &Model, config: &WorkerConfig, num_workers: u64) -> Result<MemoryShare, Failure> {
    let context = config.context_of(&model.config)?;
    // Those on CUDA devices are not asked about here.
    let engine = EnginePlan::new(model, &config.engine_config()?).map_err(WorkerError::from)?;
    let mut need = MemoryNeed::new(config, context, engine.memory);
    need.other_bytes += BASE_BYTES;
    share(need, memory_available_bytes().into_iter().chain(memory_limit_bytes()).min(), num_workers)
}

fn share(need: MemoryNeed, available_bytes: Option<u64>, num_workers: u64) -> Result<MemoryShare, Failure> {
    let mut plan = MemoryPlan::new(need).map_err(|error| match error {
        WorkerError::Memory(line) => Failure::Memory(line),
        other => Failure::Unexpected(other.to_string()),
    })?;
    if let Some(available) = available_bytes {
        let room = (available / num_workers.max(1)).saturating_sub(need.other_bytes as u64);
        if plan.bytes > room {
            plan = fit(need, room, num_workers)?;
        }
    }
    let num_tokens = plan.num_blocks as u64 * need.block_size as u64;
    Ok(MemoryShare { kv_bytes: plan.bytes, num_tokens, context: need.context, available_bytes })
}

/// What fits into `room` bytes a worker, unless the user asked for more or it is less than one context.
fn fit(need: MemoryNeed, room: u64, num_workers: u64) -> Result<MemoryPlan, Failure> {
    let block = need.block_bytes as u64;
    let num_blocks = room / block;
    if let Some(asked) = need.kv_memory {
        return Err(Failure::Memory(format!(
            "--kv-memory {asked} for each of {num_workers} workers does not fit: {} are left for each beside its weights",
            ByteSize(room)
        )));
    }
    let least = need.context.div_ceil(need.block_size) as u64;
    if num_blocks < least {
        let fits = num_blocks * need.block_size as u64;
        return Err(Failure::Memory(format!(
            "{} of memory for KV a worker hold no context of {} tokens, which needs {}: the largest that fits is {fits} \
             tokens; pass --context {fits}, or start fewer workers",
            ByteSize(room),
            need.context,
            ByteSize(least * block)
        )));
    }
    Ok(MemoryPlan {
        num_blocks: usize::try_from(num_blocks).unwrap_or(usize::MAX),
        bytes: num_blocks * block,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 512 bytes of KV a token, 64 MiB beside.
    const NEED: MemoryNeed = MemoryNeed {
        block_bytes: 16 * 512,
        block_size: 16,
        other_bytes: 64 << 20,
        context: 65_536,
        max_num_seqs: 64,
        kv_memory: None,
    };

    fn share_of(need: MemoryNeed, available_mib: u64) -> Result<MemoryShare, Failure> {
        share(need, Some(available_mib << 20), 2)
    }

    #[test]
    fn the_default_shrinks_to_what_several_workers_can_share() {
        // A context is 32 MiB; the default is more, for many moderate sequences.
        let need = MemoryNeed { max_num_seqs: 1024, ..NEED };
        let roomy = share_of(need, 4096).unwrap();
        assert!(roomy.kv_bytes > 40 << 20, "{roomy:?}");
        let tight = share_of(need, 2 * (64 + 40)).unwrap();
        assert_eq!((tight.kv_bytes, tight.num_tokens), (40 << 20, 40 << 11));
    }

    #[test]
    fn too_little_is_one_line_that_says_what_fits() {
        let failure = share_of(NEED, 2 * (64 + 16)).unwrap_err();
        assert_eq!(failure.code(), 6);
        let line = failure.to_string();
        assert!(line.contains("65536") && line.contains("--context 32768") && !line.contains('\n'), "{line}");
        let need = MemoryNeed { context: 1024, kv_memory: Some(ByteSize(40 << 20)), ..NEED };
        let asked = share_of(need, 2 * (64 + 16)).unwrap_err();
        assert!(asked.to_string().contains("--kv-memory 40 MiB"), "{asked}");
        assert_eq!(asked.code(), 6);
    }

    #[test]
    fn more_context_than_the_model_has_is_refused() {
        use clap::Parser;
        #[derive(Parser)]
        struct Command {
            #[command(flatten)]
            worker: WorkerConfig,
        }
        let config = Command::parse_from(["w", "--context", "131073"]).worker;
        let failure = plan(&Model::tiny(), &config, 2).unwrap_err();
        assert_eq!(failure.code(), 2);
        assert!(failure.to_string().contains("131072"), "{failure}");
    }
}
