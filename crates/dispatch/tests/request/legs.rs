//! Both legs of an attempt as two queues of facts, each in its own order, and the rules that hold whatever comes.

use std::collections::VecDeque;
use std::time::Duration;

use baton_dispatch::{
    DecodeFact, Legs, PlaceError, Placed, PrefillFact, Request, RequestAction, RequestConfig, RequestEnd,
    RequestFact, RetryLimits, Time,
};
use baton_handoff::{Cause, FinishReason, InstanceId, RequestId, SampledToken};

use crate::random::Random;

/// What may go wrong, per mille of steps.
#[derive(Clone, Copy, Default)]
pub(crate) struct Chances {
    pub(crate) lost: u64,
    pub(crate) failed: u64,
    pub(crate) repeat: u64,
    pub(crate) late: u64,
    pub(crate) cancel: u64,
    pub(crate) stop: u64,
    pub(crate) unplaced: u64,
    pub(crate) local: u64,
}

const STOP: u32 = 3;

/// What the model says: the token at an index, whoever computes it.
pub(crate) fn token(index: u32) -> SampledToken {
    SampledToken { id: Random(u64::from(index)).next() as u32 % 40, logprob: -1.0, index }
}

pub(crate) struct World {
    pub(crate) random: Random,
    chances: Chances,
    pub(crate) now: Time,
    pub(crate) request: Request,
    pub(crate) max_new_tokens: u32,
    legs: [VecDeque<RequestFact>; 2],
    /// What the streams of closed attempts still held.
    late: Vec<RequestFact>,
    open: Option<u32>,
    next_attempt: u32,
    pub(crate) delivered: Vec<SampledToken>,
    stopped: Option<RequestEnd>,
    pub(crate) end: Option<RequestEnd>,
    pub(crate) num_opened: u32,
}

impl World {
    pub(crate) fn new(seed: u64, chances: Chances) -> Self {
        let mut random = Random(seed);
        let max_new_tokens = 1 + random.below(30) as u32;
        let config = RequestConfig {
            request: RequestId([1; 16]),
            group: 0,
            max_new_tokens,
            stop_tokens: vec![STOP],
            deadline: random.chance(100).then(|| Duration::from_secs(2)),
            limits: RetryLimits::default(),
        };
        Self {
            random,
            chances,
            now: Time::ZERO,
            request: Request::new(config),
            max_new_tokens,
            legs: Default::default(),
            late: Vec::new(),
            open: None,
            next_attempt: 0,
            delivered: Vec::new(),
            stopped: None,
            end: None,
            num_opened: 0,
        }
    }

    pub(crate) fn run(&mut self) {
        self.feed(RequestFact::Start);
        for _ in 0..2_000 {
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
            self.stopped = Some(RequestEnd::Cancelled);
            return self.feed(RequestFact::ClientGone);
        }
        if self.random.chance(self.chances.stop) {
            self.stopped = Some(RequestEnd::Finished(FinishReason::Stop));
            return self.feed(RequestFact::StopMatched);
        }
        if self.random.chance(self.chances.late) && !self.late.is_empty() {
            let nth = self.random.below(self.late.len() as u64) as usize;
            let fact = self.late.swap_remove(nth);
            return self.feed(fact);
        }
        let Some(attempt) = self.open else {
            self.now = self.request.deadline().map_or(self.now, |at| at.max(self.now));
            return self.feed(RequestFact::Tick);
        };
        let which = self.random.below(2) as usize;
        if let Some(fact) = self.trouble(attempt, which) {
            self.legs[which].clear();
            return self.feed(fact);
        }
        if let Some(fact) = self.legs[which].pop_front() {
            if self.random.chance(self.chances.repeat) {
                self.feed(fact);
            }
            self.feed(fact);
        }
    }

