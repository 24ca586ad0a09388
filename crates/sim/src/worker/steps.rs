//! The step loop: one scheduler over one engine. Commands wait while a step runs, as they do on a real step thread.

use std::collections::VecDeque;
use std::time::Duration;

use baton_dispatch::Role;
use baton_handoff::Time;
use baton_kv::BlockPool;
use baton_scheduler::{
    Engine, Event, FirstToken, Flow, NewSequence, Origin, Refusal, Scheduler, SchedulerConfig, SequenceId,
    StageCounts, StepOutput,
};
use baton_timing::{TimingConfig, TimingEngine};

use super::line::{Line, Rank};
use crate::check;
use crate::context::Context;

/// Small, so that stop tokens come up.
pub(crate) const VOCAB: u32 = 50;
/// What the prefix cache's hashes cover besides tokens; the same everywhere.
pub(crate) const CACHE_SALT: &[u8] = b"sim";

/// Weight of the newest step in the measured rates.
const NEWEST: f64 = 0.2;

/// What the worker tells its step loop.
#[derive(Debug)]
pub(crate) enum Command {
    Submit(Box<NewSequence>),
    Grant(SequenceId),
    Reserve(SequenceId),
    Commit(SequenceId, Vec<FirstToken>),
    /// Held blocks go, or the sequence ends in whatever stage it is; before a fork the whole group.
    Drop(SequenceId),
}

/// What the step loop tells its worker.
#[derive(Debug)]
pub(crate) enum Outcome {
    Refused(SequenceId, Refusal),
    NoRoom(SequenceId),
    Event(Event),
}

impl Outcome {
    pub(crate) const fn id(&self) -> SequenceId {
        match self {
            Self::Refused(id, _) | Self::NoRoom(id) => *id,
            Self::Event(event) => match event {
                Event::NearHead { id }
                | Event::Opened { id, .. }
                | Event::Computed { id, .. }
                | Event::Token { id, .. }
                | Event::Reserved { id, .. }
                | Event::Started { id, .. }
                | Event::Preempted { id, .. } => *id,
            },
        }
    }
}

/// What steps took lately.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rates {
    pub(crate) prefill_tokens_per_s: f64,
    pub(crate) decode_step_ms: f64,
}

/// What the scheduler has to do.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    pub(crate) counts: StageCounts,
    pub(crate) queued_tokens: u64,
}

pub(crate) struct Steps {
    /// Whose loop this is.
    worker: usize,
    scheduler: Scheduler,
    engine: TimingEngine,
    output: StepOutput,
    stepping: bool,
    /// Of the running step, or of the next one.
    number: u64,
    commands: VecDeque<Command>,
    /// Sequences that a command in the queue ends.
    dropping: Vec<SequenceId>,
    line: Line,
    decodes: bool,
    /// How long the running step takes, or the last one took.
    took: Duration,
    rates: Rates,
    num_computed: u64,
    load: Load,
    /// The scheduler did something since that was looked at.
    changed: bool,
}

impl Steps {
    pub(crate) fn new(index: usize, role: Role, context: &Context) -> Self {
        let shape = &context.shape;
        let config = &shape.worker;
        let planned = context.fidelity.measured(index).map(|measured| measured.planned);
        let num_blocks = match role {
            Role::Prefill => config.prefill_blocks,
            Role::Decode => config.decode_blocks,
        };
        let mut scheduler = Scheduler::new(
            SchedulerConfig {
                block_size: config.block_size,
                context: shape.context(),
                max_num_seqs: config.max_num_seqs,
                max_queue: config.max_queue,
                max_step_tokens: config.max_step_tokens,
                local_prefill_tokens: config.local_prefill_tokens,
                max_open_prompts: config.max_open_prompts,
                lookahead: config.max_open_prompts,
                max_receiving_share: 0.5,
                cache_salt: config.cache.then(|| CACHE_SALT.to_vec()),
                ageing_tokens_per_s: 20.0,
                step_cost: Some(planned.unwrap_or_else(|| shape.device.step_cost())),
                max_step_ms: config.max_step_ms,
                max_step_growth: config.max_step_growth,
                // The pseudo model's own, if it has any.
                num_layers: match context.fidelity.num_layers() {
                    0 => shape.device.model.num_layers,
                    num_layers => num_layers,
                },
            },
            BlockPool::new(num_blocks),
        );
        scheduler.set_report_cache(config.cache);
        let engine = TimingEngine::new(TimingConfig {
            roofline: shape.device.roofline,
            shape: shape.device.model,
            num_blocks,
            block_size: config.block_size,
            num_layers: context.fidelity.num_layers(),
            vocab: VOCAB,
            max_step_tokens: config.max_step_tokens,
        });
        Self {
            worker: index,
            scheduler,
            engine,
            output: StepOutput::default(),
            stepping: false,
            number: 0,
            commands: VecDeque::new(),
            dropping: Vec::new(),
            line: Line::default(),
            decodes: role == Role::Decode,
            took: Duration::ZERO,
            rates: Rates::default(),
            num_computed: 0,
            load: Load::default(),
            changed: true,
        }
    }

