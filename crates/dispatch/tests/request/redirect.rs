//! A decode worker fails while it receives, and the prefill worker has all of it.

use baton_dispatch::{
    DecodeFact, Legs, PlaceError, Placed, PrefillFact, RequestAction, RequestFact, RetryLimits,
};
use baton_handoff::{Cause, HandoffKey, InstanceId, RequestId};

use crate::edges::{Asked, D, P, close, deliver, first, legs, says};

const D2: InstanceId = InstanceId([3; 16]);

/// The first tokens are told, nothing runs.
fn held(num_sequences: u32) -> Asked {
    let mut asked = Asked::several(num_sequences, 5);
    asked.placed();
    match num_sequences {
        1 => asked.prefill(0, first([None])),
        _ => asked.prefill(0, first([None, None])),
    };
    asked
}

fn asks(num_sequences: u32, attempt: u32, avoid: &[InstanceId]) -> [RequestAction; 2] {
    let place = RequestAction::Place {
        group: 0,
        avoid: avoid.to_vec(),
        first_sequence: 0,
        num_sequences,
        num_forced: 0,
        keep_prefill: Some(P),
    };
    [RequestAction::CloseDecode { group: 0, attempt }, place]
}

fn on(decode: InstanceId) -> RequestFact {
    RequestFact::Placed { group: 0, placed: Placed { decode, prefill: Some(P) } }
}

fn redirect(attempt: u32, num_sequences: u32) -> RequestAction {
    RequestAction::Redirect(Legs {
        key: HandoffKey { request: RequestId([1; 16]), group: 0, attempt },
        local: false,
        decode: true,
        first_sequence: 0,
        num_sequences,
        num_forced: 0,
        max_new_tokens: 5,
        preempted: false,
    })
}

#[test]
fn what_a_lost_decode_worker_was_to_get_goes_to_another_at_once() {
    let mut asked = held(1);
    assert_eq!(asked.decode(0, DecodeFact::Lost), asks(1, 0, &[D]));
    assert_eq!(asked.prefill(0, PrefillFact::HandoffFailed(Cause::PeerLost)), [], "known already");
    assert_eq!(asked.feed(on(D2)), [redirect(1, 1)]);
    assert_eq!(asked.prefill(0, PrefillFact::HandoffFailed(Cause::PeerLost)), [], "of the attempt before");
    assert_eq!(asked.decode(0, DecodeFact::Started), [], "attempt 0 is fenced");
    assert_eq!(asked.decode(1, DecodeFact::Started), []);
    assert_eq!(asked.decode(1, says(0, 1)), [deliver(0, 1)], "behind the first token");
    assert_eq!(asked.request.num_retries(), 1);
}

#[test]
fn the_prefill_worker_may_be_the_first_to_know_and_a_group_stays_whole() {
    let mut asked = held(2);
    assert_eq!(asked.prefill(0, PrefillFact::HandoffFailed(Cause::Expired)), asks(2, 0, &[D]));
    assert_eq!(asked.decode(0, DecodeFact::Lost), [], "its stream is closed");
    assert_eq!(asked.feed(on(D2)), [redirect(1, 2)]);
    asked.decode(1, DecodeFact::Started);
    assert_eq!(asked.decode(1, says(1, 1)), [deliver(1, 1)]);
}

#[test]
fn what_is_preempted_while_it_is_received_goes_elsewhere_at_no_charge() {
    let mut asked = held(1);
    assert_eq!(asked.decode(0, DecodeFact::Failed(Cause::Preempted)), asks(1, 0, &[]));
    let RequestAction::Redirect(legs) = asked.feed(on(D2))[0] else { panic!("not redirected") };
    assert!(legs.preempted);
    assert_eq!(asked.request.num_retries(), 0);
}

#[test]
fn what_runs_or_is_not_computed_is_resumed() {
    let mut asked = held(1);
    asked.decode(0, DecodeFact::Started);
    assert_eq!(asked.decode(0, DecodeFact::Lost), [close(0, 0)]);
    let mut asked = Asked::new(5);
    asked.placed();
    assert_eq!(asked.decode(0, DecodeFact::Lost), [close(0, 0)]);
    // Or when it is the prefill worker that failed.
    let mut asked = held(1);
    assert_eq!(asked.prefill(0, PrefillFact::Lost), [close(0, 0)]);
    let mut asked = held(1);
    asked.prefill(0, PrefillFact::Failed(Cause::Expired));
    assert!(matches!(asked.again()[..], [RequestAction::OpenLegs(_)]));
}

#[test]
fn a_decode_worker_that_drains_while_it_receives_costs_nothing() {
    let mut asked = held(1);
    assert_eq!(asked.decode(0, DecodeFact::Failed(Cause::Draining)), asks(1, 0, &[D]));
    assert_eq!(asked.feed(on(D2)), [redirect(1, 1)]);
    assert_eq!(asked.request.num_retries(), 0);
}

