//! A router process: a door, requests over their legs, and a view of the fleet.

use std::collections::{BTreeMap, VecDeque};

use baton_dispatch::{
    DecodeFact, Door, DoorLimits, Entry, Legs, Need, Placed, Policy, PrefillFact, Request, RequestAction,
    RequestConfig, RequestEnd, RequestFact, RetryLimits, WorkerState, WorkerView, place,
};
use baton_handoff::{FinishReason, InstanceId, RequestId, Time};
use baton_scheduler::{RowSampling, SamplingParams};
use baton_timing::pseudo_tokens;

use crate::context::Context;
use crate::network::{Arrival, Node, Payload, Side, StreamId};
use crate::queue::RouterEvent;
use crate::worker::{LegSpec, NUM_LAYERS, VOCAB};

/// A worker that has not been heard of for so long is not placed on.
const SILENCE: Time = Time::from_millis(1_000);

/// What a client asks for.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) request: RequestId,
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_new_tokens: u32,
    pub(crate) stop_tokens: Vec<u32>,
    pub(crate) seed: u64,
    /// The router finds a stop string once it has this many tokens.
    pub(crate) stop_after: Option<usize>,
    pub(crate) patience: Option<Time>,
}

impl Ask {
    /// What an undisturbed run delivers.
    fn expected(&self) -> Vec<u32> {
        let params = SamplingParams { seed: self.seed, ..SamplingParams::GREEDY };
        let sampling = RowSampling { params, sequence: 0, position: 0 };
        pseudo_tokens(&self.prompt, &sampling, (NUM_LAYERS, VOCAB), self.max_new_tokens, &self.stop_tokens)
    }
}

/// A request that passed the door.
struct Live {
    ask: Ask,
    machine: Request,
    expected: Vec<u32>,
    delivered: Vec<u32>,
    entered: Time,
    /// Workers of the current attempt.
    workers: (usize, Option<usize>),
    instances: (InstanceId, Option<InstanceId>),
    streams: [Option<StreamId>; 2],
    resumed: bool,
}

#[derive(Clone, Copy, Debug)]
struct StreamOf {
    request: usize,
    attempt: u32,
    prefill: bool,
}

/// One process.
pub(crate) struct Router {
    index: usize,
    door: Door,
    live: BTreeMap<usize, Live>,
    /// Waiting at the door, in order.
    queued: VecDeque<(usize, Ask)>,
    streams: BTreeMap<StreamId, StreamOf>,
    views: BTreeMap<usize, (Time, WorkerView)>,
    in_flight: BTreeMap<usize, u32>,
    wake: Option<Time>,
}

impl Router {
    pub(crate) fn new(index: usize) -> Self {
        Self {
            index,
            door: Door::new(DoorLimits { max_concurrent: 8, max_queue: 8 }),
            live: BTreeMap::new(),
            queued: VecDeque::new(),
            streams: BTreeMap::new(),
            views: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            wake: None,
        }
    }

    /// Requests that are not over.
    pub(crate) fn num_open(&self) -> usize {
        self.live.len() + self.queued.len()
    }

    pub(crate) fn num_streams(&self) -> usize {
        self.streams.len()
    }

    pub(crate) fn ask(&mut self, context: &mut Context, request: usize, ask: Ask) {
        context.report.num_requests += 1;
        match self.door.enter() {
            Ok(Entry::Running) => self.start(context, request, ask),
            Ok(Entry::Queued) => self.queued.push_back((request, ask)),
            Err(_) => context.report.num_shed += 1,
        }
        self.set_alarm(context);
    }

    pub(crate) fn event(&mut self, context: &mut Context, event: RouterEvent) {
        match event {
            RouterEvent::Request(_) => context.violate(|| "the world asks, not the queue".into()),
            RouterEvent::ClientGone(request) => self.client_gone(context, request),
            RouterEvent::Status(view) => {
                self.views.insert(view.index, (context.now, *view));
            }
            RouterEvent::StatusLost(worker) => {
                if let Some((_, view)) = self.views.get_mut(&worker) {
                    view.state = WorkerState::Unreachable;
                }
            }
            RouterEvent::Wake => {
                self.wake = None;
                let now = context.now;
                let due = |live: &Live| live.machine.deadline().is_some_and(|at| at <= now);
                let due: Vec<usize> = self.live.iter().filter(|(_, l)| due(l)).map(|(r, _)| *r).collect();
                for request in due {
                    self.fact(context, request, RequestFact::Tick);
                }
            }
        }
        self.set_alarm(context);
    }

