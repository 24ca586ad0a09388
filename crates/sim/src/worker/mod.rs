//! A worker process: a step loop, the legs of routers, handoffs, and what reaches it from outside.

mod decode;
mod drain;
mod leg;
mod line;
mod prefill;
mod publish;
mod receiver;
mod redirect;
mod sender;
mod steps;
mod stop;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use baton_dispatch::{Role, WorkerState};
use baton_handoff::{
    Cause, Destination, DestinationFact, HandoffKey, InstanceId, Registry, RegistryLimits, Time, Timers,
};
use baton_scheduler::SequenceId;

pub(crate) use drain::DRAIN_TIMEOUT;
pub(crate) use leg::LegSpec;
use leg::{Leg, LegStage, LegState, StreamUse};
pub(crate) use line::Passed;
use publish::Publisher;
use receiver::Receiver;
pub(crate) use steps::{CACHE_SALT, VOCAB};
use steps::{Command, Outcome, Steps};

use crate::Shape;
use crate::context::Context;
use crate::fidelity::SLICES;
use crate::network::{Arrival, Node, Payload, Side, StreamId};
use crate::queue::{Event, WorkerEvent};

/// The timers of all workers: as in production, or a small share of that.
pub(crate) fn timers(shape: &Shape) -> Timers {
    if !shape.hasty {
        return Timers::default();
    }
    let [answer, delivery, abort, hold, reserve, grant, progress, writer, park] =
        Timers::default().values().map(|value| value / 150);
    Timers { answer, delivery, abort, hold, reserve, grant, progress, writer, park }
}

/// One process.
pub(crate) struct Worker {
    pub(crate) index: usize,
    pub(crate) role: Role,
    pub(crate) instance: InstanceId,
    /// Counts the processes that had this address: events of an earlier one are void.
    pub(crate) incarnation: u32,
    pub(crate) alive: bool,
    /// Standing still; what comes meanwhile is held.
    pub(crate) paused: bool,
    pub(crate) held: VecDeque<Event>,
    pub(crate) state: WorkerState,
    pub(crate) steps: Steps,
    pub(crate) registry: Registry,
    /// Events since the pool last recounted itself.
    pub(crate) num_unchecked: usize,
    legs: BTreeMap<HandoffKey, Leg>,
    sequences: BTreeMap<SequenceId, HandoffKey>,
    streams: BTreeMap<StreamId, (HandoffKey, StreamUse)>,
    parked: BTreeMap<HandoffKey, StreamId>,
    /// Machines whose leg is over; they answer until the source closes its control stream.
    lingering: BTreeMap<StreamId, Destination>,
    /// Writers that had not ended when their handoff was given up.
    late_writers: BTreeMap<HandoffKey, Receiver>,
    publisher: Publisher,
    /// When everything that waits to be sent will be.
    link_free_at: Time,
    next_sequence: u64,
    timers: Timers,
    wake: Option<Time>,
    /// The earliest deadline among those that changed since the alarm was looked at.
    due: Option<Time>,
}

impl Worker {
    pub(crate) fn new(index: usize, role: Role, incarnation: u32, context: &mut Context) -> Self {
        let instance = InstanceId(context.random.id());
        let timers = timers(&context.shape);
        Self {
            index,
            role,
            instance,
            incarnation,
            alive: true,
            paused: false,
            held: VecDeque::new(),
            state: WorkerState::Ready,
            steps: Steps::new(index, role, context),
            registry: Registry::new(instance, RegistryLimits::default(), &timers),
            num_unchecked: 0,
            legs: BTreeMap::new(),
            sequences: BTreeMap::new(),
            streams: BTreeMap::new(),
            parked: BTreeMap::new(),
            lingering: BTreeMap::new(),
            late_writers: BTreeMap::new(),
            publisher: Publisher::new(context.shape.num_routers),
            link_free_at: Time::ZERO,
            next_sequence: 0,
            timers,
            wake: None,
            due: None,
        }
    }

