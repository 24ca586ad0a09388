//! The line: who is next, who may pass, and who has to leave room.

use std::time::Duration;

use baton_scheduler::{NewSequence, Origin, SchedulerConfig, SequenceId};

use crate::support::{Harness, Slots, config, group, sequence};

fn at_rank(id: u64, priority: i32, age_s: u64) -> NewSequence {
    let age = Duration::from_secs(age_s);
    NewSequence { priority, age, ..sequence(id, Origin::Local, vec![id as u32; 4], 1) }
}

#[test]
fn the_line_is_served_by_age_moved_by_priority() {
    let mut harness = Harness::new(SchedulerConfig { max_num_seqs: 1, ..config() }, 40);
    // Five seconds a class: the third is as old as the first minus one second.
    for new in [at_rank(1, 0, 0), at_rank(2, -1, 0), at_rank(3, 1, 9), at_rank(4, 0, 2), at_rank(5, 0, 2)] {
        harness.submit(new).unwrap();
    }
    harness.run_to_end();
    assert_eq!(harness.told_of("Started"), [2, 3, 4, 5, 1]);
}

#[test]
fn remote_sequences_stand_in_line_by_age_whenever_their_offer_comes() {
    let mut harness = Harness::new(SchedulerConfig { max_num_seqs: 1, ..config() }, 40);
    harness.submit(sequence(1, Origin::Local, vec![1; 4], 3)).unwrap();
    harness.step();
    for (id, age_s) in [(2, 0), (3, 5)] {
        let age = Duration::from_secs(age_s);
        harness.submit(NewSequence { age, ..sequence(id, Origin::Remote, vec![2; 4], 1) }).unwrap();
    }
    harness.run_to_end();
    assert_eq!(harness.told_of("Reserved"), [3, 2]);
}

/// A pool whose free blocks a large request does not fit into, as long as another one runs.
fn blocked() -> Harness<Slots> {
    let mut harness = Harness::new(SchedulerConfig { max_num_seqs: 100, ..config() }, 40);
    let long = NewSequence { stop_tokens: vec![], ..sequence(1, Origin::Local, vec![1; 4], 40) };
    harness.submit(long).unwrap();
    harness.step();
    let pool = harness.scheduler.pool().clone();
    harness.ballast = pool.allocate(25).unwrap();
    let large = NewSequence { cache: false, ..sequence(2, Origin::Local, vec![2; 60], 1) };
    harness.submit(large).unwrap();
    harness.step();
    assert_eq!(harness.scheduler.counts().waiting, 1);
    harness
}

#[test]
fn sixteen_small_ones_pass_a_large_head_and_then_nobody() {
    let mut harness = blocked();
    for id in 10..40 {
        harness.submit(sequence(id, Origin::Local, vec![3; 4], 1)).unwrap();
        harness.step();
    }
    assert_eq!(harness.told_of("Started").len(), 1 + 16);
    assert_eq!(harness.scheduler.counts().waiting, 1 + 14);
    harness.ballast.clear();
    harness.run_to_end();
    harness.assert_all_as_expected();
}

#[test]
fn a_head_that_waited_two_seconds_is_passed_by_nobody() {
    let mut harness = blocked();
    harness.submit(sequence(10, Origin::Local, vec![3; 4], 1)).unwrap();
    harness.step();
    harness.now += Duration::from_secs(2);
    harness.submit(sequence(11, Origin::Local, vec![3; 4], 1)).unwrap();
    harness.step();
    harness.step();
    assert_eq!(harness.told_of("Started"), [1, 10]);
    assert_eq!(harness.scheduler.counts().waiting, 2);
}

#[test]
fn who_comes_back_leaves_a_tenth_of_the_pool_free() {
    for (ballast, admitted) in [(29, true), (30, false)] {
        let mut harness = Harness::new(config(), 40);
        harness
            .submit(NewSequence { stop_tokens: vec![], ..sequence(1, Origin::Local, vec![1; 4], 2) })
            .unwrap();
        harness.step();
        // One block is held and the growth of that sequence and its next block are two: the rest is the watermark.
        let pool = harness.scheduler.pool().clone();
        harness.ballast = pool.allocate(ballast).unwrap();
        let new = sequence(2, Origin::Remote, vec![2; 24], 4);
        let back = NewSequence { preempted: true, id: SequenceId(3), ..new.clone() };
        harness.submit(back).unwrap();
        assert_eq!(harness.leases.len(), usize::from(admitted), "10 or 9 free, 6 needed, 4 to be left");
        if !admitted {
            harness.submit(new).unwrap();
            assert_eq!(harness.leases.len(), 1, "a new one may take them");
        }
    }
}

#[test]
fn who_comes_back_alone_needs_no_more_than_it_needs() {
    let mut harness = Harness::new(config(), 10);
    let back = NewSequence { preempted: true, ..sequence(1, Origin::Remote, vec![2; 39], 1) };
    harness.submit(back).unwrap();
    assert_eq!((harness.leases.len(), harness.scheduler.pool().counts().free), (1, 0));
}

#[test]
fn a_group_needs_room_for_its_copies_and_takes_a_place_for_each() {
    let mut harness = Harness::new(config(), 40);
    harness.submit(NewSequence { stop_tokens: vec![], ..sequence(1, Origin::Local, vec![1; 4], 4) }).unwrap();
    harness.step();
    // 7 places are left.
    harness.submit(group(10, 8, Origin::Local, vec![2; 6], 4)).unwrap();
    harness.step();
    assert_eq!(harness.scheduler.counts().waiting, 8);
    harness.run_to_end();
    for (free, admitted) in [(10, true), (9, false)] {
        let mut harness = Harness::new(config(), 40);
        harness
            .submit(NewSequence { stop_tokens: vec![], ..sequence(1, Origin::Local, vec![1; 4], 2) })
            .unwrap();
        harness.step();
        let pool = harness.scheduler.pool().clone();
        harness.ballast = pool.allocate(39 - free).unwrap();
        // 2 blocks of prompt, 3 copies, growth of 3 more by a block; growth and next block of the other one: 2.
        let new = group(10, 4, Origin::Remote, vec![2; 6], 4);
        harness.submit(new).unwrap();
        assert_eq!(harness.leases.len(), usize::from(admitted), "{free}");
    }
}
