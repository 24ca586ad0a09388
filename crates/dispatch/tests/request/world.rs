//! A request, its workers and its client, and the rules that hold whatever comes.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_dispatch::{
    DecodeFact, Legs, PlaceError, Placed, PrefillFact, Request, RequestAction, RequestConfig, RequestEnd,
    RequestFact, RetryLimits, Time,
};
use baton_handoff::{Cause, FinishReason, InstanceId, RequestId, SampledToken};

use crate::legs::{self, Open, Preempt, last_index, reason, token};
use crate::random::Random;

/// What may go wrong, per mille of steps; of sequences and groups for preemption.
#[derive(Clone, Copy, Default)]
pub(crate) struct Chances {
    pub(crate) crash: u64,
    pub(crate) failed: u64,
    pub(crate) repeat: u64,
    pub(crate) late: u64,
    pub(crate) cancel: u64,
    pub(crate) stop: u64,
    pub(crate) unplaced: u64,
    pub(crate) slow_place: u64,
    /// A worker does not redirect.
    pub(crate) not_redirected: u64,
    pub(crate) local: u64,
    pub(crate) preempt: u64,
    pub(crate) max_crashes: u64,
    pub(crate) deadline: u64,
}

const PREFILLS: usize = 2;
const WORKERS: usize = 4;

pub(crate) struct World {
    pub(crate) random: Random,
    chances: Chances,
    pub(crate) now: Time,
    pub(crate) request: Request,
    pub(crate) num_sequences: u32,
    max_new_tokens: u32,
    has_deadline: bool,
    /// Processes that run now: prefill workers, then decode workers.
    workers: [InstanceId; WORKERS],
    num_started: u8,
    /// Live attempts by group.
    open: BTreeMap<u32, Open>,
    next_attempt: BTreeMap<u32, u32>,
    /// Groups whose placement is not answered yet.
    asked: Vec<(u32, Option<InstanceId>)>,
    placed: BTreeMap<u32, Placed>,
    /// What the streams of closed attempts still held.
    late: Vec<RequestFact>,
    pub(crate) delivered: Vec<Vec<SampledToken>>,
    stopped: Vec<bool>,
    finished: Vec<Option<FinishReason>>,
    cancelled: bool,
    pub(crate) end: Option<RequestEnd>,
    pub(crate) num_opened: u32,
    pub(crate) num_resumed: u32,
    pub(crate) num_redirected: u32,
    pub(crate) num_crashes: u64,
    pub(crate) has_waited: bool,
}

impl World {
    pub(crate) fn new(seed: u64, chances: Chances) -> Self {
        let mut random = Random(seed);
        let max_new_tokens = 1 + random.below(30) as u32;
        let num_sequences = 1 + random.below(4) as u32;
        let has_deadline = random.chance(chances.deadline);
        let config = RequestConfig {
            request: RequestId([1; 16]),
            num_sequences,
            max_new_tokens,
            stop_tokens: vec![legs::STOP],
            deadline: has_deadline.then(|| Duration::from_millis(random.below(400))),
            limits: RetryLimits::default(),
        };
        Self {
            random,
            chances,
            now: Time::ZERO,
            request: Request::new(config),
            num_sequences,
            max_new_tokens,
            has_deadline,
            workers: std::array::from_fn(|nth| InstanceId([nth as u8; 16])),
            num_started: WORKERS as u8,
            open: BTreeMap::new(),
            next_attempt: BTreeMap::new(),
            asked: Vec::new(),
            placed: BTreeMap::new(),
            late: Vec::new(),
            delivered: vec![Vec::new(); num_sequences as usize],
            stopped: vec![false; num_sequences as usize],
            finished: vec![None; num_sequences as usize],
            cancelled: false,
            end: None,
            num_opened: 0,
            num_resumed: 0,
            num_redirected: 0,
            num_crashes: 0,
            has_waited: false,
        }
    }

