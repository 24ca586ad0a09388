//! Groups: one prompt, n sequences that share its blocks until they write.

use std::collections::HashSet;

use baton_scheduler::{
    BlockCopy, Event, Finish, FirstToken, NewSequence, Origin, SchedulerConfig, SequenceId,
};

use crate::support::{Device, Harness, STOP, Slots, config, group};

fn copies(harness: &Harness<Slots>) -> Vec<BlockCopy> {
    harness.scheduler.current_plan().copies.clone()
}

fn receive(harness: &mut Harness<Slots>) {
    let (_, lease) = harness.leases.pop().unwrap();
    harness.device.receive(&lease, &(10..20).collect::<Vec<u32>>());
}

/// Four sequences over a prompt of two full blocks and a half one; their prompt is computed.
fn forked(num_blocks: usize) -> Harness<Slots> {
    let mut harness = Harness::new(config(), num_blocks);
    let new = NewSequence { stop_tokens: vec![], ..group(1, 4, Origin::Local, (10..20).collect(), 12) };
    harness.submit(new).unwrap();
    harness.step();
    assert_eq!(harness.scheduler.counts().running, 4);
    harness
}

#[test]
fn siblings_share_all_prompt_blocks_and_the_last_holder_copies_nothing() {
    let mut harness = forked(40);
    assert_eq!(harness.scheduler.pool().counts().held, 3, "one prompt, once");
    assert_eq!(harness.scheduler.num_prompt_tokens_computed(), 10);
    harness.step_with(false, |harness| {
        let copies = copies(harness);
        assert_eq!(copies.len(), 3, "the fourth writes the block itself");
        assert!(copies.iter().all(|copy| copy.from == copies[0].from));
        let written: HashSet<u32> = copies.iter().map(|copy| copy.to).collect();
        assert_eq!(written.len(), 3);
        let plan = harness.scheduler.current_plan();
        let last = &plan.rows[3];
        assert_eq!(plan.blocks[last.blocks.clone()][2], copies[0].from);
    });
    assert_eq!(harness.scheduler.pool().counts().held, 2 + 4);
    harness.run_to_end();
    harness.assert_all_as_expected();
    let outputs: HashSet<_> = harness.streams.values().map(|stream| stream.produced.clone()).collect();
    assert_eq!(outputs.len(), 4, "each draws its own tokens");
    assert_eq!(harness.num_copies, 3);
}

#[test]
fn full_prompt_blocks_are_never_copied() {
    let mut harness = Harness::new(config(), 40);
    harness.submit(group(1, 4, Origin::Local, (10..18).collect(), 12)).unwrap();
    harness.run_to_end();
    harness.assert_all_as_expected();
    assert_eq!(harness.num_copies, 0);
}

#[test]
fn a_group_that_came_by_handoff_forks_at_commit() {
    let mut harness = Harness::new(config(), 40);
    harness.submit(group(1, 3, Origin::Remote, (10..20).collect(), 9)).unwrap();
    assert_eq!((harness.leases.len(), harness.scheduler.counts().receiving), (1, 3));
    harness.deliver(0);
    assert_eq!(harness.told_of("Started"), [1], "once a group");
    harness.run_to_end();
    harness.assert_all_as_expected();
}

#[test]
fn a_first_token_may_end_its_sequence_and_the_others_go_on() {
    let mut harness = Harness::new(config(), 40);
    harness.submit(group(1, 3, Origin::Remote, (10..20).collect(), 9)).unwrap();
    receive(&mut harness);
    let first =
        [true, false, true].map(|finished| FirstToken { token: if finished { STOP } else { 20 }, finished });
    assert!(harness.scheduler.commit(SequenceId(1), &first));
    harness.events();
    assert_eq!(harness.told_of("Started"), [1], "by the head's name, though it is over");
    assert_eq!(harness.scheduler.counts().running, 1);
    assert!(
        !harness.scheduler.cancel(SequenceId(1), harness.now)
            && !harness.scheduler.cancel(SequenceId(3), harness.now)
    );
    harness.streams.get_mut(&SequenceId(2)).unwrap().produced.push(20);
    harness.step_with(false, |harness| assert_eq!(copies(harness), [], "it has the prompt for itself"));
    assert!(harness.scheduler.cancel(SequenceId(2), harness.now));
    assert!(harness.scheduler.is_empty());

    harness.submit(group(11, 2, Origin::Remote, (10..20).collect(), 9)).unwrap();
    receive(&mut harness);
    assert!(harness.scheduler.commit(SequenceId(11), &[FirstToken { token: STOP, finished: true }; 2]));
    harness.events();
    assert_eq!((harness.told_of("Started"), harness.scheduler.is_empty()), (vec![1], true));
}

/// The prefill worker's context may be larger: the end is told here, or whoever reads the sequence would wait for ever.
#[test]
fn a_first_token_that_fills_the_context_here_is_told_with_its_end() {
    let mut harness = Harness::new(SchedulerConfig { context: 11, ..config() }, 40);
    harness.submit(group(1, 2, Origin::Remote, (10..20).collect(), 9)).unwrap();
    receive(&mut harness);
    assert!(harness.scheduler.commit(SequenceId(1), &[FirstToken { token: 20, finished: false }; 2]));
    let mut events = Vec::new();
    harness.scheduler.drain_events(&mut events);
    let ends = |event: &Event| match event {
        Event::Token { id, token: 20, index: 0, finish: Some(Finish::Length), .. } => Some(id.0),
        _ => None,
    };
    assert_eq!(events.iter().filter_map(ends).collect::<Vec<_>>(), [1, 2], "{events:?}");
    assert!(harness.scheduler.is_empty());
}

