//! The loop itself.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_handoff::Cause;
use baton_scheduler::{
    Engine, EngineError, Event, FirstToken, Flow, Refusal, Scheduler, SequenceId, StepOutput, StepPlan, Time,
};
use baton_telemetry::metrics::WorkerMetrics;
use tokio::sync::mpsc::Receiver;
use tokio::sync::mpsc::error::TrySendError;

use super::handle::Shared;
use super::message::{Command, LayerSink, Live, Load, SequenceEvent, Slot, Stamped, Submit};
use crate::Clock;

/// The pool recounts itself once in this many steps.
const CHECK_EVERY: u64 = 1024;

/// Longest sleep with sequences waiting: a safety net, every change wakes the loop.
const NAP: Duration = Duration::from_secs(1);

pub(super) struct StepLoop {
    shared: Arc<Shared>,
    commands: Receiver<Command>,
    scheduler: Scheduler,
    engine: Box<dyn Engine>,
    clock: Clock,
    metrics: WorkerMetrics,
    live: HashMap<SequenceId, Live>,
    /// The next three keep their memory from step to step.
    events: Vec<Event>,
    output: StepOutput,
    rows: Vec<Row>,
    num_steps: u64,
    num_prompt_tokens: u64,
}

/// What a layer's end needs to know of a row.
struct Row {
    slot: Arc<Slot>,
    sink: Option<Arc<dyn LayerSink>>,
    /// Tokens of the sequence that this step computes.
    chunk: Range<usize>,
}

/// What a loop is made from.
pub(super) struct Parts {
    pub(super) shared: Arc<Shared>,
    pub(super) commands: Receiver<Command>,
    pub(super) scheduler: Scheduler,
    pub(super) engine: Box<dyn Engine>,
    pub(super) clock: Clock,
    pub(super) metrics: WorkerMetrics,
}

impl StepLoop {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { shared, commands, scheduler, engine, clock, metrics } = parts;
        Self {
            shared,
            commands,
            scheduler,
            engine,
            clock,
            metrics,
            live: HashMap::new(),
            events: Vec::new(),
            output: StepOutput::default(),
            rows: Vec::new(),
            num_steps: 0,
            num_prompt_tokens: 0,
        }
    }

    /// Runs until stopped or until the engine fails.
    pub(super) fn run(mut self) -> Result<(), EngineError> {
        let ended = loop {
            if self.shared.stop.load(Ordering::SeqCst) {
                break Ok(());
            }
            self.take_commands();
            self.take_cancels();
            let now = self.clock.now();
            self.scheduler.plan(now);
            self.forward(now);
            let idle = self.scheduler.current_plan().is_empty();
            self.publish(idle);
            if idle {
                self.sleep();
            } else if let Err(error) = self.step() {
                break Err(error);
            }
        };
        let cause = if ended.is_ok() { Cause::Draining } else { Cause::Engine };
        for live in self.live.values() {
            let _ = live.slot.end.set(cause);
        }
        ended
    }

    /// Everything that was sent before this boundary.
    fn take_commands(&mut self) {
        for _ in 0..self.commands.len() {
            let Ok(command) = self.commands.try_recv() else { return };
            let now = self.clock.now();
            match command {
                Command::Submit(submit) => self.submit(*submit, now),
                // A sequence that is gone has nobody to tell; the same for the commands below.
                Command::Grant(id, _skip) => {
                    self.scheduler.grant(id);
                }
                Command::Reserve(id) => {
                    self.scheduler.reserve(id);
                }
                Command::Commit(id, first) => self.commit(id, first, now),
                Command::Notice(id) => self.tell(id, now, SequenceEvent::Boundary),
            }
            self.forward(now);
        }
    }

    fn submit(&mut self, submit: Submit, now: Time) {
        let Submit { sequence, live } = submit;
        if live.slot.cancelled.load(Ordering::SeqCst) {
            return;
        }
        let id = sequence.id;
        match self.scheduler.submit(sequence, now) {
            Ok(()) => {
                self.live.insert(id, live);
            }
            Err(refusal) => refuse(&live, refusal, now),
        }
    }

    fn commit(&mut self, id: SequenceId, first: FirstToken, now: Time) {
        if !self.scheduler.commit(id, first) {
            return;
        }
        self.scheduler.drain_events(&mut self.events);
        let runs = self
            .events
            .iter()
            .any(|event| matches!(event, Event::Started { id: started, .. } if *started == id));
        self.forward(now);
        if !runs {
            self.live.remove(&id);
        }
    }

    /// Ends the sequences whose handles were dropped.
    fn take_cancels(&mut self) {
        if self.shared.num_cancels.swap(0, Ordering::SeqCst) == 0 {
            return;
        }
        let now = self.clock.now();
        let scheduler = &mut self.scheduler;
        self.live.retain(|&id, live| {
            let cancelled = live.slot.cancelled.load(Ordering::SeqCst);
            if cancelled {
                scheduler.cancel(id, now);
            }
            !cancelled
        });
        self.forward(now);
    }

    /// Passes the scheduler's events on to their sequences.
    fn forward(&mut self, now: Time) {
        let mut events = std::mem::take(&mut self.events);
        self.scheduler.drain_events(&mut events);
        for event in events.drain(..) {
            let (id, event) = split(event);
            self.tell(id, now, event);
        }
        self.events = events;
    }

    fn tell(&mut self, id: SequenceId, at: Time, mut event: SequenceEvent) {
        let Some(live) = self.live.get(&id) else { return };
        if let SequenceEvent::Started { first_step, .. } = &mut event {
            *first_step = live.first_step;
        }
        let last = matches!(event, SequenceEvent::Token { finish: Some(_), .. });
        note(&self.metrics, live, &event);
        match live.events.try_send(Stamped { at, event }) {
            Ok(()) if !last => {}
            // Its handle is gone; the cancel is on its way.
            Err(TrySendError::Closed(_)) if !last => {}
            Err(TrySendError::Full(_)) => {
                tracing::warn!("a reader is too slow: its sequence is cancelled");
                let _ = live.slot.end.set(Cause::SlowReader);
                self.scheduler.cancel(id, at);
                self.live.remove(&id);
            }
            Ok(()) | Err(TrySendError::Closed(_)) => {
                self.live.remove(&id);
            }
        }
    }

    fn step(&mut self) -> Result<(), EngineError> {
        self.watch_rows(self.clock.now());
        let (shared, rows) = (&self.shared, &self.rows);
        let mut on_layer = |layer: usize| {
            shared.progress.fetch_add(1, Ordering::Relaxed);
            for row in rows {
                if let Some(sink) = &row.sink {
                    sink.layer_done(row.chunk.clone(), layer);
                }
            }
            let cancels = shared.num_cancels.load(Ordering::Relaxed) > 0;
            let nobody_cares = || rows.iter().all(|row| row.slot.cancelled.load(Ordering::Relaxed));
            if shared.stop.load(Ordering::Relaxed) || (cancels && nobody_cares()) {
                Flow::Stop
            } else {
                Flow::Continue
            }
        };
        let started = Instant::now();
        let plan: &StepPlan = self.scheduler.current_plan();
        self.engine.step(plan, &mut self.output, &mut on_layer).inspect_err(|error| {
            tracing::error!(%error, "the engine failed; every sequence ends");
        })?;
        self.metrics.step_duration.observe(started.elapsed().as_secs_f64());
        let now = self.clock.now();
        self.scheduler.apply(&self.output, now);
        // Whoever hears of the step finds it counted.
        self.count();
        self.forward(now);
        Ok(())
    }

    fn watch_rows(&mut self, now: Time) {
        self.rows.clear();
        for row in &self.scheduler.current_plan().rows {
            if let Some(live) = self.live.get_mut(&row.id) {
                live.first_step.get_or_insert(now);
                let (slot, sink) = (Arc::clone(&live.slot), live.sink.clone());
                self.rows.push(Row { slot, sink, chunk: row.position..row.position + row.tokens.len() });
            }
        }
    }

    fn count(&mut self) {
        let computed = self.scheduler.num_prompt_tokens_computed();
        self.metrics.prompt_tokens_computed.inc_by(computed - self.num_prompt_tokens);
        self.num_prompt_tokens = computed;
        self.num_steps += 1;
        if self.num_steps.is_multiple_of(CHECK_EVERY)
            && let Err(error) = self.scheduler.pool().check()
        {
            tracing::error!(%error, "the block pool is inconsistent: this is a bug");
        }
    }

    fn publish(&self, idle: bool) {
        let load =
            Load { counts: self.scheduler.counts(), queued_tokens: self.scheduler.queued_tokens(), idle };
        self.shared.load.send_if_modified(|old| std::mem::replace(old, load) != load);
    }

    fn sleep(&self) {
        if self.scheduler.is_empty() {
            std::thread::park();
        } else {
            std::thread::park_timeout(NAP);
        }
    }
}

