//! One run: processes, events, faults.

use std::collections::VecDeque;

use baton_dispatch::Role;
use baton_handoff::Time;

use crate::context::Context;
use crate::faults::{self, Fault};
use crate::load::Clients;
use crate::network::{Arrival, Network, Node, PING_TIMEOUT, Payload};
use crate::queue::{Event, Queue, RouterEvent, WorkerEvent};
use crate::random::Random;
use crate::router::{Ask, Router};
use crate::waits::Waits;
use crate::worker::{DRAIN_TIMEOUT, Worker, timers};
use crate::{Faults, Report, Shape, SimConfig, Violation, check};

/// A run that lasts longer hangs; each kind of wait has a bound of its own besides.
const TIME_LIMIT: Time = Time::from_secs(1_800);

pub(crate) struct World {
    config: SimConfig,
    context: Context,
    workers: Vec<Worker>,
    routers: Vec<Router>,
    asks: Vec<Ask>,
    num_to_come: usize,
}

impl World {
    pub(crate) fn new(config: &SimConfig, traced: bool) -> Self {
        let mut random = Random::new(config.seed);
        let drawn = Shape::draw(&mut random);
        // Timers that run out are a fault too.
        let drawn = Shape { hasty: drawn.hasty && config.faults == Faults::All, ..drawn };
        let shape = config.shape.unwrap_or(drawn);
        let weather = faults::weather(config.faults, &mut random);
        let mut queue = Queue::default();
        faults::plan(config.faults, &shape, &mut random, &mut queue);
        let network = Network::new(weather, shape.device.latency_us, Random::new(random.next()));
        let mut context = Context {
            now: Time::ZERO,
            shape,
            queue,
            network,
            random,
            report: Report { num_runs: 1, ..Report::default() },
            waits: Waits::new(&timers(&shape)),
            holds_changed: false,
            broken: None,
            over: None,
            trace: traced.then(VecDeque::new),
        };
        let routers = (0..shape.num_routers.max(1)).map(|index| Router::new(index, &mut context)).collect();
        let num_to_come = shape.load.num_requests;
        let (workers, asks) = (Vec::new(), Vec::new());
        let mut world = Self { config: *config, context, workers, routers, asks, num_to_come };
        world.start_workers();
        world.plan_requests();
        world
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
        // The fleet has been heard of by then.
        let mut at = Time::from_millis(10);
        for nth in 0..shape.load.num_requests {
            self.asks.push(clients.ask(random));
            at += random.millis(0..=shape.load.interval_ms * 2);
            let router = random.index(self.routers.len());
            self.context.queue.push(at, Event::Router(router, RouterEvent::Request(nth)));
            if let Some(after) = clients.hangs_up(random) {
                self.context.queue.push(at + after, Event::Router(router, RouterEvent::ClientGone(nth)));
            }
        }
    }

    pub(crate) fn run(mut self) -> Result<Report, Violation> {
        while let Some((at, event)) = self.context.queue.pop() {
            self.context.now = at;
            self.context.report.num_events += 1;
            if at > TIME_LIMIT {
                self.context.violate(|| "not over by the time limit".into());
            }
            self.event(event);
            if std::mem::take(&mut self.context.holds_changed) {
                check::no_deadlock(&mut self.context, &self.workers);
            }
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
        self.finish()
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
                self.num_to_come -= 1;
                let ask = self.asks[nth].clone();
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
        self.context.holds_changed = true;
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
                for event in std::mem::take(&mut self.workers[worker].held) {
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
