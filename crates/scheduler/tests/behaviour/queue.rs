//! What is accepted, and what waits for what.

use std::time::Duration;

use baton_kv::BlockPool;
use baton_scheduler::{Origin, Refusal, Scheduler, SchedulerConfig, SequenceId, StepOutput};

use crate::support::{Harness, config, group, sequence};

#[test]
fn what_can_never_fit_is_refused_with_the_largest_that_can() {
    let mut harness = Harness::new(config(), 5);
    let refusal = harness.submit(sequence(1, Origin::Local, vec![1; 15], 10)).unwrap_err();
    assert_eq!(refusal, Refusal::TooLarge { needed_tokens: 25, max_tokens: 20 });
    assert_eq!(refusal.to_string(), "needs room for 25 tokens, at most 20 fit");
    harness.submit(sequence(1, Origin::Local, vec![1; 15], 5)).unwrap();
    assert_eq!(harness.submit(sequence(1, Origin::Local, vec![1], 1)), Err(Refusal::Duplicate));
    assert_eq!(harness.submit(sequence(2, Origin::Local, vec![], 1)), Err(Refusal::Empty));
    let refusal = harness.submit(sequence(3, Origin::Prefill, vec![1; 64], 1)).unwrap_err();
    assert_eq!(refusal, Refusal::TooLarge { needed_tokens: 65, max_tokens: 20 });
}

#[test]
fn the_queue_is_bounded() {
    let mut harness = Harness::new(SchedulerConfig { max_queue: 2, max_num_seqs: 1, ..config() }, 40);
    for id in 0..2 {
        harness.submit(sequence(id, Origin::Local, vec![1; 4], 4)).unwrap();
    }
    let full = harness.submit(sequence(9, Origin::Local, vec![1; 4], 4));
    assert_eq!(full, Err(Refusal::QueueFull { max_queue: 2 }));
}

#[test]
fn a_group_takes_a_place_in_the_queue_for_each_of_its_sequences() {
    for origin in [Origin::Local, Origin::Remote, Origin::Prefill] {
        let mut harness = Harness::new(SchedulerConfig { max_queue: 4, ..config() }, 40);
        harness.submit(group(1, 2, origin, vec![1; 4], 4)).unwrap();
        // Granted or reserved at once, if at all: the line is filled anew.
        let free = 4 - harness.scheduler.counts().waiting as u64;
        let full = harness.submit(group(11, free + 1, origin, vec![1; 4], 4));
        let too_many = Err(Refusal::TooMany { num_sequences: 5, max_num_seqs: 4 });
        assert_eq!(full, if free == 4 { too_many } else { Err(Refusal::QueueFull { max_queue: 4 }) });
        harness.submit(group(21, free, origin, vec![1; 4], 4)).unwrap();
        assert!(harness.scheduler.counts().waiting <= 4);
        harness.run_to_end();
        harness.assert_all_as_expected();
    }
}

#[test]
fn without_a_grant_nothing_is_computed_and_nothing_is_held() {
    let mut scheduler = Scheduler::new(config(), BlockPool::new(10));
    scheduler.submit(sequence(1, Origin::Prefill, vec![1; 8], 4), Duration::ZERO).unwrap();
    assert!(scheduler.plan(Duration::ZERO).is_empty());
    assert_eq!(scheduler.pool().counts().free, 10);
    assert!(scheduler.grant(SequenceId(1)));
    assert!(!scheduler.plan(Duration::ZERO).is_empty());
    assert_eq!(scheduler.pool().counts().free, 8);
}

#[test]
fn a_stopped_step_changes_nothing() {
    let mut harness = Harness::new(config(), 10);
    harness.submit(sequence(1, Origin::Local, vec![1; 8], 4)).unwrap();
    let plan = harness.scheduler.plan(harness.now).clone();
    harness.scheduler.apply(&StepOutput { stopped: true, ..StepOutput::default() }, harness.now);
    let again = harness.scheduler.plan(harness.now).clone();
    assert_eq!(plan.rows, again.rows);
    assert_eq!(plan.tokens, again.tokens);
}

#[test]
fn receiving_is_bounded_but_one_may_always() {
    let mut harness = Harness::new(config(), 10);
    harness.submit(sequence(1, Origin::Remote, vec![1; 30], 1)).unwrap();
    assert_eq!(harness.leases.len(), 1, "8 blocks exceed the share of 5, but it is alone");
    harness.submit(sequence(2, Origin::Remote, vec![1; 4], 1)).unwrap();
    assert_eq!(harness.leases.len(), 1, "beyond the share");
    harness.deliver(0);
    harness.step();
    assert_eq!(harness.leases.len(), 1, "the second is reserved when the first has left");
}

#[test]
fn a_group_is_refused_with_what_its_sequences_could_have() {
    let mut harness = Harness::new(SchedulerConfig { max_num_seqs: 4, ..config() }, 10);
    // One full block is shared; three times three blocks are left.
    let refusal = harness.submit(group(1, 3, Origin::Local, vec![1; 6], 11)).unwrap_err();
    assert_eq!(refusal, Refusal::TooLarge { needed_tokens: 17, max_tokens: 16 });
    harness.submit(group(1, 3, Origin::Local, vec![1; 6], 10)).unwrap();
    let refusal = harness.submit(group(11, 5, Origin::Remote, vec![1; 6], 2)).unwrap_err();
    assert_eq!(refusal, Refusal::TooMany { num_sequences: 5, max_num_seqs: 4 });
    // A prefill worker holds the prompt once.
    harness.submit(group(11, 5, Origin::Prefill, vec![1; 40], 20)).unwrap();
    for new in [group(2, 1, Origin::Local, vec![1], 1), group(20, 1, Origin::Local, vec![1], 1)] {
        let taken = vec![SequenceId(if new.id.0 == 2 { 7 } else { 12 })];
        let refused =
            harness.scheduler.submit(baton_scheduler::NewSequence { siblings: taken, ..new }, harness.now);
        assert_eq!(refused, Err(Refusal::Duplicate), "a sibling's id is live too");
    }
    let twice = baton_scheduler::NewSequence {
        siblings: vec![SequenceId(30)],
        ..group(30, 1, Origin::Local, vec![1], 1)
    };
    assert_eq!(harness.scheduler.submit(twice, harness.now), Err(Refusal::Duplicate));
    harness.run_to_end();
    harness.assert_all_as_expected();
}

#[test]
fn queued_tokens_are_those_that_the_prefix_cache_does_not_have() {
    let mut harness = Harness::new(SchedulerConfig { max_num_seqs: 1, ..config() }, 60);
    let prompt: Vec<u32> = (10..27).collect();
    harness.submit(sequence(1, Origin::Local, prompt.clone(), 1)).unwrap();
    assert_eq!(harness.scheduler.queued_tokens(), 17);
    harness.step();
    assert_eq!(harness.scheduler.queued_tokens(), 1, "sixteen of seventeen fit into the step");
    harness.submit(sequence(2, Origin::Local, prompt.clone(), 1)).unwrap();
    assert_eq!(harness.scheduler.queued_tokens(), 1 + 1, "four blocks are known");
    let opted_out = baton_scheduler::NewSequence { cache: false, ..sequence(3, Origin::Local, prompt, 1) };
    harness.submit(opted_out).unwrap();
    assert_eq!(harness.scheduler.queued_tokens(), 1 + 1 + 17);
    harness.run_to_end();
    assert_eq!(harness.scheduler.queued_tokens(), 0);
}
