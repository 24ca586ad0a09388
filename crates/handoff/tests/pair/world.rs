//! Two machines, their shells and the wires between them; the rules that hold whatever happens.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_handoff::{
    Cause, Destination, DestinationAction, DestinationConfig, DestinationEnd, DestinationFact,
    DestinationMessage, FirstToken, HandoffKey, InstanceId, RequestId, Source, SourceAction, SourceConfig,
    SourceEnd, SourceFact, SourceMessage, Time, Timers,
};

use crate::random::Random;
use crate::shell::{Receiver, Sender, first_tokens};

/// What may go wrong, per mille.
#[derive(Clone, Copy, Default)]
pub(crate) struct Chances {
    pub(crate) lose: u64,
    pub(crate) repeat: u64,
    pub(crate) reorder: u64,
    pub(crate) corrupt: u64,
    pub(crate) break_bulk: u64,
    pub(crate) break_control: u64,
    pub(crate) cancel: u64,
    pub(crate) no_room: u64,
    pub(crate) finish_first: u64,
    pub(crate) never_reserve: u64,
    pub(crate) stuck_writer: u64,
    pub(crate) redirect: u64,
}

#[derive(Debug)]
pub(crate) enum Event {
    Source(SourceFact),
    Destination(DestinationFact),
    /// Computed up to here; the last one samples.
    Chunk(u64),
    /// A frame arrives: bulk stream, index, damaged.
    Frame(u32, u64, bool),
    /// The sender hands its next frame to the transport.
    Push(u32),
    BreakBulk,
    BreakControl,
    /// The router wants what is held elsewhere.
    Redirect,
}

/// One handoff under test. Every check panics with what it found; the caller prints the seed.
pub(crate) struct World {
    pub(crate) random: Random,
    pub(crate) chances: Chances,
    pub(crate) now: Time,
    events: BTreeMap<(Time, u64), Event>,
    next_event: u64,
    pub(crate) source: Source,
    pub(crate) destination: Destination,
    pub(crate) sender: Sender,
    pub(crate) receiver: Receiver,
    control_up: bool,
    last_arrival: [Time; 2],
    pub(crate) granted: bool,
    computing: bool,
    released: bool,
    held: bool,
    pub(crate) num_redirects: u32,
    /// Of the handoff under way.
    began: Time,
    first_tokens: Vec<FirstToken>,
    destination_cancelled: bool,
    pub(crate) ran: bool,
    freed: bool,
    pub(crate) source_end: Option<SourceEnd>,
    pub(crate) destination_end: Option<DestinationEnd>,
}

pub(crate) const PROMPT_TOKENS: u32 = 100;
const WINDOW: u64 = 64;

pub(crate) fn key() -> HandoffKey {
    HandoffKey { request: RequestId([1; 16]), group: 0, attempt: 0 }
}

pub(crate) fn source_config() -> SourceConfig {
    SourceConfig {
        key: key(),
        source: InstanceId([1; 16]),
        destination: InstanceId([2; 16]),
        prompt_tokens: PROMPT_TOKENS,
        timers: Timers::default(),
    }
}

pub(crate) fn destination_config() -> DestinationConfig {
    DestinationConfig {
        key: key(),
        instance: InstanceId([2; 16]),
        prompt_tokens: PROMPT_TOKENS,
        credit_window: WINDOW,
        timers: Timers::default(),
    }
}

impl World {
    pub(crate) fn new(seed: u64, chances: Chances) -> Self {
        let mut random = Random(seed);
        let total = random.below(40) * 8 + random.below(8);
        let mut world = Self {
            chances,
            now: Time::ZERO,
            events: BTreeMap::new(),
            next_event: 0,
            source: Source::new(source_config()),
            destination: Destination::new(destination_config()),
            sender: Sender::new(total),
            receiver: Receiver::new(total),
            control_up: true,
            last_arrival: [Time::ZERO; 2],
            granted: false,
            computing: false,
            released: false,
            held: false,
            num_redirects: 0,
            began: Time::ZERO,
            first_tokens: Vec::new(),
            destination_cancelled: false,
            ran: false,
            freed: false,
            source_end: None,
            destination_end: None,
            random,
        };
        world.after(0, Event::Source(SourceFact::NearHead));
        world.plan_trouble();
        world
    }

