//! Fetches from memory what the next few events will read, all of it at once.
//!
//! In a large cluster one event follows another on some other worker, for some other request, and what it reads has left the caches since its turn came last.
//! Read one after the other, as events need them, such places are waited for one by one, and that is then most of an event's time. Which events come next is known, though,
//! some twenty of them in a cluster of 1,000 workers: reading for all of them what each reads first, then what each reads next, the processor waits for many places
//! at a time. Nothing is changed, and in a small cluster, where few events are near and all is at hand, nothing is read.

use crate::context::Context;
use crate::network::{Node, Side, StreamId};
use crate::queue::{Event, WorkerEvent};
use crate::router::Router;
use crate::worker::Worker;

/// Fewer events that are near are not worth a look.
const FEW: usize = 8;

/// What is read for; the memory is used again.
#[derive(Default)]
pub(crate) struct Warming {
    arrivals: Vec<(StreamId, Side)>,
    /// Workers, and whether a step ends there.
    workers: Vec<(usize, bool)>,
    tokens: Vec<(usize, StreamId)>,
    requests: Vec<(usize, usize)>,
}

impl Warming {
    /// Reads for what is near, once for each bucket of events.
    pub(crate) fn warm(&mut self, context: &mut Context, routers: &[Router], workers: &[Worker]) {
        let Self { arrivals, workers: at, tokens, requests } = self;
        arrivals.clear();
        at.clear();
        for event in context.queue.upcoming() {
            match event {
                Event::Arrive(arrival) => arrivals.push((arrival.stream, arrival.side)),
                Event::Worker(worker, _, event) => {
                    at.push((*worker, matches!(event, WorkerEvent::StepDone(_))))
                }
                Event::Ask(..) | Event::Router(..) | Event::Fault(_) => {}
            }
        }
        if arrivals.len() + at.len() < FEW {
            return;
        }
        tokens.clear();
        for (stream, side) in arrivals.iter() {
            match context.network.end(*stream, *side) {
                Some(Node::Router(router)) => tokens.push((router, *stream)),
                Some(Node::Worker(worker)) => at.push((worker, false)),
                None => {}
            }
        }
        at.iter().filter_map(|(worker, _)| workers.get(*worker)).for_each(Worker::warm);
        requests.clear();
        let of = |(router, stream): &(usize, StreamId)| {
            Some((*router, routers.get(*router)?.request_of(*stream)?))
        };
        requests.extend(tokens.iter().filter_map(of));
        for (router, request) in requests.iter() {
            if let Some(router) = routers.get(*router) {
                router.warm(*request);
            }
        }
        for worker in at.iter().filter(|(_, ends_step)| *ends_step).filter_map(|(at, _)| workers.get(*at)) {
            worker.warm_sequences();
            for stream in worker.router_streams() {
                std::hint::black_box(context.network.end(stream, Side::Opener));
            }
        }
    }
}
