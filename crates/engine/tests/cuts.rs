//! The same bits however the work is cut: chunk sizes, company in the batch, threads, block tables, prefill or
//! decode rows, for every instruction set, both precisions and every element type of KV. Memory that no token has written is NaN.

mod support;

use std::collections::HashSet;
use std::sync::Arc;

use baton_engine::{CpuEngineConfig, Isa, Precision};
use baton_kv::{BlockMemory, BlockPool, BlockTable, KvDtype};
use baton_model::{ModelConfig, WeightType};
use baton_scheduler::{BlockCopy, Engine, EngineError, Flow, RowSampling, SamplingParams, StepPoint};
use support::random_model::{RandomModel, config};
use support::{Logits, Random, Rig, Sequence, bits, default_model_or_skip, greedy};

/// Crosses two softmax tiles and ends inside a block.
const LENGTH: usize = 553;

fn model() -> RandomModel {
    let shape = ModelConfig { num_layers: 2, ..config(WeightType::Q4_1) };
    RandomModel::new(21, shape, WeightType::Q4_1)
}

/// Fills every block with NaN and hands them out in another order.
fn poison(rig: &mut Rig, seed: u64) {
    let mut table = BlockTable::new();
    let num_blocks = rig.free.len();
    table.extend(BlockPool::new(num_blocks).allocate(num_blocks).unwrap());
    let lease = table.write_lease(0).unwrap();
    // All ones are a NaN in every type, in fp8 by its scale.
    let nan = vec![0xff; rig.arena.layout().block_layer_bytes()];
    for layer in 0..rig.arena.layout().num_layers {
        for nth in 0..num_blocks {
            rig.arena.write(&lease, layer, nth, &nan).unwrap();
        }
    }
    Random(seed).shuffle(&mut rig.free);
}

const PRECISIONS: [Precision; 2] = [Precision::Int8, Precision::F32];

fn engine(isa: Isa, precision: Precision) -> CpuEngineConfig {
    let num_blocks = 3 * LENGTH.div_ceil(16) + 8;
    let isa = Some(isa);
    CpuEngineConfig { num_blocks, precision, isa, max_step_tokens: 600, ..CpuEngineConfig::default() }
}

fn rig(model: &RandomModel, engine: CpuEngineConfig) -> Rig {
    let seed = engine.num_threads as u64;
    let mut rig = Rig::new(model, engine);
    poison(&mut rig, seed);
    rig
}

/// The best instruction set in the default precision.
fn best(num_threads: usize) -> CpuEngineConfig {
    CpuEngineConfig { num_threads, ..engine(Isa::available()[0], Precision::Auto) }
}

/// Logits of the test prompt with other prompts beside it in the same steps: chunks of random sizes.
fn in_company(rig: &mut Rig, tokens: &[u32], vocab: usize, random: &mut Random) -> Vec<f32> {
    let mut own = rig.sequence(tokens.len());
    let mut others: Vec<_> = (0..2).map(|_| rig.sequence(tokens.len())).collect();
    let mut all = Vec::new();
    while own.done < tokens.len() {
        let chunk = [1, 2, 5, 13, 40][random.below(5)].min(tokens.len() - own.done);
        let mut before = 0;
        for (n, other) in others.iter_mut().enumerate() {
            let company = (1 + random.below(9)).min(tokens.len() - other.done);
            if company > 0 {
                let tokens = random.tokens(company, vocab);
                let wanted = [Logits::None, greedy(other.done + company), Logits::All][random.below(3)];
                rig.add(other, &tokens, wanted);
                before += if n == 0 && wanted == Logits::All { company * vocab } else { 0 };
            }
            if n == 0 {
                let chunk = &tokens[own.done..own.done + chunk];
                rig.add(&mut own, chunk, Logits::All);
            }
        }
        rig.step();
        all.extend_from_slice(&rig.output.logits[before..before + chunk * vocab]);
    }
    others.into_iter().chain([own]).for_each(|s| rig.release(s));
    all
}

#[test]
fn logits_are_the_same_bits_however_the_work_is_cut() {
    for isa in Isa::available() {
        // Products know nothing of KV's type: each is met once.
        cut_in_every_way(engine(isa, Precision::F32));
        for kv_dtype in KvDtype::ALL {
            cut_in_every_way(CpuEngineConfig { kv_dtype, ..engine(isa, Precision::Int8) });
        }
    }
}

