//! Single decisions by name.

use std::time::Duration;

use baton_dispatch::{
    DecodeFact, Door, DoorLimits, Entry, Legs, PlaceError, Placed, PrefillFact, Request, RequestAction,
    RequestConfig, RequestEnd, RequestFact, RetryLimits, Time, Verdict,
};
use baton_handoff::{Cause, FinishReason, FirstToken, HandoffKey, InstanceId, RequestId, SampledToken};

use crate::legs;

pub(crate) const P: InstanceId = InstanceId([1; 16]);
pub(crate) const D: InstanceId = InstanceId([2; 16]);
pub(crate) const T0: Time = Time::ZERO;

/// A request that asked for its first placement.
pub(crate) struct Asked {
    pub(crate) request: Request,
    pub(crate) now: Time,
}

pub(crate) fn config(num_sequences: u32, max_new_tokens: u32) -> RequestConfig {
    RequestConfig {
        request: RequestId([1; 16]),
        num_sequences,
        max_new_tokens,
        stop_tokens: vec![],
        deadline: None,
        limits: RetryLimits::default(),
    }
}

impl Asked {
    pub(crate) fn new(max_new_tokens: u32) -> Self {
        Self::several(1, max_new_tokens)
    }

    pub(crate) fn several(num_sequences: u32, max_new_tokens: u32) -> Self {
        let mut asked = Self { request: Request::new(config(num_sequences, max_new_tokens)), now: T0 };
        let place = RequestAction::Place {
            group: 0,
            avoid: vec![],
            first_sequence: 0,
            num_sequences,
            num_forced: 0,
            keep_prefill: None,
        };
        assert_eq!(asked.feed(RequestFact::Start), [place]);
        asked
    }

    pub(crate) fn feed(&mut self, fact: RequestFact) -> Vec<RequestAction> {
        self.request.handle(self.now, fact);
        std::iter::from_fn(|| self.request.poll()).collect()
    }

    pub(crate) fn prefill(&mut self, attempt: u32, event: PrefillFact) -> Vec<RequestAction> {
        self.feed(RequestFact::Prefill { group: 0, attempt, event })
    }

    pub(crate) fn decode(&mut self, attempt: u32, event: DecodeFact) -> Vec<RequestAction> {
        self.feed(RequestFact::Decode { group: 0, attempt, event })
    }

    pub(crate) fn placed(&mut self) -> Vec<RequestAction> {
        self.placed_group(0)
    }

    pub(crate) fn placed_group(&mut self, group: u32) -> Vec<RequestAction> {
        self.feed(RequestFact::Placed { group, placed: Placed { decode: D, prefill: Some(P) } })
    }

    /// Waits out the backoff, places again.
    pub(crate) fn again(&mut self) -> Vec<RequestAction> {
        self.now = self.request.deadline().expect("backs off");
        assert!(matches!(self.feed(RequestFact::Tick)[..], [RequestAction::Place { .. }]));
        self.placed()
    }
}

pub(crate) fn legs(attempt: u32, decode: bool, num_forced: u32, max_new_tokens: u32) -> RequestAction {
    let key = HandoffKey { request: RequestId([1; 16]), group: 0, attempt };
    let preempted = false;
    let (first_sequence, num_sequences) = (0, 1);
    RequestAction::OpenLegs(Legs {
        key,
        local: false,
        decode,
        first_sequence,
        num_sequences,
        num_forced,
        max_new_tokens,
        preempted,
    })
}

fn token(index: u32) -> SampledToken {
    legs::token(0, index)
}

/// First tokens of sequences that count from 0.
pub(crate) fn first<const N: usize>(finish: [Option<FinishReason>; N]) -> PrefillFact {
    let first = |(sequence, finish)| FirstToken { sequence, token: legs::token(sequence, 0), finish };
    PrefillFact::FirstTokens((0..).zip(finish).map(first).collect())
}

pub(crate) fn says(sequence: u32, index: u32) -> DecodeFact {
    DecodeFact::Token { sequence, token: legs::token(sequence, index) }
}

pub(crate) fn deliver(sequence: u32, index: u32) -> RequestAction {
    RequestAction::Deliver { sequence, token: legs::token(sequence, index) }
}

