//! An engine, and hand-made plans for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engine::{Arena, CpuEngine, CpuEngineConfig};
use baton_model::Model;
use baton_scheduler::{Engine, Flow, RowSampling, SamplingParams, SequenceId, StepOutput, StepPlan};

use super::{Case, failure};
use crate::exit::Failure;

/// An engine whose blocks all belong to whichever case is measured.
pub(super) struct Rig {
    engine: CpuEngine,
    _arena: Arc<Arena>,
    threads: u16,
    load: Duration,
    plan: StepPlan,
    output: StepOutput,
}

impl Rig {
    pub(super) fn new(model: &Model, threads: u16, config: &CpuEngineConfig) -> Result<Rig, Failure> {
        let config = CpuEngineConfig { num_threads: threads.into(), ..config.clone() };
        let start = Instant::now();
        let (engine, arena) = CpuEngine::new(model, config).map_err(failure)?;
        let load = start.elapsed();
        let (plan, output) = (StepPlan::default(), StepOutput::default());
        Ok(Rig { engine, _arena: arena, threads, load, plan, output })
    }

    pub(super) const fn threads(&self) -> u16 {
        self.threads
    }

    /// How long packing the weights and taking all memory took.
    pub(super) const fn load(&self) -> Duration {
        self.load
    }

    /// Tokens a second of one round of `case`, all sequences together.
    pub(super) fn measure(&mut self, case: &Case) -> Result<f64, Failure> {
        let per_sequence = self.engine.layout().blocks_for(case.length()) as u32;
        let table = |sequence: u32| (sequence * per_sequence..(sequence + 1) * per_sequence).collect();
        let tables: Vec<Vec<u32>> = (0..case.batch as u32).map(table).collect();
        let vocab = self.engine.vocab_size() as u32;
        let tokens: Vec<u32> = (0..case.chunk as u32).map(|i| i * 7919 % vocab).collect();
        // Once outside the clock: output vectors, and the clock speed of the core.
        self.step(case, &tables, case.context, &tokens)?;
        let start = Instant::now();
        for position in (case.context..case.length()).step_by(case.chunk) {
            self.step(case, &tables, position, &tokens)?;
        }
        Ok((case.batch * case.tokens) as f64 / start.elapsed().as_secs_f64())
    }

    /// `tokens` for each sequence from `position`.
    fn step(
        &mut self,
        case: &Case,
        tables: &[Vec<u32>],
        position: usize,
        tokens: &[u32],
    ) -> Result<(), Failure> {
        let end = position + tokens.len();
        let used = self.engine.layout().blocks_for(end);
        let sampling = [RowSampling { params: SamplingParams::GREEDY, sequence: 0, position: end as u32 }];
        // A prompt's logits are wanted once.
        let samplings = if case.decodes() || end == case.length() { &sampling[..] } else { &[] };
        self.plan.clear();
        for (sequence, table) in tables.iter().enumerate() {
            let id = SequenceId(sequence as u64 + 1);
            self.plan.push(id, position, tokens, &table[..used], samplings);
        }
        let step = self.engine.step(&self.plan, &mut self.output, &mut |_| Flow::Continue);
        step.map_err(|error| Failure::Unexpected(error.to_string()))
    }
}
