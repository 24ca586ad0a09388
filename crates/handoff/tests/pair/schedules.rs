//! Thousands of random schedules. `BATON_SEED` repeats one.

use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use baton_handoff::{Cause, DestinationEnd, SourceEnd};

use crate::world::{Chances, World};

const RUNS: u64 = 4_000;

fn seeds() -> std::ops::Range<u64> {
    if let Some(seed) = std::env::var("BATON_SEED").ok().and_then(|seed| seed.parse::<u64>().ok()) {
        return seed..seed + 1;
    }
    let fresh = RandomState::new().hash_one(RUNS) >> 20;
    fresh..fresh + RUNS
}

/// Returns how many schedules ran.
fn each(chances: Chances, check: impl Fn(&World)) -> u64 {
    let seeds = seeds();
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

#[test]
fn undisturbed_handoffs_commit() {
    each(Chances::default(), |world| {
        assert_eq!(world.source_end, Some(SourceEnd::Committed));
        assert_eq!(world.destination_end, Some(DestinationEnd::Committed));
        assert_eq!(world.source.ignored() + world.destination.ignored(), 0);
    });
}

#[test]
fn one_lost_bulk_stream_and_a_few_bad_frames_are_healed() {
    let chances = Chances { corrupt: 15, break_bulk: 0, ..Chances::default() };
    each(chances, |world| match world.destination_end {
        Some(DestinationEnd::Committed) => {}
        end => assert_eq!(end, Some(DestinationEnd::Failed(Cause::Corrupt))),
    });
    let healed = std::cell::Cell::new(0_u64);
    let runs = each(Chances { break_bulk: 1000, ..Chances::default() }, |world| {
        if world.destination_end == Some(DestinationEnd::Committed) {
            healed.set(healed.get() + 1);
        }
    });
    // A quarter of the schedules break the stream a second time.
    reached(runs, healed.get(), RUNS / 2);
}

#[test]
fn a_finished_first_token_is_not_needed_at_the_destination() {
    each(Chances { finish_first: 1000, ..Chances::default() }, |world| {
        assert_eq!(world.source_end, Some(SourceEnd::NotNeeded));
        assert_eq!(world.destination_end, Some(DestinationEnd::Failed(Cause::NotNeeded)));
    });
}

#[test]
fn a_full_destination_answers_busy_and_nothing_is_computed() {
    for chances in [
        Chances { no_room: 1000, ..Chances::default() },
        Chances { never_reserve: 1000, ..Chances::default() },
    ] {
        each(chances, |world| {
            assert_eq!(world.source_end, Some(SourceEnd::Failed(Cause::Busy)));
            assert_eq!(world.destination_end, Some(DestinationEnd::Failed(Cause::Busy)));
            assert!(!world.granted);
        });
    }
}

#[test]
fn cancels_at_any_moment_end_both_sides() {
    each(Chances { cancel: 1000, reorder: 200, ..Chances::default() }, |world| {
        // The acknowledgement tells the source which of the two came first.
        if world.source_end == Some(SourceEnd::Committed) {
            assert!(world.ran);
        }
    });
}

#[test]
fn everything_at_once_ends_in_bounded_time_without_a_leak() {
    let chances = Chances {
        lose: 40,
        repeat: 80,
        reorder: 250,
        corrupt: 30,
        break_bulk: 150,
        break_control: 120,
        cancel: 150,
        no_room: 40,
        finish_first: 50,
        never_reserve: 30,
        stuck_writer: 0,
        redirect: 0,
    };
    each(chances, |_| {});
    each(Chances { stuck_writer: 300, ..chances }, |_| {});
    each(Chances { redirect: 600, ..chances }, |_| {});
}

#[test]
fn held_blocks_reach_another_destination_when_the_first_is_lost() {
    let redirected = std::cell::Cell::new(0_u64);
    let chances = Chances { break_control: 1000, redirect: 1000, ..Chances::default() };
    let runs = each(chances, |world| {
        if world.num_redirects > 0 {
            assert_eq!(world.source_end, Some(SourceEnd::Committed));
            assert_eq!(world.destination_end, Some(DestinationEnd::Committed));
            redirected.set(redirected.get() + 1);
        }
    });
    reached(runs, redirected.get(), 200);
}
