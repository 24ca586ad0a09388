//! Streams: ordered within each direction, in no order between each other; they break, delay, repeat and damage.
//! Beside them single messages, for statuses, which are lost too.

use std::time::Duration;

use baton_dispatch::{DecodeFact, PrefillFact};
use baton_handoff::{Cause, DestinationMessage, HandoffKey, InstanceId, SourceMessage, Time};

use crate::frames::Frame;
use crate::pages::{Number, Pages};
use crate::queue::{Event, Queue};
use crate::random::Random;
use crate::worker::LegSpec;

/// Names a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StreamId(pub(crate) u64);

impl Number for StreamId {
    fn number(self) -> usize {
        self.0 as usize
    }

    fn from_number(number: usize) -> Self {
        Self(number as u64)
    }
}

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
    /// Of a prefill leg: the handoff of this attempt failed.
    HandoffFailed(u32, Cause),
    Redirect(Box<Redirect>),
    /// Whether the worker does so.
    Redirected(bool),
    Decode(DecodeFact),
    /// The Stop call: nothing more of this sequence is wanted.
    Stop(HandoffKey, u32),
    Source(SourceMessage),
    Destination(DestinationMessage),
    Frame(Frame),
    /// The other side closed the stream after all it had to say.
    Closed,
    /// The stream broke, or nobody was there.
    Lost,
}

/// The Redirect call: held blocks go to another decode worker.
#[derive(Clone, Debug)]
pub(crate) struct Redirect {
    pub(crate) from: HandoffKey,
    pub(crate) to: HandoffKey,
    /// Address and instance.
    pub(crate) destination: (usize, InstanceId),
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
    /// Of statuses and cache updates.
    pub(crate) lose_status: u64,
}

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Pings without an answer for so long end a connection: one every 5 s, 5 s for its answer.
pub(crate) const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Messages that met bad weather.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Met {
    pub(crate) delayed: u64,
    pub(crate) repeated: u64,
    pub(crate) corrupted: u64,
    pub(crate) lost: u64,
}

/// All streams.
pub(crate) struct Network {
    streams: Pages<StreamId, Stream>,
    next: u64,
    pub(crate) weather: Weather,
    pub(crate) random: Random,
    pub(crate) met: Met,
    latency_us: (u64, u64),
    /// Nothing gets through between these two before that time.
    partitions: Vec<((Node, Node), Time)>,
}

const fn at(side: Side) -> usize {
    side as usize
}

impl Network {
    pub(crate) fn new(weather: Weather, latency_us: (u64, u64), random: Random) -> Self {
        let (streams, partitions) = (Pages::default(), Vec::new());
        Self { streams, next: 0, weather, random, met: Met::default(), latency_us, partitions }
    }

    fn latency(&mut self) -> Duration {
        self.random.micros(self.latency_us.0..=self.latency_us.1)
    }

    pub(crate) fn part(&mut self, now: Time, ends: (Node, Node), lasts: Duration) {
        self.partitions.retain(|(_, until)| *until > now);
        self.partitions.push((ends, now + lasts));
    }

    /// How long nothing gets through between these two from now on.
    pub(crate) fn parted(&self, now: Time, (a, b): (Node, Node)) -> Duration {
        let between = |ends: &(Node, Node)| *ends == (a, b) || *ends == (b, a);
        let parted = self.partitions.iter().filter(|(ends, _)| between(ends));
        parted.map(|(_, until)| until.saturating_sub(now)).max().unwrap_or_default()
    }

    /// How long a single message takes; `None`: it is lost.
    pub(crate) fn datagram(&mut self, now: Time, ends: (Node, Node)) -> Option<Duration> {
        if self.random.chance(self.weather.lose_status) || !self.parted(now, ends).is_zero() {
            self.met.lost += 1;
            return None;
        }
        let mut latency = self.latency();
        if self.random.chance(self.weather.delay) {
            self.met.delayed += 1;
            latency += self.random.millis(1..=3_000);
        }
        Some(latency)
    }

