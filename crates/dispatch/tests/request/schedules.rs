//! Thousands of random schedules. `BATON_SEED` repeats one.

use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use baton_dispatch::RequestEnd;

use crate::legs::{Chances, World};

const RUNS: u64 = 4_000;

fn each(chances: Chances, check: impl Fn(&World)) {
    let fresh = RandomState::new().hash_one(RUNS) >> 20;
    let seeds = match std::env::var("BATON_SEED").ok().and_then(|seed| seed.parse::<u64>().ok()) {
        Some(seed) => seed..seed + 1,
        None => fresh..fresh + RUNS,
    };
    println!("seeds {seeds:?}");
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
}

#[test]
fn an_undisturbed_request_is_one_attempt_and_finishes() {
    each(Chances { local: 200, ..Chances::default() }, |world| {
        assert!(matches!(world.end, Some(RequestEnd::Finished(_))));
        assert_eq!(world.num_opened, 1);
    });
}

#[test]
fn each_index_is_delivered_once_in_order_whatever_fails_or_repeats() {
    let chances = Chances {
        lost: 15,
        failed: 30,
        repeat: 200,
        late: 200,
        unplaced: 100,
        local: 200,
        ..Chances::default()
    };
    each(chances, |_| {});
}

#[test]
fn one_failed_attempt_is_resumed_to_the_same_tokens() {
    let resumed = std::cell::Cell::new(0);
    each(Chances { lost: 12, local: 100, late: 100, ..Chances::default() }, |world| {
        if world.num_opened == 2 && matches!(world.end, Some(RequestEnd::Finished(_))) {
            resumed.set(resumed.get() + 1);
        }
    });
    assert!(std::env::var("BATON_SEED").is_ok() || resumed.get() > 100, "only {} resumed", resumed.get());
}

#[test]
fn a_cancel_or_a_stop_string_at_any_moment_is_the_end() {
    let chances = Chances { cancel: 30, stop: 20, failed: 30, late: 200, repeat: 50, ..Chances::default() };
    each(chances, |_| {});
}
