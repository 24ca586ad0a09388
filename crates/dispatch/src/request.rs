//! One request over its legs.

use std::collections::VecDeque;

use baton_handoff::{Cause, FinishReason, HandoffKey, MAX_SEQUENCES, RequestId};

use crate::attempt::Attempt;
use crate::budget::{Budget, Spent};
use crate::group::{Group, Stage};
use crate::sequence::Sequence;
use crate::{Legs, PlaceError, Placed, RequestAction, RequestEnd, RequestFact, RetryLimits, Time};

/// What a request is created with.
#[derive(Clone, Debug)]
pub struct RequestConfig {
    /// The request.
    pub request: RequestId,
    /// Sequences to generate from the prompt: 1 to [`MAX_SEQUENCES`].
    pub num_sequences: u32,
    /// Tokens to generate at most, for each sequence; at least 1.
    pub max_new_tokens: u32,
    /// Tokens that end a sequence, so that a stream lost right after one is complete and is not resumed.
    pub stop_tokens: Vec<u32>,
    /// When the request's own time is up.
    pub deadline: Option<Time>,
    /// How often it is tried again.
    pub limits: RetryLimits,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    New,
    Open,
    Ended,
}

/// One request over its legs: facts in, actions out.
///
/// Each index of each sequence is delivered once, in order, from the current attempt of its group only. Once a token was
/// delivered every retry is a resume: delivered tokens are forced, and the sequence goes on behind them, in a group of its own when
/// the request has several.
#[derive(Debug)]
pub struct Request {
    pub(crate) config: RequestConfig,
    phase: Phase,
    pub(crate) sequences: Vec<Sequence>,
    /// Only grows: a group that is over stays, so that an index stays true.
    pub(crate) groups: Vec<Group>,
    pub(crate) budget: Budget,
    pub(crate) actions: VecDeque<RequestAction>,
    pub(crate) ignored: u64,
}

