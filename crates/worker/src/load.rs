//! From options to an engine, its memory and a scheduler. Runs on the step thread, so that threads and memory are where
//! they will be used.

use std::time::Instant;

use baton_engine::{CpuEngineConfig, Isa, Precision};
use baton_kv::BlockPool;
use baton_model::{Model, ModelConfig, ModelName, ModelSource, NoProgress, Progress, ResolveOptions};
use baton_scheduler::{Engine, Scheduler, SchedulerConfig};

use crate::core::{Loaded, RequestLimits};
use crate::device::PlannedEngine;
use crate::memory_plan::MemoryNeed;
use crate::pace::PacedEngine;
use crate::size::ByteSize;
use crate::steps::{Built, StepHandle};
use crate::{WorkerConfig, WorkerError};

/// How a role's scheduler plans, beyond the shared options.
#[derive(Clone, Debug)]
pub struct Scheduling {
    /// Prompt tokens of one step while other sequences decode, at most.
    pub local_prefill_tokens: usize,
    /// By what share of itself a step of decode rows may grow for a newcomer's row; a longer one is computed in parts, where the engine can. 0: never.
    pub max_step_growth: f64,
    /// Partly prefilled prompts, at most.
    pub max_open_prompts: usize,
    /// Prompts offered ahead of being computed, at most.
    pub lookahead: usize,
    /// Share of all blocks that may be receiving KV.
    pub max_receiving_share: f32,
    /// A waiting prompt counts as this many tokens shorter per second of waiting.
    pub ageing_tokens_per_s: f64,
}

impl Default for Scheduling {
    fn default() -> Self {
        Self {
            local_prefill_tokens: 256,
            max_step_growth: 0.0,
            max_open_prompts: 4,
            lookahead: 4,
            max_receiving_share: 0.5,
            ageing_tokens_per_s: 500.0,
        }
    }
}

pub(crate) fn load(
    config: &WorkerConfig,
    scheduling: &Scheduling,
    steps: &StepHandle,
) -> Result<(Built, Loaded), WorkerError> {
    let started = Instant::now();
    let model = open_model(config)?;
    let context = config.context_of(&model.config)?;
    let planned = PlannedEngine::new(config, &model)?;
    let plan = planned.fit(MemoryNeed::new(config, context, planned.memory()))?;
    let (device, weights) = (planned.device(), planned.weight_format().to_owned());
    let (engine, memory) = planned.build(&model, plan.num_blocks)?;
    let pool = BlockPool::new(plan.num_blocks);
    let cache_salt = config.prefix_cache.then(|| memory.layout().cache_salt());
    let scheduler_config = SchedulerConfig {
        cache_salt,
        max_step_growth: if engine.splits_rows() { scheduling.max_step_growth } else { 0.0 },
        num_layers: memory.layout().num_layers,
        ..scheduler_config(config, scheduling, context)
    };
    scheduler_config.check().map_err(|reason| WorkerError::config("scheduling options", reason))?;
    let scheduler = Scheduler::new(scheduler_config, pool.clone());
    let limits = RequestLimits {
        context,
        pool_tokens: plan.num_blocks * config.block_size,
        vocab: model.config.vocab,
    };
    tracing::info!(
        model = model.config.name,
        context,
        %device,
        threads = config.num_threads(),
        kv_memory = %ByteSize(plan.bytes),
        num_blocks = plan.num_blocks,
        block_size = config.block_size,
        kv_dtype = %config.kv_dtype,
        weights,
        prefix_cache = config.prefix_cache,
        numerics = memory.layout().numerics_id,
        load_ms = started.elapsed().as_millis() as u64,
        "the model is loaded"
    );
    let name = model.config.name.clone();
    let loaded = Loaded { steps: steps.clone(), pool, memory, model: name, limits };
    let engine: Box<dyn Engine> = match config.pace_tokens_per_s {
        Some(rate) => Box::new(PacedEngine::new(engine, rate)),
        None => engine,
    };
    Ok((Built { engine, scheduler }, loaded))
}

fn open_model(config: &WorkerConfig) -> Result<Model, WorkerError> {
    Ok(Model::open(&config.resolve_model(&NoProgress)?)?)
}

impl WorkerConfig {
    /// Finds the model, fetching it the first time; `progress` hears how far that is.
    ///
    /// # Errors
    /// [`WorkerError::Model`].
    pub fn resolve_model(&self, progress: &dyn Progress) -> Result<ModelSource, WorkerError> {
        let name: ModelName = self.model.parse()?;
        let mut options = ResolveOptions::from_env(progress);
        if let Some(folder) = &self.cache_dir {
            options.cache_dir.clone_from(folder);
        }
        Ok(baton_model::resolve(&name, &options)?)
    }

    /// Tokens of prompt and output together: as configured, or all that the model was made for.
    ///
    /// # Errors
    /// [`WorkerError::Config`] for more than that.
    pub fn context_of(&self, model: &ModelConfig) -> Result<usize, WorkerError> {
        match self.context {
            Some(context) if context as usize > model.context => {
                let reason = format!("{context} is more than the model's {}", model.context);
                Err(WorkerError::config("--context", reason))
            }
            Some(context) => Ok(context as usize),
            None => Ok(model.context),
        }
    }

    /// The engine's settings, all but the number of blocks, which is 1.
    ///
    /// # Errors
    /// [`WorkerError::Config`] for a name that the options' parsers would have refused.
    pub fn engine_config(&self) -> Result<CpuEngineConfig, WorkerError> {
        let precision = match self.precision.as_str() {
            "auto" => Precision::Auto,
            "f32" => Precision::F32,
            other => {
                return Err(WorkerError::config("--precision", format!("'{other}' is neither auto nor f32")));
            }
        };
        let isa = match self.isa.as_str() {
            "auto" => None,
            "amx" => Some(Isa::Amx),
            "avx512" => Some(Isa::Avx512),
            "avx2" => Some(Isa::Avx2),
            "portable" => Some(Isa::Portable),
            other => {
                let reason = format!("'{other}' is none of auto, amx, avx512, avx2 and portable");
                return Err(WorkerError::config("--isa", reason));
            }
        };
        Ok(CpuEngineConfig {
            num_blocks: 1,
            block_size: self.block_size,
            kv_dtype: self.kv_dtype,
            precision,
            quantize: self.quantize,
            num_threads: self.num_threads(),
            cpus: self.cpus.as_ref().map(|cpus| cpus.as_slice().to_vec()),
            max_step_tokens: self.max_step_tokens as usize,
            isa,
        })
    }
}

fn scheduler_config(config: &WorkerConfig, scheduling: &Scheduling, context: usize) -> SchedulerConfig {
    SchedulerConfig {
        block_size: config.block_size,
        context,
        max_num_seqs: config.max_num_seqs as usize,
        max_queue: config.max_queue as usize,
        max_step_tokens: config.max_step_tokens as usize,
        local_prefill_tokens: scheduling.local_prefill_tokens,
        max_open_prompts: scheduling.max_open_prompts,
        lookahead: scheduling.lookahead,
        max_receiving_share: scheduling.max_receiving_share,
        ageing_tokens_per_s: scheduling.ageing_tokens_per_s,
        cache_salt: None,
        // The step loop fits it.
        step_cost: None,
        max_step_ms: f64::from(config.max_step_ms),
        max_step_growth: 0.0,
        num_layers: 0,
    }
}