    fn trouble(&mut self, attempt: u32, which: usize) -> Option<RequestFact> {
        // A leg that has said everything is closed.
        if self.legs[which].is_empty() {
            return None;
        }
        let lost = self.random.chance(self.chances.lost);
        if !lost && !self.random.chance(self.chances.failed) {
            return None;
        }
        let cause = Cause::ALL[self.random.below(Cause::ALL.len() as u64) as usize];
        // A worker that isn't needed says so only beside a finished first token.
        let cause = if cause == Cause::NotNeeded { Cause::Expired } else { cause };
        Some(match (which, lost) {
            (0, true) => RequestFact::Prefill { attempt, event: PrefillFact::Lost },
            (0, false) => RequestFact::Prefill { attempt, event: PrefillFact::Failed(cause) },
            (_, true) => RequestFact::Decode { attempt, event: DecodeFact::Lost },
            (_, false) => RequestFact::Decode { attempt, event: DecodeFact::Failed(cause) },
        })
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
            RequestAction::Place { .. } => {
                assert!(self.open.is_none(), "places with legs open");
                self.place();
            }
            RequestAction::OpenLegs(legs) => self.open_legs(legs),
            RequestAction::CloseLegs { attempt } => {
                assert_eq!(self.open.take(), Some(attempt));
                for leg in &mut self.legs {
                    self.late.extend(leg.drain(..));
                }
            }
            RequestAction::Deliver(got) => {
                let index = self.delivered.len() as u32;
                assert_eq!(got, token(index), "not the token that the undisturbed run has at {index}");
                assert!(self.stopped.is_none(), "delivers after a cancel or a stop");
                self.delivered.push(got);
            }
            RequestAction::End(end) => self.end = Some(end),
        }
    }

    fn place(&mut self) {
        let fact = if self.random.chance(self.chances.unplaced) {
            let errors = [PlaceError::NoWorker, PlaceError::Saturated];
            RequestFact::NotPlaced(errors[self.random.below(2) as usize])
        } else {
            let prefill = (!self.random.chance(self.chances.local)).then_some(InstanceId([1; 16]));
            RequestFact::Placed(Placed { decode: InstanceId([2; 16]), prefill })
        };
        // Answered at once: the shell's placement is a function call.
        self.request.handle(self.now, fact);
    }

    fn open_legs(&mut self, legs: Legs) {
        assert!(self.open.is_none(), "opens before the last attempt is closed");
        assert_eq!(legs.key.attempt, self.next_attempt, "attempts count up");
        assert_eq!(legs.num_forced as usize, self.delivered.len(), "forces what was delivered");
        assert!(legs.max_new_tokens >= 1);
        assert!(self.stopped.is_none(), "opens after a cancel");
        self.num_opened += 1;
        self.next_attempt += 1;
        let attempt = legs.key.attempt;
        self.open = Some(attempt);
        let start = legs.num_forced;
        let end = (start..start + legs.max_new_tokens - 1).find(|i| token(*i).id == STOP);
        let last = end.unwrap_or(start + legs.max_new_tokens - 1);
        let reason = if token(last).id == STOP { FinishReason::Stop } else { FinishReason::Length };
        let prefill = |event| RequestFact::Prefill { attempt, event };
        let decode = |event| RequestFact::Decode { attempt, event };
        let first_ends = start == last;
        if !legs.local {
            let finish = first_ends.then_some(reason);
            self.legs[0].push_back(prefill(PrefillFact::FirstToken { token: token(start), finish }));
            if !first_ends {
                self.legs[0].push_back(prefill(PrefillFact::Done));
            }
        }
        if !legs.decode {
            return;
        }
        if first_ends && !legs.local {
            return self.legs[1].push_back(decode(DecodeFact::Failed(Cause::NotNeeded)));
        }
        self.legs[1].push_back(decode(DecodeFact::Started));
        let from = if legs.local { start } else { start + 1 };
        self.legs[1].extend((from..=last).map(|index| decode(DecodeFact::Token(token(index)))));
        self.legs[1].push_back(decode(DecodeFact::Finished(reason)));
    }

    fn check_end(&self) {
        assert!(self.open.is_none(), "legs stay open");
        let limits = RetryLimits::default();
        assert!(self.num_opened <= 1 + limits.max_retries + limits.max_replacements, "budget");
        let delivered = self.delivered.len() as u32;
        match self.end {
            Some(RequestEnd::Finished(_) | RequestEnd::Cancelled) if self.stopped.is_some() => {
                assert_eq!(self.end, self.stopped);
            }
            Some(RequestEnd::Finished(FinishReason::Length)) => assert_eq!(delivered, self.max_new_tokens),
            Some(RequestEnd::Finished(FinishReason::Stop)) => {
                assert_eq!(self.delivered.last().map(|t| t.id), Some(STOP));
            }
            Some(RequestEnd::Cancelled) => panic!("cancelled by nobody"),
            Some(RequestEnd::Failed { cause, retry_after_ms }) => {
                assert!(retry_after_ms.is_none() || delivered == 0, "sheds after a delivery");
                assert!(cause != Cause::NotNeeded);
            }
            Some(RequestEnd::Unplaced { .. }) => {}
            None => panic!("no end"),
        }
    }
}