    pub(crate) fn run(&mut self) {
        self.feed(RequestFact::Start);
        for _ in 0..20_000 {
            if self.end.is_some() {
                break;
            }
            self.step();
        }
        assert!(self.end.is_some(), "not over");
        // Whatever comes now changes nothing.
        for fact in std::mem::take(&mut self.late) {
            self.feed(fact);
        }
        self.feed(RequestFact::ClientGone);
        self.check_end();
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(self.random.below(5));
        if self.random.chance(self.chances.cancel) {
            self.cancelled = true;
            return self.feed(RequestFact::ClientGone);
        }
        if self.random.chance(self.chances.stop) {
            return self.stop_string();
        }
        if self.random.chance(self.chances.late) && !self.late.is_empty() {
            let nth = self.random.below(self.late.len() as u64) as usize;
            let fact = self.late.swap_remove(nth);
            return self.feed(fact);
        }
        if self.num_crashes < self.chances.max_crashes && self.random.chance(self.chances.crash) {
            return self.crash();
        }
        if !self.asked.is_empty() && self.random.chance(300) {
            let (group, keep) = self.asked.swap_remove(0);
            let fact = self.answer(group, keep);
            return self.feed(fact);
        }
        if self.request.deadline().is_some_and(|at| at <= self.now) {
            return self.feed(RequestFact::Tick);
        }
        if self.open.is_empty() {
            if self.asked.is_empty() {
                self.has_waited = true;
                self.now = self.request.deadline().map_or(self.now, |at| at.max(self.now));
            }
            return;
        }
        let nth = self.random.below(self.open.len() as u64) as usize;
        let group = *self.open.keys().nth(nth).expect("below its length");
        self.leg_speaks(group);
    }

    fn leg_speaks(&mut self, group: u32) {
        let Some(open) = self.open.get_mut(&group) else { return };
        let attempt = open.attempt;
        let prefill = self.random.chance(500);
        let silent = if prefill { open.prefill.is_empty() } else { open.decode.is_empty() };
        // A leg that has said everything is closed.
        if silent {
            return;
        }
        if self.random.chance(self.chances.failed) {
            let cause = Cause::ALL[self.random.below(Cause::ALL.len() as u64) as usize];
            // A worker that isn't needed says so only beside finished first tokens.
            let cause = if cause == Cause::NotNeeded { Cause::Expired } else { cause };
            open.prefill.retain(|_| !prefill);
            open.decode.retain(|_| prefill);
            if !prefill && open.prefill.back() == Some(&PrefillFact::Done) && self.random.chance(800) {
                open.handoff_fails(cause);
            }
            return self.feed(if prefill {
                RequestFact::Prefill { group, attempt, event: PrefillFact::Failed(cause) }
            } else {
                RequestFact::Decode { group, attempt, event: DecodeFact::Failed(cause) }
            });
        }
        let fact = if prefill {
            open.prefill.pop_front().map(|event| RequestFact::Prefill { group, attempt, event })
        } else {
            open.decode.pop_front().map(|event| RequestFact::Decode { group, attempt, event })
        };
        let Some(fact) = fact else { return };
        open.started |= matches!(fact, RequestFact::Decode { event: DecodeFact::Started, .. });
        if self.random.chance(self.chances.repeat) {
            self.feed(fact.clone());
        }
        self.feed(fact);
    }

    /// A process falls over: every stream to it breaks, in its own time, and another process takes its place.
    fn crash(&mut self) {
        let nth = self.random.below(WORKERS as u64) as usize;
        let gone = self.workers[nth];
        self.workers[nth] = InstanceId([self.num_started; 16]);
        self.num_started += 1;
        let mut hit = false;
        for open in self.open.values_mut() {
            if open.placed.prefill == Some(gone) && !open.prefill.is_empty() {
                open.prefill = [PrefillFact::Lost].into();
                hit = true;
            }
            if open.placed.decode == gone && !open.decode.is_empty() {
                open.decode = [DecodeFact::Lost].into();
                hit = true;
                if open.prefill.back() == Some(&PrefillFact::Done) && self.random.chance(800) {
                    open.handoff_fails(Cause::PeerLost);
                }
            }
        }
        self.num_crashes += u64::from(hit);
    }

    fn stop_string(&mut self) {
        let sequence = self.random.below(u64::from(self.num_sequences)) as u32;
        let nth = sequence as usize;
        // The router finds one in text, which comes of tokens.
        if !self.delivered[nth].is_empty() && !self.stopped[nth] {
            self.stopped[nth] = self.finished[nth].is_none();
            self.feed(RequestFact::StopMatched { sequence });
        }
    }

    fn feed(&mut self, fact: RequestFact) {
        self.request.handle(self.now, fact);
        while let Some(action) = self.request.poll() {
            self.act(action);
        }
    }

