//! One worker in virtual time: the scheduler that serves over the timing engine. Its clock is the sum of the engine's predictions.

use std::collections::HashMap;
use std::time::Duration;

use baton_kv::BlockPool;
use baton_scheduler::{
    Engine, Event, Flow, NewSequence, Origin, SamplingParams, Scheduler, SchedulerConfig, SequenceId,
    StepOutput, StepPlan,
};
use baton_timing::{TimingConfig, TimingEngine};

use crate::LabError;
use crate::device::{DEVICE, MODEL};

/// The token that ends a sequence whose length is given.
const STOP: u32 = 0;
/// Layers of the pseudo model: one is enough for every token to depend on all before it.
pub(crate) const PSEUDO_LAYERS: usize = 1;
/// Its vocabulary.
pub(crate) const VOCAB: u32 = 32_000;

/// What decides how a worker runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServingConfig {
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    /// Sequences with blocks at once.
    pub(crate) max_num_seqs: usize,
    pub(crate) max_step_tokens: usize,
    /// Prompt tokens of a step while others decode.
    pub(crate) local_prefill_tokens: usize,
    /// Whether there is a prefix cache.
    pub(crate) cache: bool,
}

impl ServingConfig {
    /// A worker whose steps hold whatever is there.
    pub(crate) const fn roomy(num_blocks: usize, block_size: usize) -> Self {
        let most = 1 << 20;
        Self {
            num_blocks,
            block_size,
            max_num_seqs: 4_096,
            max_step_tokens: most,
            local_prefill_tokens: most,
            cache: false,
        }
    }

    fn scheduler(&self) -> SchedulerConfig {
        SchedulerConfig {
            block_size: self.block_size,
            context: 1 << 20,
            max_num_seqs: self.max_num_seqs,
            max_queue: 4_096,
            max_step_tokens: self.max_step_tokens,
            local_prefill_tokens: self.local_prefill_tokens,
            max_open_prompts: 16,
            lookahead: 16,
            max_receiving_share: 0.5,
            cache_salt: self.cache.then(|| b"lab".to_vec()),
            ageing_tokens_per_s: 0.0,
            step_cost: None,
            max_step_ms: f64::MAX,
            max_step_growth: 0.0,
            num_layers: 1,
        }
    }

    /// The engine that goes with it.
    pub(crate) fn engine(&self) -> TimingEngine {
        TimingEngine::new(TimingConfig {
            roofline: DEVICE,
            shape: MODEL,
            num_blocks: self.num_blocks,
            block_size: self.block_size,
            num_layers: PSEUDO_LAYERS,
            vocab: VOCAB,
            max_step_tokens: self.max_step_tokens,
        })
    }
}

/// What is asked of a worker.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) id: u64,
    pub(crate) prompt: Vec<u32>,
    /// As the client limits it.
    pub(crate) max_new_tokens: usize,
    /// When the model says its stop token; `None`: the limit ends the sequence.
    pub(crate) ends_after: Option<usize>,
    /// Ids of further answers to the same prompt.
    pub(crate) siblings: Vec<u64>,
}

impl Ask {
    pub(crate) const fn new(id: u64, prompt: Vec<u32>, max_new_tokens: usize) -> Self {
        Self { id, prompt, max_new_tokens, ends_after: None, siblings: Vec::new() }
    }

    /// What the scheduler is given.
    fn sequence(self) -> NewSequence {
        NewSequence {
            id: SequenceId(self.id),
            siblings: self.siblings.into_iter().map(SequenceId).collect(),
            origin: Origin::Local,
            prompt: self.prompt,
            sampling: SamplingParams::GREEDY,
            sequence: 0,
            num_generated: 0,
            max_new_tokens: u32::try_from(self.max_new_tokens).unwrap_or(u32::MAX),
            stop_tokens: if self.ends_after.is_some() { vec![STOP] } else { Vec::new() },
            cache: true,
            age: Duration::ZERO,
            priority: 0,
            preempted: false,
        }
    }
}

/// One row of a step that was computed.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) id: u64,
    /// Tokens before this step.
    pub(crate) position: usize,
    pub(crate) num_tokens: usize,
    /// Its block table.
    pub(crate) blocks: Vec<u32>,
}

/// A step that was computed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Step {
    pub(crate) rows: Vec<Row>,
    /// Blocks that were copied first.
    pub(crate) num_copies: usize,
    /// As the timing engine predicts.
    pub(crate) took: Duration,
    /// Tokens that were sampled: of whom, which, and whether it is the last one.
    pub(crate) tokens: Vec<(u64, u32, bool)>,
    /// Sequences that gave up their blocks.
    pub(crate) num_preempted: usize,
    /// Prompt tokens of those that began, found in the prefix cache.
    pub(crate) num_cached_tokens: usize,
}

impl Step {
    fn of(plan: &StepPlan, took: Duration) -> Self {
        let row = |row: &baton_scheduler::PlanRow| Row {
            id: row.id.0,
            position: row.position,
            num_tokens: row.tokens.len(),
            blocks: plan.blocks.get(row.blocks.clone()).unwrap_or_default().to_vec(),
        };
        let rows = plan.rows.iter().map(row).collect();
        Self { rows, num_copies: plan.copies.len(), took, ..Self::default() }
    }

    /// Sequences that ended with it.
    pub(crate) fn finished(&self) -> impl Iterator<Item = u64> {
        self.tokens.iter().filter(|(_, _, last)| *last).map(|(id, _, _)| *id)
    }
}

