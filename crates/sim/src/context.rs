//! What every process of a simulation shares: time, chance, the network and the book of what happened.

use std::collections::VecDeque;
use std::time::Duration;

use baton_handoff::Time;

use crate::network::{Network, Node, Payload, Side, StreamId};
use crate::queue::{Event, Queue, RouterEvent, WorkerEvent};
use crate::random::Random;
use crate::{Report, Shape};

/// Lines of a trace kept for a violation.
const TRACE_LINES: usize = 120;

pub(crate) struct Context {
    pub(crate) now: Time,
    pub(crate) shape: Shape,
    pub(crate) queue: Queue,
    pub(crate) network: Network,
    pub(crate) random: Random,
    pub(crate) report: Report,
    /// The first rule that broke.
    pub(crate) broken: Option<String>,
    /// No request is left: heartbeats stop.
    pub(crate) over: bool,
    pub(crate) trace: Option<VecDeque<String>>,
}

impl Context {
    pub(crate) fn worker(&mut self, after: Duration, worker: (usize, u32), event: WorkerEvent) {
        self.queue.push(self.now + after, Event::Worker(worker.0, worker.1, event));
    }

    pub(crate) fn router(&mut self, after: Duration, router: usize, event: RouterEvent) {
        self.queue.push(self.now + after, Event::Router(router, event));
    }

    pub(crate) fn open(&mut self, opener: Node, acceptor: Node) -> StreamId {
        self.network.open(opener, acceptor)
    }

    pub(crate) fn send(&mut self, stream: StreamId, from: Side, payload: Payload) {
        self.network.send(&mut self.queue, self.now, (stream, from), payload);
    }

    pub(crate) fn close(&mut self, stream: StreamId, side: Side) {
        self.network.close(&mut self.queue, self.now, (stream, side));
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