fn cut_in_every_way(engine: CpuEngineConfig) {
    let model = model();
    let vocab = model.config.vocab;
    let tokens = Random(22).tokens(LENGTH, vocab);
    let what = format!("{:?}, {:?}, {}", engine.isa, engine.precision, engine.kv_dtype);
    let mut want = None;
    for num_threads in [1, 2, 3] {
        let mut rig = rig(&model, CpuEngineConfig { num_threads, ..engine.clone() });
        for chunk in [512, 64, 16, 3, 1] {
            let mut sequence = rig.sequence(LENGTH);
            let got = bits(&rig.logits(&mut sequence, &tokens, chunk));
            rig.release(sequence);
            let want = want.get_or_insert_with(|| got.clone());
            assert!(*want == got, "{what}, {num_threads} threads, chunks of {chunk}");
        }
        let seed = 100 + num_threads as u64;
        let got = bits(&in_company(&mut rig, &tokens, vocab, &mut Random(seed)));
        assert!(want.as_ref() == Some(&got), "{what}, in company, seed {seed}");
    }
}

/// A prefix whose blocks another sequence computed, as a prefix cache hands them out, against one computed by the sequence itself.
#[test]
fn a_cached_prefix_gives_the_bits_of_a_computed_one() {
    let model = model();
    let tokens = Random(29).tokens(LENGTH, model.config.vocab);
    for isa in Isa::available() {
        for (kv_dtype, num_threads) in KvDtype::ALL.into_iter().zip([1, 2, 3, 2]) {
            let engine = CpuEngineConfig { kv_dtype, num_threads, ..engine(isa, Precision::Int8) };
            let mut rig = rig(&model, engine);
            let mut first = rig.sequence(LENGTH);
            let want = bits(&rig.logits(&mut first, &tokens, 77));
            for (num_cached, chunk) in [(1, 512), (16, 50), (17, 1), (LENGTH / 16, 4)] {
                let mut second = rig.sequence(LENGTH);
                let own = second.blocks[..num_cached].to_vec();
                second.blocks[..num_cached].copy_from_slice(&first.blocks[..num_cached]);
                second.done = num_cached * 16;
                let got = bits(&rig.logits(&mut second, &tokens[num_cached * 16..], chunk));
                let rest = num_cached * 16 * model.config.vocab;
                assert!(want[rest..] == got, "{isa:?}, {kv_dtype}: {num_cached} blocks cached");
                second.blocks[..num_cached].copy_from_slice(&own);
                rig.release(second);
            }
        }
    }
}

/// Not a rule, but it holds and makes fleets of mixed machines exact: one table of kernels differs from another only
/// where the numerics id says so.
#[test]
fn instruction_sets_of_one_numerics_id_agree() {
    let model = model();
    let tokens = Random(23).tokens(300, model.config.vocab);
    let mut seen: Vec<(String, Isa, Vec<u32>)> = Vec::new();
    let every = Isa::available().into_iter().flat_map(|isa| PRECISIONS.map(|precision| (isa, precision)));
    for (isa, precision) in every {
        let mut rig = rig(&model, engine(isa, precision));
        let mut sequence = rig.sequence(LENGTH);
        let got = bits(&rig.logits(&mut sequence, &tokens, 100));
        let id = rig.engine.layout().numerics_id.clone();
        if let Some((_, other, want)) = seen.iter().find(|(seen, ..)| *seen == id) {
            assert!(*want == got, "{isa:?} and {other:?} are both {id}");
        }
        seen.push((id, isa, got));
    }
    let precisions: HashSet<_> = seen.iter().map(|(_, _, got)| got).collect();
    assert!(precisions.len() >= 2, "int8 is another arithmetic than f32");
}

#[test]
fn a_step_left_after_a_layer_leaves_no_trace() {
    let model = model();
    let tokens = Random(24).tokens(70, model.config.vocab);
    let mut rig = rig(&model, best(2));
    let mut sequence = rig.sequence(LENGTH);
    let want = bits(&rig.logits(&mut sequence, &tokens, 512));
    rig.release(sequence);

    let mut sequence = rig.sequence(LENGTH);
    rig.logits(&mut sequence, &tokens[..30], 512);
    let mut layers = Vec::new();
    rig.add(&mut sequence, &tokens[30..], Logits::All);
    let Rig { engine, plan, output, .. } = &mut rig;
    engine
        .step(plan, output, &mut |point| match point {
            StepPoint::LayerEnd(layer) => {
                layers.push(layer);
                Flow::Stop
            }
            StepPoint::Within => Flow::Continue,
        })
        .unwrap();
    assert!(output.stopped && output.logits.is_empty() && output.sampled.is_empty());
    assert_eq!(layers, [0], "no layer after the stop");
    plan.clear();
    sequence.done = 30;
    let got = bits(&rig.logits(&mut sequence, &tokens[30..], 512));
    assert!(!rig.output.stopped);
    assert!(want[30 * model.config.vocab..] == got[..]);
}

