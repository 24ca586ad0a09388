//! The circuit breaker: when it opens, for how long, and how it closes.

use std::time::Duration;

use baton_dispatch::{Breaker, BreakerLimits, Time};
use proptest::prelude::*;

const fn s(seconds: u64) -> Time {
    Duration::from_secs(seconds)
}

fn breaker() -> Breaker {
    Breaker::new(BreakerLimits { max_failures: 3, window: s(30), first_backoff: s(1), max_backoff: s(10) })
}

/// Opened by three failures at this time.
fn opened(at: Time) -> Breaker {
    let mut breaker = breaker();
    for _ in 0..3 {
        assert!(!breaker.is_open(at));
        breaker.failed(at);
    }
    breaker
}

#[test]
fn it_opens_on_failures_within_the_window_only() {
    let mut breaker = breaker();
    for at in [0, 10, 30, 45, 61] {
        breaker.failed(s(at));
        assert!(!breaker.is_open(s(at)), "two in 30 s, at {at}");
    }
    breaker.failed(s(70));
    assert!(breaker.is_open(s(70)));
}

#[test]
fn after_the_backoff_one_request_tries_and_closes_it() {
    let mut breaker = opened(s(5));
    assert!(breaker.is_open(s(5)));
    assert!(!breaker.is_open(s(6)));
    breaker.begin(s(6));
    assert!(breaker.is_open(s(6)), "one trial at a time");
    breaker.succeeded();
    assert!(!breaker.is_open(s(6)));
    // It starts anew: three more are needed.
    breaker.failed(s(7));
    breaker.failed(s(7));
    assert!(!breaker.is_open(s(7)));
}

#[test]
fn each_failed_trial_doubles_the_backoff_up_to_its_bound() {
    let mut breaker = opened(s(0));
    let mut now = s(1);
    for seconds in [2, 4, 8, 10, 10] {
        breaker.begin(now);
        breaker.failed(now);
        assert!(breaker.is_open(now + s(seconds) - Duration::from_millis(1)));
        now += s(seconds);
        assert!(!breaker.is_open(now));
    }
    breaker.begin(now);
    breaker.succeeded();
    for _ in 0..3 {
        breaker.failed(now);
    }
    assert!(!breaker.is_open(now + s(1)), "after a success it begins with the first backoff");
}

#[test]
fn a_trial_that_says_nothing_is_followed_by_another() {
    let mut breaker = opened(s(0));
    breaker.begin(s(1));
    assert!(breaker.is_open(s(1)));
    assert!(!breaker.is_open(s(2)));
    breaker.begin(s(2));
    assert!(breaker.is_open(s(2)));
}

#[test]
fn what_breaks_after_it_opened_is_the_same_breakdown() {
    let mut breaker = opened(s(0));
    for _ in 0..20 {
        breaker.failed(Duration::from_millis(500));
    }
    breaker.succeeded();
    assert!(breaker.is_open(Duration::from_millis(999)));
    assert!(!breaker.is_open(s(1)));
}

proptest! {
    #[test]
    fn with_nothing_more_happening_it_lets_one_through_within_its_bound(
        events in prop::collection::vec((0..4_u8, 0..5_000_u64), 0..200),
    ) {
        let mut breaker = breaker();
        let mut now = Time::ZERO;
        for (event, after_ms) in events {
            now += Duration::from_millis(after_ms);
            match event {
                0 => breaker.succeeded(),
                1 => breaker.begin(now),
                _ => breaker.failed(now),
            }
            prop_assert!(!breaker.is_open(now + s(10)));
        }
    }
}
