//! The registry: parked offers, duplicates, tombstones, superseded attempts.

use std::time::Duration;

use baton_handoff::{
    Cause, HandoffKey, InstanceId, Match, Offer, Registry, RegistryLimits, RequestId, Time, Timers,
};

const HERE: InstanceId = InstanceId([2; 16]);
const T0: Time = Time::ZERO;

fn key(request: u8, attempt: u32) -> HandoffKey {
    HandoffKey { request: RequestId([request; 16]), group: 0, attempt }
}

fn offer(key: HandoffKey) -> Offer {
    Offer { key, source: InstanceId([1; 16]), destination: HERE, prompt_tokens: 5 }
}

fn registry() -> Registry {
    Registry::new(HERE, RegistryLimits { parked_offers: 2, tombstones: 3 }, &Timers::default())
}

#[test]
fn an_offer_finds_its_leg_whichever_comes_first() {
    let mut registry = registry();
    assert_eq!(registry.open(key(1, 0), T0), Ok(None));
    assert_eq!(registry.offer(offer(key(1, 0)), T0), Match::Leg);
    assert_eq!(registry.offer(offer(key(1, 0)), T0), Match::Gone(Cause::Duplicate));
    assert_eq!(registry.offer(offer(key(2, 0)), T0), Match::Parked);
    assert_eq!(registry.offer(offer(key(2, 0)), T0), Match::Gone(Cause::Duplicate));
    assert_eq!(registry.open(key(2, 0), T0), Ok(Some(offer(key(2, 0)))));
    assert_eq!((registry.num_parked(), registry.num_legs()), (0, 2));
}

#[test]
fn parking_is_bounded_and_brief() {
    let mut registry = registry();
    let late = Timers::default().park;
    registry.offer(offer(key(1, 0)), T0);
    registry.offer(offer(key(2, 0)), Duration::from_millis(1));
    assert_eq!(registry.offer(offer(key(3, 0)), T0), Match::Gone(Cause::Busy));
    assert_eq!(registry.deadline(), Some(late));
    assert_eq!(registry.expired(late), [offer(key(1, 0))]);
    registry.withdraw(key(2, 0));
    assert_eq!((registry.num_parked(), registry.deadline()), (0, None));
}

#[test]
fn a_live_or_finished_key_is_refused_and_the_cause_is_remembered() {
    let mut registry = registry();
    let timers = Timers::default();
    assert_eq!(registry.open(key(1, 0), T0), Ok(None));
    assert_eq!(registry.open(key(1, 0), T0), Err(Cause::Duplicate));
    registry.finish(key(1, 0), Cause::Corrupt, T0);
    assert_eq!(registry.open(key(1, 0), T0), Err(Cause::Duplicate));
    let before = timers.values().iter().sum::<Duration>();
    assert_eq!(registry.offer(offer(key(1, 0)), before), Match::Gone(Cause::Corrupt));
    assert_eq!(registry.open(key(1, 0), timers.tombstone()), Ok(None));
}

#[test]
fn an_earlier_attempt_is_refused_once_a_later_one_is_known() {
    let mut registry = registry();
    assert_eq!(registry.open(key(1, 0), T0), Ok(None));
    assert_eq!(registry.open(key(1, 2), T0), Ok(None));
    assert_eq!(registry.open(key(1, 1), T0), Err(Cause::Cancelled));
    assert_eq!(registry.offer(offer(key(1, 1)), T0), Match::Gone(Cause::Cancelled));
}

#[test]
fn tombstones_are_bounded_and_another_instance_is_told() {
    let mut registry = registry();
    for request in 0..10 {
        assert_eq!(registry.open(key(request, 0), T0), Ok(None));
        registry.finish(key(request, 0), Cause::Cancelled, T0);
    }
    assert_eq!((registry.num_tombstones(), registry.num_legs()), (3, 0));
    let elsewhere = Offer { destination: InstanceId([9; 16]), ..offer(key(20, 0)) };
    assert_eq!(registry.offer(elsewhere, T0), Match::Gone(Cause::WrongInstance));
}
