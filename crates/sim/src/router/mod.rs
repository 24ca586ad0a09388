//! A router process: a door, requests over their legs, and a view of the fleet.

mod act;
mod fleet;
mod live;

use std::collections::{BTreeSet, VecDeque};

use baton_dispatch::{
    DecodeFact, Door, Entry, PrefillFact, Request, RequestConfig, RequestFact, RetryLimits,
};
use baton_handoff::Time;

pub(crate) use fleet::FleetView;
pub(crate) use live::Ask;
use live::Live;

use crate::context::Context;
use crate::network::{Arrival, Node, Payload, Side, StreamId};
use crate::pages::Pages;
use crate::queue::RouterEvent;
use crate::waits::Wait;

#[derive(Clone, Copy, Debug)]
struct StreamOf {
    request: usize,
    group: u32,
    attempt: u32,
    prefill: bool,
    /// Whether there is a Decode leg beside it.
    decode: bool,
    /// A sequence of the leg ended, or was stopped: its stream may end in good order.
    may_end: bool,
    /// The Redirect call, beside the Prefill leg that it is about.
    call: bool,
}

/// One process.
pub(crate) struct Router {
    index: usize,
    door: Door,
    live: Pages<usize, Box<Live>>,
    /// Of the requests that wait for a moment: when, by time.
    deadlines: BTreeSet<(Time, usize)>,
    /// Waiting at the door, in order, and since when.
    queued: VecDeque<(usize, Ask, Time)>,
    streams: Pages<StreamId, StreamOf>,
    pub(crate) fleet: FleetView,
    wake: Option<Time>,
}

impl Router {
    pub(crate) fn new(index: usize, context: &mut Context) -> Self {
        Self {
            index,
            door: Door::new(context.shape.door),
            live: Pages::default(),
            deadlines: BTreeSet::new(),
            queued: VecDeque::new(),
            streams: Pages::default(),
            fleet: FleetView::new(index, &context.shape, context.random.next()),
            wake: None,
        }
    }

    const fn node(&self) -> Node {
        Node::Router(self.index)
    }

    /// The request that a stream belongs to.
    pub(crate) fn request_of(&self, stream: StreamId) -> Option<usize> {
        self.streams.get(stream).map(|of| of.request)
    }

