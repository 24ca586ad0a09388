//! Newcomers with a long context: their first tokens are computed a few layers a step.

use baton_scheduler::{NewSequence, Origin, RowPart, SchedulerConfig, SequenceId, StepCost};

use crate::support::{Harness, Slots, config, sequence};

/// A tenth of a step is a context of 450 where three rows of 500 decode.
const COST: StepCost = StepCost { fixed_s: 2e-3, per_token_s: 0.5e-3, per_context_token_s: 1e-6 };
const LAYERS: usize = 30;

fn harness(max_step_growth: f64) -> Harness<Slots> {
    with_rows(64, max_step_growth)
}

fn with_rows(max_step_tokens: usize, max_step_growth: f64) -> Harness<Slots> {
    let config = SchedulerConfig {
        context: 10_000,
        max_step_tokens,
        local_prefill_tokens: 16,
        step_cost: Some(COST),
        max_step_growth,
        num_layers: LAYERS,
        cache_salt: None,
        max_receiving_share: 1.0,
        ..config()
    };
    Harness::new(config, 10_000)
}

fn endless(id: u64, origin: Origin, len: usize) -> NewSequence {
    NewSequence { stop_tokens: vec![], ..sequence(id, origin, vec![id as u32; len], 4_000) }
}

/// A long one comes by handoff.
fn arrives(harness: &mut Harness<Slots>, id: u64) {
    harness.submit(endless(id, Origin::Remote, 2_000)).unwrap();
    harness.deliver(0);
}

/// Three that decode, at a context of 500, and no newcomers any more.
fn three_decode(harness: &mut Harness<Slots>) {
    for id in 0..3 {
        harness.submit(endless(id, Origin::Remote, 480)).unwrap();
        harness.deliver(0);
    }
    for _ in 0..20 {
        harness.step();
    }
    assert!((0..3).all(|id| num_tokens(harness, id) == 21));
}

fn num_tokens(harness: &Harness<Slots>, id: u64) -> usize {
    harness.streams[&SequenceId(id)].produced.len()
}

/// One step: the part in it, and by how much it is expected to be longer than without its last row.
fn step(harness: &mut Harness<Slots>) -> (Option<(u64, RowPart)>, f64) {
    let mut seen = (None, 0.0);
    harness.step_with(false, |harness| {
        let plan = harness.scheduler.current_plan();
        let seconds =
            |tokens, context| COST.fixed_s + COST.per_token_s * tokens + COST.per_context_token_s * context;
        let with = plan.load();
        let mut without = plan.clone();
        without.part = None;
        without.rows.pop();
        without.tokens.pop();
        let without = without.load();
        let growth = seconds(with.0, with.1) / seconds(without.0, without.1) - 1.0;
        let last = plan.rows.last().map(|row| row.id.0);
        seen = (last.zip(plan.part.clone()), growth);
    });
    seen
}

#[test]
fn a_long_newcomer_stretches_no_step_and_the_others_get_a_token_in_each() {
    let mut harness = harness(0.1);
    three_decode(&mut harness);
    arrives(&mut harness, 9);
    let (mut steps, before) = (0, num_tokens(&harness, 0));
    let mut layers = Vec::new();
    while num_tokens(&harness, 9) < 17 {
        let (part, growth) = step(&mut harness);
        let (id, part) = part.expect("a part in every step");
        assert_eq!(id, 9);
        // What a row costs besides its context comes on top.
        assert!(growth < 0.1 + 0.03, "{growth}");
        steps += 1;
        layers.push(part.layers.len());
        assert_eq!((0..3).map(|id| num_tokens(&harness, id) - before).collect::<Vec<_>>(), [steps; 3]);
    }
    // 2 ms in steps of 5: a fifth of the layers, so five steps for each of 16 tokens; the first token came with it.
    assert_eq!((steps, layers.iter().sum::<usize>()), (16 * 5, 16 * LAYERS));
    assert!(layers.iter().all(|&num| num == LAYERS / 5), "{layers:?}");
    // From then on it is as the others.
    let (part, growth) = step(&mut harness);
    assert!(part.is_none() && growth > 0.3, "{part:?}, {growth}");
    assert_eq!(num_tokens(&harness, 9), 18);
    harness.cancel(SequenceId(9));
    (0..3).for_each(|id| harness.cancel(SequenceId(id)));
    harness.assert_all_as_expected();
}

