//! The step loop: one scheduler over one engine. Commands wait while a step runs, as they do on a real step thread.

use std::collections::VecDeque;
use std::time::Duration;

use baton_dispatch::Role;
use baton_handoff::Time;
use baton_kv::BlockPool;
use baton_scheduler::{
    Engine, Event, FirstToken, Flow, NewSequence, Refusal, Scheduler, SchedulerConfig, SequenceId, StepOutput,
};
use baton_timing::{ModelShape, Roofline, TimingConfig, TimingEngine};

use crate::context::Context;

pub(crate) const NUM_LAYERS: usize = 2;
/// Small, so that stop tokens come up.
pub(crate) const VOCAB: u32 = 50;

const SHAPE: ModelShape =
    ModelShape { num_params: 1e8, weight_bytes: 1.0, num_layers: 30, hidden: 576, kv_token_bytes: 23_040 };
const ROOFLINE: Roofline =
    Roofline { flops_per_s: 2e11, bytes_per_s: 2e10, overhead: Duration::from_micros(200) };

/// What the worker tells its step loop.
#[derive(Debug)]
pub(crate) enum Command {
    Submit(Box<NewSequence>),
    Grant(SequenceId),
    Reserve(SequenceId),
    Commit(SequenceId, FirstToken),
    /// Held blocks go, or the sequence ends in whatever stage it is.
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
                | Event::Preempted { id } => *id,
            },
        }
    }
}

pub(crate) struct Steps {
    scheduler: Scheduler,
    engine: TimingEngine,
    output: StepOutput,
    stepping: bool,
    /// Of the running step, or of the next one.
    number: u64,
    commands: VecDeque<Command>,
}

impl Steps {
    pub(crate) fn new(role: Role, context: &Context) -> Self {
        let shape = context.shape;
        let num_blocks = match role {
            Role::Prefill => shape.prefill_blocks,
            Role::Decode => shape.decode_blocks,
        };
        let config = SchedulerConfig {
            block_size: shape.block_size,
            context: shape.context(),
            max_num_seqs: 8,
            max_queue: 16,
            max_step_tokens: shape.max_step_tokens,
            local_prefill_tokens: shape.block_size,
            max_open_prompts: 2,
            lookahead: 2,
            max_receiving_share: 0.5,
            cache_salt: shape.cache.then(|| b"sim".to_vec()),
            ageing_tokens_per_s: 20.0,
        };
        let engine = TimingEngine::new(TimingConfig {
            roofline: ROOFLINE,
            shape: SHAPE,
            num_blocks,
            block_size: shape.block_size,
            num_layers: NUM_LAYERS,
            vocab: VOCAB,
            max_step_tokens: shape.max_step_tokens,
        });
        Self {
            scheduler: Scheduler::new(config, BlockPool::new(num_blocks)),
            engine,
            output: StepOutput::default(),
            stepping: false,
            number: 0,
            commands: VecDeque::new(),
        }
    }

    pub(crate) const fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    pub(crate) const fn engine(&self) -> &TimingEngine {
        &self.engine
    }

    pub(crate) const fn engine_mut(&mut self) -> &mut TimingEngine {
        &mut self.engine
    }

    pub(crate) fn is_idle(&self) -> bool {
        !self.stepping && self.commands.is_empty()
    }

    /// Queues a command. `Some`: the running step has rows of the sequence that it ends; that step is to be left now.
    pub(crate) fn command(&mut self, command: Command) -> Option<u64> {
        let hit = match &command {
            Command::Drop(id) => {
                self.stepping
                    && !self.output.stopped
                    && self.scheduler.current_plan().rows.iter().any(|row| row.id == *id)
            }
            _ => false,
        };
        self.commands.push_back(command);
        self.output.stopped |= hit;
        hit.then_some(self.number)
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
        while let Some(command) = self.commands.pop_front() {
            self.execute(context, command, out);
        }
        self.drain(out);
        if !out.is_empty() {
            return None;
        }
        let empty = self.scheduler.plan(context.now).is_empty();
        if !empty {
            let plan = self.scheduler.current_plan();
            if let Err(error) = self.engine.step(plan, &mut self.output, &mut |_| Flow::Continue) {
                context.violate(|| format!("engine: {error}"));
            }
            self.stepping = true;
        }
        self.drain(out);
        self.stepping.then(|| (self.number, self.engine.last_step_time()))
    }

    fn execute(&mut self, context: &mut Context, command: Command, out: &mut Vec<Outcome>) {
        let now = context.now;
        match command {
            Command::Submit(new) => {
                let id = new.id;
                if let Err(refusal) = self.scheduler.submit(*new, now) {
                    out.push(Outcome::Refused(id, refusal));
                }
            }
            Command::Grant(id) => {
                if !self.scheduler.grant(id) {
                    context.violate(|| format!("grant of {id:?}, which was not offered"));
                }
            }
            Command::Reserve(id) => {
                if !self.scheduler.reserve(id) {
                    out.push(Outcome::NoRoom(id));
                }
            }
            Command::Commit(id, first) => {
                if !self.scheduler.commit(id, first) {
                    context.violate(|| format!("commit of {id:?}, which is not receiving"));
                }
            }
            Command::Drop(id) => {
                let _ = self.scheduler.release(id, now) || self.scheduler.cancel(id, now);
            }
        }
        // In the order in which they came about.
        self.drain(out);
    }

    /// The step with this number is over, unless it was left before.
    pub(crate) fn done(&mut self, number: u64, now: Time, out: &mut Vec<Outcome>) {
        if !self.stepping || number != self.number {
            return;
        }
        self.stepping = false;
        self.number += 1;
        self.scheduler.apply(&self.output, now);
        self.drain(out);
    }

    fn drain(&mut self, out: &mut Vec<Outcome>) {
        let mut events = Vec::new();
        self.scheduler.drain_events(&mut events);
        out.extend(events.into_iter().map(Outcome::Event));
    }
}
