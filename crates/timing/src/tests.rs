use std::time::Duration;

use baton_scheduler::{
    Engine, EngineError, Flow, RowSampling, SamplingParams, SequenceId, StepCost, StepOutput, StepPlan,
};

use crate::hash::{EMPTY, draw, embed, kv, mix};
use crate::{ModelShape, Roofline, StepWork, TimingConfig, TimingEngine, pseudo_token, pseudo_tokens};

const SHAPE: ModelShape =
    ModelShape { num_params: 1e8, weight_bytes: 2.0, num_layers: 30, hidden: 576, kv_token_bytes: 23_040 };
const ROOFLINE: Roofline =
    Roofline { flops_per_s: 1e11, bytes_per_s: 2e10, overhead: Duration::from_micros(100) };
const LAYERS: usize = 2;
const VOCAB: u32 = 1_000;

const ENGINE: TimingConfig = TimingConfig {
    roofline: ROOFLINE,
    shape: SHAPE,
    num_blocks: 32,
    block_size: 4,
    num_layers: LAYERS,
    vocab: VOCAB,
    max_step_tokens: 64,
};

fn engine() -> TimingEngine {
    TimingEngine::new(ENGINE)
}

fn sampling(position: usize) -> RowSampling {
    RowSampling {
        params: SamplingParams { seed: 9, ..SamplingParams::GREEDY },
        sequence: 0,
        position: position as u32,
    }
}

/// Computes `tokens[from..]` in one row and samples.
fn row(engine: &mut TimingEngine, tokens: &[u32], from: usize, blocks: &[u32]) -> u32 {
    let mut plan = StepPlan::default();
    plan.push(SequenceId(1), from, &tokens[from..], blocks, &[sampling(tokens.len())]);
    let mut output = StepOutput::default();
    engine.step(&plan, &mut output, &mut |_| Flow::Continue).unwrap();
    output.sampled[0].token
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|i| i * 7 % 50).collect()
}

#[test]
fn tokens_do_not_depend_on_chunks_or_blocks_but_on_every_token() {
    let tokens = prompt(19);
    let whole = row(&mut engine(), &tokens, 0, &[0, 1, 2, 3, 4]);
    assert_eq!(whole, pseudo_token(&tokens, &sampling(19), LAYERS, VOCAB));
    for cut in 1..19 {
        let mut engine = engine();
        row(&mut engine, &tokens[..cut], 0, &[9, 3, 5, 0, 7]);
        assert_eq!(row(&mut engine, &tokens, cut, &[9, 3, 5, 0, 7]), whole, "cut at {cut}");
    }
    for changed in 0..19 {
        let mut other = tokens.clone();
        other[changed] += 1;
        assert_ne!(row(&mut engine(), &other, 0, &[0, 1, 2, 3, 4]), whole, "token {changed}");
    }
}

#[test]
fn a_wrong_block_or_one_changed_slot_gives_another_token() {
    let tokens = prompt(19);
    let blocks = [9, 3, 5, 0, 7];
    let mut engine = engine();
    row(&mut engine, &tokens[..18], 0, &blocks);
    let right = row(&mut engine, &tokens, 18, &blocks);
    assert_ne!(row(&mut engine, &tokens, 18, &[9, 5, 3, 0, 7]), right, "two blocks swapped");
    for layer in 0..LAYERS {
        for position in 0..18 {
            let slot = &mut engine.memory_mut().block_mut(layer, blocks[position / 4]).unwrap()[position % 4];
            *slot ^= 1;
            assert_ne!(row(&mut engine, &tokens, 18, &blocks), right, "layer {layer}, position {position}");
            engine.memory_mut().block_mut(layer, blocks[position / 4]).unwrap()[position % 4] ^= 1;
        }
    }
    assert_eq!(row(&mut engine, &tokens, 18, &blocks), right);
}

#[test]
fn moved_kv_gives_the_same_token_elsewhere() {
    let tokens = prompt(10);
    let (mut from, mut to) = (engine(), engine());
    row(&mut from, &tokens, 0, &[4, 5, 6]);
    for layer in 0..LAYERS {
        for (source, destination, num) in [(4, 20, 4), (5, 10, 4), (6, 0, 2)] {
            let bytes = from.memory().read(layer, source, num).unwrap();
            assert!(to.memory_mut().write(layer, destination, &bytes));
        }
    }
    let mut more = tokens.clone();
    more.push(3);
    assert_eq!(row(&mut to, &more, 10, &[20, 10, 0]), row(&mut from, &more, 10, &[4, 5, 6]));
    assert!(!to.memory_mut().write(0, 99, &[0; 8]) && !to.memory_mut().write(0, 1, &[0; 7]));
}

#[test]
fn an_undisturbed_run_stops_at_a_stop_token_and_can_be_resumed_anywhere() {
    let prompt = prompt(5);
    let all = pseudo_tokens(&prompt, &sampling(0), (LAYERS, VOCAB), 20, &[]);
    assert_eq!(all.len(), 20);
    let until = pseudo_tokens(&prompt, &sampling(0), (LAYERS, VOCAB), 20, &[all[7]]);
    assert_eq!(until, all[..8]);
    let forced = [prompt.as_slice(), &all[..6]].concat();
    assert_eq!(pseudo_tokens(&forced, &sampling(0), (LAYERS, VOCAB), 14, &[]), all[6..]);
}

