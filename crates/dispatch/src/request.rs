//! One request over its legs.

use std::collections::VecDeque;

use baton_handoff::{Cause, FinishReason, HandoffKey, InstanceId, RequestId, SampledToken};

use crate::attempt::Attempt;
use crate::{
    DecodeFact, Legs, PlaceError, Placed, PrefillFact, RequestAction, RequestEnd, RequestFact, RetryLimits,
    Time, Verdict,
};

/// What a request is created with.
#[derive(Clone, Debug)]
pub struct RequestConfig {
    /// The request.
    pub request: RequestId,
    /// Which of its sequence groups.
    pub group: u32,
    /// Tokens to generate at most; at least 1.
    pub max_new_tokens: u32,
    /// Tokens that end the sequence, so that a stream lost right after one is complete and is not resumed.
    pub stop_tokens: Vec<u32>,
    /// When the request's own time is up.
    pub deadline: Option<Time>,
    /// How often it is tried again.
    pub limits: RetryLimits,
}

#[derive(Debug)]
enum Stage {
    /// Not yet started.
    New,
    /// `Place` is out.
    Placing,
    /// Placed again at this time.
    Backoff { until: Time },
    /// Legs are open.
    Running(Attempt),
    /// Over.
    Ended,
}

/// One sequence group over its legs: facts in, actions out.
///
/// Each index is delivered once, in order, from the current attempt only. Once a token was delivered every retry is a resume:
/// delivered tokens are forced, and the sequence goes on behind them.
#[derive(Debug)]
pub struct Request {
    config: RequestConfig,
    stage: Stage,
    actions: VecDeque<RequestAction>,
    /// Of the next attempt to open.
    attempt: u32,
    delivered: u32,
    last_token: Option<u32>,
    avoid: Vec<InstanceId>,
    num_retries: u32,
    num_replacements: u32,
    num_unplaced: u32,
    num_workers_lost: u32,
    ignored: u64,
}

