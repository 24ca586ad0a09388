//! What happens next: a calendar queue (R. Brown, Communications of the ACM 31(10), 1988) with a heap for what is far away.
//!
//! A heap of all events takes a step more for each doubling of their number, and each step is another line of memory. Here what is near lies in buckets of
//! one ring, by time; a bucket is put in order when its time comes, and is as short in a large cluster as in a small one for each event that comes of it.

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

/// Where an event waits, by time and then by the order in which they were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    at_ns: u64,
    nth: u64,
    slot: u32,
}

/// An event, and the next one of its bucket.
#[derive(Debug)]
struct Slot {
    at_ns: u64,
    nth: u64,
    next: u32,
    event: Option<Event>,
}

/// No slot.
const NONE: u32 = u32::MAX;
/// A bucket is 2^14 ns long: about 16 us, in which a cluster of 1,000 workers has some twenty events.
const BUCKET_BITS: u32 = 14;
/// Buckets of the ring, which reaches 67 ms ahead. Steps, messages and statuses are nearer; timers and heartbeats are not.
const NUM_BUCKETS: usize = 4_096;
const NUM_WORDS: usize = NUM_BUCKETS / 64;

/// Events by time; those of one moment in the order in which they were added.
pub(crate) struct Queue {
    slots: Vec<Slot>,
    /// Places in `slots` that are empty.
    empty: Vec<u32>,
    /// Of the bucket whose time it is, the last one first.
    now: Vec<Entry>,
    /// Nobody has looked at what is in it.
    is_fresh: bool,
    /// Number of that bucket, from time 0 on; earlier ones are over.
    bucket: u64,
    /// The first slot of each bucket within [`NUM_BUCKETS`] after it.
    ring: Vec<u32>,
    /// A bit for each that has any.
    full: [u64; NUM_WORDS],
    /// What comes later.
    far: BinaryHeap<Reverse<Entry>>,
    nth: u64,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            empty: Vec::new(),
            now: Vec::new(),
            is_fresh: false,
            bucket: 0,
            ring: vec![NONE; NUM_BUCKETS],
            full: [0; NUM_WORDS],
            far: BinaryHeap::new(),
            nth: 0,
        }
    }
}

const fn bucket_of(at_ns: u64) -> u64 {
    at_ns >> BUCKET_BITS
}

impl Queue {
    pub(crate) fn push(&mut self, at: Time, event: Event) {
        self.nth += 1;
        let at_ns = u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        let new = Slot { at_ns, nth: self.nth, next: NONE, event: Some(event) };
        let slot = match self.empty.pop() {
            Some(slot) => {
                self.slots[slot as usize] = new;
                slot
            }
            None => {
                self.slots.push(new);
                // Four thousand million events at once would fill the memory first.
                u32::try_from(self.slots.len() - 1).unwrap_or(NONE)
            }
        };
        self.put(Entry { at_ns, nth: self.nth, slot });
    }

    fn put(&mut self, entry: Entry) {
        let bucket = bucket_of(entry.at_ns);
        if bucket <= self.bucket {
            let at = self.now.partition_point(|other| *other > entry);
            self.now.insert(at, entry);
        } else if bucket - self.bucket < NUM_BUCKETS as u64 {
            let nth = bucket as usize % NUM_BUCKETS;
            self.slots[entry.slot as usize].next = std::mem::replace(&mut self.ring[nth], entry.slot);
            self.full[nth / 64] |= 1 << (nth % 64);
        } else {
            self.far.push(Reverse(entry));
        }
    }

    pub(crate) fn pop(&mut self) -> Option<(Time, Event)> {
        while self.now.is_empty() {
            self.turn()?;
        }
        let Entry { at_ns, slot, .. } = self.now.pop()?;
        self.empty.push(slot);
        let event = self.slots.get_mut(slot as usize)?.event.take()?;
        Some((Time::from_nanos(at_ns), event))
    }