pub(crate) fn finished(sequence: u32, reason: FinishReason) -> RequestAction {
    RequestAction::Finished { sequence, reason }
}

pub(crate) fn close(group: u32, attempt: u32) -> RequestAction {
    RequestAction::CloseLegs { group, attempt }
}

pub(crate) const END: RequestAction = RequestAction::End(RequestEnd::Finished);

#[test]
fn one_token_opens_no_decode_leg() {
    let mut asked = Asked::new(1);
    assert_eq!(asked.placed(), [legs(0, false, 0, 1)]);
    let actions = asked.prefill(0, first([Some(FinishReason::Length)]));
    assert_eq!(actions, [deliver(0, 0), finished(0, FinishReason::Length), close(0, 0), END]);
}

#[test]
fn tokens_of_the_decode_leg_wait_for_the_first_one() {
    let mut asked = Asked::new(5);
    asked.placed();
    assert_eq!(asked.decode(0, DecodeFact::Started), []);
    assert_eq!(asked.decode(0, says(0, 1)), []);
    let actions = asked.prefill(0, first([None]));
    assert_eq!(actions, [deliver(0, 0), deliver(0, 1)]);
    // The handoff is over: what becomes of the prefill worker does not matter.
    assert_eq!(asked.prefill(0, PrefillFact::Lost), []);
    assert_eq!(asked.decode(0, says(0, 2)), [deliver(0, 2)]);
}

#[test]
fn a_stop_string_holds_back_the_tokens_that_ran_ahead() {
    let mut asked = Asked::new(3);
    asked.placed();
    for event in [DecodeFact::Started, says(0, 1), says(0, 2)] {
        asked.decode(0, event);
    }
    asked.decode(0, DecodeFact::Finished { sequence: 0, reason: FinishReason::Length });
    asked.request.handle(T0, RequestFact::Prefill { group: 0, attempt: 0, event: first([None]) });
    assert_eq!(asked.request.poll(), Some(deliver(0, 0)));
    // The stop string ends with the first token, while two more and the end wait to be told.
    let actions = asked.feed(RequestFact::StopMatched { sequence: 0 });
    assert_eq!(actions, [finished(0, FinishReason::Stop), close(0, 0), END]);
    assert_eq!(asked.request.num_delivered(), 1);
}

#[test]
fn a_lost_decode_worker_is_resumed_behind_what_was_delivered() {
    let mut asked = Asked::new(5);
    asked.placed();
    asked.prefill(0, first([None]));
    asked.decode(0, DecodeFact::Started);
    asked.decode(0, says(0, 1));
    assert_eq!(asked.decode(0, DecodeFact::Lost), [close(0, 0)]);
    assert_eq!(asked.again(), [legs(1, true, 2, 3)]);
    assert_eq!(asked.decode(0, says(0, 2)), [], "attempt 0 is fenced");
    let first = FirstToken { sequence: 0, token: token(2), finish: None };
    assert_eq!(asked.prefill(1, PrefillFact::FirstTokens(vec![first])), [deliver(0, 2)]);
}

#[test]
fn a_request_that_took_two_workers_down_is_given_up() {
    let mut asked = Asked::new(5);
    asked.placed();
    asked.prefill(0, PrefillFact::Lost);
    asked.again();
    let end = RequestAction::End(RequestEnd::Failed { cause: Cause::PeerLost, retry_after_ms: None });
    assert_eq!(asked.decode(1, DecodeFact::Lost), [close(0, 1), end]);
    // A worker that never had the request can't have fallen over because of it.
    let mut asked = Asked::new(5);
    asked.placed();
    for attempt in 0..3 {
        asked.prefill(attempt, PrefillFact::Unreachable);
        assert_eq!(asked.again(), [legs(attempt + 1, true, 0, 5)]);
    }
    assert!(matches!(asked.prefill(3, PrefillFact::Unreachable)[..], [_, RequestAction::End(_)]));
}

