//! Several sequences of one request, by name: sharing legs, parting, coming back.

use baton_dispatch::{
    DecodeFact, Legs, Placed, PrefillFact, Request, RequestAction, RequestConfig, RequestEnd, RequestFact,
    RetryLimits,
};
use baton_handoff::{Cause, FinishReason, HandoffKey, InstanceId, RequestId};

use crate::edges::{Asked, D, END, P, T0, close, config, deliver, finished, first, says};

/// A request of three sequences whose first tokens were delivered.
fn running() -> Asked {
    let mut asked = Asked::several(3, 5);
    asked.placed_group(0);
    let actions = asked.prefill(0, first([None; 3]));
    assert_eq!(actions, [deliver(0, 0), deliver(1, 0), deliver(2, 0)]);
    asked.decode(0, DecodeFact::Started);
    asked
}

fn place(sequence: u32, avoid: Vec<InstanceId>, num_forced: u32) -> RequestAction {
    RequestAction::Place {
        group: sequence + 1,
        avoid,
        first_sequence: sequence,
        num_sequences: 1,
        num_forced,
        keep_prefill: None,
    }
}

fn of_one(sequence: u32, attempt: u32, num_forced: u32, preempted: bool) -> RequestAction {
    let key = HandoffKey { request: RequestId([1; 16]), group: sequence + 1, attempt };
    let (local, decode, first_sequence, num_sequences) = (false, true, sequence, 1);
    let max_new_tokens = 5 - num_forced;
    RequestAction::OpenLegs(Legs {
        key,
        local,
        decode,
        first_sequence,
        num_sequences,
        num_forced,
        max_new_tokens,
        preempted,
    })
}

fn decode(group: u32, attempt: u32, event: DecodeFact) -> RequestFact {
    RequestFact::Decode { group, attempt, event }
}

#[test]
fn sequences_share_their_legs_and_finish_one_by_one() {
    let mut asked = running();
    assert_eq!(asked.decode(0, says(2, 1)), [deliver(2, 1)]);
    assert_eq!(asked.decode(0, says(0, 1)), [deliver(0, 1)]);
    let end = |sequence| DecodeFact::Finished { sequence, reason: FinishReason::Stop };
    assert_eq!(asked.decode(0, end(2)), [finished(2, FinishReason::Stop)]);
    assert_eq!(asked.decode(0, says(2, 2)), [], "it is complete");
    assert_eq!(asked.decode(0, end(1)), [finished(1, FinishReason::Stop)]);
    assert_eq!(asked.decode(0, end(0)), [finished(0, FinishReason::Stop), close(0, 0), END]);
}

#[test]
fn a_first_token_ends_its_sequence_and_the_others_go_on() {
    let mut asked = Asked::several(2, 5);
    asked.placed_group(0);
    let stop = Some(FinishReason::Stop);
    let actions = asked.prefill(0, first([stop, None]));
    assert_eq!(actions, [deliver(0, 0), finished(0, FinishReason::Stop), deliver(1, 0)]);
    assert_eq!(asked.decode(0, DecodeFact::Started), []);
    assert_eq!(asked.decode(0, says(1, 1)), [deliver(1, 1)]);
    let mut asked = Asked::several(2, 5);
    asked.placed_group(0);
    let actions = asked.prefill(0, first([stop, stop]));
    assert_eq!(actions[3..], [finished(1, FinishReason::Stop), close(0, 0), END]);
}

#[test]
fn before_a_delivery_the_whole_group_is_tried_again() {
    let mut asked = Asked::several(3, 5);
    asked.placed_group(0);
    // The decode worker ran ahead; nothing reached the client.
    asked.decode(0, DecodeFact::Started);
    asked.decode(0, says(1, 1));
    asked.decode(0, DecodeFact::Finished { sequence: 2, reason: FinishReason::Stop });
    assert_eq!(asked.decode(0, DecodeFact::Lost), [close(0, 0)]);
    asked.now = asked.request.deadline().expect("backs off");
    let again = RequestAction::Place {
        group: 0,
        avoid: vec![D],
        first_sequence: 0,
        num_sequences: 3,
        num_forced: 0,
        keep_prefill: None,
    };
    assert_eq!(asked.feed(RequestFact::Tick), [again]);
    assert!(matches!(asked.placed_group(0)[..], [RequestAction::OpenLegs(legs)] if legs.key.attempt == 1));
}

