//! The loop itself.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_handoff::Cause;
use baton_scheduler::{
    Engine, EngineError, Event, FirstToken, Flow, Refusal, Scheduler, SequenceId, StepOutput, StepPlan,
    StepPoint, Time,
};
use baton_telemetry::metrics::WorkerMetrics;
use baton_telemetry::trace::Tracing;
use tokio::sync::mpsc::Receiver;
use tokio::sync::mpsc::error::TrySendError;

use super::boundaries::Boundaries;
use super::cache_feed::CacheFeed;
use super::group::{Group, Member, Members, NewIds};
use super::handle::Shared;
use super::message::{Command, LayerSink, Live, Load, SequenceEvent, Slot, Stamped, Submit, nth_id};
use super::profile::Planned;
use super::rates::StepMeter;
use super::stall::{Chunk, StallWatch};
use super::tracer::{StepTracer, TracedStep};
use super::yielding::Yielding;
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
    members: Members,
    meter: StepMeter,
    cache_feed: CacheFeed,
    boundaries: Boundaries,
    stalls: StallWatch,
    tracer: StepTracer,
    yielding: Yielding,
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
    pub(super) tracing: Tracing,
    pub(super) stall_threshold: Duration,
    /// Whether its steps let others on their CPU go first.
    pub(super) gives_way: bool,
}