    /// Reads what a token of this request reads.
    pub(crate) fn warm(&self, request: usize) {
        if let Some(live) = self.live.get(request) {
            live.warm();
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
        context.report.num_sequences += u64::from(ask.num_sequences());
        match self.door.enter() {
            Ok(Entry::Running) => self.start(context, request, ask, context.now),
            Ok(Entry::Queued) => self.queued.push_back((request, ask, context.now)),
            Err(_) => {
                context.report.num_shed += 1;
                context.has_ended(request, false);
            }
        }
        self.set_alarm(context);
    }

    pub(crate) fn event(&mut self, context: &mut Context, event: RouterEvent) {
        match event {
            RouterEvent::Request(_) => context.violate(|| "the world asks, not the queue".into()),
            RouterEvent::ClientGone(request) => self.client_gone(context, request),
            RouterEvent::Status(status) => self.fleet.status(context, &status),
            RouterEvent::Cache(update) => self.fleet.cache_update(context, &update),
            RouterEvent::StatusLost(worker) => self.fleet.status_lost(worker),
            RouterEvent::Wake => {
                self.wake = None;
                let now = context.now;
                let due = self.deadlines.iter().take_while(|(at, _)| *at <= now);
                let mut due: Vec<usize> = due.map(|(_, request)| *request).collect();
                due.sort_unstable();
                for request in due {
                    self.fact(context, request, RequestFact::Tick);
                }
            }
        }
        self.set_alarm(context);
    }

    /// `accepted`: the other side heard of the stream.
    pub(crate) fn arrive(&mut self, context: &mut Context, arrival: Arrival, accepted: bool) {
        let id = arrival.stream;
        let Some(of) = self.streams.get_mut(id) else { return };
        let (group, attempt) = (of.group, of.attempt);
        let mut last = false;
        let fact = match arrival.payload {
            Payload::Prefill(event) => {
                last = is_last_of_prefill(&event, of.decode);
                RequestFact::Prefill { group, attempt, event }
            }
            Payload::Decode(event) => {
                last = matches!(event, DecodeFact::Failed(_));
                of.may_end |= matches!(event, DecodeFact::Finished { .. } | DecodeFact::Preempted { .. });
                RequestFact::Decode { group, attempt, event }
            }
            Payload::HandoffFailed(attempt, cause) => {
                RequestFact::Prefill { group, attempt, event: PrefillFact::HandoffFailed(cause) }
            }
            answer if of.call => {
                let request = of.request;
                self.streams.remove(id);
                context.close(id, Side::Opener);
                if !matches!(answer, Payload::Redirected(true)) {
                    let event = PrefillFact::NotRedirected;
                    self.fact(context, request, RequestFact::Prefill { group, attempt, event });
                    self.set_alarm(context);
                }
                return;
            }
            // Every sequence has had its last word.
            Payload::Closed if of.may_end => {
                self.streams.remove(id);
                return;
            }
            Payload::Closed | Payload::Lost => match (of.prefill, accepted) {
                (true, true) => RequestFact::Prefill { group, attempt, event: PrefillFact::Lost },
                (true, false) => RequestFact::Prefill { group, attempt, event: PrefillFact::Unreachable },
                (false, true) => RequestFact::Decode { group, attempt, event: DecodeFact::Lost },
                (false, false) => RequestFact::Decode { group, attempt, event: DecodeFact::Unreachable },
            },
            other => return context.violate(|| format!("a router got {other:?}")),
        };
        let request = of.request;
        let lost = matches!(
            fact,
            RequestFact::Prefill { event: PrefillFact::Lost | PrefillFact::Unreachable, .. }
                | RequestFact::Decode { event: DecodeFact::Lost | DecodeFact::Unreachable, .. }
        );
        if last || lost {
            self.streams.remove(id);
        }
        if last {
            context.close(id, Side::Opener);
        }
        if let RequestFact::Prefill { event: PrefillFact::FirstTokens(_), .. } = fact {
            self.computed(request, group);
        }
        self.fact(context, request, fact);
        self.set_alarm(context);
    }

    fn start(&mut self, context: &mut Context, request: usize, ask: Ask, asked: Time) {
        context.waited(Wait::Door, asked);
        let config = RequestConfig {
            request: ask.request,
            num_sequences: ask.num_sequences(),
            max_new_tokens: ask.max_new_tokens,
            stop_tokens: ask.stop_tokens.clone(),
            deadline: ask.patience.map(|patience| context.now + patience),
            limits: RetryLimits::default(),
        };
        let live = Live::new(context, ask, Request::new(config), asked);
        self.live.insert(request, Box::new(live));
        self.fact(context, request, RequestFact::Start);
    }

    fn client_gone(&mut self, context: &mut Context, request: usize) {
        if let Some(at) = self.queued.iter().position(|(queued, ..)| *queued == request) {
            self.queued.remove(at);
            context.report.num_cancelled += 1;
            context.has_ended(request, false);
            let next = self.door.abandon();
            return self.admit(context, next);
        }
        self.fact(context, request, RequestFact::ClientGone);
    }

    fn admit(&mut self, context: &mut Context, next: bool) {
        if next && let Some((request, ask, asked)) = self.queued.pop_front() {
            self.start(context, request, ask, asked);
        }
    }

    fn fact(&mut self, context: &mut Context, request: usize, fact: RequestFact) {
        context.note(|| format!("router {} request {request}: {fact:?}", self.index));
        let Some(live) = self.live.get_mut(request) else { return };
        live.machine.handle(context.now, fact);
        while let Some(action) = self.live.get_mut(request).and_then(|live| live.machine.poll()) {
            context.note(|| format!("router {} request {request} -> {action:?}", self.index));
            self.act(context, request, action);
        }
        self.note_deadline(request);
    }

    fn note_deadline(&mut self, request: usize) {
        let Some(live) = self.live.get_mut(request) else { return };
        let deadline = live.machine.deadline();
        let before = std::mem::replace(&mut live.deadline, deadline);
        if before != deadline {
            if let Some(at) = before {
                self.deadlines.remove(&(at, request));
            }
            self.deadlines.extend(deadline.map(|at| (at, request)));
        }
    }

    fn set_alarm(&mut self, context: &mut Context) {
        let Some((next, _)) = self.deadlines.first().copied() else { return };
        if self.wake.is_none_or(|at| next < at) {
            self.wake = Some(next);
            let after = next.saturating_sub(context.now);
            context.router(after, self.index, RouterEvent::Wake);
        }
    }
}

/// Whether a prefill worker ends the stream behind this.
fn is_last_of_prefill(event: &PrefillFact, decode: bool) -> bool {
    match event {
        PrefillFact::FirstTokens(first) => !decode || first.iter().all(|first| first.finish.is_some()),
        PrefillFact::Done | PrefillFact::Failed(_) => true,
        PrefillFact::HandoffFailed(_) | PrefillFact::NotRedirected => false,
        PrefillFact::Unreachable | PrefillFact::Lost => false,
    }
}
