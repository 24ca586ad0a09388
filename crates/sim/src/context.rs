//! What every process of a simulation shares: time, chance, the network and the book of what happened.

use std::collections::VecDeque;
use std::time::Duration;

use baton_handoff::Time;

use crate::fidelity::Fidelity;
use crate::frames::Cut;
use crate::graph::WaitGraph;
use crate::network::{Network, Node, Payload, Side, StreamId};
use crate::queue::{Event, Queue, RouterEvent, WorkerEvent};
use crate::random::Random;
use crate::serve::Observer;
use crate::waits::{Wait, Waits};
use crate::{Faults, Report, Shape};

/// Lines of a trace kept for a violation.
const TRACE_LINES: usize = 160;

pub(crate) struct Context {
    pub(crate) now: Time,
    pub(crate) faults: Faults,
    pub(crate) shape: Shape,
    pub(crate) fidelity: Fidelity,
    pub(crate) queue: Queue,
    pub(crate) network: Network,
    pub(crate) random: Random,
    pub(crate) report: Report,
    pub(crate) waits: Waits,
    /// Who holds blocks, and who waits for some.
    pub(crate) graph: WaitGraph,
    /// The first rule that broke.
    pub(crate) broken: Option<String>,
    /// When the last request ended: heartbeats stop soon.
    pub(crate) over: Option<Time>,
    pub(crate) trace: Option<VecDeque<String>>,
    /// Of a given workload.
    pub(crate) observer: Option<Observer>,
}

impl Context {
    /// How the KV of a prompt is sent.
    pub(crate) const fn cut(&self, prompt_tokens: usize, skip_tokens: usize) -> Cut {
        self.fidelity.cut(prompt_tokens, skip_tokens, self.shape.worker.block_size)
    }

    /// How long a fenced writer takes to notice: any time where that is what is looked for, now and then more than `patience`, else
    /// what it takes.
    pub(crate) fn writer_lag(&mut self, patience: Duration) -> Duration {
        if self.observer.is_some() {
            return self.random.micros(0..=20);
        }
        let lag = self.random.micros(0..=3_000);
        let is_late = self.faults == Faults::All && self.random.chance(2);
        if is_late { patience + lag } else { lag }
    }

    pub(crate) fn worker(&mut self, after: Duration, worker: (usize, u32), event: WorkerEvent) {
        self.queue.push(self.now + after, Event::Worker(worker.0, worker.1, event));
    }

    pub(crate) fn router(&mut self, after: Duration, router: usize, event: RouterEvent) {
        self.queue.push(self.now + after, Event::Router(router, event));
    }

    /// A message of the status path, which may be lost.
    pub(crate) fn tell_router(&mut self, after: Duration, (from, to): (usize, usize), event: RouterEvent) {
        let ends = (Node::Worker(from), Node::Router(to));
        if let Some(latency) = self.network.datagram(self.now, ends) {
            self.router(after + latency, to, event);
        }
    }

    /// The same in the other direction.
    pub(crate) fn ask_worker(&mut self, (from, to): (usize, usize), event: WorkerEvent) {
        let ends = (Node::Router(from), Node::Worker(to));
        if let Some(latency) = self.network.datagram(self.now, ends) {
            // Whatever process is there then.
            self.queue.push(self.now + latency, Event::Ask(to, event));
        }
    }

    pub(crate) fn open(&mut self, opener: Node, acceptor: Node) -> StreamId {
        self.network.open(&mut self.queue, self.now, (opener, acceptor))
    }

    pub(crate) fn send(&mut self, stream: StreamId, from: Side, payload: Payload) {
        self.network.send(&mut self.queue, self.now, (stream, from), payload);
    }

    /// Nobody takes this stream.
    pub(crate) fn refuse(&mut self, stream: StreamId) {
        self.network.refuse(&mut self.queue, self.now, stream);
    }

    pub(crate) fn close(&mut self, stream: StreamId, side: Side) {
        self.network.close(&mut self.queue, self.now, (stream, side));
    }

    /// A wait is over, or goes on since `since`.
    pub(crate) fn waited(&mut self, wait: Wait, since: Time) {
        let took = self.now.saturating_sub(since);
        if let Some(limit) = self.waits.take_note(wait, took) {
            self.violate(|| format!("{wait:?} takes {took:.1?}, at most {limit:.1?} are allowed"));
        }
    }

    /// A client got its first token.
    pub(crate) fn first_token(&mut self, request: usize, took: Duration) {
        self.report.ttft.record(took);
        if let Some(observer) = &mut self.observer {
            observer.first_token(request, took);
        }
    }

    /// A client got another token, the `nth` from 0 on.
    pub(crate) fn gap(&mut self, request: usize, nth: usize, gap: Duration) {
        self.report.itl.record(gap);
        if let Some(observer) = &mut self.observer {
            observer.gap(request, nth, gap);
        }
    }

    /// A request is over, in whatever way.
    pub(crate) fn has_ended(&mut self, request: usize, finished: bool) {
        if let Some(observer) = &mut self.observer {
            observer.ended.push((request, finished));
        }
    }

    /// A rule broke; the first one counts.
    pub(crate) fn violate(&mut self, what: impl FnOnce() -> String) {
        if self.broken.is_none() {
            self.broken = Some(what());
        }
    }

    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            if trace.len() == TRACE_LINES {
                trace.pop_front();
            }
            trace.push_back(format!("{:>12.3?} {}", self.now, line()));
        }
    }
}