#[test]
fn busy_is_placed_again_twice_and_then_shed() {
    let mut asked = Asked::new(5);
    asked.placed();
    for attempt in 0..2 {
        asked.decode(attempt, DecodeFact::Failed(Cause::Busy));
        asked.again();
    }
    let end = RequestAction::End(RequestEnd::Failed { cause: Cause::Busy, retry_after_ms: Some(1_000) });
    assert_eq!(asked.decode(2, DecodeFact::Failed(Cause::Busy)), [close(0, 2), end]);
}

#[test]
fn a_stream_lost_after_the_last_token_is_complete() {
    let mut asked = Asked::new(2);
    asked.placed();
    asked.prefill(0, first([None]));
    asked.decode(0, DecodeFact::Started);
    asked.decode(0, says(0, 1));
    let actions = asked.decode(0, DecodeFact::Lost);
    assert_eq!(actions, [finished(0, FinishReason::Length), close(0, 0), END]);
}

#[test]
fn a_first_attempt_without_workers_fails_at_once_and_a_resume_waits() {
    let mut asked = Asked::new(5);
    let error = PlaceError::NoWorker;
    let end = RequestAction::End(RequestEnd::Unplaced { error, retry_after_ms: Some(1_000) });
    assert_eq!(asked.feed(RequestFact::NotPlaced { group: 0, error }), [end]);
    let mut asked = Asked::new(5);
    asked.placed();
    asked.decode(0, DecodeFact::Lost);
    asked.now = asked.request.deadline().expect("backs off");
    asked.feed(RequestFact::Tick);
    assert_eq!(asked.feed(RequestFact::NotPlaced { group: 0, error }), []);
    assert_eq!(asked.again(), [legs(1, true, 0, 5)]);
}

#[test]
fn a_deadline_ends_whatever_is_going_on() {
    let config = RequestConfig { deadline: Some(Duration::from_secs(1)), ..config(1, 5) };
    let mut asked = Asked { request: Request::new(config), now: T0 };
    asked.feed(RequestFact::Start);
    asked.placed();
    assert_eq!(asked.request.deadline(), Some(Duration::from_secs(1)));
    asked.now = Duration::from_secs(1);
    let end = RequestAction::End(RequestEnd::Failed { cause: Cause::Deadline, retry_after_ms: None });
    assert_eq!(asked.feed(RequestFact::Tick), [close(0, 0), end]);
}

#[test]
fn every_cause_has_a_verdict_and_the_final_ones_end_the_request() {
    for cause in Cause::ALL {
        let mut asked = Asked::new(5);
        asked.placed();
        let actions = asked.prefill(0, PrefillFact::Failed(cause));
        match Verdict::of(cause) {
            Verdict::Ignore => assert_eq!(actions, []),
            Verdict::Resume | Verdict::MoveOn => {
                assert!(matches!(actions[..], [_, RequestAction::Place { .. }]));
            }
            Verdict::GiveUp => assert!(asked.request.is_ended()),
            Verdict::Retry | Verdict::PlaceAgain | Verdict::WorkerLost => {
                assert_eq!(actions, [close(0, 0)]);
            }
        }
    }
}

#[test]
fn backoff_doubles_up_to_its_bound() {
    let limits = RetryLimits::default();
    assert_eq!(limits.backoff(0), limits.first_backoff);
    assert_eq!(limits.backoff(2), limits.first_backoff * 4);
    assert_eq!(limits.backoff(1_000), limits.max_backoff);
}

#[test]
fn the_door_lets_in_queues_sheds_and_keeps_order() {
    let mut door = Door::new(DoorLimits { max_concurrent: 1, max_queue: 1 });
    assert_eq!(door.enter(), Ok(Entry::Running));
    assert_eq!(door.enter(), Ok(Entry::Queued));
    assert!(door.enter().is_err());
    assert!(door.leave(Duration::from_secs(90)), "the queued one runs");
    assert_eq!(door.enter(), Ok(Entry::Queued), "a newcomer does not overtake");
    assert!(door.enter().unwrap_err().retry_after_ms > 10_000);
    assert!(!door.abandon());
    assert!(!door.leave(Duration::ZERO));
    assert_eq!((door.num_running(), door.num_queued()), (0, 0));
}
