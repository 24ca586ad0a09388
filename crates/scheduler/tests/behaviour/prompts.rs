//! A prefill worker: whose prompt goes first, and how long a step takes.

use std::time::Duration;

use baton_scheduler::{NewSequence, Origin, SchedulerConfig, SequenceId, StepCost, StepPlan};

use crate::support::{Harness, Slots, config, sequence};

#[test]
fn a_short_prompt_overtakes_a_long_one_that_is_already_open() {
    let config = SchedulerConfig { context: 1000, ..config() };
    let mut harness = Harness::new(config, 300);
    harness.submit(sequence(1, Origin::Prefill, vec![3; 900], 2)).unwrap();
    harness.step();
    harness.submit(sequence(2, Origin::Prefill, vec![4; 8], 2)).unwrap();
    harness.step();
    assert!(has_token(&harness, 2), "the short one got the very next step");
    assert!(!has_token(&harness, 1));
}

#[test]
fn an_old_long_prompt_is_not_starved_by_short_ones() {
    let config = SchedulerConfig { context: 1000, ..config() };
    let mut harness = Harness::new(config, 300);
    harness.submit(sequence(0, Origin::Prefill, vec![3; 400], 2)).unwrap();
    let mut steps = 0;
    while !has_token(&harness, 0) {
        steps += 1;
        assert!(steps < 200, "starved");
        // Each short prompt alone fills a step.
        harness.submit(sequence(steps, Origin::Prefill, vec![4; 16], 2)).unwrap();
        harness.step();
        harness.release_all();
    }
}

fn has_token(harness: &Harness<Slots>, id: u64) -> bool {
    !harness.streams[&SequenceId(id)].produced.is_empty()
}

/// A context grows a step's time: a chunk at the end of a long prompt costs many times one at its beginning.
const COST: StepCost = StepCost { fixed_s: 0.002, per_token_s: 50e-6, per_context_token_s: 5e-9 };
const MAX_STEP_MS: f64 = 30.0;

fn seconds(plan: &StepPlan) -> f64 {
    let context: usize = plan
        .rows
        .iter()
        .map(|row| (row.position..row.position + row.tokens.len()).map(|at| at + 1).sum::<usize>())
        .sum();
    COST.fixed_s + COST.per_token_s * plan.tokens.len() as f64 + COST.per_context_token_s * context as f64
}

fn timed() -> Harness<Slots> {
    let config = SchedulerConfig {
        context: 200_000,
        max_step_tokens: 512,
        local_prefill_tokens: 256,
        step_cost: Some(COST),
        max_step_ms: MAX_STEP_MS,
        cache_salt: None,
        ..config()
    };
    Harness::new(config, 40_000)
}

/// One step in the time it is said to take; nothing is computed.
fn timed_step(harness: &mut Harness<Slots>) -> f64 {
    let plan = harness.scheduler.plan(harness.now).clone();
    assert_eq!(harness.scheduler.check(), Ok(()));
    let took = seconds(&plan);
    let mut output = baton_scheduler::StepOutput::default();
    for (nth, row) in plan.rows.iter().enumerate() {
        if let baton_scheduler::Logits::Sample(wanted) = &row.logits {
            output.sampled.extend(wanted.clone().map(|at| baton_scheduler::Sampled {
                row: nth as u32,
                sampling: at as u32,
                token: 1,
                logprob: 0.0,
            }));
        }
    }
    harness.now += Duration::from_secs_f64(took);
    harness.scheduler.apply(&output, harness.now);
    harness.events();
    // Everything was sent: what is released returns at once.
    harness.reads.clear();
    took
}

/// Seconds until a sequence's first token.
fn time_to_first_token(harness: &mut Harness<Slots>, id: u64) -> f64 {
    let start = harness.now;
    while !has_token(harness, id) {
        timed_step(harness);
    }
    (harness.now - start).as_secs_f64()
}

#[test]
fn beside_a_prompt_of_100_000_tokens_a_short_one_waits_at_most_two_chunks_more_than_alone() {
    let short = |id| sequence(id, Origin::Prefill, vec![4; 40], 2);
    let mut harness = timed();
    harness.submit(short(1)).unwrap();
    let idle = time_to_first_token(&mut harness, 1);
    let mut harness = timed();
    harness.submit(sequence(0, Origin::Prefill, vec![3; 100_000], 2)).unwrap();
    let (mut id, mut worst_chunk) = (1, 0.0_f64);
    while !has_token(&harness, 0) {
        for _ in 0..20 {
            let took = timed_step(&mut harness);
            assert!(took <= MAX_STEP_MS / 1e3 + 1e-9, "{took} s");
            worst_chunk = worst_chunk.max(took);
        }
        if has_token(&harness, 0) {
            break;
        }
        // It comes just after a step began.
        let running = timed_step(&mut harness);
        harness.submit(short(id)).unwrap();
        let ttft = running + time_to_first_token(&mut harness, id);
        assert!(ttft <= idle + 2.0 * worst_chunk + 1e-9, "{ttft} s, alone {idle} s, a chunk {worst_chunk} s");
        harness.release_all();
        id += 1;
    }
    assert!(id > 10, "the short ones came all along");
}

