//! Thousands of random schedules. `BATON_SEED` repeats one.

use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use baton_dispatch::RequestEnd;

use crate::world::{Chances, World};

const RUNS: u64 = 4_000;

/// Returns how many schedules ran.
fn each(chances: Chances, check: impl Fn(&World)) -> u64 {
    let fresh = RandomState::new().hash_one(RUNS) >> 20;
    let seeds = match std::env::var("BATON_SEED").ok().and_then(|seed| seed.parse::<u64>().ok()) {
        Some(seed) => seed..seed + 1,
        None => fresh..fresh + RUNS,
    };
    println!("seeds {seeds:?}");
    let runs = seeds.end - seeds.start;
    for seed in seeds {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut world = World::new(seed, chances);
            world.run();
            check(&world);
        }));
        if let Err(panic) = outcome {
            eprintln!("again with BATON_SEED={seed}");
            resume_unwind(panic);
        }
    }
    runs
}

/// What `RUNS` schedules must have reached, or they show nothing; one that is repeated by its seed need not.
fn reached(runs: u64, num: u64, more_than: u64) {
    if runs == RUNS {
        assert!(num > more_than, "only {num} of {runs} schedules");
    }
}

const EVERYTHING: Chances = Chances {
    crash: 15,
    failed: 30,
    repeat: 200,
    late: 200,
    cancel: 0,
    stop: 0,
    unplaced: 100,
    slow_place: 300,
    not_redirected: 200,
    local: 200,
    preempt: 200,
    max_crashes: 10,
    deadline: 0,
};

#[test]
fn an_undisturbed_request_is_one_attempt_and_delivers_every_sequence() {
    each(Chances { local: 200, ..Chances::default() }, |world| {
        assert_eq!(world.end, Some(RequestEnd::Finished));
        assert_eq!(world.num_opened, 1);
    });
}

#[test]
fn each_index_is_delivered_once_in_order_whatever_fails_or_repeats() {
    each(EVERYTHING, |_| {});
}

#[test]
fn one_crash_is_one_failure_however_many_groups_it_hits() {
    let several = std::cell::Cell::new(0);
    let chances =
        Chances { crash: 25, max_crashes: 1, local: 100, late: 100, preempt: 300, ..Chances::default() };
    let runs = each(chances, |world| {
        assert_eq!(world.end, Some(RequestEnd::Finished));
        assert!(u64::from(world.request.num_retries()) <= world.num_crashes);
        several.set(several.get() + u32::from(world.num_crashes == 1 && world.num_resumed > 2));
    });
    reached(runs, several.get().into(), 100);
}

#[test]
fn preemption_costs_no_budget_and_no_wait() {
    let resumed = std::cell::Cell::new(0);
    let runs =
        each(Chances { preempt: 400, local: 200, late: 100, repeat: 50, ..Chances::default() }, |world| {
            assert_eq!(world.end, Some(RequestEnd::Finished));
            assert_eq!(world.request.num_retries(), 0);
            assert!(!world.has_waited, "backs off after a preemption");
            resumed.set(resumed.get() + world.num_resumed);
        });
    reached(runs, resumed.get().into(), 1_000);
}

#[test]
fn a_cancel_a_deadline_or_stop_strings_at_any_moment_leave_nothing_open() {
    let chances = Chances { cancel: 10, stop: 40, deadline: 200, ..EVERYTHING };
    each(chances, |_| {});
}

#[test]
fn a_stop_string_ends_its_sequence_and_no_other() {
    each(Chances { stop: 60, local: 200, late: 200, preempt: 200, ..Chances::default() }, |world| {
        assert_eq!(world.end, Some(RequestEnd::Finished));
    });
}

#[test]
fn a_decode_worker_lost_while_it_receives_costs_no_second_prefill() {
    let redirected = std::cell::Cell::new(0);
    let runs =
        each(Chances { crash: 250, max_crashes: 1, repeat: 100, late: 100, ..Chances::default() }, |world| {
            assert_eq!(world.end, Some(RequestEnd::Finished));
            redirected.set(redirected.get() + world.num_redirected);
        });
    reached(runs, redirected.get().into(), 50);
}
