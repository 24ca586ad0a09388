//! What happens next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use baton_handoff::{HandoffKey, Time};

use crate::faults::Fault;
use crate::network::{Arrival, StreamId};
use crate::status::{CacheUpdate, Status};

/// Something that happens at a moment.
#[derive(Debug)]
pub(crate) enum Event {
    /// A message, or the end of a stream, reaches one end.
    Arrive(Arrival),
    /// A worker, in this incarnation.
    Worker(usize, u32, WorkerEvent),
    /// A router asks something of whatever process has this worker's address.
    Ask(usize, WorkerEvent),
    /// A router.
    Router(usize, RouterEvent),
    /// Trouble.
    Fault(Fault),
}

/// What a worker wakes up for by itself, and what routers ask of its status service.
#[derive(Debug)]
pub(crate) enum WorkerEvent {
    /// The step with this number ends.
    StepDone(u64),
    /// The sender of this handoff may put another frame on its stream.
    Push(HandoffKey, StreamId),
    /// The writer of this handoff has let its lease go.
    WriterEnded(HandoffKey),
    /// A timer of a machine or of the registry.
    Wake,
    /// Tell the routers how it is.
    Heartbeat,
    /// Tell them now, since something changed.
    Publish,
    /// A router opens a stream of cache updates and names it.
    WatchCache { router: usize, stream: u64 },
}

/// What a router wakes up for by itself, and what workers tell it of themselves.
#[derive(Debug)]
pub(crate) enum RouterEvent {
    /// A client's request.
    Request(usize),
    /// The client of that request hangs up.
    ClientGone(usize),
    /// A worker's status.
    Status(Box<Status>),
    /// What entered and left a worker's prefix cache.
    Cache(Box<CacheUpdate>),
    /// A worker's status stream broke.
    StatusLost(usize),
    /// A timer of a request.
    Wake,
}

struct Entry {
    at: Time,
    nth: u64,
    event: Event,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.nth == other.nth
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.nth).cmp(&(other.at, other.nth))
    }
}

/// Events by time; those of one moment in the order in which they were added.
#[derive(Default)]
pub(crate) struct Queue {
    heap: BinaryHeap<Reverse<Entry>>,
    nth: u64,
}

impl Queue {
    pub(crate) fn push(&mut self, at: Time, event: Event) {
        self.nth += 1;
        self.heap.push(Reverse(Entry { at, nth: self.nth, event }));
    }

    pub(crate) fn pop(&mut self) -> Option<(Time, Event)> {
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.event))
    }
}