    fn me(&self) -> (usize, u32) {
        (self.index, self.incarnation)
    }

    const fn node(&self) -> Node {
        Node::Worker(self.index)
    }

    /// Reads what most events here read first.
    pub(crate) fn warm(&self) {
        let steps = &self.steps;
        std::hint::black_box((
            self.alive,
            self.paused,
            self.wake,
            self.due,
            self.legs.len(),
            self.sequences.len(),
        ));
        std::hint::black_box((steps.is_idle(), steps.load().queued_tokens, steps.rates().decode_step_ms));
        std::hint::black_box(self.publisher.is_scheduled());
    }

    /// Reads what the end of a step reads of each sequence.
    pub(crate) fn warm_sequences(&self) {
        self.steps.scheduler().warm();
        std::hint::black_box(self.sequences.values().filter(|key| key.attempt > 0).count());
        self.legs.values().for_each(Leg::warm);
    }

    /// The streams on which routers hear of the tokens that a step makes.
    pub(crate) fn router_streams(&self) -> impl Iterator<Item = StreamId> {
        self.legs.values().filter_map(|leg| leg.state().stream)
    }

    /// Legs, parked offers and lingering machines: nothing is left when all is over.
    pub(crate) fn num_left(&self) -> (usize, usize, usize) {
        (self.legs.len(), self.parked.len(), self.lingering.len())
    }

    /// Which legs hold blocks here, and which wait for some.
    pub(crate) fn holds(&self) -> impl Iterator<Item = (HandoffKey, (bool, bool))> {
        self.legs.iter().map(|(key, leg)| (*key, leg.state().stage.blocks()))
    }

    /// The process is gone, with everything it held.
    pub(crate) fn die(&mut self) {
        self.alive = false;
        self.paused = false;
        self.held.clear();
    }

    pub(crate) fn start(&mut self, context: &mut Context) {
        context.worker(Duration::ZERO, self.me(), WorkerEvent::Heartbeat);
    }

    pub(crate) fn event(&mut self, context: &mut Context, event: WorkerEvent) {
        match event {
            WorkerEvent::StepDone(number) => {
                let mut outcomes = Vec::new();
                self.steps.done(context, number, &mut outcomes);
                self.outcomes(context, outcomes);
            }
            WorkerEvent::Layers(number, nth) => self.layers(context, number, nth),
            WorkerEvent::Push(key, stream) => self.push(context, key, stream),
            WorkerEvent::WriterEnded(key) => self.writer_ended(context, key),
            WorkerEvent::Wake => self.tick(context),
            WorkerEvent::Heartbeat => self.heartbeat(context),
            WorkerEvent::Publish => self.publish(context),
            WorkerEvent::WatchCache { router, stream } => self.publisher.watch(router, stream),
        }
        self.settle(context);
    }

    pub(crate) fn arrive(&mut self, context: &mut Context, arrival: Arrival) {
        let Arrival { stream, payload, .. } = arrival;
        match payload {
            Payload::OpenPrefill(spec) => self.open_prefill(context, stream, *spec),
            Payload::OpenDecode(spec) => self.open_decode(context, stream, *spec),
            Payload::Stop(key, sequence) => {
                self.stop(context, key, sequence);
                context.close(stream, Side::Acceptor);
            }
            Payload::Redirect(redirect) => self.redirect(context, stream, &redirect),
            Payload::Source(message) => self.source_says(context, stream, message),
            Payload::Destination(message) => self.destination_says(context, stream, message),
            Payload::Frame(frame) => self.frame(context, stream, frame),
            Payload::Closed => self.stream_over(context, stream, false),
            Payload::Lost => self.stream_over(context, stream, true),
            Payload::Prefill(_)
            | Payload::HandoffFailed(..)
            | Payload::Redirected(_)
            | Payload::Decode(_) => context.violate(|| "a worker got a router's event".into()),
        }
        self.settle(context);
    }

