//! One run: processes, events, faults.

use std::collections::VecDeque;

use baton_dispatch::Role;
use baton_handoff::Time;

use crate::context::Context;
use crate::faults::{self, Fault};
use crate::fidelity::Fidelity;
use crate::graph::WaitGraph;
use crate::load::Clients;
use crate::network::{Arrival, Network, Node, PING_TIMEOUT, Payload};
use crate::queue::{Event, Queue, RouterEvent, WorkerEvent};
use crate::random::Random;
use crate::router::{Ask, Router};
use crate::serve::Given;
use crate::waits::{LINE, Waits};
use crate::warm::Warming;
use crate::worker::{DRAIN_TIMEOUT, Worker, timers};
use crate::{Faults, Report, ServeConfig, Served, Shape, SimConfig, Violation, check};

/// The fleet has been heard of by then.
pub(crate) const HEARD_OF: Time = Time::from_millis(10);

/// A run that lasts longer hangs; each kind of wait has a bound of its own besides.
const TIME_LIMIT: Time = Time::from_secs(1_800);

/// What a request of a given workload takes, at most, where they are served one after the other.
const EACH: Time = Time::from_secs(60);

pub(crate) struct World {
    config: SimConfig,
    pub(crate) context: Context,
    workers: Vec<Worker>,
    pub(crate) routers: Vec<Router>,
    pub(crate) source: Source,
    pub(crate) num_to_come: usize,
    time_limit: Time,
}

/// Where requests come from.
pub(crate) enum Source {
    /// Drawn before the run.
    Drawn(Vec<Ask>),
    /// A given workload.
    Given(Box<Given>),
}

impl World {
    pub(crate) fn new(config: &SimConfig, traced: bool) -> Self {
        let mut random = Random::new(config.seed);
        let drawn = Shape::draw(&mut random);
        // Timers that run out are a fault too.
        let drawn = Shape { hasty: drawn.hasty && config.faults == Faults::All, ..drawn };
        let shape = config.shape.unwrap_or(drawn);
        let mut world = Self::empty(*config, shape, Fidelity::default(), random);
        world.context.trace = traced.then(VecDeque::new);
        world.start_workers();
        world.plan_requests();
        world
    }

    /// A given workload on this cluster, without faults.
    pub(crate) fn serving(config: &ServeConfig, shape: Shape, fidelity: Fidelity) -> Self {
        let random = Random::new(config.seed);
        let sim = SimConfig { seed: config.seed, faults: Faults::None, shape: Some(shape) };
        let mut world = Self::empty(sim, shape, fidelity, random);
        let (given, observer) = Given::new(config);
        world.num_to_come = given.num_arrivals();
        let last = given.workload().arrivals.last().map_or(Time::ZERO, |arrival| arrival.at);
        // More may come than the cluster can do; then the last one waits for all others.
        let all = EACH.saturating_mul(u32::try_from(given.num_arrivals()).unwrap_or(u32::MAX));
        world.time_limit = TIME_LIMIT + last + given.workload().quiet + all;
        world.context.waits = Waits::new(&timers(&shape), world.time_limit);
        world.source = Source::Given(Box::new(given));
        world.context.observer = Some(observer);
        world.start_workers();
        world.begin();
        world
    }

    fn empty(config: SimConfig, shape: Shape, fidelity: Fidelity, mut random: Random) -> Self {
        let weather = faults::weather(config.faults, &mut random);
        let mut queue = Queue::default();
        faults::plan(config.faults, &shape, &mut random, &mut queue);
        let network = Network::new(weather, shape.device.latency_us, Random::new(random.next()));
        let mut context = Context {
            faults: config.faults,
            now: Time::ZERO,
            shape,
            fidelity,
            queue,
            network,
            random,
            report: Report { num_runs: 1, ..Report::default() },
            waits: Waits::new(&timers(&shape), LINE),
            graph: WaitGraph::default(),
            broken: None,
            over: None,
            trace: None,
            observer: None,
        };
        let routers = (0..shape.num_routers.max(1)).map(|index| Router::new(index, &mut context)).collect();
        let (workers, source) = (Vec::new(), Source::Drawn(Vec::new()));
        Self { config, context, workers, routers, source, num_to_come: 0, time_limit: TIME_LIMIT }
    }

    fn start_workers(&mut self) {
        for index in 0..self.context.shape.num_workers() {
            let is_prefill = index < self.context.shape.num_prefill_workers;
            let role = if is_prefill { Role::Prefill } else { Role::Decode };
            let mut worker = Worker::new(index, role, 0, &mut self.context);
            worker.start(&mut self.context);
            self.workers.push(worker);
        }
    }

    fn plan_requests(&mut self) {
        let (shape, random) = (self.context.shape, &mut self.context.random);
        let clients = Clients::new(shape, self.config.faults, random);
        let mut asks = Vec::with_capacity(shape.load.num_requests);
        let mut at = HEARD_OF;
        for nth in 0..shape.load.num_requests {
            asks.push(clients.ask(random));
            at += random.millis(0..=shape.load.interval_ms * 2);
            let router = random.index(self.routers.len());
            self.context.queue.push(at, Event::Router(router, RouterEvent::Request(nth)));
            if let Some(after) = clients.hangs_up(random) {
                self.context.queue.push(at + after, Event::Router(router, RouterEvent::ClientGone(nth)));
            }
        }
        self.num_to_come = asks.len();
        self.source = Source::Drawn(asks);
    }

