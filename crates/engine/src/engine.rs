//! The CPU engine: from a step plan to its output.

use std::sync::Arc;

use baton_kv::{BlockMemory, KvLayout};
use baton_model::Model;
use baton_scheduler::{Engine, EngineError, Flow, Sampled, StepOutput, StepPlan, StepPoint};

use crate::arena::Arena;
use crate::batch::{Batch, Bounds, Purpose};
use crate::config::{CpuEngineConfig, kv_layout};
use crate::decoder::{Carry, Decoder, Outcome, Step};
use crate::error::EngineBuildError;
use crate::kernels::Isa;
use crate::rope::Rope;
use crate::scratch::{Matrix, Scratch};
use crate::source::WeightSource;
use crate::team::Team;
use crate::weights::{ModelWeights, WeightPlan};

/// Computes steps on CPU cores. The thread that calls [`Engine::step`] is one of its team.
pub struct CpuEngine {
    decoder: Decoder,
    team: Team,
    batch: Batch,
    bounds: Bounds,
    /// Of a row in parts.
    carry: Carry,
    isa: Isa,
}

impl CpuEngine {
    /// Packs the weights, takes the arena and all scratch, starts the team.
    ///
    /// # Errors
    /// [`EngineBuildError`]: a setting out of bounds, an instruction set that is not there, a model that the
    /// engine can't run, no memory, no threads.
    pub fn new(model: &Model, config: CpuEngineConfig) -> Result<(CpuEngine, Arc<Arena>), EngineBuildError> {
        Self::from_source(model, config)
    }

    /// As [`Self::new`], from any source of weights.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn from_source(
        source: &dyn WeightSource,
        config: CpuEngineConfig,
    ) -> Result<(CpuEngine, Arc<Arena>), EngineBuildError> {
        let model = source.config().clone();
        let kernels = config.check(&model)?;
        let plan = WeightPlan::new(source, config.quantize)?;
        let weights = ModelWeights::load(source, config.quantize, &plan)?;
        let layout = kv_layout(source, &config, kernels, &plan);
        let arena = Arc::new(Arena::new(layout, config.num_blocks)?);
        let bounds = Bounds {
            num_blocks: config.num_blocks,
            vocab: model.vocab,
            context: model.context,
            max_step_tokens: config.max_step_tokens,
            num_layers: model.num_layers,
            group: model.num_heads / model.num_kv_heads,
        };
        let decoder = Decoder {
            int8: config.is_int8(&plan),
            weights,
            kernels,
            rope: Rope::new(&model),
            scratch: Scratch::new(&model, &config)?,
            arena: Arc::clone(&arena),
            outcome: Outcome::new(config.max_step_tokens),
            config: model,
        };
        let team =
            Team::new(config.num_threads, config.cpus.as_deref()).map_err(EngineBuildError::Threads)?;
        let batch = Batch::new(&bounds);
        Ok((CpuEngine { decoder, team, batch, bounds, carry: Carry::default(), isa: kernels.isa }, arena))
    }

    /// The instruction set in use.
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    fn copy_blocks(&self, plan: &StepPlan) {
        for copy in &plan.copies {
            // SAFETY: both blocks were checked. They are the planner's: no lease writes a block that a plan holds.
            unsafe { self.decoder.arena.copy_block(copy.from as usize, copy.to as usize) };
        }
    }

    fn fill(&self, output: &mut StepOutput) {
        for wanted in &self.batch.wanted {
            let Purpose::Sample { row, samplings } = &wanted.purpose else { continue };
            for nth in samplings.clone() {
                let drawn = self.decoder.outcome.drawn(nth);
                let (row, sampling) = (*row, nth as u32);
                output.sampled.push(Sampled { row, sampling, token: drawn.token, logprob: drawn.logprob });
            }
        }
    }
}

impl Engine for CpuEngine {
    fn layout(&self) -> &KvLayout {
        self.decoder.arena.layout()
    }

    fn max_step_tokens(&self) -> usize {
        self.bounds.max_step_tokens
    }

    fn vocab_size(&self) -> usize {
        self.bounds.vocab
    }

    fn splits_rows(&self) -> bool {
        true
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        on_point: &mut dyn FnMut(StepPoint) -> Flow,
    ) -> Result<(), EngineError> {
        output.sampled.clear();
        output.logits.clear();
        output.stopped = false;
        self.batch.prepare(plan, self.decoder.arena.layout(), &self.bounds).map_err(EngineError::BadPlan)?;
        self.copy_blocks(plan);
        if plan.is_empty() {
            return Ok(());
        }
        self.decoder.restore(plan, &self.carry).map_err(EngineError::BadPlan)?;
        output.logits.resize(self.batch.num_copied * self.bounds.vocab, 0.0);
        self.decoder.outcome.start(plan.samplings.len());
        let copied = Matrix::new(output.logits.as_mut_ptr(), self.bounds.vocab);
        let (decoder, step) = (&self.decoder, Step { plan, batch: &self.batch, copied });
        let finished = self
            .team
            .run(&|m| _ = decoder.run(m, step, None), |m| decoder.run(m, step, Some(on_point)))
            .and_then(|result| result);
        if finished.is_err() {
            return Err(EngineError::Fatal("a step thread panicked".to_owned()));
        }
        output.stopped = self.decoder.outcome.stopped();
        if output.stopped {
            output.logits.clear();
            return Ok(());
        }
        if self.decoder.outcome.not_finite() {
            return Err(EngineError::Fatal("logits are not finite".to_owned()));
        }
        self.decoder.keep(plan, &mut self.carry);
        self.fill(output);
        Ok(())
    }
}