    /// Opens a stream. One that can't be opened in time is lost to its opener.
    pub(crate) fn open(
        &mut self,
        queue: &mut Queue,
        now: Time,
        (opener, acceptor): (Node, Node),
    ) -> StreamId {
        self.next += 1;
        let id = StreamId(self.next);
        let broken = self.parted(now, (opener, acceptor)) > CONNECT_TIMEOUT;
        let (ends, last) = ([opener, acceptor], [Time::ZERO; 2]);
        self.streams.insert(id, Stream { ends, last, deaf: [false, broken], broken, accepted: false });
        if broken {
            let arrival = Arrival { stream: id, side: Side::Opener, payload: Payload::Lost };
            queue.push(now + CONNECT_TIMEOUT, Event::Arrive(arrival));
        }
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
        let Some(stream) = self.streams.get(id) else { return };
        if stream.broken || stream.deaf[at(from)] {
            return;
        }
        let mut latency = self.parted(now, (stream.ends[0], stream.ends[1])) + self.latency();
        if self.random.chance(self.weather.delay) {
            self.met.delayed += 1;
            latency += self.random.millis(1..=3_000);
        }
        let side = from.other();
        let Some(stream) = self.streams.get_mut(id) else { return };
        let arrives = (now + latency).max(stream.last[at(side)]);
        stream.last[at(side)] = arrives;
        let repeatable = !matches!(
            payload,
            Payload::OpenPrefill(_)
                | Payload::OpenDecode(_)
                | Payload::Redirect(_)
                | Payload::Redirected(_)
                | Payload::Closed
        );
        if repeatable && self.random.chance(self.weather.repeat) {
            self.met.repeated += 1;
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
                    self.met.corrupted += 1;
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
        let Some(stream) = self.streams.get_mut(id) else { return };
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

    fn streams_of(&self, of: impl Fn(&Stream) -> bool) -> Vec<StreamId> {
        self.streams.iter().filter(|(_, stream)| of(stream)).map(|(id, _)| id).collect()
    }

    /// All streams between two processes.
    pub(crate) fn cut_between(&mut self, queue: &mut Queue, now: Time, (a, b): (Node, Node)) {
        for id in self.streams_of(|stream| stream.ends.contains(&a) && stream.ends.contains(&b)) {
            self.cut(queue, now, id);
        }
    }

    /// All streams of a process that died.
    pub(crate) fn cut_all(&mut self, queue: &mut Queue, now: Time, node: Node) {
        let ids = self.streams_of(|stream| stream.ends.contains(&node));
        for id in ids {
            self.cut(queue, now, id);
            for side in [Side::Opener, Side::Acceptor] {
                if self.streams.get(id).is_some_and(|stream| stream.ends[at(side)] == node) {
                    self.deafen(id, side);
                }
            }
        }
    }

    /// Some live stream.
    pub(crate) fn any(&self, random: &mut Random) -> Option<StreamId> {
        let live = self.streams_of(|stream| !stream.broken);
        live.get(random.index(live.len())).copied()
    }

    /// The end that a payload reaches, of a stream that may be over.
    pub(crate) fn end(&self, stream: StreamId, side: Side) -> Option<Node> {
        self.streams.get(stream).map(|stream| stream.ends[at(side)])
    }

    /// Whose end this is.
    pub(crate) fn node(&self, arrival: &Arrival) -> Option<Node> {
        self.end(arrival.stream, arrival.side)
    }

    /// Whether this end still listens and the payload still travels; `Some(false)` when the acceptor never heard of the stream. The
    /// end of a stream is told once.
    pub(crate) fn receive(&mut self, arrival: &Arrival) -> Option<bool> {
        let stream = self.streams.get_mut(arrival.stream)?;
        let over = matches!(arrival.payload, Payload::Closed | Payload::Lost);
        if stream.deaf[at(arrival.side)] || (stream.broken && !matches!(arrival.payload, Payload::Lost)) {
            return None;
        }
        stream.accepted |= arrival.side == Side::Acceptor && !over;
        let accepted = stream.accepted;
        if over {
            self.deafen(arrival.stream, arrival.side);
        }
        Some(accepted)
    }

    /// Nobody is there: the opener hears it soon.
    pub(crate) fn refuse(&mut self, queue: &mut Queue, now: Time, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(id) {
            stream.broken = true;
            stream.accepted = false;
            let hears = now + self.random.millis(0..=5);
            let arrival = Arrival { stream: id, side: Side::Opener, payload: Payload::Lost };
            queue.push(hears, Event::Arrive(arrival));
        }
        self.deafen(id, Side::Acceptor);
    }

    fn deafen(&mut self, id: StreamId, side: Side) {
        if let Some(stream) = self.streams.get_mut(id) {
            stream.deaf[at(side)] = true;
            if stream.deaf == [true, true] {
                self.streams.remove(id);
            }
        }
    }
}