    pub(crate) fn arrive(&mut self, context: &mut Context, arrival: Arrival) {
        let Some(of) = self.streams.get(&arrival.stream).copied() else { return };
        let attempt = of.attempt;
        let fact = match arrival.payload {
            Payload::Prefill(event) => RequestFact::Prefill { attempt, event },
            Payload::Decode(event) => RequestFact::Decode { attempt, event },
            Payload::Closed | Payload::Lost => {
                let accepted = context.network.was_accepted(arrival.stream);
                self.streams.remove(&arrival.stream);
                match (of.prefill, accepted) {
                    (true, true) => RequestFact::Prefill { attempt, event: PrefillFact::Lost },
                    (true, false) => RequestFact::Prefill { attempt, event: PrefillFact::Unreachable },
                    (false, true) => RequestFact::Decode { attempt, event: DecodeFact::Lost },
                    (false, false) => RequestFact::Decode { attempt, event: DecodeFact::Unreachable },
                }
            }
            other => return context.violate(|| format!("a router got {other:?}")),
        };
        // A leg's last word, and only that, ends its stream in good order.
        let last = matches!(
            fact,
            RequestFact::Prefill { event: PrefillFact::Done | PrefillFact::Failed(_), .. }
                | RequestFact::Decode { event: DecodeFact::Finished(_) | DecodeFact::Failed(_), .. }
        ) || matches!(
            fact,
            RequestFact::Prefill { event: PrefillFact::FirstToken { finish: Some(_), .. }, .. }
        );
        if last {
            self.streams.remove(&arrival.stream);
            context.close(arrival.stream, Side::Opener);
        }
        self.fact(context, of.request, fact);
        self.set_alarm(context);
    }

    fn start(&mut self, context: &mut Context, request: usize, ask: Ask) {
        let config = RequestConfig {
            request: ask.request,
            group: 0,
            max_new_tokens: ask.max_new_tokens,
            stop_tokens: ask.stop_tokens.clone(),
            deadline: ask.patience.map(|patience| context.now + patience),
            limits: RetryLimits::default(),
        };
        let live = Live {
            expected: ask.expected(),
            machine: Request::new(config),
            delivered: Vec::new(),
            entered: context.now,
            workers: (0, None),
            instances: (InstanceId([0; 16]), None),
            streams: [None; 2],
            resumed: false,
            ask,
        };
        self.live.insert(request, live);
        self.fact(context, request, RequestFact::Start);
    }

    fn client_gone(&mut self, context: &mut Context, request: usize) {
        if let Some(at) = self.queued.iter().position(|(queued, _)| *queued == request) {
            self.queued.remove(at);
            context.report.num_cancelled += 1;
            let next = self.door.abandon();
            return self.admit(context, next);
        }
        self.fact(context, request, RequestFact::ClientGone);
    }

    fn admit(&mut self, context: &mut Context, next: bool) {
        if next && let Some((request, ask)) = self.queued.pop_front() {
            self.start(context, request, ask);
        }
    }

    fn fact(&mut self, context: &mut Context, request: usize, fact: RequestFact) {
        context.note(|| format!("router {} request {request}: {fact:?}", self.index));
        let Some(live) = self.live.get_mut(&request) else { return };
        live.machine.handle(context.now, fact);
        while let Some(action) = self.live.get_mut(&request).and_then(|live| live.machine.poll()) {
            context.note(|| format!("router {} request {request} -> {action:?}", self.index));
            self.act(context, request, action);
        }
    }

    fn act(&mut self, context: &mut Context, request: usize, action: RequestAction) {
        match action {
            RequestAction::Place { avoid } => self.place(context, request, &avoid),
            RequestAction::OpenLegs(legs) => self.open_legs(context, request, legs),
            RequestAction::CloseLegs { .. } => self.close_legs(context, request),
            RequestAction::Deliver(token) => {
                let Some(live) = self.live.get_mut(&request) else { return };
                let nth = live.delivered.len();
                if token.index as usize != nth || live.expected.get(nth) != Some(&token.id) {
                    let expected = live.expected.get(nth).copied();
                    context.violate(|| {
                        format!("request {request}: {token:?} delivered, {expected:?} expected at {nth}")
                    });
                }
                live.delivered.push(token.id);
                context.report.num_tokens += 1;
                if live.ask.stop_after == Some(live.delivered.len()) {
                    self.fact(context, request, RequestFact::StopMatched);
                }
            }
            RequestAction::End(end) => self.ended(context, request, end),
        }
    }

    fn place(&mut self, context: &mut Context, request: usize, avoid: &[InstanceId]) {
        let views: Vec<WorkerView> = self
            .views
            .values()
            .map(|(heard, view)| WorkerView {
                state: if context.now - *heard > SILENCE { WorkerState::Unreachable } else { view.state },
                in_flight: self.in_flight.get(&view.index).copied().unwrap_or(0),
                ..*view
            })
            .collect();
        let Some(live) = self.live.get_mut(&request) else { return };
        let need = Need {
            prompt_tokens: (live.ask.prompt.len() + live.delivered.len()) as u32,
            max_new_tokens: live.ask.max_new_tokens - live.delivered.len() as u32,
            block_size: context.shape.block_size as u32,
            max_waiting: 16,
            avoid,
        };
        let policy = if context.shape.colocated { Policy::Colocated } else { Policy::Disaggregated };
        let instance = |index: usize| views.iter().find(|view| view.index == index).map(|view| view.instance);
        let fact = match place(&views, &need, policy) {
            Ok(placement) => {
                let decode = instance(placement.decode).unwrap_or(InstanceId([0; 16]));
                let prefill = placement.prefill.and_then(instance);
                live.workers = (placement.decode, placement.prefill);
                live.instances = (decode, prefill);
                RequestFact::Placed(Placed { decode, prefill })
            }
            Err(error) => RequestFact::NotPlaced(error),
        };
        self.fact(context, request, fact);
    }