impl Request {
    /// A request that passed the door.
    pub fn new(config: RequestConfig) -> Self {
        let num = usize::try_from(config.num_sequences).unwrap_or(MAX_SEQUENCES).clamp(1, MAX_SEQUENCES);
        Self {
            budget: Budget::new(config.limits),
            config,
            phase: Phase::New,
            sequences: vec![Sequence::default(); num],
            groups: Vec::new(),
            actions: VecDeque::new(),
            ignored: 0,
        }
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<RequestAction> {
        self.actions.pop_front()
    }

    /// When to call [`Request::handle`] with [`RequestFact::Tick`] if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        if self.is_ended() {
            return None;
        }
        let backoffs = self.groups.iter().filter_map(|group| match group.stage {
            Stage::Backoff { until } => Some(until),
            Stage::Placing | Stage::Running(_) | Stage::Redirecting(_) | Stage::Over => None,
        });
        backoffs.chain(self.config.deadline).min()
    }

    /// Facts of earlier attempts, duplicates, and others that changed nothing.
    pub const fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Tokens delivered, of all sequences together.
    pub fn num_delivered(&self) -> u32 {
        self.sequences.iter().map(|sequence| sequence.delivered).sum()
    }

    /// Failures of workers that were followed by another attempt.
    pub const fn num_retries(&self) -> u32 {
        self.budget.num_retries()
    }

    /// Whether [`RequestAction::End`] was emitted.
    pub fn is_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// Takes in what happened.
    pub fn handle(&mut self, now: Time, fact: RequestFact) {
        match fact {
            RequestFact::Start => self.start(),
            RequestFact::Placed { group, placed } => self.placed(now, group, placed),
            RequestFact::NotPlaced { group, error } => self.not_placed(now, group, error),
            RequestFact::Prefill { group, attempt, event } => match self.running(group, attempt) {
                Some((at, legs)) if !legs.local => self.prefill(now, at, event),
                Some(_) => self.ignored += 1,
                None => self.prefill_held(now, group, attempt, event),
            },
            RequestFact::Decode { group, attempt, event } => match self.running(group, attempt) {
                Some((at, legs)) if legs.decode => self.decode(now, at, event),
                _ => self.ignored += 1,
            },
            RequestFact::ClientGone => self.client_gone(),
            RequestFact::StopMatched { sequence } => self.stop_matched(sequence),
            RequestFact::Tick => self.tick(now),
        }
    }

    /// Where the group stands in `groups` and the legs of its attempt, when that attempt is live.
    fn running(&self, number: u32, attempt: u32) -> Option<(usize, Legs)> {
        self.groups.iter().enumerate().find_map(|(at, group)| match &group.stage {
            Stage::Running(live) if group.number == number && live.legs.key.attempt == attempt => {
                Some((at, live.legs))
            }
            Stage::Placing
            | Stage::Backoff { .. }
            | Stage::Running(_)
            | Stage::Redirecting(_)
            | Stage::Over => None,
        })
    }

    fn placing(&self, number: u32) -> Option<usize> {
        self.groups.iter().position(|group| group.number == number && matches!(group.stage, Stage::Placing))
    }

    fn start(&mut self) {
        match self.phase {
            Phase::New => {
                self.phase = Phase::Open;
                self.groups.push(Group::whole(u32::try_from(self.sequences.len()).unwrap_or(1)));
                self.place(0);
            }
            Phase::Open | Phase::Ended => self.ignored += 1,
        }
    }

    fn placed(&mut self, now: Time, group: u32, placed: Placed) {
        match (self.placing(group), self.redirecting(group)) {
            (Some(at), _) => self.open(at, placed),
            (None, Some(at)) => self.redirect(now, at, placed),
            (None, None) => self.ignored += 1,
        }
    }

    fn not_placed(&mut self, now: Time, group: u32, error: PlaceError) {
        let Some(at) = self.placing(group) else {
            return match self.redirecting(group) {
                Some(at) => self.start_over(now, at),
                None => self.ignored += 1,
            };
        };
        let end = RequestEnd::Unplaced { error, retry_after_ms: Some(self.config.limits.retry_after_ms) };
        match error {
            PlaceError::TooLarge => {
                self.close_and_end(RequestEnd::Unplaced { error, retry_after_ms: None });
            }
            PlaceError::Saturated if self.num_delivered() == 0 => match self.budget.place_again(None) {
                Ok(nth) => self.back_off(now, at, nth),
                Err(Spent) => self.close_and_end(end),
            },
            // A first attempt needs a worker now; a later one waits for one to come back.
            PlaceError::NoWorker | PlaceError::Saturated => {
                let nth = self.groups[at].num_unplaced + 1;
                if !self.budget.has_opened() || nth > self.config.limits.max_unplaced {
                    return self.close_and_end(end);
                }
                self.groups[at].num_unplaced = nth;
                self.back_off(now, at, nth);
            }
        }
    }

    /// The client left: what waits to be told is not, and an end that waits is replaced.
    fn client_gone(&mut self) {
        self.withdraw(|_| true);
        self.actions.retain(|action| !matches!(action, RequestAction::Finished { .. }));
        match (self.phase, self.actions.back_mut()) {
            (Phase::New | Phase::Open, _) => self.close_and_end(RequestEnd::Cancelled),
            (Phase::Ended, Some(RequestAction::End(pending))) => *pending = RequestEnd::Cancelled,
            (Phase::Ended, _) => self.ignored += 1,
        }
    }

    /// Nothing more of a sequence is wanted: tokens of it that wait to be delivered are not, and its end, if it waits to be told,
    /// becomes this one.
    fn stop_matched(&mut self, sequence: u32) {
        let Some(state) = self.sequences.get(sequence as usize) else {
            self.ignored += 1;
            return;
        };
        let (finished, group) = (state.finished, state.group);
        self.withdraw(|of| of == sequence);
        if finished {
            let told = self.actions.iter_mut().find_map(|action| match action {
                RequestAction::Finished { sequence: of, reason } if *of == sequence => Some(reason),
                _ => None,
            });
            match told {
                Some(reason) => *reason = FinishReason::Stop,
                None => self.ignored += 1,
            }
            return;
        }
        // No group speaks for it before the start or after the end.
        let Some(at) = self.groups.iter().position(|of| of.number == group && !of.is_over()) else {
            self.ignored += 1;
            return;
        };
        self.finish(sequence, FinishReason::Stop);
        if let (true, Some(live)) = (self.has_open(at), self.groups[at].live()) {
            let attempt = live.legs.key.attempt;
            self.actions.push_back(RequestAction::StopSequence { group, attempt, sequence });
        }
        self.settle(at);
    }

    /// Takes back tokens that were not handed out yet.
    fn withdraw(&mut self, of: impl Fn(u32) -> bool) {
        let Self { actions, sequences, .. } = self;
        actions.retain(|action| match action {
            RequestAction::Deliver { sequence, .. } if of(*sequence) => {
                if let Some(state) = sequences.get_mut(*sequence as usize) {
                    state.delivered -= 1;
                }
                false
            }
            _ => true,
        });
    }

    fn tick(&mut self, now: Time) {
        if self.deadline().is_none_or(|at| at > now) {
            return;
        }
        if self.config.deadline.is_some_and(|at| at <= now) {
            return self.close_and_end(RequestEnd::Failed { cause: Cause::Deadline, retry_after_ms: None });
        }
        for at in 0..self.groups.len() {
            if matches!(self.groups[at].stage, Stage::Backoff { until } if until <= now) {
                self.place(at);
            }
        }
    }

    /// Tokens of the group's one sequence that the next attempt must force.
    fn num_forced(&self, at: usize) -> u32 {
        let group = &self.groups[at];
        if group.num_sequences > 1 { 0 } else { self.sequences[group.first_sequence as usize].delivered }
    }

    pub(crate) fn place(&mut self, at: usize) {
        let num_forced = self.num_forced(at);
        let avoid = self.budget.avoid();
        let group = &mut self.groups[at];
        group.stage = Stage::Placing;
        let Group { number, first_sequence, num_sequences, .. } = *group;
        self.actions.push_back(RequestAction::Place {
            group: number,
            avoid,
            first_sequence,
            num_sequences,
            num_forced,
            keep_prefill: None,
        });
    }

    fn open(&mut self, at: usize, placed: Placed) {
        let num_forced = self.num_forced(at);
        let nth = self.budget.open();
        let group = &mut self.groups[at];
        let key = HandoffKey { request: self.config.request, group: group.number, attempt: group.attempt };
        let local = placed.prefill.is_none();
        let max_new_tokens = self.config.max_new_tokens.saturating_sub(num_forced).max(1);
        let legs = Legs {
            key,
            local,
            decode: local || max_new_tokens > 1,
            first_sequence: group.first_sequence,
            num_sequences: group.num_sequences,
            num_forced,
            max_new_tokens,
            preempted: group.preempted,
        };
        group.attempt += 1;
        group.num_unplaced = 0;
        group.stage = Stage::Running(Attempt::new(placed, legs, nth));
        self.actions.push_back(RequestAction::OpenLegs(legs));
    }

    pub(crate) fn back_off(&mut self, now: Time, at: usize, nth: u32) {
        self.groups[at].stage = Stage::Backoff { until: now + self.config.limits.backoff(nth) };
    }

    /// Drops the streams of a group, or the question where to open them.
    pub(crate) fn close(&mut self, at: usize) {
        let number = self.groups[at].number;
        if let Stage::Placing | Stage::Redirecting(_) = &self.groups[at].stage {
            self.actions
                .retain(|action| !matches!(action, RequestAction::Place { group, .. } if *group == number));
        }
        if let Stage::Running(live) | Stage::Redirecting(live) = &self.groups[at].stage {
            let attempt = live.legs.key.attempt;
            self.actions.push_back(RequestAction::CloseLegs { group: number, attempt });
        }
    }

    pub(crate) fn close_group(&mut self, at: usize) {
        self.close(at);
        self.groups[at].stage = Stage::Over;
    }

    pub(crate) fn close_and_end(&mut self, end: RequestEnd) {
        for at in 0..self.groups.len() {
            self.close_group(at);
        }
        self.phase = Phase::Ended;
        self.actions.push_back(RequestAction::End(end));
    }

    /// The only place where a sequence ends; [`Request::settle`] follows.
    pub(crate) fn finish(&mut self, sequence: u32, reason: FinishReason) {
        self.sequences[sequence as usize].finished = true;
        self.actions.push_back(RequestAction::Finished { sequence, reason });
    }

    /// Whether an unfinished sequence belongs to the group.
    pub(crate) fn has_open(&self, at: usize) -> bool {
        self.groups[at].sequences().any(|sequence| self.owns(at, sequence))
    }

    /// Whether the group speaks for this sequence.
    pub(crate) fn owns(&self, at: usize, sequence: u32) -> bool {
        let state = self.sequences.get(sequence as usize);
        state.is_some_and(|state| state.group == self.groups[at].number && !state.finished)
    }

    /// Closes a group that has nothing left to do, and the request with the last one.
    pub(crate) fn settle(&mut self, at: usize) {
        if self.groups[at].is_over() || self.has_open(at) {
            return;
        }
        self.close_group(at);
        if self.sequences.iter().all(|sequence| sequence.finished) {
            self.close_and_end(RequestEnd::Finished);
        }
    }
}