/// Computes `tokens` after those that are done and leaves the step at its `nth` point. Returns how many points there were.
fn leave_at(rig: &mut Rig, sequence: &mut Sequence, tokens: &[u32], nth: usize) -> usize {
    let done = sequence.done;
    rig.add(sequence, tokens, Logits::None);
    sequence.done = done;
    let Rig { engine, plan, output, .. } = rig;
    let mut num_points = 0;
    let mut on_point = |_| {
        num_points += 1;
        if num_points > nth { Flow::Stop } else { Flow::Continue }
    };
    engine.step(plan, output, &mut on_point).unwrap();
    plan.clear();
    num_points
}

/// Leaves a step over the last of `tokens`, all but `num_done`, at many of its points; each time nothing else was written, and in the end its
/// logits are those of a step that was never left. Returns how many points there are.
fn left_anywhere(
    model: &RandomModel,
    config: CpuEngineConfig,
    tokens: &[u32],
    (num_done, every): (usize, usize),
) -> usize {
    let what = format!("{:?}, {} threads", config.isa, config.num_threads);
    let num_blocks = config.num_blocks;
    let mut rig = rig(model, config);
    let mut sequence = rig.sequence(tokens.len());
    let (done, rest) = tokens.split_at(num_done);
    rig.logits(&mut sequence, done, 512);
    let num_points = leave_at(&mut rig, &mut sequence, rest, usize::MAX);
    assert!(!rig.output.stopped, "{what}");
    // What the steps below leave half done was computed before: they may only write the same again.
    let mut table = BlockTable::new();
    table.extend(BlockPool::new(num_blocks).allocate(num_blocks).unwrap());
    let lease = table.read_lease();
    let arena = Arc::clone(&rig.arena);
    let memory = || {
        (0..2 * num_blocks).map(|n| arena.read(&lease, n % 2, n / 2).unwrap().to_vec()).collect::<Vec<_>>()
    };
    let whole = memory();
    for nth in (0..num_points).step_by(every) {
        let seen = leave_at(&mut rig, &mut sequence, rest, nth);
        assert_eq!((seen, rig.output.stopped), (nth + 1, true), "{what}");
        assert!(whole == memory(), "{what}: left at {nth}");
    }
    let got = bits(&rig.logits(&mut sequence, rest, 512));
    let mut other = rig.sequence(tokens.len());
    let want = bits(&rig.logits(&mut other, tokens, 512));
    assert!(want[num_done * model.config.vocab..] == got[..], "{what}");
    num_points
}

#[test]
fn a_step_left_anywhere_within_a_layer_is_left_at_once_and_leaves_no_trace() {
    let model = model();
    let tokens = Random(27).tokens(LENGTH, model.config.vocab);
    for (isa, num_threads) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
        let config = CpuEngineConfig { num_threads, ..engine(isa, Precision::Auto) };
        let num_points = left_anywhere(&model, config, &tokens, (30, 17));
        assert!(num_points > 100, "{isa:?}: {num_points} points");
    }
}

#[test]
fn attention_over_a_long_context_is_left_within() {
    let model = model();
    let tokens = Random(28).tokens(1100, model.config.vocab);
    for isa in Isa::available() {
        let num_points = |num_done: usize| {
            let config = CpuEngineConfig { num_blocks: 150, num_threads: 2, ..engine(isa, Precision::Auto) };
            left_anywhere(&model, config, &tokens[..num_done + 9], (num_done, 5))
        };
        // Attention of the same rows is looked into at 1,024 tokens of context.
        let (short, long) = (num_points(900), num_points(1091));
        assert!(long > short, "{isa:?}: {short}, {long} points");
    }
}

#[test]
fn tokens_drawn_from_one_row_are_those_of_rows_of_their_own() {
    let model = model();
    let tokens = Random(26).tokens(20, model.config.vocab);
    let mut rig = rig(&model, best(2));
    let params = SamplingParams { temperature: 100.0, seed: 5, ..SamplingParams::GREEDY };
    let sampling = |sequence| RowSampling { params, sequence, position: 20 };
    let mut alone = Vec::new();
    for n in 0..4 {
        let mut sequence = rig.sequence(LENGTH);
        rig.add(&mut sequence, &tokens, Logits::Last(sampling(n)));
        rig.step();
        alone.extend(rig.output.sampled.iter().map(|s| (s.token, s.logprob.to_bits())));
        rig.release(sequence);
    }
    // Beside another row, and more draws than the step has tokens.
    let (mut other, sequence) = (rig.sequence(LENGTH), rig.sequence(LENGTH));
    rig.add(&mut other, &tokens[..3], greedy(3));
    let samplings: Vec<_> = (0..700).map(sampling).collect();
    rig.plan.push(baton_scheduler::SequenceId(99), 0, &tokens, &sequence.blocks, &samplings);
    rig.step();
    let sampled = &rig.output.sampled;
    assert_eq!(sampled.len(), 701);
    assert!(sampled.iter().enumerate().all(|(n, s)| s.row == u32::from(n > 0) && s.sampling == n as u32));
    let together: Vec<_> = sampled[1..5].iter().map(|s| (s.token, s.logprob.to_bits())).collect();
    assert_eq!(together, alone);
    assert!(sampled[1..].iter().map(|s| s.token).collect::<HashSet<_>>().len() > 1, "they differ");
}

