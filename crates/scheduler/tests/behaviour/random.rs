//! Random operations: whatever happens, every sequence produces what an undisturbed run would, and every invariant holds after
//! every operation.

use std::time::Duration;

use baton_scheduler::{NewSequence, Origin, Refusal, SchedulerConfig, SequenceId, StepCost};
use proptest::prelude::*;

use crate::support::{Harness, Slots, config, group};

#[derive(Debug, Clone)]
enum Op {
    Submit {
        origin: Origin,
        n: u64,
        len: usize,
        max_new: u32,
        priority: i32,
        cache: bool,
    },
    Step,
    StoppedStep,
    /// A sequence is cancelled while a step is under way.
    StepAndCancel(usize),
    /// A transfer completes while a step is under way.
    StepAndDeliver(usize),
    Deliver(usize),
    Cancel(usize),
    Release,
    DropLeases,
}

fn op(decode: bool) -> impl Strategy<Value = Op> {
    let origin = if decode {
        prop_oneof![Just(Origin::Local), Just(Origin::Remote)].boxed()
    } else {
        Just(Origin::Prefill).boxed()
    };
    let submit =
        (origin, prop_oneof![3 => Just(1u64), 2 => 2u64..5], 1usize..40, 1u32..30, -2i32..3, any::<bool>());
    prop_oneof![
        3 => submit.prop_map(|(origin, n, len, max_new, priority, cache)| {
            Op::Submit { origin, n, len, max_new, priority, cache }
        }),
        8 => Just(Op::Step),
        1 => Just(Op::StoppedStep),
        1 => any::<usize>().prop_map(Op::StepAndCancel),
        1 => any::<usize>().prop_map(Op::StepAndDeliver),
        2 => any::<usize>().prop_map(Op::Deliver),
        1 => any::<usize>().prop_map(Op::Cancel),
        1 => Just(Op::Release),
        1 => Just(Op::DropLeases),
    ]
}

fn cancel(harness: &mut Harness<Slots>, nth: usize) {
    let ids: Vec<SequenceId> = harness.streams.keys().copied().collect();
    if !ids.is_empty() {
        harness.cancel(ids[nth % ids.len()]);
    }
}

fn submit(harness: &mut Harness<Slots>, new: NewSequence) {
    match harness.submit(new) {
        Ok(()) | Err(Refusal::QueueFull { .. }) => {}
        Err(Refusal::TooLarge { needed_tokens, max_tokens }) => assert!(needed_tokens > max_tokens),
        Err(other) => panic!("{other}"),
    }
}

fn drive(num_blocks: usize, ops: Vec<Op>) {
    // In every second pool a context is so dear that newcomers are computed in parts.
    let dear = StepCost { fixed_s: 1e-3, per_token_s: 1e-5, per_context_token_s: 2e-5 };
    let config = match num_blocks % 2 {
        0 => config(),
        _ => SchedulerConfig { step_cost: Some(dear), max_step_growth: 0.1, num_layers: 5, ..config() },
    };
    let mut harness = Harness::new(config, num_blocks);
    for (nth, op) in ops.into_iter().enumerate() {
        match op {
            Op::Submit { origin, n, len, max_new, priority, cache } => {
                // Few different beginnings, so that prefixes are shared and diverge.
                let prompt: Vec<u32> = (0..len).map(|i| ((nth % 3) * (i / 9) + i * 7) as u32 % 50).collect();
                let new = group(nth as u64 * 100, n, origin, prompt, max_new);
                let age = Duration::from_millis(nth as u64 * 37 % 400);
                submit(&mut harness, NewSequence { priority, cache, age, ..new });
            }
            Op::Step => _ = harness.step(),
            Op::StoppedStep => _ = harness.step_with(true, |_| {}),
            Op::StepAndCancel(nth) => _ = harness.step_with(false, |harness| cancel(harness, nth)),
            Op::StepAndDeliver(nth) => _ = harness.step_with(false, |harness| harness.deliver(nth)),
            Op::Deliver(nth) => harness.deliver(nth),
            Op::Cancel(nth) => cancel(&mut harness, nth),
            Op::Release => harness.release_all(),
            Op::DropLeases => {
                harness.stale.clear();
                harness.reads.clear();
            }
        }
        harness.check();
    }
    harness.run_to_end();
    harness.assert_all_as_expected();
    let counts = harness.scheduler.pool().counts();
    assert_eq!(counts.free + counts.cached, counts.total, "every block came back");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn a_decode_worker_produces_what_an_undisturbed_run_would(
        num_blocks in 1usize..40,
        ops in prop::collection::vec(op(true), 1..120),
    ) {
        drive(num_blocks, ops);
    }

    #[test]
    fn a_prefill_worker_computes_every_prompt_and_gives_back_every_block(
        num_blocks in 1usize..40,
        ops in prop::collection::vec(op(false), 1..120),
    ) {
        drive(num_blocks, ops);
    }

    /// A pool of exactly what the largest request needs, and more such requests than fit: all end, and the one with the lowest rank
    /// never loses its blocks and has a row in each step once it has begun.
    #[test]
    fn the_oldest_always_goes_on_in_any_pool_that_admission_accepts(
        requests in prop::collection::vec((1u64..5, 1usize..20, 1u32..24), 2..7),
    ) {
        let blocks = |&(n, len, max_new): &(u64, usize, u32)| {
            len / 4 + n as usize * ((len + max_new as usize).div_ceil(4) - len / 4)
        };
        let num_blocks = requests.iter().map(blocks).max().unwrap();
        let mut harness = Harness::new(config(), num_blocks);
        for (nth, &(n, len, max_new)) in requests.iter().enumerate() {
            let prompt = (0..len).map(|i| (nth * 11 + i * 7) as u32 % 50).collect();
            harness.submit(group(nth as u64 * 100, n, Origin::Local, prompt, max_new)).unwrap();
        }
        let mut begun = false;
        let mut oldest = SequenceId(0);
        for _ in 0..5000 {
            if harness.scheduler.is_empty() {
                break;
            }
            let first = harness.streams.iter().find(|(_, stream)| stream.finish.is_none()).map(|(id, _)| *id).unwrap();
            begun &= std::mem::replace(&mut oldest, first) == first;
            let told = harness.told.len();
            harness.step_with(false, |harness| {
                let head = harness.streams[&first].new.id;
                let planned = harness.scheduler.current_plan().rows.iter().any(|row| row.id == first || row.id == head);
                assert!(planned || !begun, "{first:?} stands still");
                begun |= planned;
            });
            let lost = format!("{:?}", baton_scheduler::Event::Preempted { id: first, gone: false });
            prop_assert!(!harness.told[told..].contains(&lost) || !begun);
        }
        prop_assert!(harness.scheduler.is_empty(), "every accepted sequence ends");
        harness.assert_all_as_expected();
    }
}