#[test]
fn after_a_delivery_each_unfinished_sequence_resumes_on_its_own() {
    let mut asked = running();
    asked.decode(0, says(2, 1));
    asked.decode(0, DecodeFact::Finished { sequence: 1, reason: FinishReason::Stop });
    assert_eq!(asked.decode(0, DecodeFact::Lost), [close(0, 0)]);
    asked.now = asked.request.deadline().expect("backs off");
    assert_eq!(asked.feed(RequestFact::Tick), [place(0, vec![D], 1), place(2, vec![D], 2)]);
    assert_eq!(asked.placed_group(1), [of_one(0, 0, 1, false)]);
    assert_eq!(asked.placed_group(3), [of_one(2, 0, 2, false)]);
    assert_eq!(asked.feed(RequestFact::Placed { group: 0, placed: Placed { decode: D, prefill: None } }), []);
}

#[test]
fn one_lost_worker_is_one_retry_and_the_same_loss_later_another() {
    let mut asked = running();
    asked.decode(0, DecodeFact::Lost);
    asked.now = asked.request.deadline().expect("backs off");
    asked.feed(RequestFact::Tick);
    for group in 1..=3 {
        asked.placed_group(group);
    }
    assert_eq!(asked.request.num_retries(), 1);
    // All three run on one prefill worker, which lets go.
    for group in 1..=3 {
        let event = PrefillFact::Failed(Cause::Expired);
        let actions = asked.feed(RequestFact::Prefill { group, attempt: 0, event });
        assert_eq!(actions, [close(group, 0)]);
    }
    assert_eq!(asked.request.num_retries(), 2);
    // Opened there after that, so it is news when the worker says so again; and again.
    for attempt in 1..=2 {
        asked.now = asked.request.deadline().expect("backs off");
        asked.feed(RequestFact::Tick);
        for group in 1..=3 {
            asked.placed_group(group);
        }
        let event = PrefillFact::Failed(Cause::Expired);
        asked.feed(RequestFact::Prefill { group: 2, attempt, event: event.clone() });
        assert_eq!((asked.request.num_retries(), asked.request.is_ended()), (3, attempt == 2));
        for group in [1, 3] {
            asked.feed(RequestFact::Prefill { group, attempt, event: event.clone() });
        }
    }
}

#[test]
fn a_worker_that_drains_is_left_at_once_and_costs_nothing() {
    let mut asked = running();
    let actions = asked.decode(0, DecodeFact::Failed(Cause::Draining));
    let places = [0, 1, 2].map(|sequence| place(sequence, vec![D], 1));
    assert_eq!(actions[..1], [close(0, 0)]);
    assert_eq!(actions[1..], places, "no wait");
    for group in 1..=3 {
        asked.placed_group(group);
    }
    // Another one, under all three: each goes on, still for nothing.
    for group in 1..=3 {
        let event = PrefillFact::Failed(Cause::Draining);
        let actions = asked.feed(RequestFact::Prefill { group, attempt: 0, event });
        assert_eq!(actions, [close(group, 0), place(group - 1, vec![D, P], 1)]);
        asked.placed_group(group);
    }
    assert_eq!(asked.request.num_retries(), 0);
    // Chosen again though it drains, it is a failure like others; so this ends.
    for num_retries in 1..=3 {
        let event = PrefillFact::Failed(Cause::Draining);
        asked.feed(RequestFact::Prefill { group: 1, attempt: num_retries, event });
        assert_eq!(asked.request.num_retries(), num_retries);
        asked.now = asked.request.deadline().expect("backs off");
        asked.feed(RequestFact::Tick);
        asked.placed_group(1);
    }
    let event = PrefillFact::Failed(Cause::Draining);
    asked.feed(RequestFact::Prefill { group: 1, attempt: 4, event });
    assert!(asked.request.is_ended());
}

