//! Streams: ordered within each direction, in no order between each other; they break, delay, repeat and damage.

use std::collections::BTreeMap;

use baton_dispatch::{DecodeFact, PrefillFact};
use baton_handoff::{DestinationMessage, SourceMessage, Time};

use crate::frames::Frame;
use crate::queue::{Event, Queue};
use crate::random::Random;
use crate::worker::LegSpec;

/// Names a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamId(pub(crate) u64);

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    Router(usize),
    Worker(usize),
}

/// End of a stream: who opened it, or who accepted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Opener,
    Acceptor,
}

impl Side {
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Opener => Self::Acceptor,
            Self::Acceptor => Self::Opener,
        }
    }
}

/// What travels.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    OpenPrefill(Box<LegSpec>),
    OpenDecode(Box<LegSpec>),
    Prefill(PrefillFact),
    Decode(DecodeFact),
    Source(SourceMessage),
    Destination(DestinationMessage),
    Frame(Frame),
    /// The other side closed the stream after all it had to say.
    Closed,
    /// The stream broke, or nobody was there.
    Lost,
}

/// A payload at one end of a stream.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) stream: StreamId,
    pub(crate) side: Side,
    pub(crate) payload: Payload,
}

#[derive(Debug)]
struct Stream {
    ends: [Node; 2],
    last: [Time; 2],
    /// This end hears nothing more: it closed the stream, or knows that it is over, or its process is gone.
    deaf: [bool; 2],
    broken: bool,
    accepted: bool,
}

/// How bad a network is, per mille of messages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weather {
    pub(crate) delay: u64,
    pub(crate) repeat: u64,
    pub(crate) corrupt: u64,
}

/// All streams.
pub(crate) struct Network {
    streams: BTreeMap<StreamId, Stream>,
    next: u64,
    pub(crate) weather: Weather,
    pub(crate) random: Random,
    pub(crate) num_damaged: u64,
}

const fn at(side: Side) -> usize {
    side as usize
}

impl Network {
    pub(crate) fn new(weather: Weather, random: Random) -> Self {
        Self { streams: BTreeMap::new(), next: 0, weather, random, num_damaged: 0 }
    }

    pub(crate) fn open(&mut self, opener: Node, acceptor: Node) -> StreamId {
        self.next += 1;
        let id = StreamId(self.next);
        let ends = [opener, acceptor];
        let (last, deaf) = ([Time::ZERO; 2], [false; 2]);
        self.streams.insert(id, Stream { ends, last, deaf, broken: false, accepted: false });
        id
    }

    /// Sends from one end; into a stream that is over it sends into the void.
    pub(crate) fn send(
        &mut self,
        queue: &mut Queue,
        now: Time,
        (id, from): (StreamId, Side),
        payload: Payload,
    ) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if stream.broken || stream.deaf[at(from)] {
            return;
        }
        let mut latency = self.random.micros(100..=1_500);
        if self.random.chance(self.weather.delay) {
            latency += self.random.millis(1..=3_000);
        }
        let side = from.other();
        let arrives = (now + latency).max(stream.last[at(side)]);
        stream.last[at(side)] = arrives;
        let repeatable =
            !matches!(payload, Payload::OpenPrefill(_) | Payload::OpenDecode(_) | Payload::Closed);
        if repeatable && self.random.chance(self.weather.repeat) {
            let payload = payload.clone();
            queue.push(arrives, Event::Arrive(Arrival { stream: id, side, payload }));
        }
        let payload = self.damage(payload);
        queue.push(arrives, Event::Arrive(Arrival { stream: id, side, payload }));
    }

    fn damage(&mut self, payload: Payload) -> Payload {
        match payload {
            Payload::Frame(mut frame) if self.random.chance(self.weather.corrupt) => {
                let byte = self.random.index(frame.payload.len());
                if let Some(byte) = frame.payload.get_mut(byte) {
                    *byte ^= 1 << self.random.index(8);
                    self.num_damaged += 1;
                }
                Payload::Frame(frame)
            }
            payload => payload,
        }
    }

    /// Closes one end in order: the other one hears it after everything sent before.
    pub(crate) fn close(&mut self, queue: &mut Queue, now: Time, (id, side): (StreamId, Side)) {
        self.send(queue, now, (id, side), Payload::Closed);
        self.deafen(id, side);
    }

    /// What is on its way is lost; each end hears of it at some time of its own.
    pub(crate) fn cut(&mut self, queue: &mut Queue, now: Time, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if std::mem::replace(&mut stream.broken, true) {
            return;
        }
        for side in [Side::Opener, Side::Acceptor] {
            // A reset is heard at once, a silent loss at the next ping.
            let wait = if self.random.chance(300) { 20_000 } else { 20 };
            let hears = now + self.random.millis(0..=wait);
            queue.push(hears, Event::Arrive(Arrival { stream: id, side, payload: Payload::Lost }));
        }
    }

    /// All streams of a process that died.
    pub(crate) fn cut_all(&mut self, queue: &mut Queue, now: Time, node: Node) {
        let ids: Vec<StreamId> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.ends.contains(&node))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            self.cut(queue, now, id);
            for side in [Side::Opener, Side::Acceptor] {
                if self.streams.get(&id).is_some_and(|stream| stream.ends[at(side)] == node) {
                    self.deafen(id, side);
                }
            }
        }
    }

    /// Some live stream.
    pub(crate) fn any(&self, random: &mut Random) -> Option<StreamId> {
        let live: Vec<StreamId> =
            self.streams.iter().filter(|(_, stream)| !stream.broken).map(|(id, _)| *id).collect();
        live.get(random.index(live.len())).copied()
    }

    /// Whose end this is.
    pub(crate) fn node(&self, arrival: &Arrival) -> Option<Node> {
        self.streams.get(&arrival.stream).map(|stream| stream.ends[at(arrival.side)])
    }

    /// Whose end this is, if it still listens and the payload still travels. The end of a stream is told once.
    pub(crate) fn receive(&mut self, arrival: &Arrival) -> Option<Node> {
        let stream = self.streams.get_mut(&arrival.stream)?;
        let over = matches!(arrival.payload, Payload::Closed | Payload::Lost);
        if stream.deaf[at(arrival.side)] || (stream.broken && !matches!(arrival.payload, Payload::Lost)) {
            return None;
        }
        let node = stream.ends[at(arrival.side)];
        if arrival.side == Side::Acceptor {
            stream.accepted = true;
        }
        if over {
            self.deafen(arrival.stream, arrival.side);
        }
        Some(node)
    }

    /// Whether the acceptor ever heard of it.
    pub(crate) fn was_accepted(&self, id: StreamId) -> bool {
        self.streams.get(&id).is_none_or(|stream| stream.accepted)
    }

    /// Nobody is there: the opener hears it soon.
    pub(crate) fn refuse(&mut self, queue: &mut Queue, now: Time, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.broken = true;
            stream.accepted = false;
            let hears = now + self.random.millis(0..=5);
            let arrival = Arrival { stream: id, side: Side::Opener, payload: Payload::Lost };
            queue.push(hears, Event::Arrive(arrival));
        }
        self.deafen(id, Side::Acceptor);
    }

    fn deafen(&mut self, id: StreamId, side: Side) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.deaf[at(side)] = true;
            if stream.deaf == [true, true] {
                self.streams.remove(&id);
            }
        }
    }
}