    fn plan_trouble(&mut self) {
        if self.random.chance(self.chances.cancel) {
            let at = self.random.below(400);
            let fact = Event::Source(SourceFact::Cancelled(Cause::Cancelled));
            self.after(at, fact);
            // The router drops both legs, and they notice at different times.
            let at = at + self.random.below(60);
            self.after(at, Event::Destination(DestinationFact::Cancelled(Cause::Cancelled)));
        }
        for (chance, event) in
            [(self.chances.break_bulk, Event::BreakBulk), (self.chances.break_control, Event::BreakControl)]
        {
            if self.random.chance(chance) {
                let at = self.random.below(300);
                self.after(at, event);
            }
        }
        if self.random.chance(self.chances.redirect) {
            // It may know before the source does.
            let at = self.random.below(500);
            self.after(at, Event::Redirect);
        }
        if self.random.chance(self.chances.break_bulk / 4) {
            let at = self.random.below(400);
            self.after(at, Event::BreakBulk);
        }
    }

    pub(crate) fn after(&mut self, ms: u64, event: Event) {
        let at = self.now + Duration::from_millis(ms);
        self.events.insert((at, self.next_event), event);
        self.next_event += 1;
    }

    /// Runs until both machines have ended and nothing is on its way.
    pub(crate) fn run(&mut self) {
        loop {
            let timer = [self.source.deadline(), self.destination.deadline()].into_iter().flatten().min();
            let next = self.events.keys().next().copied();
            match (next, timer) {
                (Some((at, _)), timer) if timer.is_none_or(|timer| at <= timer) => {
                    self.now = self.now.max(at);
                    let (_, event) = self.events.pop_first().expect("peeked");
                    self.step(event);
                }
                (_, Some(timer)) => {
                    self.now = self.now.max(timer);
                    self.source_fact(SourceFact::Tick);
                    self.destination_fact(DestinationFact::Tick);
                }
                (None, None) if self.source_end.is_none() || self.destination_end.is_none() => {
                    // No timer runs while a leg waits for its router, whose stream ends in the end.
                    self.source_fact(SourceFact::Cancelled(Cause::Deadline));
                    self.destination_fact(DestinationFact::Cancelled(Cause::Deadline));
                }
                _ => break,
            }
            assert!(
                self.now - self.began < Timers::default().tombstone(),
                "not over after every timer together"
            );
        }
        self.check_end();
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Source(fact) => self.source_fact(fact),
            Event::Destination(fact) => self.destination_fact(fact),
            Event::Chunk(bytes) => self.chunk(bytes),
            Event::Push(stream) => self.push(stream),
            Event::Frame(stream, frame, damaged) => self.frame(stream, frame, damaged),
            Event::BreakBulk => self.break_bulk(),
            Event::BreakControl => self.break_control(),
            Event::Redirect => self.redirect(),
        }
    }

    fn source_fact(&mut self, fact: SourceFact) {
        self.source.handle(self.now, fact);
        while let Some(action) = self.source.poll() {
            self.source_action(action);
        }
    }

    fn destination_fact(&mut self, fact: DestinationFact) {
        match fact {
            DestinationFact::WriterEnded => self.receiver.writer_ended = true,
            DestinationFact::Cancelled(_) => self.destination_cancelled = true,
            _ => {}
        }
        self.destination.handle(self.now, fact);
        while let Some(action) = self.destination.poll() {
            self.destination_action(action);
        }
    }

    fn source_action(&mut self, action: SourceAction) {
        let over = self.source_end.is_some();
        assert!(!over, "source did {action:?} after its end");
        match action {
            SourceAction::Send(message) => self.tell_destination(message),
            SourceAction::Compute { .. } => {
                assert!(self.granted, "the source computes before the destination granted");
                assert!(!self.computing, "computes twice");
                self.computing = true;
                if self.first_tokens.is_empty() {
                    self.next_chunk(0);
                } else {
                    self.after(1, Event::Chunk(self.sender.total));
                }
            }
            SourceAction::Transmit { up_to } => {
                let outstanding = up_to - self.receiver.contiguous().min(up_to);
                assert!(outstanding <= WINDOW, "{outstanding} bytes outstanding in a window of {WINDOW}");
                self.sender.up_to = up_to;
                self.after(1, Event::Push(self.sender.stream));
            }
            SourceAction::Resend { frame } => {
                if let Some(stream) = self.sender.resend(frame) {
                    self.frame_leaves(stream, frame);
                    self.after(2, Event::Source(SourceFact::Resent));
                }
            }
            SourceAction::Reopen { from } => {
                assert!(from <= self.receiver.contiguous(), "goes on at {from}, behind what is verified");
                self.sender.reopen(from);
                self.after(1, Event::Push(self.sender.stream));
            }
            SourceAction::Fence => self.sender.fenced = true,
            SourceAction::Hold(_) => {
                assert!(!self.released && !self.first_tokens.is_empty(), "holds what is not there");
                assert!(self.sender.fenced || !self.computing, "holds under a live sender");
                self.held = true;
                if self.random.chance(self.chances.redirect) {
                    let ms = self.random.below(4_000);
                    self.after(ms, Event::Redirect);
                }
            }
            SourceAction::Release => {
                assert!(!self.released, "released twice");
                assert!(self.ran || self.sender.fenced || !self.computing, "released under a live sender");
                self.released = true;
            }
            SourceAction::End(end) => {
                assert!(!self.held || end != SourceEnd::Committed, "committed while held");
                assert!(self.released, "ended with blocks");
                if end == SourceEnd::Committed {
                    assert!(self.ran, "the source believes in a commit that was not");
                }
                self.source_end = Some(end);
            }
        }
    }

    fn destination_action(&mut self, action: DestinationAction) {
        let answer = matches!(action, DestinationAction::Send(_));
        assert!(answer || self.destination_end.is_none(), "destination did {action:?} after its end");
        match action {
            DestinationAction::Reserve => self.reserve(),
            DestinationAction::Send(message) => {
                if matches!(message, DestinationMessage::Grant { .. }) {
                    self.granted = true;
                }
                self.tell_source(message);
            }
            DestinationAction::Fence => {
                self.receiver.fenced = true;
                if !self.random.chance(self.chances.stuck_writer) {
                    let ms = self.random.below(20);
                    self.after(ms, Event::Destination(DestinationFact::WriterEnded));
                }
            }
            DestinationAction::Run(commit) => {
                assert!(
                    !self.ran && !self.freed,
                    "runs after {}",
                    if self.ran { "running" } else { "freeing" }
                );
                assert!(self.receiver.writer_ended, "runs under a live writer");
                assert!(self.receiver.is_whole(), "runs with unverified bytes");
                assert!(!self.destination_cancelled, "cancel must win over a commit that is not done");
                assert_eq!(commit.bytes, self.receiver.total);
                assert_eq!(commit.first_tokens, self.first_tokens, "not what the source sampled");
                assert!(!commit.is_finished(), "runs though every sequence has ended");
                self.ran = true;
            }
            DestinationAction::Free => {
                assert!(!self.ran && !self.freed, "frees twice, or what runs");
                let stuck = self.chances.stuck_writer > 0;
                assert!(!self.granted || self.receiver.writer_ended || stuck, "frees under a live writer");
                self.freed = true;
            }
            DestinationAction::End(end) => {
                assert_eq!(self.ran, end == DestinationEnd::Committed);
                assert_eq!(self.freed, end != DestinationEnd::Committed);
                self.destination_end = Some(end);
            }
        }
    }

    fn check_end(&self) {
        assert!(self.source_end.is_some() && self.destination_end.is_some());
        assert!(self.released && (self.ran != self.freed));
    }

    fn reserve(&mut self) {
        let ms = self.random.below(30);
        if self.random.chance(self.chances.no_room) {
            self.after(ms, Event::Destination(DestinationFact::NoRoom));
        } else if !self.random.chance(self.chances.never_reserve) {
            let bytes = self.receiver.total;
            self.after(ms, Event::Destination(DestinationFact::Reserved { skip_tokens: 0, bytes }));
        }
    }

    fn tell_destination(&mut self, message: SourceMessage) {
        let fact = DestinationFact::Received(message);
        self.deliver(0, |()| Event::Destination(fact.clone()));
    }

    fn tell_source(&mut self, message: DestinationMessage) {
        let fact = SourceFact::Received(message);
        self.deliver(1, |()| Event::Source(fact.clone()));
    }

    /// In order unless it may be reordered; a control stream that is down takes nothing.
    fn deliver(&mut self, direction: usize, event: impl Fn(()) -> Event) {
        if !self.control_up || self.random.chance(self.chances.lose) {
            return;
        }
        let copies = 1 + u64::from(self.random.chance(self.chances.repeat));
        for _ in 0..copies {
            let mut at = self.now + Duration::from_millis(1 + self.random.below(12));
            if !self.random.chance(self.chances.reorder) {
                at = at.max(self.last_arrival[direction]);
                self.last_arrival[direction] = at;
            }
            let ms = u64::try_from((at - self.now).as_millis()).unwrap_or(u64::MAX);
            self.after(ms, event(()));
        }
    }

    fn break_control(&mut self) {
        if std::mem::replace(&mut self.control_up, false) {
            let (a, b) = (self.random.below(30), self.random.below(30));
            self.after(a, Event::Source(SourceFact::ControlLost));
            self.after(b, Event::Destination(DestinationFact::ControlLost));
        }
    }
}