#[test]
fn a_second_lost_worker_ends_every_group() {
    let mut asked = running();
    asked.decode(0, DecodeFact::Lost);
    asked.now = asked.request.deadline().expect("backs off");
    asked.feed(RequestFact::Tick);
    for group in 1..=3 {
        asked.placed_group(group);
    }
    let actions = asked.feed(RequestFact::Prefill { group: 2, attempt: 0, event: PrefillFact::Lost });
    let end = RequestAction::End(RequestEnd::Failed { cause: Cause::PeerLost, retry_after_ms: None });
    assert_eq!(actions, [close(1, 0), close(2, 0), close(3, 0), end]);
}

#[test]
fn a_preempted_sequence_goes_on_elsewhere_at_once_and_the_others_stay() {
    let mut asked = running();
    asked.decode(0, says(1, 1));
    let actions = asked.decode(0, DecodeFact::Preempted { sequence: 1 });
    assert_eq!(actions, [place(1, vec![], 2)], "no legs are closed, nobody is blamed");
    assert_eq!(asked.placed_group(2), [of_one(1, 0, 2, true)]);
    assert_eq!(asked.decode(0, says(1, 2)), [], "group 0 speaks for it no more");
    assert_eq!(asked.decode(0, says(2, 1)), [deliver(2, 1)]);
    // Preempted again before it ran: still one that comes back.
    let gone = DecodeFact::Failed(Cause::Preempted);
    assert_eq!(asked.feed(decode(2, 0, gone)), [close(2, 0), place(1, vec![], 2)]);
    assert_eq!(asked.placed_group(2), [of_one(1, 1, 2, true)]);
    // Once it runs it is like any other.
    asked.feed(decode(2, 1, DecodeFact::Started));
    asked.feed(decode(2, 1, DecodeFact::Lost));
    asked.now = asked.request.deadline().expect("backs off");
    asked.feed(RequestFact::Tick);
    assert_eq!(asked.placed_group(2), [of_one(1, 2, 2, false)]);
}

#[test]
fn the_last_sequence_to_leave_closes_the_legs() {
    let mut asked = running();
    for sequence in 0..2 {
        assert_eq!(asked.decode(0, DecodeFact::Preempted { sequence }), [place(sequence, vec![], 1)]);
    }
    assert_eq!(asked.decode(0, DecodeFact::Preempted { sequence: 2 }), [close(0, 0), place(2, vec![], 1)]);
}

#[test]
fn a_group_that_is_preempted_while_it_receives_goes_as_a_whole() {
    // The first tokens are on their way: nothing was delivered, so the group stays one.
    let mut asked = Asked::several(3, 5);
    asked.placed_group(0);
    let again = RequestAction::Place {
        group: 0,
        avoid: vec![],
        first_sequence: 0,
        num_sequences: 3,
        num_forced: 0,
        keep_prefill: None,
    };
    let actions = asked.decode(0, DecodeFact::Preempted { sequence: 0 });
    assert_eq!(actions, [close(0, 0), again]);
    assert!(matches!(asked.placed_group(0)[..], [RequestAction::OpenLegs(legs)] if legs.preempted));
    assert_eq!(asked.decode(0, DecodeFact::Preempted { sequence: 1 }), [], "attempt 0 is fenced");
    // They were delivered: each sequence goes on by itself.
    asked.prefill(1, first([None; 3]));
    let actions = asked.prefill(1, PrefillFact::Failed(Cause::Preempted));
    let alone = |sequence| place(sequence, vec![], 1);
    assert_eq!(actions, [close(0, 1), alone(0), alone(1), alone(2)]);
    assert_eq!(asked.request.num_retries(), 0);
}

#[test]
fn a_preemption_that_overtakes_the_first_token_waits_for_it() {
    let mut asked = Asked::several(2, 5);
    asked.placed_group(0);
    asked.decode(0, DecodeFact::Started);
    asked.decode(0, says(1, 1));
    assert_eq!(asked.decode(0, DecodeFact::Preempted { sequence: 1 }), []);
    let actions = asked.prefill(0, first([None; 2]));
    assert_eq!(actions, [deliver(0, 0), deliver(1, 0), deliver(1, 1), place(1, vec![], 2)]);
}