    pub(crate) fn run(mut self) -> Result<Report, Violation> {
        self.go();
        self.finish()
    }

    /// The same of a given workload, with what its clients saw.
    pub(crate) fn run_serving(mut self) -> Result<Served, Violation> {
        self.go();
        let observer = self.context.observer.take().unwrap_or_default();
        Ok(observer.served(self.finish()?))
    }

    fn go(&mut self) {
        let mut warming = Warming::default();
        loop {
            warming.warm(&mut self.context, &self.routers, &self.workers);
            let Some((at, event)) = self.context.queue.pop() else { break };
            self.context.now = at;
            self.context.report.num_events += 1;
            if at > self.time_limit {
                self.context.violate(|| "not over by the time limit".into());
            }
            self.event(event);
            self.follow();
            check::no_deadlock(&mut self.context);
            if self.context.broken.is_some() {
                break;
            }
            let is_over = self.num_to_come == 0 && self.routers.iter().all(|router| router.num_open() == 0);
            if !is_over {
                self.context.over = None;
            } else if self.context.over.is_none() {
                self.context.over = Some(at);
            }
        }
        if self.context.broken.is_none() {
            check::baseline(&mut self.context, &self.workers, &self.routers);
            if self.config.faults == Faults::None && self.context.shape.worker.cache {
                check::views(&mut self.context, &self.workers, &self.routers);
            }
        }
    }

    fn finish(mut self) -> Result<Report, Violation> {
        self.workers.iter().for_each(|worker| count_work(&mut self.context.report, worker));
        let Context { now, broken, trace, mut report, network, waits, .. } = self.context;
        report.time = now;
        report.longest_waits = waits.longest().collect();
        let met = network.met;
        let met = [
            ("delayed", met.delayed),
            ("repeated", met.repeated),
            ("corrupted", met.corrupted),
            ("lost_status", met.lost),
        ];
        report.faults.extend(met.into_iter().filter(|(_, count)| *count > 0));
        match broken {
            None => Ok(report),
            Some(what) => Err(Violation {
                seed: self.config.seed,
                faults: self.config.faults,
                at: now,
                again: self.config.again(),
                what,
                trace: trace.map(Vec::from).unwrap_or_default(),
            }),
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Arrive(arrival) => self.arrive(arrival),
            Event::Worker(worker, incarnation, event) => self.worker_event(worker, incarnation, event),
            Event::Ask(worker, event) => {
                let incarnation = self.workers[worker].incarnation;
                self.worker_event(worker, incarnation, event);
            }
            Event::Router(router, RouterEvent::Request(nth)) => {
                let ask = match &self.source {
                    Source::Drawn(asks) => asks[nth].clone(),
                    Source::Given(given) => given.ask(nth, &mut self.context.random),
                };
                self.has_come(nth);
                self.routers[router].ask(&mut self.context, nth, ask);
            }
            Event::Router(router, event) => self.routers[router].event(&mut self.context, event),
            Event::Fault(fault) => self.fault(fault),
        }
    }

    fn arrive(&mut self, arrival: Arrival) {
        let worker = match self.context.network.node(&arrival) {
            Some(Node::Worker(worker)) => worker,
            Some(Node::Router(router)) => {
                if let Some(accepted) = self.context.network.receive(&arrival) {
                    self.routers[router].arrive(&mut self.context, arrival, accepted);
                }
                return;
            }
            None => return,
        };
        let process = &mut self.workers[worker];
        if process.paused {
            return process.held.push_back(Event::Arrive(arrival));
        }
        if !process.alive {
            return self.nobody_there(&arrival);
        }
        if self.context.network.receive(&arrival).is_some() {
            self.digest(worker as u64, arrival.stream.0);
            self.workers[worker].arrive(&mut self.context, arrival);
            self.after(worker);
        }
    }

    fn worker_event(&mut self, worker: usize, incarnation: u32, event: WorkerEvent) {
        let process = &mut self.workers[worker];
        if process.incarnation != incarnation || !process.alive {
            return;
        }
        if process.paused {
            process.held.push_back(Event::Worker(worker, incarnation, event));
            return;
        }
        self.digest(worker as u64, u64::from(incarnation) << 32);
        self.workers[worker].event(&mut self.context, event);
        self.after(worker);
    }

    /// After every event on a worker.
    fn after(&mut self, worker: usize) {
        check::worker(&mut self.context, &mut self.workers[worker]);
        if self.workers[worker].is_drained() {
            self.exit(worker);
        }
    }

    fn nobody_there(&mut self, arrival: &Arrival) {
        let opens = matches!(
            arrival.payload,
            Payload::OpenPrefill(_)
                | Payload::OpenDecode(_)
                | Payload::Stop(..)
                | Payload::Redirect(_)
                | Payload::Source(_)
                | Payload::Frame(_)
        );
        if opens {
            self.context.refuse(arrival.stream);
        }
    }