impl StepLoop {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts {
            shared,
            commands,
            scheduler,
            engine,
            clock,
            metrics,
            tracing,
            stall_threshold,
            gives_way,
        } = parts;
        Self {
            shared,
            commands,
            scheduler,
            engine,
            clock,
            metrics,
            members: Members::default(),
            meter: StepMeter::default(),
            cache_feed: CacheFeed::new(),
            boundaries: Boundaries::new(),
            stalls: StallWatch::new(stall_threshold),
            tracer: StepTracer::new(tracing),
            yielding: Yielding::new(gives_way),
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
            self.boundaries.push(self.clock.now());
            let turn = Instant::now();
            self.take_commands();
            self.take_cancels();
            let now = self.clock.now();
            self.scheduler.plan(now);
            self.forward(now);
            self.cache_feed.publish(&mut self.scheduler);
            let idle = self.scheduler.current_plan().is_empty();
            self.publish(idle);
            if idle {
                self.boundaries.sleeps();
                self.sleep();
            } else {
                let planned = Planned::new(self.scheduler.current_plan());
                match self.step() {
                    // From boundary to boundary: that is what a gap between two tokens is.
                    Ok(true) => self.shared.profile.observe(planned, turn.elapsed().as_secs_f64()),
                    Ok(false) => {}
                    Err(error) => break Err(error),
                }
            }
        };
        let cause = if ended.is_ok() { Cause::Draining } else { Cause::Engine };
        self.members.end_all(cause);
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
                Command::Commit(id, first, prefill_s) => self.commit(id, &first, prefill_s, now),
                Command::Notice(id, at) => {
                    self.tell(id, self.boundaries.at_or_after(at, now), SequenceEvent::Boundary);
                }
                Command::Stop(id) => self.stop(id, now),
                Command::WatchCache(reader) => {
                    // A reader that is gone needs no answer.
                    let _ = reader.send(self.cache_feed.open(&mut self.scheduler));
                }
            }
            self.forward(now);
        }
    }

    fn submit(&mut self, submit: Submit, now: Time) {
        let Submit { sequence, live } = submit;
        if live.slot.cancelled.load(Ordering::SeqCst) {
            return;
        }
        let ids = NewIds::of(&sequence);
        match self.scheduler.submit(sequence, now) {
            Ok(()) => self.members.insert(ids, live),
            Err(refusal) => refuse(&live, refusal, now),
        }
    }

    fn commit(&mut self, id: SequenceId, first: &[FirstToken], prefill_s: Option<f64>, now: Time) {
        if !self.scheduler.commit(id, first) {
            return;
        }
        self.scheduler.drain_events(&mut self.events);
        let runs = self
            .events
            .iter()
            .any(|event| matches!(event, Event::Started { id: started, .. } if *started == id));
        if runs && let Some(each_s) = prefill_s {
            let avoided = self.members.spare_victims(id, each_s);
            // A counter can't fall.
            self.metrics.hol_avoided.inc_by(avoided.total_s.max(0.0));
        }
        self.forward(now);
        // A sequence that its first token ended has no event.
        for (nth, first) in (0..).zip(first) {
            if first.finished || !runs {
                self.members.remove(nth_id(id, nth));
            }
        }
    }

    /// Ends one sequence of a group.
    fn stop(&mut self, id: SequenceId, now: Time) {
        let Some(member) = self.members.get(id) else { return };
        if id == member.group.head && member.group.is_whole() {
            return member.group.head_stopped.set(true);
        }
        self.scheduler.cancel(id, now);
        if let Some(group) = self.members.remove(id)
            && group.is_unwanted()
        {
            self.scheduler.cancel(group.head, now);
            self.members.remove(group.head);
        }
    }

    /// Ends the sequences whose handles were dropped.
    fn take_cancels(&mut self) {
        if self.shared.num_cancels.swap(0, Ordering::SeqCst) == 0 {
            return;
        }
        let now = self.clock.now();
        let mut ids = Vec::new();
        self.members.remove_cancelled(|id| ids.push(id));
        self.scheduler.cancel_all(&ids, now);
        self.forward(now);
    }

    /// Passes the scheduler's events on to their sequences.
    fn forward(&mut self, now: Time) {
        let mut events = std::mem::take(&mut self.events);
        self.scheduler.drain_events(&mut events);
        for event in events.drain(..) {
            if let Some((id, event)) = translate(event, &self.members, self.stalls.began()) {
                self.tell(id, now, event);
            }
        }
        self.events = events;
    }

    fn tell(&mut self, id: SequenceId, at: Time, event: SequenceEvent) {
        let Some(member) = self.members.get(id) else { return };
        let group = &member.group;
        note(&self.metrics, group, &event);
        match event {
            SequenceEvent::Started { .. } => group.start(at, &self.stalls),
            // From now on its prompt may be computed elsewhere. When that is done some of these have ended, and who began anew waits behind it.
            SequenceEvent::Reserved { .. } => self.members.note_victims(id, at),
            SequenceEvent::Preempted { .. } => member.preempted.set(true),
            SequenceEvent::Token { .. } => {
                if let Some(stall) = member.token(at, &self.stalls, &self.metrics) {
                    group.tell_aside(Stamped { at, event: SequenceEvent::Stall(stall) });
                }
            }
            _ => {}
        }
        let head = group.head;
        let starts = matches!(event, SequenceEvent::Started { .. });
        let is_gone = matches!(event, SequenceEvent::Preempted { gone: true, .. });
        let is_finished = matches!(event, SequenceEvent::Token { finish: Some(_), .. });
        // A prefill worker holds all blocks of a group under the id of the first: it stays until the handle is dropped.
        let is_over = is_gone || (is_finished && !group.is_prefill);
        let all_over = is_gone && !group.started.get();
        match group.events.try_send(Stamped { at, event }) {
            // With a closed channel its handle is gone; the cancel is on its way.
            Ok(()) | Err(TrySendError::Closed(_)) => {}
            Err(TrySendError::Full(_)) => {
                tracing::warn!("a reader is too slow: its sequences are cancelled");
                let _ = group.slot.end.set(Cause::SlowReader);
                // The event may be of the past.
                let mut ids = Vec::new();
                self.members.remove_group(head, |id| ids.push(id));
                self.scheduler.cancel_all(&ids, self.clock.now());
                return;
            }
        }
        if starts {
            if group.head_stopped.replace(false) {
                self.stop(head, at);
            }
        } else if all_over {
            self.members.remove_group(head, |_| {});
        } else if is_over {
            self.members.remove(id);
        }
    }

    /// Whether it was computed to its end.
    fn step(&mut self) -> Result<bool, EngineError> {
        self.watch_rows(self.clock.now());
        let traced = self.traced_step();
        let (shared, rows, yielding) = (&self.shared, &self.rows, &mut self.yielding);
        let mut on_point = |point| {
            yielding.at_point();
            if let StepPoint::LayerEnd(layer) = point {
                shared.progress.fetch_add(1, Ordering::Relaxed);
                for row in rows {
                    if let Some(sink) = &row.sink {
                        sink.layer_done(row.chunk.clone(), layer);
                    }
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
        self.engine.step(plan, &mut self.output, &mut on_point).inspect_err(|error| {
            tracing::error!(%error, "the engine failed; every sequence ends");
        })?;
        let took = started.elapsed();
        self.metrics.step_duration.observe(took.as_secs_f64());
        if !self.output.stopped {
            let cost = self.meter.observe(self.scheduler.current_plan(), took, &self.shared.rates);
            if cost.is_some() {
                self.scheduler.set_step_cost(cost);
            }
            self.shared.learnt(cost, self.meter.residual(), self.meter.level());
            self.metrics.block_copies.inc_by(self.scheduler.current_plan().copies.len() as u64);
            self.metrics.row_parts.inc_by(u64::from(self.scheduler.current_plan().part.is_some()));
        }
        if let Some(traced) = traced {
            let plan = self.scheduler.current_plan();
            traced.end(started, plan.rows.len(), plan.tokens.len());
        }
        let now = self.clock.now();
        self.stalls.end(now, self.scheduler.current_plan().copies.len());
        self.scheduler.apply(&self.output, now);
        // Whoever hears of the step finds it counted.
        self.count();
        self.forward(now);
        Ok(!self.output.stopped)
    }

    fn traced_step(&mut self) -> Option<TracedStep> {
        let (rows, members) = (&self.scheduler.current_plan().rows, &self.members);
        self.tracer.next(rows.iter().filter_map(|row| members.get(row.id)?.group.owner.trace))
    }

    fn watch_rows(&mut self, now: Time) {
        self.rows.clear();
        self.stalls.begin(now);
        for row in &self.scheduler.current_plan().rows {
            if let Some(member) = self.members.get(row.id) {
                let group = &member.group;
                group.first_step.set(group.first_step.get().or(Some(now)));
                let num_tokens = row.tokens.len();
                if member.runs() {
                    self.stalls.decodes();
                } else if num_tokens > 1 {
                    // A row of one token takes as long as one that decodes.
                    let is_resume = group.is_resume || member.preempted.get();
                    self.stalls.chunk(Chunk { num_tokens, is_resume, owner: group.owner });
                }
                let (slot, sink) = (Arc::clone(&group.slot), group.sink.clone());
                self.rows.push(Row { slot, sink, chunk: row.position..row.position + num_tokens });
            }
        }
        self.stalls.expect(self.meter.decode_alone(self.stalls.num_decoding()));
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
fn note(metrics: &WorkerMetrics, group: &Group, event: &SequenceEvent) {
    let done = match *event {
        SequenceEvent::Token { .. } => {
            metrics.generated_tokens.inc();
            return;
        }
        SequenceEvent::Started { cached_tokens, .. } => {
            metrics.prefix_hit_tokens.inc_by(cached_tokens as u64);
            metrics.forks.inc_by(u64::from(group.num_open.get() - 1));
            return;
        }
        SequenceEvent::Preempted { gone, .. } => {
            metrics.preemptions.inc();
            metrics.preempted_gone.inc_by(u64::from(gone));
            return;
        }
        SequenceEvent::Opened { cached_tokens, .. } => {
            metrics.prefix_hit_tokens.inc_by(cached_tokens as u64);
            cached_tokens
        }
        SequenceEvent::Computed { num_tokens, .. } => num_tokens,
        _ => return,
    };
    if let Some(sink) = &group.sink
        && done > 0
    {
        sink.tokens_done(done);
    }
}

fn refuse(live: &Live, refusal: Refusal, now: Time) {
    // The channel is fresh, so there is room; a dropped handle needs no answer.
    let _ = live.events.try_send(Stamped { at: now, event: SequenceEvent::Refused(refusal) });
}

/// An event as the sequence's reader is told it, and whom it is about. `None` when nobody listens any more.
fn translate(event: Event, members: &Members, began: Time) -> Option<(SequenceId, SequenceEvent)> {
    Some(match event {
        Event::NearHead { id } => (id, SequenceEvent::NearHead),
        Event::Opened { id, lease, cached_tokens } => (id, SequenceEvent::Opened { lease, cached_tokens }),
        Event::Computed { id, num_tokens } => (id, SequenceEvent::Computed { num_tokens, began }),
        Event::Token { id, token, logprob, index, finish } => {
            let sequence = members.get(id)?.sequence;
            (id, SequenceEvent::Token { sequence, token, logprob, index, finish })
        }
        Event::Reserved { id, lease, skip_tokens } => (id, SequenceEvent::Reserved { lease, skip_tokens }),
        Event::Started { id, cached_tokens } => {
            let group = &members.get(id)?.group;
            let (first_step, avoided) = (group.first_step.get(), group.avoided.take());
            (id, SequenceEvent::Started { first_step, cached_tokens, avoided })
        }
        Event::Preempted { id, gone } => {
            let Member { group, sequence, .. } = members.get(id)?;
            // Until the fork the first sequence speaks for all.
            let is_news = group.started.get() || id == group.head;
            return is_news.then_some((id, SequenceEvent::Preempted { sequence: *sequence, gone }));
        }
    })
}
