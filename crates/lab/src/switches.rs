//! A scheduler of the demonstration's own, over the real pool, tables and engine: small, and with two mechanisms that can be switched off, which
//! the scheduler that serves does not allow.

use std::collections::VecDeque;

use baton_kv::{BlockPool, BlockTable};
use baton_scheduler::{Engine, Flow, RowSampling, SamplingParams, SequenceId, StepOutput, StepPlan};
use baton_timing::{TimingEngine, pseudo_tokens};

use crate::LabError;
use crate::crowd::Served;
use crate::serving::{Ask, PSEUDO_LAYERS, ServingConfig, VOCAB};

/// What is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Switches {
    /// Blocks kept free for each sequence that runs, for its growth; `None`: whoever's prompt fits is let in.
    pub(crate) admission: Option<usize>,
    /// Whether the youngest gives up its blocks when one is needed and none is free.
    pub(crate) preemption: bool,
}

struct Sequence {
    id: u64,
    tokens: Vec<u32>,
    prompt_len: usize,
    /// Tokens at its end.
    end: usize,
    /// Tokens in its blocks.
    computed: usize,
    table: BlockTable,
}

impl Sequence {
    fn is_exact(&self) -> bool {
        let (prompt, reply) = self.tokens.split_at(self.prompt_len);
        let sampling = RowSampling { params: SamplingParams::GREEDY, sequence: 0, position: 0 };
        pseudo_tokens(prompt, &sampling, (PSEUDO_LAYERS, VOCAB), reply.len() as u32, &[]) == reply
    }
}

/// What came of a crowd.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) served: Served,
    pub(crate) num_finished: usize,
    /// Of them those whose every token is that of a run that nothing disturbs; counted for the demonstration's own scheduler.
    pub(crate) num_exact: usize,
    /// Sequences that hold blocks and never go on.
    pub(crate) num_stuck: usize,
}

struct LabScheduler {
    switches: Switches,
    block_size: usize,
    pool: BlockPool,
    engine: TimingEngine,
    waiting: VecDeque<Sequence>,
    /// Oldest first.
    running: Vec<Sequence>,
    outcome: Outcome,
}

impl LabScheduler {
    fn new(config: &ServingConfig, switches: Switches, asks: Vec<Ask>) -> Self {
        let sequence = |ask: Ask| Sequence {
            id: ask.id,
            prompt_len: ask.prompt.len(),
            end: ask.prompt.len() + ask.ends_after.unwrap_or(ask.max_new_tokens),
            tokens: ask.prompt,
            computed: 0,
            table: BlockTable::new(),
        };
        Self {
            switches,
            block_size: config.block_size,
            pool: BlockPool::new(config.num_blocks),
            engine: config.engine(),
            waiting: asks.into_iter().map(sequence).collect(),
            running: Vec::new(),
            outcome: Outcome::default(),
        }
    }

    /// Lets in from the front of the line, with blocks for all tokens they have.
    fn admit(&mut self) {
        while let Some(front) = self.waiting.front() {
            let need = front.tokens.len().div_ceil(self.block_size);
            let kept = self.switches.admission.map_or(0, |growth| growth * (self.running.len() + 1));
            let fits = self.running.is_empty() || need + kept <= self.pool.counts().free;
            let Some(blocks) = fits.then(|| self.pool.allocate(need)).flatten() else { return };
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            sequence.table.extend(blocks);
            self.running.push(sequence);
        }
    }

    /// A slot for the newest token of the `nth`; false when there is none in this step.
    fn make_room(&mut self, nth: usize) -> bool {
        while let Some(sequence) = self.running.get_mut(nth) {
            if sequence.tokens.len() <= sequence.table.len() * self.block_size {
                return true;
            }
            if let Some(block) = self.pool.allocate_one() {
                sequence.table.push(block);
                return true;
            }
            if !self.switches.preemption {
                return false;
            }
            let Some(mut youngest) = self.running.pop() else { return false };
            youngest.table.clear();
            youngest.computed = 0;
            self.waiting.push_front(youngest);
            self.outcome.served.num_preempted += 1;
        }
        false
    }

    fn plan(&mut self) -> StepPlan {
        self.admit();
        let mut plan = StepPlan::default();
        let mut nth = 0;
        while nth < self.running.len() {
            if self.make_room(nth)
                && let Some(sequence) = self.running.get(nth)
            {
                let position = sequence.tokens.len() as u32;
                let sampling = RowSampling { params: SamplingParams::GREEDY, sequence: 0, position };
                let new = &sequence.tokens[sequence.computed..];
                plan.push(SequenceId(sequence.id), sequence.computed, new, sequence.table.ids(), &[sampling]);
            }
            nth += 1;
        }
        plan
    }

    fn apply(&mut self, plan: &StepPlan, output: &StepOutput) {
        let served = &mut self.outcome.served;
        served.num_steps += 1;
        served.time += self.engine.last_step_time();
        served.peak = served.peak.max(plan.rows.len());
        served.peak_entries = served.peak_entries.max(plan.blocks.len());
        for sampled in &output.sampled {
            let Some(row) = plan.rows.get(sampled.row as usize) else { continue };
            let Some(sequence) = self.running.iter_mut().find(|sequence| sequence.id == row.id.0) else {
                continue;
            };
            if row.tokens.len() > 1 || row.position < sequence.prompt_len {
                served.num_prompt_tokens += row.tokens.len() as u64;
            }
            sequence.computed = sequence.tokens.len();
            sequence.tokens.push(sampled.token);
            served.note_token(row.id.0, served.time);
        }
        let ended: Vec<Sequence> =
            self.running.extract_if(.., |sequence| sequence.tokens.len() >= sequence.end).collect();
        let num_ended = ended.len();
        self.outcome.num_exact += ended.iter().filter(|sequence| sequence.is_exact()).count();
        self.outcome.num_finished += num_ended;
        let now = self.outcome.served.time.as_secs_f64();
        self.outcome.served.latencies.extend(std::iter::repeat_n(now, num_ended));
    }
}

/// Serves a crowd that is all there from the beginning, until everyone is done or nobody goes on.
pub(crate) fn serve(config: &ServingConfig, switches: Switches, asks: Vec<Ask>) -> Result<Outcome, LabError> {
    let mut scheduler = LabScheduler::new(config, switches, asks);
    let mut output = StepOutput::default();
    while !(scheduler.waiting.is_empty() && scheduler.running.is_empty()) {
        let plan = scheduler.plan();
        if plan.is_empty() {
            scheduler.outcome.num_stuck = scheduler.running.len();
            break;
        }
        scheduler.engine.step(&plan, &mut output, &mut |_| Flow::Continue)?;
        scheduler.apply(&plan, &output);
    }
    scheduler.pool.check().map_err(|why| LabError::Broken { what: "break", why })?;
    Ok(scheduler.outcome)
}
