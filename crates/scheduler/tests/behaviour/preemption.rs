//! Full pools: who gives up blocks, for whom, and what becomes of it.

use std::sync::{Arc, Mutex};

use baton_kv::BlockTable;
use baton_scheduler::{NewSequence, Origin, SchedulerConfig, SequenceId};

use crate::support::{Harness, Slots, config, group, sequence};

fn endless(new: NewSequence) -> NewSequence {
    NewSequence { stop_tokens: vec![], ..new }
}

/// Short outputs make the growth estimate too low for what follows.
fn optimistic(num_blocks: usize) -> Harness<Slots> {
    let config = SchedulerConfig { context: 200, max_receiving_share: 1.0, max_step_tokens: 64, ..config() };
    let mut harness = Harness::new(config, num_blocks);
    for id in 100..120 {
        harness.submit(sequence(id, Origin::Local, vec![1; 3], 1)).unwrap();
        harness.run_to_end();
    }
    harness.streams.clear();
    harness.told.clear();
    harness
}

#[test]
fn a_full_pool_preempts_the_youngest_and_the_tokens_stay_the_same() {
    for origin in [Origin::Local, Origin::Remote] {
        let mut harness = optimistic(9);
        for id in 0..3 {
            harness.submit(endless(sequence(id, origin, vec![id as u32 + 10; 6], 24))).unwrap();
            harness.deliver(0);
        }
        harness.run_to_end();
        assert!(harness.scheduler.num_preemptions() > 0, "9 blocks can't hold three sequences of 30 tokens");
        assert!(!harness.told_of("Preempted").contains(&0), "the oldest gives up nothing");
        harness.assert_all_as_expected();
    }
}

#[test]
fn what_came_by_handoff_leaves_and_what_was_computed_here_waits_here() {
    for (origin, gone) in [(Origin::Remote, true), (Origin::Local, false)] {
        let mut harness = optimistic(40);
        harness.resume = false;
        for id in 0..2 {
            harness.submit(endless(sequence(id, origin, vec![id as u32 + 10; 8], 20))).unwrap();
            harness.deliver(0);
            harness.step();
        }
        harness.fill_pool();
        while harness.told_of("Preempted").is_empty() {
            harness.step();
        }
        assert!(harness.told.contains(&format!("Preempted {{ id: SequenceId(1), gone: {gone} }}")));
        assert_eq!(harness.scheduler.counts().waiting, usize::from(!gone));
        assert_eq!(harness.scheduler.counts().running, 1);
    }
}

/// Four sequences of one prompt whose pool is just what they need together, and one that holds half of what is left.
#[test]
fn four_siblings_in_a_full_pool_all_end() {
    for origin in [Origin::Local, Origin::Remote] {
        // Feasible: 2 full blocks of the prompt, and 4 times (8 - 2).
        let mut harness = optimistic(26);
        harness.submit(endless(group(0, 4, origin, (10..20).collect(), 22))).unwrap();
        harness.deliver(0);
        harness.submit(endless(sequence(10, Origin::Local, vec![1; 20], 40))).unwrap();
        harness.run_to_end();
        harness.assert_all_as_expected();
        // And alone in a pool in which only two of them can be at a time.
        let mut harness = optimistic(26);
        harness.submit(endless(group(0, 4, origin, (10..20).collect(), 22))).unwrap();
        harness.deliver(0);
        let pool = harness.scheduler.pool().clone();
        harness.ballast = pool.allocate(13).unwrap();
        for _ in 0..40 {
            harness.step();
        }
        assert!(harness.scheduler.num_preemptions() > 0);
        assert!(!harness.told_of("Preempted").contains(&0));
        harness.ballast.clear();
        harness.run_to_end();
        harness.assert_all_as_expected();
    }
}

#[test]
fn who_would_free_nothing_is_passed_over_while_another_frees_a_block() {
    let mut harness = optimistic(40);
    // By age: one that needs a block next, one with blocks of its own, two that share all of theirs.
    harness.submit(endless(sequence(1, Origin::Local, vec![1; 4], 20))).unwrap();
    harness.submit(endless(sequence(2, Origin::Local, vec![2; 6], 20))).unwrap();
    harness.submit(endless(group(3, 2, Origin::Local, vec![3; 8], 20))).unwrap();
    harness.step();
    assert_eq!(harness.scheduler.counts().running, 4);
    harness.fill_pool();
    harness.step();
    // The first takes one of the second's two blocks, the third the other; the fourth steps aside.
    assert_eq!(harness.told_of("Preempted"), [2, 4]);
    harness.ballast.clear();
    harness.run_to_end();
    harness.assert_all_as_expected();
}

#[test]
fn when_nobody_frees_a_block_alone_those_behind_go_until_one_is_free() {
    let mut harness = optimistic(40);
    harness.submit(endless(sequence(1, Origin::Local, vec![1; 4], 20))).unwrap();
    harness.submit(endless(group(2, 3, Origin::Local, vec![3; 8], 20))).unwrap();
    harness.step();
    harness.fill_pool();
    harness.step();
    assert_eq!(harness.told_of("Preempted"), [4, 3, 2], "all three share two blocks");
    harness.ballast.clear();
    harness.run_to_end();
    harness.assert_all_as_expected();
}

/// One that runs and needs a block next, and two younger ones that receive.
fn one_running_two_receiving() -> Harness<Slots> {
    let mut harness = optimistic(40);
    harness.resume = false;
    harness.submit(endless(sequence(1, Origin::Local, vec![1; 4], 20))).unwrap();
    harness.step();
    for id in 2..4 {
        harness.submit(endless(sequence(id, Origin::Remote, vec![id as u32; 8], 20))).unwrap();
    }
    assert_eq!(harness.scheduler.counts().receiving, 2);
    harness.fill_pool();
    harness
}