#[test]
fn a_prefill_worker_draws_all_first_tokens_at_once_and_holds_the_blocks_once() {
    let mut harness = Harness::new(config(), 40);
    harness.submit(group(1, 4, Origin::Prefill, (10..20).collect(), 9)).unwrap();
    harness.step();
    assert_eq!(harness.told_of("Opened"), [1]);
    assert_eq!(harness.told_of("Token"), [1, 2, 3, 4]);
    assert_eq!((harness.held.clone(), harness.scheduler.pool().counts().held), (vec![SequenceId(1)], 3));
    harness.assert_all_as_expected();
    harness.release_all();
    assert!(harness.scheduler.is_empty());
    // Without a decode leg nothing is held.
    harness.submit(group(11, 4, Origin::Prefill, (10..20).collect(), 1)).unwrap();
    harness.step();
    assert_eq!(harness.told_of("Token")[4..], [11, 12, 13, 14]);
    assert!(harness.scheduler.is_empty());
}

#[test]
fn a_sibling_leaves_alone_and_before_the_fork_the_head_takes_all_with_it() {
    for origin in [Origin::Local, Origin::Prefill] {
        let mut harness = Harness::new(config(), 40);
        harness.submit(group(1, 4, origin, (10..20).collect(), 9)).unwrap();
        assert!(harness.scheduler.cancel(SequenceId(3), harness.now));
        assert!(!harness.scheduler.cancel(SequenceId(3), harness.now), "it is gone");
        harness.step();
        assert_eq!(harness.told_of("Token"), [1, 2, 4]);
        harness.submit(group(11, 4, origin, (30..40).collect(), 9)).unwrap();
        harness.cancel(SequenceId(11));
        assert!(!harness.scheduler.cancel(SequenceId(12), harness.now), "it went with its head");
        harness.run_to_end();
    }
    // Its place among the first tokens stays.
    let mut harness = Harness::new(config(), 40);
    harness.submit(group(1, 3, Origin::Remote, (10..20).collect(), 9)).unwrap();
    harness.cancel(SequenceId(2));
    harness.deliver(0);
    harness.run_to_end();
    harness.assert_all_as_expected();
}

/// Whoever ends while a step is under way may still be read and written by it.
#[test]
fn what_a_step_uses_is_given_to_nobody_before_it_is_over() {
    let mut harness = forked(24);
    harness.ballast = harness.scheduler.pool().allocate(15).unwrap();
    let mut used = HashSet::new();
    harness.step_with(false, |harness| {
        used.extend(copies(harness).iter().flat_map(|copy| [copy.from, copy.to]));
        used.extend(harness.scheduler.current_plan().blocks.iter().copied());
        (1..5).for_each(|id| harness.cancel(SequenceId(id)));
        harness.submit(group(11, 1, Origin::Remote, vec![1; 36], 1)).unwrap();
        assert_eq!(harness.leases.len(), 0, "there is no room yet");
    });
    let counts = harness.scheduler.pool().counts();
    assert_eq!((used.len(), counts.free + counts.cached), (6, 9));
    harness.step();
    assert_eq!(harness.leases.len(), 1, "now there is");
    harness.run_to_end();
}

/// The same for a block that the step copies from, when the one that held it last steps aside. It may not write it itself, since a lease
/// outlived the commit.
#[test]
fn what_a_step_copies_from_is_given_to_nobody_before_it_is_over() {
    let mut harness = Harness::new(config(), 40);
    harness.resume = false;
    let new = group(1, 2, Origin::Remote, (10..20).collect(), 9);
    harness.submit(NewSequence { stop_tokens: vec![], ..new }).unwrap();
    let (_, lease) = harness.leases.pop().unwrap();
    harness.device.receive(&lease, &(10..20).collect::<Vec<u32>>());
    assert!(harness.scheduler.commit(SequenceId(1), &[FirstToken { token: 20, finished: false }; 2]));
    harness.events();
    harness.streams.values_mut().for_each(|stream| stream.produced.push(20));
    let pool = harness.scheduler.pool().clone();
    harness.ballast = pool.allocate(pool.counts().free - 1).unwrap();
    harness.step_with(false, |harness| {
        assert_eq!(copies(harness).len(), 1);
        drop(lease);
        assert_eq!(harness.scheduler.pool().counts().free, 0);
    });
    assert_eq!((harness.told_of("Preempted"), pool.counts().free), (vec![2], 1));
}

#[test]
fn a_head_without_room_for_its_copy_takes_its_siblings_share_and_copies_nothing() {
    let mut harness = Harness::new(config(), 40);
    let old = NewSequence { stop_tokens: vec![], ..group(1, 1, Origin::Local, vec![1; 3], 20) };
    let new = NewSequence { stop_tokens: vec![], ..group(11, 2, Origin::Local, (10..16).collect(), 12) };
    harness.submit(old).unwrap();
    harness.submit(new).unwrap();
    harness.step();
    assert_eq!(harness.scheduler.counts().running, 3);
    harness.fill_pool();
    // There is no block to copy to: the sibling goes, and the head is the last holder.
    harness.step_with(false, |harness| assert_eq!(copies(harness), []));
    assert_eq!(harness.told_of("Preempted"), [12]);
    harness.ballast.clear();
    harness.run_to_end();
    harness.assert_all_as_expected();
}