    pub(crate) const fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    pub(crate) const fn scheduler_mut(&mut self) -> &mut Scheduler {
        &mut self.scheduler
    }

    pub(crate) const fn engine(&self) -> &TimingEngine {
        &self.engine
    }

    pub(crate) const fn engine_mut(&mut self) -> &mut TimingEngine {
        &mut self.engine
    }

    /// Counts sequences, if there can be others; while what was just planned is at hand. Who asks later looks at none.
    pub(crate) fn refresh(&mut self) {
        if std::mem::take(&mut self.changed) {
            let queued_tokens = self.scheduler.queued_tokens();
            self.load = Load { counts: self.scheduler.counts(), queued_tokens };
        }
    }

    /// As of the last refresh.
    pub(crate) const fn load(&self) -> Load {
        self.load
    }

    pub(crate) const fn rates(&self) -> Rates {
        self.rates
    }

    pub(crate) fn is_idle(&self) -> bool {
        !self.stepping && self.commands.is_empty()
    }

    /// Queues a command. `Some`: the running step has no row left that anybody wants; that step is to be left now.
    pub(crate) fn command(&mut self, command: Command) -> Option<u64> {
        if let Command::Drop(id) = command {
            self.dropping.push(id);
        }
        self.commands.push_back(command);
        let unwanted = self.stepping
            && !self.output.stopped
            && self.scheduler.current_plan().rows.iter().all(|row| self.dropping.contains(&row.id));
        self.output.stopped |= unwanted;
        unwanted.then_some(self.number)
    }

    /// Of the running step, if it has this number: each chunk's sequence, first position and length.
    pub(crate) fn chunks(&self, number: u64) -> Vec<(SequenceId, usize, usize)> {
        if !self.stepping || self.output.stopped || number != self.number {
            return Vec::new();
        }
        let rows = &self.scheduler.current_plan().rows;
        rows.iter().map(|row| (row.id, row.position, row.tokens.len())).collect()
    }

    /// Executes what waits, and starts a step if there is one to do: its number and how long it takes.
    pub(crate) fn advance(
        &mut self,
        context: &mut Context,
        out: &mut Vec<Outcome>,
    ) -> Option<(u64, Duration)> {
        if self.stepping {
            return None;
        }
        self.changed = true;
        while let Some(command) = self.commands.pop_front() {
            self.execute(context, command, out);
        }
        self.dropping.clear();
        self.drain(context, out);
        if !out.is_empty() {
            return None;
        }
        let empty = self.scheduler.plan(context.now).is_empty();
        if !empty {
            self.begin(context);
        }
        self.drain(context, out);
        self.stepping.then_some((self.number, self.took))
    }

    /// Computes the plan, and notes how long that takes.
    fn begin(&mut self, context: &mut Context) {
        let plan = self.scheduler.current_plan();
        let kind = context.fidelity.measured(self.worker).and_then(|measured| measured.kind(plan));
        let ratio = kind.map(|kind| {
            self.engine.set_step_cost(kind.cost);
            kind.draw(&mut context.random)
        });
        if let Err(error) = self.engine.step(plan, &mut self.output, &mut |_| Flow::Continue) {
            context.violate(|| format!("engine: {error}"));
        }
        let expected = self.engine.last_step_time();
        self.took = ratio.map_or(expected, |ratio| expected.mul_f64(ratio));
        self.stepping = true;
    }

