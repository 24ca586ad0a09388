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
    /// So many eighths of the layers of the step with this number are computed.
    Layers(u64, u32),
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

/// Where an event waits, by time and then by the order in which they were added. Kept small, since a heap moves what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    at_ns: u64,
    nth: u64,
    slot: u32,
}

/// Events by time; those of one moment in the order in which they were added.
#[derive(Default)]
pub(crate) struct Queue {
    heap: BinaryHeap<Reverse<Entry>>,
    events: Vec<Option<Event>>,
    /// Places in `events` that are empty.
    empty: Vec<u32>,
    nth: u64,
}

impl Queue {
    pub(crate) fn push(&mut self, at: Time, event: Event) {
        self.nth += 1;
        let slot = match self.empty.pop() {
            Some(slot) => slot,
            None => {
                self.events.push(None);
                // Four thousand million events at once would fill the memory first.
                u32::try_from(self.events.len() - 1).unwrap_or(u32::MAX)
            }
        };
        self.events[slot as usize] = Some(event);
        let at_ns = u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        self.heap.push(Reverse(Entry { at_ns, nth: self.nth, slot }));
    }

    pub(crate) fn pop(&mut self) -> Option<(Time, Event)> {
        let Reverse(Entry { at_ns, slot, .. }) = self.heap.pop()?;
        self.empty.push(slot);
        let event = self.events.get_mut(slot as usize)?.take()?;
        Some((Time::from_nanos(at_ns), event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_in_order() {
        let mut queue = Queue::default();
        let wakes = |nth| Event::Router(nth, RouterEvent::Wake);
        for (nth, ms) in [5, 3, 5, 1, 3].into_iter().enumerate() {
            queue.push(Time::from_millis(ms), wakes(nth));
        }
        let mut order = Vec::new();
        while let Some((at, Event::Router(nth, _))) = queue.pop() {
            order.push((at.as_millis(), nth));
            if nth == 1 {
                queue.push(Time::from_millis(4), wakes(9));
            }
        }
        assert_eq!(order, [(1, 3), (3, 1), (3, 4), (4, 9), (5, 0), (5, 2)]);
        assert!(queue.events.len() <= 5, "places are used again");
    }
}