#[test]
fn a_stop_string_stops_one_sequence_and_the_last_one_closes_the_legs() {
    let mut asked = running();
    let stop = |group, sequence| RequestAction::StopSequence { group, attempt: 0, sequence };
    let actions = asked.feed(RequestFact::StopMatched { sequence: 1 });
    assert_eq!(actions, [finished(1, FinishReason::Stop), stop(0, 1)]);
    assert_eq!(asked.feed(RequestFact::StopMatched { sequence: 1 }), [], "once");
    assert_eq!(asked.decode(0, says(1, 1)), [], "what was on its way is dropped");
    let actions = asked.feed(RequestFact::StopMatched { sequence: 0 });
    assert_eq!(actions, [finished(0, FinishReason::Stop), stop(0, 0)]);
    // The last one is between two attempts.
    asked.decode(0, DecodeFact::Preempted { sequence: 2 });
    let actions = asked.feed(RequestFact::StopMatched { sequence: 2 });
    assert_eq!(actions, [finished(2, FinishReason::Stop), END]);
    assert_eq!(asked.placed_group(3), [], "too late");
}

#[test]
fn a_stream_lost_behind_the_last_tokens_resumes_only_what_is_missing() {
    let mut asked = Asked::several(2, 2);
    asked.placed_group(0);
    asked.prefill(0, first([None; 2]));
    asked.decode(0, DecodeFact::Started);
    asked.decode(0, says(1, 1));
    let actions = asked.decode(0, DecodeFact::Lost);
    assert_eq!(actions, [finished(1, FinishReason::Length), close(0, 0)]);
    asked.now = asked.request.deadline().expect("backs off");
    assert_eq!(asked.feed(RequestFact::Tick), [place(0, vec![D], 1)]);
}

#[test]
fn one_token_of_each_needs_no_decode_leg() {
    let mut asked = Asked::several(2, 1);
    assert!(matches!(asked.placed_group(0)[..], [RequestAction::OpenLegs(legs)] if !legs.decode));
    let length = |sequence| finished(sequence, FinishReason::Length);
    let actions = asked.prefill(0, first([None; 2]));
    assert_eq!(actions, [deliver(0, 0), length(0), deliver(1, 0), length(1), close(0, 0), END]);
}

#[test]
fn what_is_not_of_the_group_is_a_protocol_violation() {
    let end = RequestAction::End(RequestEnd::Failed { cause: Cause::Protocol, retry_after_ms: None });
    let mut asked = Asked::several(2, 5);
    asked.placed_group(0);
    assert_eq!(asked.prefill(0, first([None; 3])), [close(0, 0), end.clone()]);
    let mut asked = running();
    assert_eq!(asked.decode(0, says(3, 0)), [close(0, 0), end.clone()]);
    let mut asked = running();
    assert_eq!(asked.decode(0, says(1, 2)), [close(0, 0), end], "index 1 is missing");
}

#[test]
fn tokens_that_run_ahead_are_bounded_for_each_sequence() {
    let limits = RetryLimits { max_early_tokens: 2, ..RetryLimits::default() };
    let mut asked = Asked { request: Request::new(RequestConfig { limits, ..config(2, 9) }), now: T0 };
    asked.feed(RequestFact::Start);
    asked.placed_group(0);
    asked.decode(0, DecodeFact::Started);
    for (sequence, index) in [(0, 1), (0, 2), (1, 1), (1, 2)] {
        assert_eq!(asked.decode(0, says(sequence, index)), []);
    }
    assert_eq!(asked.decode(0, says(1, 3)), [close(0, 0)]);
    asked.now = asked.request.deadline().expect("backs off");
    let place = RequestAction::Place {
        group: 0,
        avoid: vec![P],
        first_sequence: 0,
        num_sequences: 2,
        num_forced: 0,
        keep_prefill: None,
    };
    assert_eq!(asked.feed(RequestFact::Tick), [place]);
}