/// The definition, layer by layer over all positions at once.
fn by_layers(tokens: &[u32], sampling: &RowSampling, num_layers: usize, vocab: u32) -> u32 {
    let mut hidden: Vec<u64> = tokens.iter().map(|token| embed(*token)).collect();
    for layer in 0..num_layers {
        let mut attended = EMPTY;
        for (position, hidden) in hidden.iter_mut().enumerate() {
            attended = mix(attended, kv(layer, position, *hidden));
            *hidden = mix(*hidden, attended);
        }
    }
    draw(*hidden.last().unwrap(), sampling, vocab)
}

#[test]
fn an_undisturbed_run_is_what_each_token_computed_from_all_before_it_gives() {
    let mut state = 1;
    let mut below = |n: u64| {
        state = mix(state, 1);
        state % n
    };
    for _ in 0..200 {
        let (num_layers, vocab) = (below(5) as usize, 1 + below(2_000) as u32);
        let prompt: Vec<u32> = (0..1 + below(40)).map(|_| below(2_000) as u32).collect();
        let params = SamplingParams { seed: below(1_000), ..SamplingParams::GREEDY };
        let sampling = RowSampling { params, sequence: below(16) as u32, position: 0 };
        let mut tokens = prompt.clone();
        for _ in 0..30 {
            let sampling = RowSampling { position: tokens.len() as u32, ..sampling };
            let token = by_layers(&tokens, &sampling, num_layers, vocab);
            assert_eq!(pseudo_token(&tokens, &sampling, num_layers, vocab), token);
            tokens.push(token);
        }
        let run = pseudo_tokens(&prompt, &sampling, (num_layers, vocab), 30, &[]);
        assert_eq!(run, tokens[prompt.len()..], "{num_layers} layers, {} of prompt", prompt.len());
    }
}

#[test]
fn a_stopped_step_samples_nothing_and_a_bad_plan_is_refused() {
    let mut engine = engine();
    let mut plan = StepPlan::default();
    plan.push(SequenceId(1), 0, &[1, 2], &[0], &[sampling(2)]);
    let mut output = StepOutput::default();
    engine.step(&plan, &mut output, &mut |_| Flow::Stop).unwrap();
    assert!(output.stopped && output.sampled.is_empty());
    for (position, block) in [(3, 0), (0, 32)] {
        let mut plan = StepPlan::default();
        plan.push(SequenceId(1), position, &[1, 2], &[block], &[]);
        let outcome = engine.step(&plan, &mut output, &mut |_| Flow::Continue);
        assert!(matches!(outcome, Err(EngineError::BadPlan(_))), "{position} {block}");
    }
}

#[test]
fn decode_is_bound_by_memory_and_prefill_by_compute() {
    let one = StepWork { num_tokens: 1, num_attended: 100, num_context: 100 };
    // 1e8 weights of 2 bytes at 2e10 bytes/s: 10 ms, and 100 tokens of 23,040 bytes: 0.1152 ms.
    assert_eq!(ROOFLINE.step_time(&SHAPE, &one), Duration::from_nanos(10_215_200));
    let many = StepWork { num_tokens: 512, num_attended: 0, num_context: 0 };
    // 2 * 1e8 * 512 operations at 1e11 a second: 1.024 s.
    assert_eq!(ROOFLINE.step_time(&SHAPE, &many), Duration::from_micros(1_024_100));
    let mut engine = engine();
    row(&mut engine, &prompt(19), 0, &[0, 1, 2, 3, 4]);
    let work = StepWork { num_tokens: 19, num_attended: 190, num_context: 19 };
    assert_eq!(engine.last_step_time(), ROOFLINE.step_time(&SHAPE, &work));
}

#[test]
fn measured_costs_take_the_rooflines_place() {
    let mut engine = engine();
    engine.set_step_cost(StepCost { fixed_s: 1.0, per_token_s: 0.5, per_context_token_s: 0.25 });
    row(&mut engine, &prompt(3), 0, &[0]);
    // Three tokens, which attend over 1 + 2 + 3.
    assert_eq!(engine.last_step_time(), Duration::from_secs(4));
}

#[test]
fn without_layers_a_token_is_a_function_of_its_place_and_the_one_before() {
    let engine = || TimingEngine::new(TimingConfig { num_layers: 0, ..ENGINE });
    let tokens = prompt(9);
    let drawn = row(&mut engine(), &tokens, 0, &[0, 1, 2]);
    assert_eq!(drawn, pseudo_token(&tokens, &sampling(9), 0, VOCAB));
    let mut others = tokens.clone();
    others[0] += 1;
    assert_eq!(row(&mut engine(), &others, 0, &[7, 5, 3]), drawn);
}