impl World {
    fn next_chunk(&mut self, from: u64) {
        let ms = 1 + self.random.below(25);
        let bytes = (from + 16 + self.random.below(64)).min(self.sender.total);
        self.after(ms, Event::Chunk(bytes));
    }

    fn chunk(&mut self, bytes: u64) {
        if self.released {
            return;
        }
        if bytes < self.sender.total {
            self.source_fact(SourceFact::Encoded { bytes });
            return self.next_chunk(bytes);
        }
        if !self.first_tokens.is_empty() {
            return self.source_fact(self.sender.sampled(self.first_tokens.clone()));
        }
        let num = 1 + self.random.below(4) as u32;
        let all = self.random.chance(self.chances.finish_first);
        // One of them goes on unless all end.
        let goes_on = self.random.below(u64::from(num)) as u32;
        let random = &mut self.random;
        let first = first_tokens(num, |nth| all || (nth != goes_on && random.chance(300)));
        self.first_tokens.clone_from(&first);
        self.source_fact(self.sender.sampled(first));
    }

    fn push(&mut self, stream: u32) {
        let Some((frame, sent)) = self.sender.push(stream) else { return };
        self.frame_leaves(stream, frame);
        self.source_fact(SourceFact::Sent { bytes: sent });
        let ms = 1 + self.random.below(3);
        self.after(ms, Event::Push(self.sender.stream));
    }