#[test]
fn a_receiving_victim_leaves_and_its_blocks_come_when_its_writer_ends() {
    let mut harness = one_running_two_receiving();
    assert!(!harness.step(), "the block is not there yet");
    assert_eq!(harness.told_of("Preempted"), [3], "the youngest, and nobody else for the same block");
    assert_eq!(harness.scheduler.pool().counts().draining, 2);
    harness.stale.clear();
    assert!(harness.step());
    assert_eq!(harness.told_of("Preempted"), [3]);
    // A writer that does not end is not waited for.
    let mut harness = one_running_two_receiving();
    assert!(!harness.step() && !harness.step());
    assert_eq!(harness.told_of("Preempted"), [3, 2]);
}

/// Leases end on other threads, so also in the middle of a plan; here on the hook that the pool calls as a victim's blocks return.
#[test]
fn a_lease_that_ends_while_a_victim_gives_way_upsets_nothing() {
    let mut harness = optimistic(40);
    for id in 0..2 {
        harness.submit(endless(sequence(id, Origin::Local, vec![id as u32 + 1; 4], 20))).unwrap();
    }
    harness.step();
    let pool = harness.scheduler.pool().clone();
    let mut table = BlockTable::new();
    table.extend(pool.allocate(3).unwrap());
    let pinned = Arc::new(Mutex::new(table.write_lease(0)));
    drop(table);
    harness.fill_pool();
    assert_eq!((pool.counts().free, pool.counts().draining), (0, 3));
    let taken = Arc::clone(&pinned);
    pool.on_free(Box::new(move || {
        // The lock is let go of before the lease is, which calls this again.
        let lease = taken.lock().unwrap().take();
        drop(lease);
    }));
    harness.step();
    assert_eq!(harness.told_of("Preempted"), [1]);
    assert!(pinned.lock().unwrap().is_none() && pool.counts().draining == 0);
    harness.ballast.clear();
    harness.run_to_end();
    harness.assert_all_as_expected();
}

#[test]
fn a_group_that_receives_leaves_by_all_its_names() {
    let mut harness = optimistic(40);
    harness.submit(endless(sequence(1, Origin::Local, vec![1; 4], 20))).unwrap();
    harness.step();
    harness.submit(endless(group(2, 3, Origin::Remote, vec![3; 8], 20))).unwrap();
    harness.fill_pool();
    harness.resume = false;
    harness.step();
    assert_eq!(harness.told_of("Preempted"), [2, 3, 4]);
    assert!(!harness.scheduler.cancel(SequenceId(3), harness.now));
    harness.ballast.clear();
    harness.resume = true;
    harness.run_to_end();
    harness.assert_all_as_expected();
}

/// Two that run, then one that came back from preemption, in a full pool where the `needy`th needs a block.
fn came_back(needy: u64) -> Vec<u64> {
    let mut harness = optimistic(40);
    for id in 0..3 {
        let prompt = vec![id as u32 + 1; if id == needy { 4 } else { 5 }];
        let new = NewSequence { preempted: id == 2, ..endless(sequence(id, Origin::Local, prompt, 20)) };
        harness.submit(new).unwrap();
    }
    harness.step();
    assert_eq!(harness.scheduler.counts().running, 3);
    harness.fill_pool();
    harness.step();
    harness.told_of("Preempted")
}

#[test]
fn who_came_back_keeps_its_blocks_for_64_tokens_unless_the_oldest_needs_them() {
    assert_eq!(came_back(0), [2], "the oldest takes from anybody");
    assert_eq!(came_back(1), [1], "another finds nobody behind it and steps aside");
    assert_eq!(came_back(2), [], "and it waits for a block where it is");
}

#[test]
fn who_came_back_is_a_victim_again_after_64_tokens() {
    // All make a token a step. When each has made that many, the second needs a block and the others do not.
    for (num_tokens, victim) in [(63, 1), (64, 2)] {
        let mut harness = optimistic(90);
        let len = 4 + (65 - num_tokens) % 4;
        for id in 0..3 {
            let prompt = vec![id as u32 + 1; if id == 1 { len } else { len + 1 }];
            let new = NewSequence { preempted: id == 2, ..endless(sequence(id, Origin::Local, prompt, 90)) };
            harness.submit(new).unwrap();
        }
        for _ in 0..num_tokens {
            harness.step();
        }
        assert!(harness.streams.values().all(|stream| stream.produced.len() == num_tokens));
        harness.fill_pool();
        harness.step();
        assert_eq!(harness.told_of("Preempted"), [victim], "after {num_tokens} tokens");
    }
}

#[test]
fn who_is_computed_again_here_leaves_a_tenth_of_the_pool_free_too() {
    for (free, admitted) in [(6, true), (5, false)] {
        let mut harness = optimistic(40);
        for (id, len) in [(0, 4), (1, 5)] {
            let new = endless(sequence(id, Origin::Local, vec![id as u32 + 1; len], 20));
            harness.submit(NewSequence { cache: false, ..new }).unwrap();
        }
        harness.step();
        harness.fill_pool();
        harness.step();
        assert_eq!(harness.told_of("Preempted"), [1]);
        // It needs two blocks; the other one's growth and next block are two, the watermark is four.
        while harness.scheduler.pool().counts().free < free {
            harness.ballast.pop();
        }
        harness.step();
        assert_eq!(harness.scheduler.counts().waiting, usize::from(!admitted), "{free} free");
    }
}