    fn act(&mut self, action: RequestAction) {
        assert!(self.end.is_none(), "{action:?} after the end");
        match action {
            RequestAction::Place {
                group, first_sequence, num_sequences, num_forced, keep_prefill, ..
            } => {
                match self.open.get(&group) {
                    None => {
                        assert_eq!(keep_prefill, None);
                        self.check_group(group, first_sequence, num_sequences, num_forced);
                    }
                    Some(open) => {
                        assert!(keep_prefill.is_some(), "places with legs open");
                        assert_eq!(open.placed.prefill, keep_prefill);
                        assert!(open.decode.is_empty() && !open.started, "redirects what runs");
                    }
                }
                self.asked.retain(|(of, _)| *of != group);
                if self.random.chance(self.chances.slow_place) {
                    return self.asked.push((group, keep_prefill));
                }
                let fact = self.answer(group, keep_prefill);
                self.request.handle(self.now, fact);
            }
            RequestAction::OpenLegs(legs) => self.open_legs(legs),
            RequestAction::Redirect(legs) => self.redirect(legs),
            RequestAction::CloseDecode { group, attempt } => {
                let open = self.open.get_mut(&group).expect("closes what is open");
                assert_eq!(open.attempt, attempt);
                let decode = open.decode.drain(..);
                self.late.extend(decode.map(|event| RequestFact::Decode { group, attempt, event }));
            }
            RequestAction::CloseLegs { group, attempt } => {
                let open = self.open.remove(&group).expect("closes what is open");
                assert_eq!(open.attempt, attempt);
                let prefill = open.prefill.into_iter();
                self.late.extend(prefill.map(|event| RequestFact::Prefill { group, attempt, event }));
                let decode = open.decode.into_iter();
                self.late.extend(decode.map(|event| RequestFact::Decode { group, attempt, event }));
            }
            RequestAction::StopSequence { group, attempt, sequence } => {
                let open = self.open.get_mut(&group).expect("stops what is open");
                assert_eq!(open.attempt, attempt);
                // It arrives at once, or behind everything.
                if self.random.chance(500) {
                    open.decode.retain(|fact| !is_of(fact, sequence));
                }
            }
            RequestAction::Deliver { sequence, token } => self.deliver(sequence, token),
            RequestAction::Finished { sequence, reason: why } => {
                let nth = sequence as usize;
                assert_eq!(self.finished[nth].replace(why), None, "sequence {sequence} finishes twice");
                if self.stopped[nth] {
                    return assert_eq!(why, FinishReason::Stop);
                }
                assert_eq!(why, reason(sequence, self.max_new_tokens));
                let num = last_index(sequence, self.max_new_tokens) as usize + 1;
                assert_eq!(self.delivered[nth].len(), num, "sequence {sequence} is not complete");
            }
            RequestAction::End(end) => self.end = Some(end),
        }
    }

    fn deliver(&mut self, sequence: u32, got: SampledToken) {
        let nth = sequence as usize;
        let index = self.delivered[nth].len() as u32;
        assert_eq!(
            got,
            token(sequence, index),
            "not what the undisturbed sequence {sequence} has at {index}"
        );
        assert!(!self.stopped[nth] && self.finished[nth].is_none(), "delivers after the end of {sequence}");
        assert!(!self.cancelled, "delivers to nobody");
        self.delivered[nth].push(got);
    }

    fn check_group(&self, group: u32, first: u32, num: u32, num_forced: u32) {
        if group == 0 {
            assert_eq!((first, num), (0, self.num_sequences));
        } else {
            assert!(self.num_sequences > 1, "one sequence never leaves its group");
            assert_eq!((first, num), (group - 1, 1));
        }
        for sequence in first..first + num {
            let nth = sequence as usize;
            assert_eq!(num_forced as usize, self.delivered[nth].len(), "forces what was delivered");
            assert_eq!(self.finished[nth], None, "sequence {sequence} is complete");
        }
    }

    fn answer(&mut self, group: u32, keep: Option<InstanceId>) -> RequestFact {
        if self.random.chance(self.chances.unplaced) {
            let errors = [PlaceError::NoWorker, PlaceError::Saturated];
            return RequestFact::NotPlaced { group, error: errors[self.random.below(2) as usize] };
        }
        let local = self.random.chance(self.chances.local);
        let nth = self.random.below(PREFILLS as u64) as usize;
        let decode = PREFILLS + self.random.below((WORKERS - PREFILLS) as u64) as usize;
        let prefill = keep.or_else(|| (!local).then_some(self.workers[nth]));
        let placed = Placed { decode: self.workers[decode], prefill };
        self.placed.insert(group, placed);
        RequestFact::Placed { group, placed }
    }