#[test]
fn on_layer_is_called_once_for_each_layer_with_its_kv_complete() {
    let model = model();
    let tokens = Random(25).tokens(40, model.config.vocab);
    let mut rig = rig(&model, best(2));
    let mut table = BlockTable::new();
    table.extend(BlockPool::new(3).allocate(3).unwrap());
    let lease = table.read_lease();
    rig.plan.push(baton_scheduler::SequenceId(1), 0, &tokens, table.ids(), &[]);
    let Rig { engine, plan, output, arena, .. } = &mut rig;
    let copy = |layer| (0..3).map(|nth| arena.read(&lease, layer, nth).unwrap().to_vec()).collect::<Vec<_>>();
    let mut seen = Vec::new();
    engine
        .step(plan, output, &mut |point| {
            if let StepPoint::LayerEnd(layer) = point {
                seen.push((layer, copy(layer)));
            }
            Flow::Continue
        })
        .unwrap();
    assert_eq!(seen.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(), [0, 1]);
    for (layer, blocks) in &seen {
        assert!(*blocks == copy(*layer), "layer {layer} changed after it was announced");
    }
    assert_eq!(output.sampled.len(), 0);
}

#[test]
fn a_copied_block_serves_as_the_one_it_was_copied_from() {
    let model = model();
    let tokens = Random(26).tokens(40, model.config.vocab);
    let mut rig = rig(&model, best(1));
    let mut sequence = rig.sequence(LENGTH);
    rig.logits(&mut sequence, &tokens[..35], 512);
    let mut fork = rig.sequence(LENGTH);
    (fork.blocks[0], fork.blocks[1], fork.done) = (sequence.blocks[0], sequence.blocks[1], 35);
    let want = bits(&rig.logits(&mut sequence, &tokens[35..], 512));
    // The fork's first write goes to a copy of the shared, partly filled block.
    rig.plan.copies.push(BlockCopy { from: sequence.blocks[2], to: fork.blocks[2] });
    let got = bits(&rig.logits(&mut fork, &tokens[35..], 512));
    assert!(want == got);
}

#[test]
fn a_nan_in_kv_is_fatal_and_names_itself() {
    let model = model();
    let mut rig = rig(&model, best(1));
    let mut sequence = rig.sequence(LENGTH);
    // Position 5 of a sequence whose first five tokens were never written: poison.
    sequence.done = 5;
    rig.add(&mut sequence, &[1], greedy(6));
    let Rig { engine, plan, output, .. } = &mut rig;
    let error = engine.step(plan, output, &mut |_| Flow::Continue).unwrap_err();
    assert_eq!(error, EngineError::Fatal("logits are not finite".to_owned()));
}

/// The real model with f16 KV, as served: 512 tokens at once on two threads against pieces on one.
#[test]
fn the_default_model_gives_the_same_bits_in_pieces() {
    let Some(model) = default_model_or_skip("cuts of the default model") else { return };
    let tokens = Random(27).tokens(300, model.config.vocab);
    let engine = |num_threads| CpuEngineConfig { num_blocks: 40, num_threads, ..CpuEngineConfig::default() };
    let mut rig = Rig::new(&model, engine(2));
    let mut sequence = rig.sequence(310);
    let mut want = vec![rig.prefill(&mut sequence, &tokens, 512)];
    for _ in 0..8 {
        let next = want.last().unwrap().token;
        want.push(rig.prefill(&mut sequence, &[next], 1));
    }
    let mut rig = Rig::new(&model, engine(1));
    let mut sequence = rig.sequence(310);
    let mut got = vec![rig.prefill(&mut sequence, &tokens, 37)];
    let generated: Vec<u32> = want.iter().map(|s| s.token).collect();
    for n in 1..=8 {
        // As after a preemption: the tokens so far come again as one prompt.
        sequence.done = 290;
        let again = [&tokens[290..], &generated[..n]].concat();
        got.push(rig.prefill(&mut sequence, &again, 16));
    }
    assert_eq!(got, want);
}