    fn frame_leaves(&mut self, stream: u32, frame: u64) {
        let damaged = self.random.chance(self.chances.corrupt);
        let ms = 2 + self.random.below(8);
        self.after(ms, Event::Frame(stream, frame, damaged));
    }

    fn frame(&mut self, stream: u32, frame: u64, damaged: bool) {
        if stream != self.sender.stream || !self.receiver.may_write() {
            return;
        }
        if damaged {
            return self.destination_fact(DestinationFact::Corrupt { frame });
        }
        let before = self.receiver.contiguous();
        let bytes = self.receiver.write(frame);
        if bytes > before {
            self.destination_fact(DestinationFact::Verified { bytes });
        }
    }

    fn break_bulk(&mut self) {
        if self.sender.fenced || !self.computing {
            return;
        }
        self.sender.cut();
        let (a, b) = (self.random.below(20), self.random.below(20));
        self.after(a, Event::Source(SourceFact::BulkLost));
        self.after(b, Event::Destination(DestinationFact::BulkLost));
    }
}

impl World {
    /// The old destination sees its control stream end; another one takes its place.
    fn redirect(&mut self) {
        // The router closes the old Decode leg first, so that one that has committed does not run on.
        if !self.source.can_redirect() || self.num_redirects > 0 {
            return;
        }
        self.num_redirects += 1;
        self.end_destination();
        self.events.retain(|_, event| matches!(event, Event::Source(SourceFact::Cancelled(_))));
        let key = HandoffKey { attempt: 1, ..key() };
        let instance = InstanceId([3; 16]);
        self.destination = Destination::new(DestinationConfig { key, instance, ..destination_config() });
        self.receiver = Receiver::new(self.receiver.total);
        (self.granted, self.ran, self.freed, self.destination_cancelled) = (false, false, false, false);
        (self.control_up, self.last_arrival) = (true, [self.now; 2]);
        self.destination_end = None;
        (self.began, self.held) = (self.now, false);
        self.source_fact(SourceFact::Redirected { key, destination: instance });
        assert!(self.sender.fenced || !self.computing, "redirects under a live sender");
        self.computing = false;
        self.sender = Sender::new(self.sender.total);
        self.break_again();
    }

    fn end_destination(&mut self) {
        self.control_up = false;
        self.destination_fact(DestinationFact::Cancelled(Cause::Cancelled));
        self.destination_fact(DestinationFact::ControlLost);
        while self.destination_end.is_none() {
            self.now = self.now.max(self.destination.deadline().unwrap_or(self.now));
            self.destination_fact(DestinationFact::WriterEnded);
            self.destination_fact(DestinationFact::Tick);
        }
    }

    /// The second time may fail as well.
    fn break_again(&mut self) {
        if self.random.chance(self.chances.lose) {
            let at = self.random.below(100);
            self.after(at, Event::BreakControl);
        }
    }
}