    fn open_legs(&mut self, opened: Legs) {
        let group = opened.key.group;
        self.check_group(group, opened.first_sequence, opened.num_sequences, opened.num_forced);
        let open = self.attempt(opened);
        assert!(self.open.insert(group, open).is_none(), "opens before the last attempt is closed");
    }

    /// What an attempt that begins now will say.
    fn attempt(&mut self, opened: Legs) -> Open {
        let group = opened.key.group;
        let next = self.next_attempt.entry(group).or_default();
        assert_eq!(opened.key.attempt, *next, "attempts count up");
        *next += 1;
        assert_eq!(opened.max_new_tokens, self.max_new_tokens - opened.num_forced);
        assert!(!self.cancelled, "opens after a cancel");
        self.num_opened += 1;
        self.num_resumed += u32::from(opened.num_forced > 0);
        let running = self.chances.preempt;
        let preempt = Preempt { running, receiving: running / 2 };
        let placed = self.placed[&group];
        let mut open = legs::open(&mut self.random, &opened, placed, self.max_new_tokens, preempt);
        // Placed on a process that has fallen over meanwhile.
        if placed.prefill.is_some_and(|worker| !self.workers.contains(&worker)) {
            open.prefill = [PrefillFact::Unreachable].into();
        }
        if opened.decode && !self.workers.contains(&placed.decode) {
            open.decode = [DecodeFact::Unreachable].into();
        }
        open
    }

    /// The Prefill leg goes on under the next attempt, if what it has is still there.
    fn redirect(&mut self, legs: Legs) {
        let group = legs.key.group;
        let last = self.open.remove(&group).expect("redirects what is open");
        assert_eq!(last.attempt + 1, legs.key.attempt);
        assert_eq!(last.placed.prefill, self.placed[&group].prefill, "the worker that has it");
        let mut open = self.attempt(legs);
        let takes = last
            .prefill
            .iter()
            .any(|fact| matches!(fact, PrefillFact::HandoffFailed(_) | PrefillFact::Failed(_)));
        if last.prefill == [PrefillFact::Lost] {
            open.prefill = last.prefill;
        } else if !takes || self.random.chance(self.chances.not_redirected) {
            // It was handed off after all, or given up.
            open.prefill = last
                .prefill
                .into_iter()
                .filter(|fact| !matches!(fact, PrefillFact::HandoffFailed(_)))
                .collect();
            open.prefill.push_front(PrefillFact::NotRedirected);
            open.decode.clear();
        } else {
            self.num_redirected += 1;
            open.prefill.retain(|fact| !matches!(fact, PrefillFact::FirstTokens(_)));
            if open.decode.front() == Some(&DecodeFact::Unreachable) {
                open.handoff_fails(Cause::PeerLost);
            }
            // What the last handoff came to may be told late.
            let stale = PrefillFact::HandoffFailed(Cause::PeerLost);
            self.late.push(RequestFact::Prefill { group, attempt: last.attempt, event: stale });
        }
        self.open.insert(group, open);
    }

    fn check_end(&self) {
        assert!(self.open.is_empty(), "legs stay open");
        assert!(self.request.num_retries() <= RetryLimits::default().max_retries, "budget");
        let nothing = self.delivered.iter().all(Vec::is_empty);
        match self.end {
            Some(RequestEnd::Finished) => {
                assert!(self.finished.iter().all(Option::is_some), "{:?}", self.finished);
            }
            Some(RequestEnd::Cancelled) => assert!(self.cancelled, "cancelled by nobody"),
            Some(RequestEnd::Failed { cause, retry_after_ms }) => {
                assert!(retry_after_ms.is_none() || nothing, "sheds after a delivery");
                assert!(cause != Cause::NotNeeded && cause != Cause::Preempted);
                assert!(cause != Cause::Deadline || self.has_deadline || self.chances.failed > 0);
            }
            Some(RequestEnd::Unplaced { .. }) => assert!(self.chances.unplaced > 0),
            None => panic!("no end"),
        }
    }
}

fn is_of(fact: &DecodeFact, of: u32) -> bool {
    match fact {
        DecodeFact::Token { sequence, .. }
        | DecodeFact::Finished { sequence, .. }
        | DecodeFact::Preempted { sequence } => *sequence == of,
        DecodeFact::Started | DecodeFact::Failed(_) | DecodeFact::Unreachable | DecodeFact::Lost => false,
    }
}