impl Request {
    /// A request that passed the door.
    pub fn new(config: RequestConfig) -> Self {
        Self {
            config,
            stage: Stage::New,
            actions: VecDeque::new(),
            attempt: 0,
            delivered: 0,
            last_token: None,
            avoid: Vec::new(),
            num_retries: 0,
            num_replacements: 0,
            num_unplaced: 0,
            num_workers_lost: 0,
            ignored: 0,
        }
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<RequestAction> {
        self.actions.pop_front()
    }

    /// When to call [`Request::handle`] with [`RequestFact::Tick`] if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        match self.stage {
            Stage::Ended => None,
            Stage::Backoff { until } => Some(self.config.deadline.map_or(until, |at| at.min(until))),
            Stage::New | Stage::Placing | Stage::Running(_) => self.config.deadline,
        }
    }

    /// Facts of earlier attempts, duplicates, and others that changed nothing.
    pub const fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Tokens delivered.
    pub const fn num_delivered(&self) -> u32 {
        self.delivered
    }

    /// Attempts opened after the first one.
    pub const fn num_retries(&self) -> u32 {
        self.num_retries
    }

    /// Whether [`RequestAction::End`] was emitted.
    pub const fn is_ended(&self) -> bool {
        matches!(self.stage, Stage::Ended)
    }

    /// Takes in what happened.
    pub fn handle(&mut self, now: Time, fact: RequestFact) {
        match fact {
            RequestFact::Start => self.start(),
            RequestFact::Placed(placed) => self.placed(placed),
            RequestFact::NotPlaced(error) => self.not_placed(now, error),
            RequestFact::Prefill { attempt, event } => {
                let live = matches!(&self.stage, Stage::Running(live) if live.legs.key.attempt == attempt && !live.legs.local);
                if self.is_news(live) {
                    self.prefill(now, event);
                }
            }
            RequestFact::Decode { attempt, event } => {
                let live = matches!(&self.stage, Stage::Running(live) if live.legs.key.attempt == attempt && live.legs.decode);
                if self.is_news(live) {
                    self.decode(now, event);
                }
            }
            RequestFact::ClientGone => self.stop(RequestEnd::Cancelled),
            RequestFact::StopMatched => self.stop(RequestEnd::Finished(FinishReason::Stop)),
            RequestFact::Tick => self.tick(now),
        }
    }

    fn start(&mut self) {
        match self.stage {
            Stage::New => self.place(),
            Stage::Placing | Stage::Backoff { .. } | Stage::Running(_) | Stage::Ended => self.ignored += 1,
        }
    }

    fn placed(&mut self, placed: Placed) {
        match self.stage {
            Stage::Placing => self.open(placed),
            Stage::New | Stage::Backoff { .. } | Stage::Running(_) | Stage::Ended => self.ignored += 1,
        }
    }

    fn not_placed(&mut self, now: Time, error: PlaceError) {
        match self.stage {
            Stage::Placing => {}
            Stage::New | Stage::Backoff { .. } | Stage::Running(_) | Stage::Ended => {
                self.ignored += 1;
                return;
            }
        }
        let retry_after_ms = Some(self.config.limits.retry_after_ms);
        match error {
            PlaceError::TooLarge => self.end(RequestEnd::Unplaced { error, retry_after_ms: None }),
            PlaceError::Saturated if self.delivered == 0 => {
                if self.num_replacements >= self.config.limits.max_replacements {
                    return self.end(RequestEnd::Unplaced { error, retry_after_ms });
                }
                self.num_replacements += 1;
                self.back_off(now, self.num_replacements - 1);
            }
            // A first attempt needs a worker now; a later one waits for one to come back.
            PlaceError::NoWorker | PlaceError::Saturated => {
                if self.attempt == 0 || self.num_unplaced >= self.config.limits.max_unplaced {
                    return self.end(RequestEnd::Unplaced { error, retry_after_ms });
                }
                self.num_unplaced += 1;
                self.back_off(now, self.num_unplaced);
            }
        }
    }

    fn prefill(&mut self, now: Time, event: PrefillFact) {
        let Stage::Running(live) = &mut self.stage else { return };
        match event {
            PrefillFact::FirstToken { .. } if live.first_token => self.ignored += 1,
            PrefillFact::FirstToken { token, finish } => {
                live.first_token = true;
                let finish = finish.or_else(|| (!live.legs.decode).then_some(FinishReason::Length));
                self.first_token(now, token, finish);
            }
            // The decode leg says how it goes on.
            PrefillFact::Done => {}
            PrefillFact::Failed(_) | PrefillFact::Unreachable | PrefillFact::Lost
                if live.is_past_prefill() =>
            {
                self.ignored += 1
            }
            PrefillFact::Failed(cause) => {
                let blamed =
                    if cause == Cause::PeerLost { live.placed.decode } else { Self::prefill_of(live) };
                self.attempt_failed(now, cause, blamed);
            }
            PrefillFact::Unreachable => {
                let blamed = Self::prefill_of(live);
                self.retry(now, Cause::PeerLost, blamed);
            }
            PrefillFact::Lost => {
                let blamed = Self::prefill_of(live);
                self.worker_lost(now, Cause::PeerLost, blamed);
            }
        }
    }

    fn prefill_of(live: &Attempt) -> InstanceId {
        live.placed.prefill.unwrap_or(live.placed.decode)
    }

    fn first_token(&mut self, now: Time, token: SampledToken, finish: Option<FinishReason>) {
        self.token(now, token);
        if let Some(reason) = finish
            && self.is_running()
        {
            return self.close_and_end(RequestEnd::Finished(reason));
        }
        while let Stage::Running(live) = &mut self.stage
            && let Some(token) = live.early.pop_front()
        {
            self.token(now, token);
        }
        if let Stage::Running(live) = &self.stage
            && let Some(reason) = live.finished
        {
            self.close_and_end(RequestEnd::Finished(reason));
        }
    }

    fn decode(&mut self, now: Time, event: DecodeFact) {
        let Stage::Running(live) = &mut self.stage else { return };
        match event {
            // The leg has said its last word, and waits for the first token.
            _ if live.finished.is_some() => self.ignored += 1,
            DecodeFact::Started if live.started => self.ignored += 1,
            DecodeFact::Started => live.started = true,
            DecodeFact::Token(token) if live.first_token => self.token(now, token),
            DecodeFact::Token(_) if live.early.len() >= self.config.limits.max_early_tokens => {
                let blamed = Self::prefill_of(live);
                self.attempt_failed(now, Cause::Expired, blamed);
            }
            DecodeFact::Token(token) => live.early.push_back(token),
            DecodeFact::Finished(reason) if live.first_token => {
                self.close_and_end(RequestEnd::Finished(reason));
            }
            DecodeFact::Finished(reason) => live.finished = Some(reason),
            DecodeFact::Failed(cause) => {
                let blamed =
                    if cause == Cause::PeerLost { Self::prefill_of(live) } else { live.placed.decode };
                self.attempt_failed(now, cause, blamed);
            }
            DecodeFact::Unreachable => {
                let blamed = live.placed.decode;
                self.retry(now, Cause::PeerLost, blamed);
            }
            DecodeFact::Lost => {
                let blamed = live.placed.decode;
                self.worker_lost(now, Cause::PeerLost, blamed);
            }
        }
    }

    /// The only place where a token is delivered.
    fn token(&mut self, now: Time, token: SampledToken) {
        if token.index < self.delivered {
            self.ignored += 1;
        } else if token.index == self.delivered {
            self.delivered += 1;
            self.last_token = Some(token.id);
            self.actions.push_back(RequestAction::Deliver(token));
        } else if let Stage::Running(live) = &self.stage {
            // A hole in an ordered stream: what comes after it can't be trusted.
            let blamed = live.placed.decode;
            self.attempt_failed(now, Cause::Protocol, blamed);
        }
    }

    fn worker_lost(&mut self, now: Time, cause: Cause, blamed: InstanceId) {
        if let Some(reason) = self.complete() {
            return self.close_and_end(RequestEnd::Finished(reason));
        }
        self.num_workers_lost += 1;
        if self.num_workers_lost >= self.config.limits.max_workers_lost {
            return self.close_and_end(RequestEnd::Failed { cause, retry_after_ms: None });
        }
        self.retry(now, cause, blamed);
    }

    fn attempt_failed(&mut self, now: Time, cause: Cause, blamed: InstanceId) {
        if let Some(reason) = self.complete() {
            return self.close_and_end(RequestEnd::Finished(reason));
        }
        match Verdict::of(cause) {
            Verdict::Ignore => self.ignored += 1,
            Verdict::GiveUp => self.close_and_end(RequestEnd::Failed { cause, retry_after_ms: None }),
            Verdict::WorkerLost => self.worker_lost(now, cause, blamed),
            Verdict::Retry => self.retry(now, cause, blamed),
            // After a delivered token nothing can be shed: it is a resume like any other.
            Verdict::PlaceAgain if self.delivered > 0 => self.retry(now, cause, blamed),
            Verdict::PlaceAgain => self.place_again(now, cause, blamed),
        }
    }

    fn retry(&mut self, now: Time, cause: Cause, blamed: InstanceId) {
        if self.num_retries >= self.config.limits.max_retries {
            let retry_after_ms = (self.delivered == 0).then_some(self.config.limits.retry_after_ms);
            return self.close_and_end(RequestEnd::Failed { cause, retry_after_ms });
        }
        self.num_retries += 1;
        self.close();
        self.blame(blamed);
        self.back_off(now, self.num_retries - 1);
    }

    fn place_again(&mut self, now: Time, cause: Cause, blamed: InstanceId) {
        if self.num_replacements >= self.config.limits.max_replacements {
            let retry_after_ms = Some(self.config.limits.retry_after_ms);
            return self.close_and_end(RequestEnd::Failed { cause, retry_after_ms });
        }
        self.num_replacements += 1;
        self.close();
        self.blame(blamed);
        self.back_off(now, self.num_replacements - 1);
    }

    fn blame(&mut self, blamed: InstanceId) {
        if !self.avoid.contains(&blamed) {
            self.avoid.push(blamed);
        }
    }

    /// Why the sequence needs nothing more, though its last word is missing.
    fn complete(&self) -> Option<FinishReason> {
        let last = self.last_token?;
        if self.config.stop_tokens.contains(&last) {
            return Some(FinishReason::Stop);
        }
        (self.delivered >= self.config.max_new_tokens).then_some(FinishReason::Length)
    }

    /// Nothing more is wanted: tokens that wait to be delivered are not, and an end that waits to be told is replaced.
    fn stop(&mut self, end: RequestEnd) {
        let before = self.actions.len();
        self.actions.retain(|action| !matches!(action, RequestAction::Deliver(_)));
        self.delivered -= u32::try_from(before - self.actions.len()).unwrap_or(self.delivered);
        match self.stage {
            Stage::New | Stage::Placing | Stage::Backoff { .. } | Stage::Running(_) => {
                self.close_and_end(end);
            }
            Stage::Ended => match self.actions.back_mut() {
                Some(RequestAction::End(pending)) => *pending = end,
                _ => self.ignored += 1,
            },
        }
    }

    fn tick(&mut self, now: Time) {
        if self.deadline().is_none_or(|at| at > now) {
            return;
        }
        if self.config.deadline.is_some_and(|at| at <= now) {
            let end = RequestEnd::Failed { cause: Cause::Deadline, retry_after_ms: None };
            return self.close_and_end(end);
        }
        if let Stage::Backoff { .. } = self.stage {
            self.place();
        }
    }

    fn place(&mut self) {
        self.stage = Stage::Placing;
        self.actions.push_back(RequestAction::Place { avoid: self.avoid.clone() });
    }

    fn open(&mut self, placed: Placed) {
        let RequestConfig { request, group, max_new_tokens, .. } = self.config;
        let key = HandoffKey { request, group, attempt: self.attempt };
        let local = placed.prefill.is_none();
        let max_new_tokens = max_new_tokens.saturating_sub(self.delivered).max(1);
        let decode = local || max_new_tokens > 1;
        let legs = Legs { key, local, decode, num_forced: self.delivered, max_new_tokens };
        self.attempt += 1;
        self.num_unplaced = 0;
        self.stage = Stage::Running(Attempt::new(placed, legs));
        self.actions.push_back(RequestAction::OpenLegs(legs));
    }

    fn back_off(&mut self, now: Time, nth: u32) {
        self.stage = Stage::Backoff { until: now + self.config.limits.backoff(nth) };
    }

    fn close(&mut self) {
        if let Stage::Running(live) = &self.stage {
            let attempt = live.legs.key.attempt;
            self.actions.push_back(RequestAction::CloseLegs { attempt });
        }
    }

    fn close_and_end(&mut self, end: RequestEnd) {
        self.close();
        self.end(end);
    }

    fn end(&mut self, end: RequestEnd) {
        self.stage = Stage::Ended;
        self.actions.push_back(RequestAction::End(end));
    }

    fn is_news(&mut self, news: bool) -> bool {
        self.ignored += u64::from(!news);
        news
    }

    const fn is_running(&self) -> bool {
        matches!(self.stage, Stage::Running(_))
    }
}