    /// Lets the step loop go on, and sees to the next timer.
    fn settle(&mut self, context: &mut Context) {
        loop {
            let mut outcomes = Vec::new();
            let started = self.steps.advance(context, &mut outcomes);
            if let Some((number, takes)) = started {
                self.announce_layers(context, number, takes);
                context.worker(takes, self.me(), WorkerEvent::StepDone(number));
            }
            if outcomes.is_empty() {
                break;
            }
            self.outcomes(context, outcomes);
        }
        self.steps.refresh();
        self.publish_changes(context);
        self.set_alarm(context);
    }

    /// Where frames are not of layers, a prefill worker sends parts of a chunk while the chunk is computed.
    fn announce_layers(&self, context: &mut Context, number: u64, takes: Duration) {
        if self.role == Role::Prefill && context.fidelity.empty {
            for nth in 1..SLICES {
                context.worker(takes * nth / SLICES, self.me(), WorkerEvent::Layers(number, nth));
            }
        }
    }

    fn layers(&mut self, context: &mut Context, number: u64, nth: u32) {
        for (id, position, num_tokens) in self.steps.chunks(number) {
            if let Some(key) = self.sequences.get(&id).copied() {
                self.computed(context, key, position + num_tokens * nth as usize / SLICES as usize);
            }
        }
    }

    fn outcomes(&mut self, context: &mut Context, outcomes: Vec<Outcome>) {
        for outcome in outcomes {
            context.note(|| format!("worker {} scheduler: {outcome:?}", self.index));
            let Some(key) = self.sequences.get(&outcome.id()).copied() else { continue };
            match self.role {
                Role::Prefill => self.prefill_outcome(context, key, outcome),
                Role::Decode => self.decode_outcome(context, key, outcome),
            }
        }
    }

    /// Gives a command to the step loop; one that leaves the running step without a purpose makes it end after the current layer.
    fn command(&mut self, context: &mut Context, command: Command) {
        context.note(|| format!("worker {} command: {command:?}", self.index));
        if let Some(number) = self.steps.command(command) {
            context.worker(Duration::from_micros(50), self.me(), WorkerEvent::StepDone(number));
        }
    }

    /// What both kinds of leg begin with.
    fn new_leg(&mut self, now: Time, spec: LegSpec, stream: StreamId, stage: LegStage) -> LegState {
        let ids = (0..spec.num_sequences.max(1)).map(|_| {
            self.next_sequence += 1;
            SequenceId(self.next_sequence)
        });
        let ids: Vec<SequenceId> = ids.collect();
        self.sequences.extend(ids.iter().map(|id| (*id, spec.key)));
        self.streams.insert(stream, (spec.key, StreamUse::Router));
        LegState { spec, ids, stream: Some(stream), control: None, stage, since: now }
    }

    fn add_leg(&mut self, context: &mut Context, key: HandoffKey, leg: Leg) {
        context.graph.note(key, self.index, leg.state().stage.blocks());
        self.legs.insert(key, leg);
    }

    /// A leg's sequences and timers are no more.
    fn end_leg(&mut self, context: &mut Context, key: HandoffKey) -> Option<Leg> {
        let leg = self.legs.remove(&key)?;
        context.graph.note(key, self.index, (false, false));
        for id in &leg.state().ids {
            self.sequences.remove(id);
        }
        self.steps.forget(&leg.state().ids, context.now);
        Some(leg)
    }

    fn set_stage(&mut self, context: &mut Context, key: HandoffKey, stage: LegStage) {
        let Some(leg) = self.legs.get_mut(&key) else { return };
        let state = leg.state_mut();
        context.waited(state.stage.wait(), state.since);
        if state.stage.blocks() != stage.blocks() {
            context.graph.note(key, self.index, stage.blocks());
        }
        (state.stage, state.since) = (stage, context.now);
    }