#[test]
fn two_workers_that_lost_each_other_keep_what_is_computed() {
    let mut asked = held(1);
    assert_eq!(asked.decode(0, DecodeFact::Failed(Cause::PeerLost)), asks(1, 0, &[P, D]));
    assert_eq!(
        asked.prefill(0, PrefillFact::HandoffFailed(Cause::PeerLost)),
        [],
        "told by the other side too"
    );
    assert_eq!(asked.feed(on(D2)), [redirect(1, 1)]);
    assert_eq!(asked.request.num_retries(), 1);
    // If it is the prefill worker that is gone, that is the same failure.
    let mut asked = held(1);
    asked.decode(0, DecodeFact::Failed(Cause::PeerLost));
    assert_eq!(asked.prefill(0, PrefillFact::Lost), [close(0, 0)]);
    assert_eq!(asked.request.num_retries(), 1);
    assert_eq!(asked.again(), [legs(1, true, 1, 4)]);
    // Known before, there is nothing to redirect.
    let mut asked = held(1);
    asked.prefill(0, PrefillFact::Lost);
    assert_eq!(asked.decode(0, DecodeFact::Failed(Cause::PeerLost)), []);
}

#[test]
fn what_was_stopped_before_the_redirect_is_stopped_behind_it() {
    let mut asked = held(2);
    asked.feed(RequestFact::StopMatched { sequence: 1 });
    asked.decode(0, DecodeFact::Lost);
    assert_eq!(asked.feed(on(D2)), [redirect(1, 2)]);
    let stop = RequestAction::StopSequence { group: 0, attempt: 1, sequence: 1 };
    assert_eq!(asked.decode(1, DecodeFact::Started), [stop], "known there from here on");
    // Also one that is stopped while another place is looked for.
    let mut asked = held(2);
    asked.decode(0, DecodeFact::Lost);
    asked.feed(RequestFact::StopMatched { sequence: 0 });
    asked.feed(on(D2));
    let stop = RequestAction::StopSequence { group: 0, attempt: 1, sequence: 0 };
    assert_eq!(asked.decode(1, DecodeFact::Started), [stop]);
}

#[test]
fn without_another_decode_worker_it_is_an_ordinary_resume() {
    let error = PlaceError::NoWorker;
    for answer in [RequestFact::NotPlaced { group: 0, error }, on(D)] {
        let mut asked = held(1);
        asked.decode(0, DecodeFact::Lost);
        assert_eq!(asked.feed(answer), [close(0, 0)]);
        assert_eq!(asked.request.deadline(), Some(RetryLimits::default().first_backoff));
        assert_eq!(asked.again(), [legs(1, true, 1, 4)]);
        assert_eq!(asked.request.num_retries(), 1, "charged once");
    }
}

#[test]
fn what_is_not_there_any_more_is_computed_again() {
    // Told before a place was found, or in answer to the redirect.
    for event in [PrefillFact::Failed(Cause::PeerLost), PrefillFact::Done] {
        let mut asked = held(1);
        asked.decode(0, DecodeFact::Lost);
        assert_eq!(asked.prefill(0, event), [close(0, 0)]);
        assert_eq!(asked.feed(on(D2)), [], "no longer asked for");
        assert_eq!(asked.again(), [legs(1, true, 1, 4)]);
    }
    for event in [PrefillFact::NotRedirected, PrefillFact::Failed(Cause::PeerLost)] {
        let mut asked = held(1);
        asked.decode(0, DecodeFact::Lost);
        asked.feed(on(D2));
        assert_eq!(asked.prefill(1, event), [close(0, 1)]);
        assert_eq!(asked.again(), [legs(2, true, 1, 4)]);
        assert_eq!(asked.request.num_retries(), 1);
    }
}

#[test]
fn redirects_spend_the_retry_budget() {
    let mut asked = held(1);
    for attempt in 0..3 {
        let next = InstanceId([10 + attempt as u8; 16]);
        let actions = asked.prefill(attempt, PrefillFact::HandoffFailed(Cause::Expired));
        assert!(matches!(actions[..], [RequestAction::CloseDecode { .. }, RequestAction::Place { .. }]));
        assert_eq!(asked.feed(on(next)), [redirect(attempt + 1, 1)]);
    }
    let actions = asked.prefill(3, PrefillFact::HandoffFailed(Cause::Expired));
    assert!(matches!(actions[..], [RequestAction::CloseLegs { .. }, RequestAction::End(_)]), "{actions:?}");
}

#[test]
fn a_client_that_leaves_meanwhile_frees_what_is_held() {
    let mut asked = held(1);
    asked.request.handle(asked.now, RequestFact::Decode { group: 0, attempt: 0, event: DecodeFact::Lost });
    let actions = asked.feed(RequestFact::ClientGone);
    let [RequestAction::CloseDecode { .. }, closed, RequestAction::End(_)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(closed, &close(0, 0));
}