    fn open_legs(&mut self, context: &mut Context, request: usize, legs: Legs) {
        let me = Node::Router(self.index);
        let Some(live) = self.live.get_mut(&request) else { return };
        let (decode, prefill) = live.workers;
        live.resumed |= legs.num_forced > 0;
        context.report.num_retries += u64::from(legs.key.attempt > 0);
        if legs.num_forced as usize != live.delivered.len() || live.streams != [None; 2] {
            context
                .violate(|| format!("request {request}: {legs:?} forces the wrong tokens, or legs are open"));
        }
        let spec = LegSpec {
            key: legs.key,
            prompt: [live.ask.prompt.as_slice(), &live.delivered].concat(),
            num_generated: legs.num_forced,
            max_new_tokens: legs.max_new_tokens,
            seed: live.ask.seed,
            stop_tokens: live.ask.stop_tokens.clone(),
            local: legs.local,
            destination: legs.decode.then_some((decode, live.instances.0)),
        };
        let attempt = legs.key.attempt;
        if let Some(worker) = prefill {
            let stream = context.open(me, Node::Worker(worker));
            live.streams[0] = Some(stream);
            self.streams.insert(stream, StreamOf { request, attempt, prefill: true });
            *self.in_flight.entry(worker).or_default() += 1;
            context.send(stream, Side::Opener, Payload::OpenPrefill(Box::new(spec.clone())));
        }
        if legs.decode {
            let stream = context.open(me, Node::Worker(decode));
            live.streams[1] = Some(stream);
            self.streams.insert(stream, StreamOf { request, attempt, prefill: false });
            *self.in_flight.entry(decode).or_default() += 1;
            context.send(stream, Side::Opener, Payload::OpenDecode(Box::new(spec)));
        }
    }

    fn close_legs(&mut self, context: &mut Context, request: usize) {
        let Some(live) = self.live.get_mut(&request) else { return };
        let (decode, prefill) = live.workers;
        for (stream, worker) in [(live.streams[0], prefill), (live.streams[1], Some(decode))] {
            let (Some(stream), Some(worker)) = (stream, worker) else { continue };
            if let Some(count) = self.in_flight.get_mut(&worker) {
                *count = count.saturating_sub(1);
            }
            if self.streams.remove(&stream).is_some() {
                context.close(stream, Side::Opener);
            }
        }
        live.streams = [None; 2];
    }

    fn ended(&mut self, context: &mut Context, request: usize, end: RequestEnd) {
        let Some(live) = self.live.remove(&request) else { return };
        if live.streams != [None; 2] {
            context.violate(|| format!("request {request} ended with open legs"));
        }
        let report = &mut context.report;
        report.num_ignored += live.machine.ignored();
        match end {
            RequestEnd::Finished(reason) => {
                report.num_finished += 1;
                report.num_resumed += u64::from(live.resumed);
                self.check_finished(context, request, &live, reason);
            }
            RequestEnd::Cancelled => report.num_cancelled += 1,
            RequestEnd::Unplaced { .. } if live.delivered.is_empty() => report.num_shed += 1,
            RequestEnd::Failed { retry_after_ms: Some(_), .. } => {
                report.num_shed += 1;
                if !live.delivered.is_empty() {
                    context.violate(|| format!("request {request} is shed after a delivery"));
                }
            }
            RequestEnd::Unplaced { .. } => {
                report.num_failed += 1;
                *report.failures.entry("unplaced").or_default() += 1;
            }
            RequestEnd::Failed { cause, .. } => {
                report.num_failed += 1;
                *report.failures.entry(cause.name()).or_default() += 1;
            }
        }
        let next = self.door.leave(context.now - live.entered);
        self.admit(context, next);
    }

    fn check_finished(&self, context: &mut Context, request: usize, live: &Live, reason: FinishReason) {
        if live.ask.stop_after.is_some_and(|after| after == live.delivered.len()) {
            return;
        }
        let stops = live.expected.last().is_some_and(|last| live.ask.stop_tokens.contains(last));
        let right = if stops { FinishReason::Stop } else { FinishReason::Length };
        if live.delivered != live.expected || reason != right {
            let (got, want) = (live.delivered.len(), live.expected.len());
            context
                .violate(|| format!("request {request} finished as {reason:?} with {got} tokens of {want}"));
        }
    }

    fn set_alarm(&mut self, context: &mut Context) {
        let Some(next) = self.live.values().filter_map(|live| live.machine.deadline()).min() else { return };
        if self.wake.is_none_or(|at| next < at) {
            self.wake = Some(next);
            let after = next.saturating_sub(context.now);
            context.router(after, self.index, RouterEvent::Wake);
        }
    }
}