    /// What is still to come of the bucket whose time it is, when the next event is its first; none else.
    pub(crate) fn upcoming(&mut self) -> impl Iterator<Item = &Event> {
        if self.now.is_empty() {
            self.turn();
        }
        let fresh = std::mem::take(&mut self.is_fresh);
        let Self { now, slots, .. } = &*self;
        let entries = if fresh { now.as_slice() } else { &[] };
        entries.iter().filter_map(move |entry| slots.get(entry.slot as usize)?.event.as_ref())
    }

    /// Goes on to the next bucket that has events. `None`: there are none at all.
    fn turn(&mut self) -> Option<()> {
        let far = self.far.peek().map(|Reverse(entry)| bucket_of(entry.at_ns));
        self.bucket = match (self.next_full(), far) {
            (Some(near), Some(far)) => near.min(far),
            (near, far) => near.or(far)?,
        };
        let nth = self.bucket as usize % NUM_BUCKETS;
        self.full[nth / 64] &= !(1 << (nth % 64));
        let mut slot = std::mem::replace(&mut self.ring[nth], NONE);
        while let Some(Slot { at_ns, nth, next, .. }) = self.slots.get(slot as usize) {
            self.now.push(Entry { at_ns: *at_ns, nth: *nth, slot });
            slot = *next;
        }
        self.now.sort_unstable_by(|a, b| b.cmp(a));
        self.is_fresh = true;
        // What was far when it was added may be near now.
        while let Some(Reverse(entry)) = self.far.peek().copied()
            && bucket_of(entry.at_ns) < self.bucket + NUM_BUCKETS as u64
        {
            self.far.pop();
            self.put(entry);
        }
        Some(())
    }

    /// The first bucket of the ring that has events, behind the one whose time it is.
    fn next_full(&self) -> Option<u64> {
        let first = (self.bucket as usize + 1) % NUM_BUCKETS;
        let (word, bit) = (first / 64, first % 64);
        // Once around; the word that it begins in comes first and last, with the bits from there on and with those before.
        (0..=NUM_WORDS).find_map(|turn| {
            let at = (word + turn) % NUM_WORDS;
            let from = if turn == 0 { !0 << bit } else { !0 };
            let bits = self.full[at] & from;
            let found = (bits != 0).then(|| at * 64 + bits.trailing_zeros() as usize)?;
            let ahead = (found + NUM_BUCKETS - first) % NUM_BUCKETS;
            Some(self.bucket + 1 + ahead as u64)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn wakes(nth: usize) -> Event {
        Event::Router(nth, RouterEvent::Wake)
    }

    #[test]
    fn events_come_by_time_and_then_in_order() {
        let mut queue = Queue::default();
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
        assert!(queue.slots.len() <= 5, "places are used again");
    }

    /// Beside a heap: near and far, at one moment, into the bucket that is being read, and once around the ring.
    #[test]
    fn whatever_is_added_when_it_is_the_order_of_a_heap() {
        let mut random = Random::new(7);
        let (mut queue, mut heap, mut now) = (Queue::default(), BinaryHeap::new(), 0);
        let mut num = 0;
        for _ in 0..200_000 {
            if random.chance(520) {
                let ahead = match random.index(5) {
                    0 => 0,
                    1 => random.between(0..=20_000),
                    2 => random.between(0..=5_000_000),
                    3 => random.between(60_000_000..=70_000_000),
                    _ => random.between(0..=2_000_000_000),
                };
                num += 1;
                queue.push(Time::from_nanos(now + ahead), wakes(num));
                heap.push(Reverse((now + ahead, num)));
            } else {
                let popped = queue.pop().map(|(at, event)| match event {
                    Event::Router(nth, _) => (at.as_nanos() as u64, nth),
                    other => panic!("{other:?}"),
                });
                assert_eq!(popped, heap.pop().map(|Reverse(entry)| entry));
                now = popped.map_or(now, |(at, _)| at);
            }
        }
        assert!(num > 100_000);
    }
}