    /// A leg moved on within its stage.
    fn moved(&mut self, context: &mut Context, key: HandoffKey) {
        if let Some(stage) = self.legs.get(&key).map(|leg| leg.state().stage) {
            self.set_stage(context, key, stage);
        }
    }

    fn stream_over(&mut self, context: &mut Context, stream: StreamId, lost: bool) {
        self.lingering.remove(&stream);
        if let Some(key) = self.parked.iter().find(|(_, s)| **s == stream).map(|(key, _)| *key) {
            self.parked.remove(&key);
            self.registry.withdraw(key);
        }
        let Some((key, usage)) = self.streams.remove(&stream) else { return };
        match (self.role, usage) {
            (_, StreamUse::Router) => self.router_left(context, key),
            (Role::Prefill, StreamUse::Control) => self.source_control_lost(context, key),
            (Role::Prefill, StreamUse::Bulk) => self.source_bulk_lost(context, key, stream),
            (Role::Decode, StreamUse::Control) => {
                self.destination_fact(context, key, DestinationFact::ControlLost);
            }
            (Role::Decode, StreamUse::Bulk) if lost => {
                self.destination_fact(context, key, DestinationFact::BulkLost);
            }
            (Role::Decode, StreamUse::Bulk) => {}
        }
    }

    fn router_left(&mut self, context: &mut Context, key: HandoffKey) {
        let Some(leg) = self.legs.get_mut(&key) else { return };
        leg.state_mut().stream = None;
        match leg {
            Leg::Prefill(_) => self.prefill_cancelled(context, key),
            Leg::Decode(_) => self.decode_cancelled(context, key, Cause::Cancelled),
        }
    }

    /// Says a leg's last word to its router and closes the stream.
    fn close_leg(&mut self, context: &mut Context, stream: Option<StreamId>, last: Option<Payload>) {
        let Some(stream) = stream else { return };
        if let Some(last) = last {
            context.send(stream, Side::Acceptor, last);
        }
        context.close(stream, Side::Acceptor);
        self.streams.remove(&stream);
    }

    fn tick(&mut self, context: &mut Context) {
        self.wake = None;
        let now = context.now;
        let due: Vec<HandoffKey> = self
            .legs
            .iter()
            .filter(|(_, leg)| leg.deadline().is_some_and(|at| at <= now))
            .map(|(key, _)| *key)
            .collect();
        for key in due {
            match self.role {
                Role::Prefill => self.source_fact(context, key, baton_handoff::SourceFact::Tick),
                Role::Decode => self.destination_fact(context, key, DestinationFact::Tick),
            }
        }
        for offer in self.registry.expired(now) {
            if let Some(stream) = self.parked.remove(&offer.key) {
                let gone = baton_handoff::DestinationMessage::Gone(Cause::NotFound);
                context.send(stream, Side::Acceptor, Payload::Destination(gone));
            }
        }
    }

    /// A leg's machine was told something.
    fn note_deadline(&mut self, key: HandoffKey) {
        let deadline = self.legs.get(&key).and_then(|leg| leg.deadline());
        self.due = self.due.into_iter().chain(deadline).min();
    }

    fn deadline(&self) -> Option<Time> {
        let legs = self.legs.values().filter_map(|leg| leg.deadline());
        legs.chain(self.registry.deadline()).min()
    }

    /// Whether the alarm goes off before anything is due.
    pub(crate) fn is_alarm_in_time(&self) -> bool {
        self.deadline().is_none_or(|deadline| self.wake.is_some_and(|at| at <= deadline))
    }

    fn set_alarm(&mut self, context: &mut Context) {
        let due = self.due.take();
        // An alarm that is set is earlier than whatever did not change.
        let next = if self.wake.is_some() { due } else { self.deadline() };
        let Some(next) = next else { return };
        if self.wake.is_none_or(|at| next < at) {
            self.wake = Some(next);
            let after = next.saturating_sub(context.now);
            context.worker(after, self.me(), WorkerEvent::Wake);
        }
    }
}