#[test]
fn a_step_in_which_a_short_prompt_ends_takes_about_twice_what_that_takes() {
    let mut harness = timed();
    harness.submit(sequence(0, Origin::Prefill, vec![3; 100_000], 2)).unwrap();
    for (id, len) in [(1, 16), (2, 64), (3, 200)] {
        // By then the giant is first, by its age.
        for _ in 0..40 * id {
            timed_step(&mut harness);
        }
        let alone = COST.fixed_s + COST.per_token_s * len as f64;
        harness.submit(sequence(id, Origin::Prefill, vec![4; len], 2)).unwrap();
        let before = harness.scheduler.num_prompt_tokens_computed();
        let took = timed_step(&mut harness);
        assert!(has_token(&harness, id), "in the very next step");
        // A block of the giant at least, so that it goes on whatever comes.
        let block = 4.0 * (COST.per_token_s + 100_000.0 * COST.per_context_token_s);
        assert!(took <= 2.0 * alone + block, "{len} tokens: {took} s, alone {alone}");
        assert!(harness.scheduler.num_prompt_tokens_computed() - before >= len as u64 + 4);
        harness.release_all();
    }
}

#[test]
fn beside_more_giants_than_may_be_open_or_offered_a_short_one_waits_no_longer() {
    let mut harness = timed();
    for id in 0..9 {
        harness.submit(sequence(id, Origin::Prefill, vec![id as u32; 20_000], 2)).unwrap();
    }
    for _ in 0..10 {
        timed_step(&mut harness);
    }
    assert_eq!(harness.told_of("Opened"), [0], "one that gets no tokens holds no blocks and no place");
    assert_eq!(harness.told_of("NearHead").len(), 1 + 4);
    harness.submit(sequence(9, Origin::Prefill, vec![4; 40], 2)).unwrap();
    assert!(time_to_first_token(&mut harness, 9) <= MAX_STEP_MS / 1e3 + 1e-9, "it is in the very next step");
    while !harness.streams.keys().all(|id| has_token(&harness, id.0)) {
        timed_step(&mut harness);
        harness.release_all();
    }
}

#[test]
fn a_prompt_of_100_000_tokens_gets_its_first_token_however_many_short_ones_come() {
    let mut harness = timed();
    harness.submit(sequence(0, Origin::Prefill, vec![3; 100_000], 2)).unwrap();
    let alone = time_to_first_token(&mut harness, 0);
    let mut harness = timed();
    harness.submit(sequence(0, Origin::Prefill, vec![3; 100_000], 2)).unwrap();
    let start = harness.now;
    for id in 1.. {
        if has_token(&harness, 0) {
            break;
        }
        // More than a step can take.
        if harness.scheduler.counts().waiting < 20 {
            harness.submit(sequence(id, Origin::Prefill, vec![4; 512], 2)).unwrap();
        }
        timed_step(&mut harness);
        harness.release_all();
        // It counts as 1,000 tokens shorter a second: after 100 seconds every new one ranks behind it.
        let waited = (harness.now - start).as_secs_f64();
        assert!(waited < 100.0 + 2.0 * alone, "{waited} s, alone {alone} s");
    }
}

#[test]
fn priority_and_age_from_elsewhere_count_as_waiting() {
    let order = |priority, age_s| {
        let mut harness = Harness::new(
            SchedulerConfig { context: 9000, max_open_prompts: 1, lookahead: 1, ..config() },
            4000,
        );
        harness.submit(sequence(1, Origin::Prefill, vec![1; 8], 1)).unwrap();
        harness.submit(sequence(2, Origin::Prefill, vec![2; 40], 1)).unwrap();
        let age = Duration::from_secs(age_s);
        let long = NewSequence { priority, age, ..sequence(3, Origin::Prefill, vec![3; 4000], 1) };
        harness.submit(long).unwrap();
        for _ in 0..400 {
            harness.step();
        }
        harness.told_of("Opened")
    };
    assert_eq!(order(0, 0), [1, 2, 3]);
    assert_eq!(order(0, 5), [3, 1, 2], "5,000 tokens shorter");
    assert_eq!(order(-1, 0), [3, 1, 2], "the same");
}

#[test]
fn a_cached_prompt_goes_before_a_shorter_uncached_one() {
    let mut harness = Harness::new(SchedulerConfig { context: 1000, max_open_prompts: 1, ..config() }, 300);
    let long: Vec<u32> = (0..200).collect();
    harness.submit(sequence(1, Origin::Prefill, long.clone(), 1)).unwrap();
    harness.run_to_end();
    harness.submit(sequence(2, Origin::Prefill, vec![49; 100], 1)).unwrap();
    harness.submit(sequence(3, Origin::Prefill, long, 1)).unwrap();
    harness.run_to_end();
    assert_eq!(harness.told_of("Opened"), [1, 3, 2]);
}

#[test]
fn a_local_prompt_beside_decoding_rows_is_cut_by_tokens_and_by_time() {
    let mut harness = timed();
    let endless =
        |id, len| NewSequence { stop_tokens: vec![], ..sequence(id, Origin::Local, vec![3; len], 20_000) };
    harness.submit(endless(1, 40)).unwrap();
    harness.step();
    harness.submit(endless(2, 100_000)).unwrap();
    let mut computed = vec![40];
    while harness.scheduler.counts().running < 2 {
        assert!(timed_step(&mut harness) <= MAX_STEP_MS / 1e3 + 1e-9);
        computed.push(harness.scheduler.num_prompt_tokens_computed());
    }
    let chunks: Vec<u64> = computed.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(chunks[0], 256, "the bound of tokens");
    let late = chunks[chunks.len() - 2];
    assert!((4..256).contains(&late), "the bound of time: {late}");
    // A bound that no prompt can keep still lets it go on, by a block a step.
    harness.scheduler.set_step_cost(Some(StepCost { fixed_s: 1.0, ..COST }));
    harness.submit(endless(3, 40)).unwrap();
    timed_step(&mut harness);
    assert_eq!(harness.scheduler.num_prompt_tokens_computed(), 100_040 + 4);
}