    fn execute(&mut self, context: &mut Context, command: Command, out: &mut Vec<Outcome>) {
        let now = context.now;
        match command {
            Command::Submit(new) => self.submit(*new, now, out),
            Command::Grant(id) => {
                if !self.scheduler.grant(id) {
                    context.violate(|| format!("grant of {id:?}, which was not offered"));
                }
            }
            Command::Reserve(id) => {
                self.line.wait(id, now);
                if !self.scheduler.reserve(id) {
                    out.push(Outcome::NoRoom(id));
                }
            }
            Command::Commit(id, first) => {
                if !self.scheduler.commit(id, &first) {
                    context.violate(|| format!("commit of {id:?}, which is not receiving"));
                }
            }
            Command::Drop(id) => {
                let _ = self.scheduler.release(id, now) || self.scheduler.cancel(id, now);
                self.line.forget(id, now);
            }
        }
        // In the order in which they came about.
        self.drain(context, out);
    }

    fn submit(&mut self, new: NewSequence, now: Time, out: &mut Vec<Outcome>) {
        let (id, origin) = (new.id, new.origin);
        if self.decodes {
            for id in std::iter::once(&id).chain(&new.siblings) {
                self.line.know(*id, Rank::new(now, &new, *id));
            }
        }
        if let Err(refusal) = self.scheduler.submit(new, now) {
            return out.push(Outcome::Refused(id, refusal));
        }
        if origin == Origin::Local {
            self.line.wait(id, now);
        }
    }

    /// The process stood still until now.
    pub(crate) fn resumed(&mut self, now: Time) {
        self.line.resumed(now);
    }

    /// These sequences are over.
    pub(crate) fn forget(&mut self, ids: &[SequenceId], now: Time) {
        ids.iter().for_each(|id| self.line.forget(*id, now));
    }

    /// The step with this number is over, unless it was left before.
    pub(crate) fn done(&mut self, context: &mut Context, number: u64, out: &mut Vec<Outcome>) {
        if !self.stepping || number != self.number {
            return;
        }
        self.stepping = false;
        self.changed = true;
        self.number += 1;
        self.scheduler.apply(&self.output, context.now);
        self.measure();
        self.drain(context, out);
    }

    fn measure(&mut self) {
        if self.output.stopped {
            return;
        }
        let computed = self.scheduler.num_prompt_tokens_computed();
        let seconds = self.took.as_secs_f64();
        let (rate, value) = match computed - std::mem::replace(&mut self.num_computed, computed) {
            0 => (&mut self.rates.decode_step_ms, seconds * 1e3),
            tokens => (&mut self.rates.prefill_tokens_per_s, tokens as f64 / seconds),
        };
        *rate = if *rate == 0.0 { value } else { *rate * (1.0 - NEWEST) + value * NEWEST };
    }

    fn drain(&mut self, context: &mut Context, out: &mut Vec<Outcome>) {
        let mut events = Vec::new();
        self.scheduler.drain_events(&mut events);
        for event in &events {
            if self.decodes {
                self.follow_line(context, event);
            }
        }
        out.extend(events.into_iter().map(Outcome::Event));
    }

    fn follow_line(&mut self, context: &mut Context, event: &Event) {
        let now = context.now;
        match event {
            Event::Reserved { id, .. } => {
                if let Some(passed) = self.line.serve(*id, now) {
                    check::passed(context, passed);
                }
            }
            Event::Computed { id, .. } | Event::Started { id, .. } => {
                self.line.serve(*id, now);
            }
            Event::Preempted { id, gone: true } | Event::Token { id, finish: Some(_), .. } => {
                self.line.forget(*id, now);
            }
            Event::Preempted { id, gone: false } => self.line.wait(*id, now),
            Event::Token { .. } | Event::NearHead { .. } | Event::Opened { .. } => {}
        }
    }
}