/// Where a sequence's end is given beforehand.
#[derive(Clone, Copy, Debug)]
struct Script {
    ends_after: usize,
    generated: usize,
}

/// A worker.
pub(crate) struct Serving {
    scheduler: Scheduler,
    engine: TimingEngine,
    now: Duration,
    scripts: HashMap<u64, Script>,
    /// Whether others may hold blocks of the pool.
    others: bool,
    output: StepOutput,
    events: Vec<Event>,
}

impl Serving {
    pub(crate) fn new(config: &ServingConfig) -> Self {
        Self { others: false, ..Self::over(config, BlockPool::new(config.num_blocks)) }
    }

    /// A worker over a pool that others may hold blocks of.
    pub(crate) fn over(config: &ServingConfig, pool: BlockPool) -> Self {
        Self {
            scheduler: Scheduler::new(config.scheduler(), pool),
            engine: config.engine(),
            now: Duration::ZERO,
            scripts: HashMap::new(),
            others: true,
            output: StepOutput::default(),
            events: Vec::new(),
        }
    }

    /// Virtual time so far.
    pub(crate) const fn now(&self) -> Duration {
        self.now
    }

    /// Nothing happens until then.
    pub(crate) fn wait_until(&mut self, time: Duration) {
        self.now = self.now.max(time);
    }

    pub(crate) const fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    pub(crate) fn submit(&mut self, ask: Ask) -> Result<(), LabError> {
        let id = ask.id;
        if let Some(ends_after) = ask.ends_after {
            self.scripts.insert(id, Script { ends_after, generated: 0 });
        }
        let submitted = self.scheduler.submit(ask.sequence(), self.now);
        submitted.map_err(|refusal| LabError::Refused { id, refusal })
    }

    pub(crate) fn cancel(&mut self, id: u64) {
        self.scheduler.cancel(SequenceId(id), self.now);
        self.scripts.remove(&id);
    }

    /// Computes one step; `None` when nothing can be computed.
    pub(crate) fn step(&mut self) -> Result<Option<Step>, LabError> {
        let plan = self.scheduler.plan(self.now);
        if plan.is_empty() {
            return Ok(None);
        }
        self.engine.step(plan, &mut self.output, &mut |_| Flow::Continue)?;
        let mut step = Step::of(plan, self.engine.last_step_time());
        self.now += step.took;
        self.follow_scripts(&step);
        self.scheduler.apply(&self.output, self.now);
        self.scheduler.drain_events(&mut self.events);
        for event in self.events.drain(..) {
            match event {
                Event::Token { id, token, finish, .. } => {
                    if finish.is_some() {
                        self.scripts.remove(&id.0);
                    }
                    step.tokens.push((id.0, token, finish.is_some()));
                }
                Event::Preempted { .. } => step.num_preempted += 1,
                Event::Started { cached_tokens, .. } => step.num_cached_tokens += cached_tokens,
                _ => {}
            }
        }
        Ok(Some(step))
    }

    /// Steps until every sequence is over, and tells `each` of them.
    pub(crate) fn run(&mut self, what: &'static str, mut each: impl FnMut(&Step)) -> Result<(), LabError> {
        while !self.scheduler.is_empty() {
            match self.step()? {
                Some(step) => each(&step),
                None => return Err(LabError::Standstill { what, num_left: self.num_left() }),
            }
        }
        self.check(what)
    }

    /// Recounts every block, and every list where nobody else holds blocks.
    pub(crate) fn check(&self, what: &'static str) -> Result<(), LabError> {
        let checked = if self.others { self.scheduler.pool().check() } else { self.scheduler.check() };
        checked.map_err(|why| LabError::Broken { what, why })
    }

    fn num_left(&self) -> usize {
        let counts = self.scheduler.counts();
        counts.waiting + counts.prefilling + counts.held + counts.receiving + counts.running
    }

    /// Where a length is given, the model says its stop token exactly then.
    fn follow_scripts(&mut self, step: &Step) {
        for sampled in &mut self.output.sampled {
            let Some(row) = step.rows.get(sampled.row as usize) else { continue };
            let Some(script) = self.scripts.get_mut(&row.id) else { continue };
            script.generated += 1;
            let ends = script.generated >= script.ends_after;
            sampled.token = if ends { STOP } else { sampled.token.max(STOP + 1) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn a_sequence_ends_where_its_script_says_and_takes_as_many_steps() {
        let mut serving = Serving::new(&ServingConfig::roomy(64, 16));
        let mut random = Random::new(1);
        for (id, ends_after) in [(1, 7), (2, 1), (3, 20)] {
            let ask = Ask { ends_after: Some(ends_after), ..Ask::new(id, random.tokens(20), 100) };
            serving.submit(ask).unwrap();
        }
        let (mut num_steps, mut ended) = (0, Vec::new());
        serving
            .run("test", |step| {
                num_steps += 1;
                ended.extend(step.finished().map(|id| (id, num_steps)));
            })
            .unwrap();
        assert_eq!(ended, [(2, 1), (1, 7), (3, 20)]);
        assert!(serving.now() > Duration::ZERO && serving.scheduler().pool().counts().held == 0);
    }

    #[test]
    fn what_can_never_fit_is_an_error() {
        let mut serving = Serving::new(&ServingConfig::roomy(2, 4));
        let error = serving.submit(Ask::new(5, vec![1; 8], 1)).unwrap_err();
        assert!(matches!(error, LabError::Refused { id: 5, .. }), "{error}");
    }
}
