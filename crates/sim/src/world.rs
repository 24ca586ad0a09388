//! One run: processes, events, faults.

use std::collections::VecDeque;

use baton_dispatch::Role;
use baton_handoff::{RequestId, Time};

use crate::context::Context;
use crate::faults::{self, Fault};
use crate::network::{Network, Node, Payload};
use crate::queue::{Event, Queue, RouterEvent, WorkerEvent};
use crate::random::Random;
use crate::router::{Ask, Router};
use crate::worker::Worker;
use crate::{Faults, Report, Shape, SimConfig, Violation, check};

/// Every wait is bounded: a run that lasts longer hangs.
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
        let shape = config.shape.unwrap_or(drawn);
        let weather = faults::weather(config.faults, &mut random);
        let mut queue = Queue::default();
        faults::plan(config.faults, &shape, &mut random, &mut queue);
        let network = Network::new(weather, Random::new(random.next()));
        let mut world = Self {
            config: *config,
            workers: Vec::new(),
            routers: (0..shape.num_routers.max(1)).map(Router::new).collect(),
            asks: Vec::new(),
            num_to_come: shape.num_requests,
            context: Context {
                now: Time::ZERO,
                shape,
                queue,
                network,
                random,
                report: Report { num_runs: 1, ..Report::default() },
                broken: None,
                over: false,
                trace: traced.then(VecDeque::new),
            },
        };
        world.start_workers();
        world.plan_requests();
        world
    }

    fn start_workers(&mut self) {
        let Shape { num_prefill_workers, num_decode_workers, .. } = self.context.shape;
        for index in 0..num_prefill_workers + num_decode_workers {
            let role = if index < num_prefill_workers { Role::Prefill } else { Role::Decode };
            let mut worker = Worker::new(index, role, 0, &mut self.context);
            worker.start(&mut self.context);
            self.workers.push(worker);
        }
    }

    fn plan_requests(&mut self) {
        let (shape, faults) = (self.context.shape, self.config.faults);
        // Some prompts share their beginning, so that prefix caches have something to do.
        let common: Vec<u32> = (0..shape.max_prompt).map(|_| self.token()).collect();
        // The fleet has been heard of by then.
        let mut at = Time::from_millis(10);
        for nth in 0..shape.num_requests {
            let random = &mut self.context.random;
            let len = random.between(1..=shape.max_prompt as u64) as usize;
            let shared = if random.chance(500) { random.index(len + 1) } else { 0 };
            let mut prompt = common[..shared].to_vec();
            while prompt.len() < len {
                prompt.push(self.token());
            }
            let random = &mut self.context.random;
            let max_new_tokens =
                if random.chance(100) { 1 } else { random.between(1..=shape.max_new_tokens.into()) };
            let stop_after = random.chance(80).then(|| random.between(1..=10) as usize);
            let ask = Ask {
                request: RequestId(random.id()),
                prompt,
                max_new_tokens: max_new_tokens as u32,
                stop_tokens: if random.chance(500) { vec![1, 2] } else { vec![] },
                seed: random.next(),
                stop_after,
                patience: (faults == Faults::All && random.chance(100)).then(|| random.millis(20..=60_000)),
            };
            self.asks.push(ask);
            at += random.millis(0..=shape.interval_ms * 2);
            let router = random.index(shape.num_routers);
            self.context.queue.push(at, Event::Router(router, RouterEvent::Request(nth)));
            if faults == Faults::All && self.context.random.chance(200) {
                let gone = at + self.context.random.millis(0..=1_500);
                self.context.queue.push(gone, Event::Router(router, RouterEvent::ClientGone(nth)));
            }
        }
    }

    fn token(&mut self) -> u32 {
        self.context.random.between(3..=40) as u32
    }

    pub(crate) fn run(mut self) -> Result<Report, Violation> {
        while let Some((at, event)) = self.context.queue.pop() {
            self.context.now = at;
            self.context.report.num_events += 1;
            if at > TIME_LIMIT {
                self.context.violate(|| "a wait without a bound: not over by the time limit".into());
            }
            self.event(event);
            if self.context.broken.is_some() {
                break;
            }
            self.context.over =
                self.num_to_come == 0 && self.routers.iter().all(|router| router.num_open() == 0);
        }
        if self.context.broken.is_none() {
            check::baseline(&mut self.context, &self.workers, &self.routers);
        }
        self.finish()
    }

    fn finish(self) -> Result<Report, Violation> {
        let Context { now, broken, trace, mut report, .. } = self.context;
        report.time = now;
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
            Event::Arrive(arrival) => {
                let worker = match self.context.network.node(&arrival) {
                    Some(Node::Worker(worker)) => worker,
                    Some(Node::Router(router)) => {
                        if self.context.network.receive(&arrival).is_some() {
                            self.routers[router].arrive(&mut self.context, arrival);
                        }
                        return;
                    }
                    None => return,
                };
                if self.workers[worker].paused {
                    return self.workers[worker].held.push_back(Event::Arrive(arrival));
                }
                if !self.workers[worker].alive {
                    return self.nobody_there(&arrival);
                }
                if self.context.network.receive(&arrival).is_some() {
                    self.digest(worker as u64, arrival.stream.0);
                    self.workers[worker].arrive(&mut self.context, arrival);
                    check::worker(&mut self.context, &self.workers[worker]);
                }
            }
            Event::Worker(worker, incarnation, event) => self.worker_event(worker, incarnation, event),
            Event::Router(router, RouterEvent::Request(nth)) => {
                self.num_to_come -= 1;
                let ask = self.asks[nth].clone();
                self.routers[router].ask(&mut self.context, nth, ask);
            }
            Event::Router(router, event) => self.routers[router].event(&mut self.context, event),
            Event::Fault(fault) => self.fault(fault),
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
        check::worker(&mut self.context, &self.workers[worker]);
    }

    fn nobody_there(&mut self, arrival: &crate::network::Arrival) {
        let opens = matches!(
            arrival.payload,
            Payload::OpenPrefill(_) | Payload::OpenDecode(_) | Payload::Source(_) | Payload::Frame(_)
        );
        if opens {
            let now = self.context.now;
            self.context.network.refuse(&mut self.context.queue, now, arrival.stream);
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

    fn fault(&mut self, fault: Fault) {
        self.context.note(|| format!("{fault:?}"));
        let now = self.context.now;
        match fault {
            Fault::Kill { worker, down } if self.workers[worker].alive => {
                self.context.report.num_kills += 1;
                self.workers[worker].die();
                self.tell_routers(worker);
                self.context.network.cut_all(&mut self.context.queue, now, Node::Worker(worker));
                self.context.queue.push(now + down, Event::Fault(Fault::Restart { worker }));
            }
            Fault::Restart { worker } => {
                let (role, next) = (self.workers[worker].role, self.workers[worker].incarnation + 1);
                let mut process = Worker::new(worker, role, next, &mut self.context);
                process.start(&mut self.context);
                self.workers[worker] = process;
            }
            Fault::Pause { worker, still } if self.workers[worker].alive && !self.workers[worker].paused => {
                self.workers[worker].paused = true;
                self.context.queue.push(now + still, Event::Fault(Fault::Resume { worker }));
            }
            Fault::Resume { worker } => {
                self.workers[worker].paused = false;
                for event in std::mem::take(&mut self.workers[worker].held) {
                    self.event(event);
                }
            }
            Fault::Cut => {
                if let Some(stream) = self.context.network.any(&mut self.context.random) {
                    self.context.network.cut(&mut self.context.queue, now, stream);
                }
            }
            Fault::KillRouter { router } => {
                self.context.report.num_kills += 1;
                self.context.report.num_lost_with_router += self.routers[router].num_open() as u64;
                self.context.network.cut_all(&mut self.context.queue, now, Node::Router(router));
                self.routers[router] = Router::new(router);
            }
            Fault::Kill { .. } | Fault::Pause { .. } => {}
        }
    }
}