    fn digest(&mut self, a: u64, b: u64) {
        let now = self.context.now.as_nanos() as u64;
        let digest = &mut self.context.report.digest;
        *digest = (digest.rotate_left(7) ^ now ^ a ^ b).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    /// A broken status stream is heard of soon; a silent one is noticed by its silence.
    fn tell_routers(&mut self, worker: usize) {
        for router in 0..self.routers.len() {
            if self.context.random.chance(800) {
                let after = self.context.random.millis(2..=30);
                self.context.router(after, router, RouterEvent::StatusLost(worker));
            }
        }
    }

    /// The process ends now, whatever it does.
    fn exit(&mut self, worker: usize) {
        let now = self.context.now;
        count_work(&mut self.context.report, &self.workers[worker]);
        self.workers[worker].die();
        self.context.graph.forget(worker);
        self.tell_routers(worker);
        self.context.network.cut_all(&mut self.context.queue, now, Node::Worker(worker));
    }

    fn fault(&mut self, fault: Fault) {
        self.context.note(|| format!("{fault:?}"));
        let now = self.context.now;
        let happens = match fault {
            Fault::Kill { worker, down } if self.workers[worker].alive => {
                self.exit(worker);
                self.context.queue.push(now + down, Event::Fault(Fault::Restart { worker }));
                true
            }
            Fault::Drain { worker, down } if self.workers[worker].can_drain() => {
                self.workers[worker].drain(&mut self.context);
                let incarnation = self.workers[worker].incarnation;
                let over = Fault::DrainOver { worker, incarnation, down };
                self.context.queue.push(now + DRAIN_TIMEOUT, Event::Fault(over));
                self.after(worker);
                true
            }
            Fault::Pause { worker, still } if self.workers[worker].alive && !self.workers[worker].paused => {
                self.workers[worker].paused = true;
                self.context.queue.push(now + still, Event::Fault(Fault::Resume { worker }));
                true
            }
            Fault::Kill { .. } | Fault::Drain { .. } | Fault::Pause { .. } => false,
            Fault::Cut => {
                let stream = self.context.network.any(&mut self.context.random);
                if let Some(stream) = stream {
                    self.context.network.cut(&mut self.context.queue, now, stream);
                }
                stream.is_some()
            }
            Fault::Partition { ends, lasts } => {
                self.context.network.part(now, ends, lasts);
                self.context.queue.push(now + PING_TIMEOUT, Event::Fault(Fault::Sever { ends }));
                true
            }
            Fault::KillRouter { router } => {
                let num_open = self.routers[router].num_open() as u64;
                self.context.report.num_lost_with_router += num_open;
                self.context.network.cut_all(&mut self.context.queue, now, Node::Router(router));
                self.routers[router] = Router::new(router, &mut self.context);
                true
            }
            Fault::Restart { .. } | Fault::Resume { .. } | Fault::DrainOver { .. } | Fault::Sever { .. } => {
                self.aftermath(fault);
                false
            }
        };
        if happens && let Some(kind) = fault.kind() {
            *self.context.report.faults.entry(kind).or_default() += 1;
        }
    }

    /// What follows from a fault.
    fn aftermath(&mut self, fault: Fault) {
        let now = self.context.now;
        match fault {
            // It may have been killed while it drained.
            Fault::Restart { worker } if self.workers[worker].alive => {}
            Fault::Restart { worker } => {
                let (role, next) = (self.workers[worker].role, self.workers[worker].incarnation + 1);
                let mut process = Worker::new(worker, role, next, &mut self.context);
                process.start(&mut self.context);
                self.workers[worker] = process;
            }
            Fault::Resume { worker } => {
                self.workers[worker].paused = false;
                self.workers[worker].steps.resumed(now);
                // As in the real ones, what has come meanwhile counts before what is late.
                let held = std::mem::take(&mut self.workers[worker].held);
                let is_alarm = |event: &Event| matches!(event, Event::Worker(.., WorkerEvent::Wake));
                let (alarms, facts): (Vec<Event>, Vec<Event>) = held.into_iter().partition(is_alarm);
                for event in facts.into_iter().chain(alarms) {
                    self.event(event);
                }
                self.after(worker);
            }
            Fault::DrainOver { worker, incarnation, down } => {
                // Another fault ended it, and another process is there or on its way.
                let process = &mut self.workers[worker];
                if process.incarnation != incarnation {
                    return;
                }
                if process.alive && !process.paused {
                    process.end_all(&mut self.context);
                }
                if self.workers[worker].alive {
                    self.exit(worker);
                }
                self.context.queue.push(now + down, Event::Fault(Fault::Restart { worker }));
            }
            Fault::Sever { ends } if !self.context.network.parted(now, ends).is_zero() => {
                self.context.network.cut_between(&mut self.context.queue, now, ends);
            }
            _ => {}
        }
    }
}

/// What a process has computed; it may be gone at the end of the run.
fn count_work(report: &mut Report, worker: &Worker) {
    if worker.alive {
        report.num_prompt_tokens += worker.steps.scheduler().num_prompt_tokens_computed();
    }
}