#[test]
fn short_newcomers_those_alone_and_all_where_it_is_turned_off_are_computed_whole() {
    let no_parts = |harness: &mut Harness<Slots>, id: u64, len: usize| {
        harness.submit(endless(id, Origin::Remote, len)).unwrap();
        harness.deliver(0);
        for _ in 0..5 {
            assert_eq!(step(harness).0, None, "{id}");
        }
        assert_eq!(num_tokens(harness, id), 6);
    };
    let mut on = harness(0.1);
    no_parts(&mut on, 8, 2_000);
    on.cancel(SequenceId(8));
    three_decode(&mut on);
    no_parts(&mut on, 9, 400);
    let mut off = harness(0.0);
    three_decode(&mut off);
    no_parts(&mut off, 9, 2_000);
    // Nor before anything is known of what a step takes.
    let mut unknown = harness(0.1);
    three_decode(&mut unknown);
    unknown.scheduler.set_step_cost(None);
    no_parts(&mut unknown, 9, 2_000);
}

#[test]
fn two_take_turns_and_three_are_what_steps_are_made_of() {
    let mut harness = harness(0.1);
    three_decode(&mut harness);
    arrives(&mut harness, 8);
    arrives(&mut harness, 9);
    let mut turns = Vec::new();
    for _ in 0..40 {
        let id = step(&mut harness).0.expect("a part").0;
        if turns.last() != Some(&id) {
            turns.push(id);
        }
        assert!(num_tokens(&harness, 8).abs_diff(num_tokens(&harness, 9)) <= 1);
    }
    assert_eq!(turns, [8, 9, 8, 9, 8, 9, 8, 9]);
    step(&mut harness);
    arrives(&mut harness, 7);
    // What was begun is ended at once, and then all have a row.
    let counts = |harness: &Harness<Slots>| [7, 8, 9].map(|id| num_tokens(harness, id));
    let before = counts(&harness);
    let (id, part) = step(&mut harness).0.expect("the rest of what was begun");
    assert!(part.is_last() && part.layers.start > 0, "{part:?} of {id}");
    assert_eq!(step(&mut harness).0, None);
    assert_eq!(counts(&harness), before.map(|num| num + 2));
}

#[test]
fn who_is_cancelled_in_the_middle_leaves_its_place_to_the_next() {
    let mut harness = harness(0.1);
    three_decode(&mut harness);
    arrives(&mut harness, 8);
    arrives(&mut harness, 9);
    let (id, part) = step(&mut harness).0.unwrap();
    assert_eq!((id, part.layers.start), (8, 0));
    // While its second part is computed.
    harness.step_with(false, |harness| harness.cancel(SequenceId(8)));
    let (id, part) = step(&mut harness).0.unwrap();
    assert_eq!((id, part.layers.start), (9, 0));
    // A step that is left is planned again as it was.
    harness.step_with(true, |_| {});
    let (again, next) = step(&mut harness).0.unwrap();
    assert_eq!((again, next.layers.start), (9, part.layers.end));
}

/// The engine keeps one row: if another is begun since there were too many for a step, the first one begins anew.
#[test]
fn who_had_no_place_in_a_step_while_another_began_begins_anew() {
    let mut harness = with_rows(4, 0.1);
    three_decode(&mut harness);
    arrives(&mut harness, 8);
    assert_eq!(step(&mut harness).0.map(|(id, part)| (id, part.layers.start)), Some((8, 0)));
    // One that is older takes the fourth place.
    let age = std::time::Duration::from_secs(60);
    harness.submit(NewSequence { age, ..endless(9, Origin::Remote, 2_000) }).unwrap();
    harness.deliver(0);
    assert_eq!(step(&mut harness).0.map(|(id, part)| (id, part.layers.start)), Some((9, 0)));
    harness.cancel(SequenceId(9));
    let (id, part) = step(&mut harness).0.unwrap();
    assert_eq!((id, part.layers.start), (8, 0));
    while num_tokens(&harness, 8) < 3 {
        step(&mut harness);
    }
    (0..3).for_each(|id| harness.cancel(SequenceId(id)));
    harness.cancel(SequenceId(8));
}

#[test]
fn a_local_prompt_beside_a_part_is_computed_too() {
    let mut harness = harness(0.1);
    three_decode(&mut harness);
    arrives(&mut harness, 9);
    harness.submit(endless(4, Origin::Local, 40)).unwrap();
    let mut parts = 0;
    while num_tokens(&harness, 4) == 0 {
        parts += usize::from(step(&mut harness).0.is_some_and(|(id, _)| id == 9));
    }
    assert_eq!(parts, 3, "chunks of 16 tokens");
}