/// Counts, and tells the sink. It hears of tokens from this thread alone, so that what it was told never goes back: what
/// was cached first, then layer by layer what is computed.
fn note(metrics: &WorkerMetrics, live: &Live, event: &SequenceEvent) {
    let done = match *event {
        SequenceEvent::Token { .. } => {
            metrics.generated_tokens.inc();
            return;
        }
        SequenceEvent::Started { cached_tokens, .. } => {
            metrics.prefix_hit_tokens.inc_by(cached_tokens as u64);
            return;
        }
        SequenceEvent::Opened { cached_tokens, .. } => {
            metrics.prefix_hit_tokens.inc_by(cached_tokens as u64);
            cached_tokens
        }
        SequenceEvent::Computed { num_tokens } => num_tokens,
        _ => return,
    };
    if let Some(sink) = &live.sink
        && done > 0
    {
        sink.tokens_done(done);
    }
}

fn refuse(live: &Live, refusal: Refusal, now: Time) {
    // The channel is fresh, so there is room; a dropped handle needs no answer.
    let _ = live.events.try_send(Stamped { at: now, event: SequenceEvent::Refused(refusal) });
}

fn split(event: Event) -> (SequenceId, SequenceEvent) {
    match event {
        Event::NearHead { id } => (id, SequenceEvent::NearHead),
        Event::Opened { id, lease, cached_tokens } => (id, SequenceEvent::Opened { lease, cached_tokens }),
        Event::Computed { id, num_tokens } => (id, SequenceEvent::Computed { num_tokens }),
        Event::Token { id, token, logprob, index, finish } => {
            (id, SequenceEvent::Token { token, logprob, index, finish })
        }
        Event::Reserved { id, lease, skip_tokens } => (id, SequenceEvent::Reserved { lease, skip_tokens }),
        Event::Started { id, cached_tokens } => {
            (id, SequenceEvent::Started { first_step: None, cached_tokens })
        }
        Event::Preempted { id } => (id, SequenceEvent::Preempted),
    }
}
