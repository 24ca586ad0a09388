//! The scheduler over the timing engine: tokens depend on every slot of every layer, so that a block that was not copied, copied too
//! late, written by two or read from the wrong place changes them.

#[path = "../../scheduler/tests/behaviour/support.rs"]
mod support;

use std::time::Duration;

use baton_kv::WriteLease;
use baton_scheduler::{
    Engine, Flow, NewSequence, Origin, Refusal, RowSampling, SchedulerConfig, SequenceId, StepCost,
    StepOutput, StepPlan,
};
use baton_timing::{ModelShape, Roofline, TimingConfig, TimingEngine, pseudo_token, pseudo_tokens};
use support::{BLOCK, Device, Harness, VOCAB, config, group};

const LAYERS: usize = 2;
const ROOFLINE: Roofline = Roofline { flops_per_s: 1e11, bytes_per_s: 1e10, overhead: Duration::ZERO };
const SHAPE: ModelShape =
    ModelShape { num_params: 1e8, weight_bytes: 1.0, num_layers: 30, hidden: 576, kv_token_bytes: 23_040 };

fn engine(num_blocks: usize) -> TimingEngine {
    TimingEngine::new(TimingConfig {
        roofline: ROOFLINE,
        shape: SHAPE,
        num_blocks,
        block_size: BLOCK,
        num_layers: LAYERS,
        vocab: VOCAB,
        max_step_tokens: 64,
    })
}

impl Device for TimingEngine {
    fn step(&mut self, plan: &StepPlan, stopped: bool) -> StepOutput {
        let mut output = StepOutput::default();
        let flow = if stopped { Flow::Stop } else { Flow::Continue };
        Engine::step(self, plan, &mut output, &mut |_| flow).unwrap();
        output
    }

    /// Another engine computes the tokens and their bytes are moved.
    fn receive(&mut self, lease: &WriteLease, tokens: &[u32]) {
        let num_blocks = tokens.len().div_ceil(BLOCK);
        let mut source = engine(num_blocks);
        let mut plan = StepPlan::default();
        let blocks: Vec<u32> = (0..num_blocks as u32).collect();
        plan.push(SequenceId(0), 0, tokens, &blocks, &[]);
        Device::step(&mut source, &plan, false);
        for layer in 0..LAYERS {
            for nth in lease.skip()..num_blocks {
                let num_tokens = BLOCK.min(tokens.len() - nth * BLOCK);
                let bytes = source.memory().read(layer, nth as u32, num_tokens).unwrap();
                assert!(self.memory_mut().write(layer, lease.block(nth).unwrap(), &bytes));
            }
        }
    }

    fn next_token(&self, tokens: &[u32], sampling: &RowSampling) -> u32 {
        pseudo_token(tokens, sampling, LAYERS, VOCAB)
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// Prints the seed of a run that fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with seed {}", self.0);
        }
    }
}

fn submit(harness: &mut Harness<TimingEngine>, random: &mut Random, id: u64, prefill: bool) {
    let origin = match prefill {
        true => Origin::Prefill,
        false => [Origin::Local, Origin::Remote][random.below(2) as usize],
    };
    let (start, len) = (random.below(3), 1 + random.below(30));
    let prompt = (0..len).map(|i| ((start * (i / 9) + i * 7) % 50) as u32).collect();
    let new = group(id, 1 + random.below(4), origin, prompt, 1 + random.below(24) as u32);
    let priority = random.below(3) as i32 - 1;
    let new = NewSequence { priority, cache: random.below(4) > 0, ..new };
    match harness.submit(new) {
        Ok(()) | Err(Refusal::TooLarge { .. } | Refusal::QueueFull { .. }) => {}
        Err(other) => panic!("{other}"),
    }
}

fn cancel(harness: &mut Harness<TimingEngine>, nth: usize) {
    let ids: Vec<SequenceId> = harness.streams.keys().copied().collect();
    if !ids.is_empty() {
        harness.cancel(ids[nth % ids.len()]);
    }
}

fn drive(seed: u64) -> (usize, u64) {
    let _seed = Seed(seed);
    let mut random = Random(seed);
    let num_blocks = 6 + random.below(16) as usize;
    let prefill = random.below(4) == 0;
    // In every second run a context is so dear that newcomers are computed layer by layer.
    let dear = StepCost { fixed_s: 1e-3, per_token_s: 1e-5, per_context_token_s: 2e-5 };
    let config = match seed % 2 {
        0 => config(),
        _ => SchedulerConfig { step_cost: Some(dear), max_step_growth: 0.1, num_layers: LAYERS, ..config() },
    };
    let mut harness = Harness::on(engine(num_blocks), config, num_blocks);
    for nth in 0..80 {
        match random.below(12) {
            0..3 => submit(&mut harness, &mut random, nth * 10, prefill),
            3..8 => _ = harness.step(),
            8 => {
                harness.step_with(true, |_| {});
                let at = random.below(100) as usize;
                _ = harness.step_with(false, |harness| cancel(harness, at));
            }
            9 => cancel(&mut harness, random.below(100) as usize),
            10 => harness.deliver(random.below(8) as usize),
            _ => {
                harness.stale.clear();
                harness.reads.clear();
                harness.release_all();
            }
        }
    }
    harness.run_to_end();
    harness.assert_all_as_expected();
    (harness.num_copies, harness.scheduler.num_preemptions())
}

#[test]
fn whatever_is_shared_copied_preempted_and_resumed_the_tokens_are_those_of_an_undisturbed_run() {
    let (mut copies, mut preemptions) = (0, 0);
    for seed in 0..3000 {
        let (more_copies, more_preemptions) = drive(seed);
        (copies, preemptions) = (copies + more_copies, preemptions + more_preemptions);
    }
    assert!(copies > 5000 && preemptions > 200, "{copies} copies, {preemptions} preemptions");
}

#[test]
fn a_copy_that_is_not_done_gives_other_tokens() {
    let mut harness = Harness::on(engine(40), config(), 40);
    let new = NewSequence { stop_tokens: vec![], ..group(1, 2, Origin::Local, (10..20).collect(), 6) };
    harness.submit(new).unwrap();
    while !harness.scheduler.is_empty() {
        let mut plan = harness.scheduler.plan(harness.now).clone();
        plan.copies.clear();
        let output = Device::step(&mut harness.device, &plan, false);
        harness.scheduler.apply(&output, harness.now);
        harness.events();
    }
    let right = |id| {
        let stream = &harness.streams[&SequenceId(id)];
        let sampling = RowSampling { params: stream.new.sampling, sequence: stream.number, position: 0 };
        stream.produced == pseudo_tokens(&stream.new.prompt, &sampling, (LAYERS, VOCAB), 6, &[])
    };
    assert!(
        !right(1) && right(2),
        "the first wrote into a block without the prompt's end, the second had it"
    );
}

/// A step that the roofline's costs bound takes no longer than it said.
#[test]
fn a_roofline_bounds_the_steps_of_a_scheduler() {
    let cost = ROOFLINE.step_cost(&SHAPE);
    // The weights once take 10 ms, a token 2 ms.
    let config = SchedulerConfig { step_cost: Some(cost), max_step_ms: 30.0, ..config() };
    let mut harness = Harness::on(engine(40), config, 40);
    harness.submit(group(1, 2, Origin::Prefill, (10..50).collect(), 6)).unwrap();
    let mut chunks = 0;
    while harness.step() {
        chunks += 1;
        let took = harness.device.last_step_time();
        assert!(took <= Duration::from_millis(30), "{took:?}");
    }
    // Of four blocks in the budget of tokens two fit into the time.
    assert_eq!(chunks, 5);
}
