//! The CUDA engine's own code, from a step plan to logits, on a driver for machines without a card: near the CPU's logits, the same bits
//! however work is cut, and nothing kept.

use std::sync::Arc;

use baton_engine::{
    Arena, CpuEngine, CpuEngineConfig, CudaArena, CudaEngine, CudaEngineConfig, CudaFound, Precision,
    Quantize,
};
use baton_kv::{BlockMemory, BlockOrder, BlockPool, BlockRun, BlockSlice, BlockTable, KvDtype, MemoryError};
use baton_model::Model;
use baton_scheduler::{
    BlockCopy, Engine, Flow, RowSampling, SamplingParams, SequenceId, StepOutput, StepPlan, StepPoint,
};
use baton_tests::Turn;
use baton_tests::fake_cuda::FakeCuda;
use baton_tests::seed::Random;

const NUM_BLOCKS: usize = 48;
const PROMPT: usize = 16 * 11 + 7;

/// The driver, one test at a time: what it counts is then one test's.
fn driver() -> Option<(Turn, FakeCuda)> {
    let turn = Turn::take();
    let fake = FakeCuda::build_or_skip()?.loaded();
    assert!(CudaFound::look().is_usable(), "{}", CudaFound::look());
    Some((turn, fake))
}

fn cuda(kv_dtype: KvDtype) -> (CudaEngine, Arc<CudaArena>) {
    let config = CudaEngineConfig {
        ordinal: 0,
        num_blocks: NUM_BLOCKS,
        block_size: 16,
        kv_dtype,
        quantize: Quantize::None,
        graphs: true,
        max_step_tokens: 256,
    };
    CudaEngine::new(&Model::tiny(), &config).expect("a CUDA engine")
}

/// The engine that rounds as little as can be.
fn reference(kv_dtype: KvDtype) -> (CpuEngine, Arc<Arena>) {
    let config = CpuEngineConfig {
        num_blocks: NUM_BLOCKS,
        kv_dtype,
        precision: Precision::F32,
        ..CpuEngineConfig::default()
    };
    CpuEngine::new(&Model::tiny(), config).expect("a CPU engine")
}

/// Block tables that are not in order, apart from each other.
fn tables(num: usize) -> Vec<BlockTable> {
    let pool = BlockPool::new(NUM_BLOCKS);
    let mut tables: Vec<BlockTable> = (0..num).map(|_| BlockTable::new()).collect();
    for _ in 0..NUM_BLOCKS / num {
        for table in &mut tables {
            table.extend(pool.allocate(1).expect("a block"));
        }
    }
    tables
}

fn run(engine: &mut dyn Engine, plan: &StepPlan) -> StepOutput {
    let mut output = StepOutput::default();
    engine.step(plan, &mut output, &mut |_| Flow::Continue).expect("a step");
    output
}

/// Logits of all tokens, computed in chunks of these lengths.
fn logits(engine: &mut dyn Engine, table: &BlockTable, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
    let (mut all, mut start) = (Vec::new(), 0);
    for chunk in chunks {
        let mut plan = StepPlan::default();
        plan.push_all_logits(SequenceId(1), start, &tokens[start..start + chunk], table.ids());
        all.extend(run(engine, &plan).logits);
        start += chunk;
    }
    assert_eq!(start, tokens.len());
    all
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn farthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn logits_are_near_the_cpus_in_both_types_and_nothing_is_kept() {
    let Some((_turn, fake)) = driver() else { return };
    let before = fake.counts();
    // One prompt, since the bounds below are of what was measured with it.
    let tokens: Vec<u32> = (0..PROMPT as u32).map(|i| 32 + (i * i * 31 + i * 7) % 95).collect();
    let table = &tables(1)[0];
    let want = logits(&mut reference(KvDtype::F32).0, table, &tokens, &[PROMPT]);
    // Logits have a deviation of about 4; bf16 keeps 8 bits of what f16 keeps 11 of.
    for (dtype, bound) in [(KvDtype::F16, F16_BOUND), (KvDtype::BF16, 8.0 * F16_BOUND)] {
        let (mut engine, arena) = cuda(dtype);
        let got = logits(&mut engine, table, &tokens, &[PROMPT]);
        let apart = farthest(&got, &want);
        println!("{dtype}: logits are up to {apart} from f32's");
        assert!(apart > 0.0 && apart < bound, "{dtype}: {apart}");
        drop((engine, arena));
    }
    let after = fake.counts();
    assert_eq!(after.held, before.held, "taken from the driver and not given back");
    assert!(after.num_launches > before.num_launches && after.num_products > before.num_products);
}

/// Largest difference of an f16 logit from f32's.
const F16_BOUND: f32 = 0.15;

#[test]
fn logits_are_the_same_bits_however_the_prompt_is_cut_and_whoever_is_beside_it() {
    let Some((_turn, _fake)) = driver() else { return };
    let mut random = Random::from_env("cuda_cuts");
    let (tokens, other) = (random.tiny_prompt(PROMPT), random.tiny_prompt(90));
    let (mut engine, _arena) = cuda(KvDtype::F16);
    let tables = tables(2);
    let whole = bits(&logits(&mut engine, &tables[0], &tokens, &[PROMPT]));
    for chunks in [vec![128, PROMPT - 128], vec![1, 16, 3, 100, PROMPT - 120], vec![PROMPT - 9, 1, 8]] {
        assert_eq!(bits(&logits(&mut engine, &tables[0], &tokens, &chunks)), whole, "chunks {chunks:?}");
    }
    // The last tokens as a decode row beside a chunk of another prompt, from another place in the batch.
    let mut plan = StepPlan::default();
    plan.push_all_logits(SequenceId(2), 0, &other, tables[1].ids());
    plan.push_all_logits(SequenceId(1), PROMPT - 1, &tokens[PROMPT - 1..], tables[0].ids());
    let beside = bits(&run(&mut engine, &plan).logits);
    let vocab = engine.vocab_size();
    assert_eq!(beside[other.len() * vocab..], whole[(PROMPT - 1) * vocab..]);
}

#[test]
fn greedy_takes_the_largest_logit_and_draws_depend_on_seed_and_position_alone() {
    let Some((_turn, _fake)) = driver() else { return };
    let tokens = Random::from_env("cuda_draws").tiny_prompt(60);
    let (mut engine, _arena) = cuda(KvDtype::F16);
    let table = &tables(1)[0];
    let all = logits(&mut engine, table, &tokens, &[60]);
    let last = &all[all.len() - engine.vocab_size()..];
    let largest = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b])).expect("logits") as u32;
    let hot = |seed| SamplingParams { temperature: 3.0, top_p: 0.95, top_k: 60, min_p: 0.001, seed };
    let sampling = |params, position| RowSampling { params, sequence: 0, position };
    let mut draw = |samplings: &[RowSampling]| -> Vec<(u32, f32)> {
        let mut plan = StepPlan::default();
        plan.push(SequenceId(1), 59, &tokens[59..], table.ids(), samplings);
        let output = run(&mut engine, &plan);
        assert!(
            (0u32..).zip(&output.sampled).all(|(nth, sampled)| sampled.sampling == nth && sampled.row == 0)
        );
        output.sampled.iter().map(|sampled| (sampled.token, sampled.logprob)).collect()
    };
    let many: Vec<_> = (0..100).map(|seed| sampling(hot(seed), 60)).collect();
    let together = draw(&[&[sampling(SamplingParams::GREEDY, 60)][..], &many].concat());
    assert_eq!(together[0].0, largest);
    let sum: f32 = last.iter().map(|logit| (logit - last[largest as usize]).exp()).sum();
    assert!((together[0].1 + sum.ln()).abs() < 1e-3, "{:?} and {}", together[0], -sum.ln());
    assert_eq!(draw(&many[7..9]), together[8..10]);
    let later: Vec<_> = (60..160).map(|position| sampling(hot(3), position)).collect();
    let distinct = |drawn: &[(u32, f32)]| {
        drawn.iter().map(|(token, _)| *token).collect::<std::collections::HashSet<_>>().len()
    };
    let (seeds, positions) = (distinct(&together), distinct(&draw(&later)));
    assert!(seeds > 5 && positions > 5, "{seeds} tokens of 100 seeds, {positions} at 100 positions");
}

#[test]
fn kv_that_arrives_is_read_by_the_next_step_in_raw_and_in_canonical_order() {
    let Some((_turn, _fake)) = driver() else { return };
    let tokens = Random::from_env("cuda_arrival").tiny_prompt(PROMPT + 1);
    let (prompt, next) = tokens.split_at(PROMPT);
    let tables = tables(2);
    let (mut source, from) = cuda(KvDtype::F16);
    let want = [logits(&mut source, &tables[0], prompt, &[PROMPT]), {
        let mut plan = StepPlan::default();
        plan.push_all_logits(SequenceId(1), PROMPT, next, tables[0].ids());
        run(&mut source, &plan).logits
    }]
    .concat();
    let last = want.len() - source.vocab_size()..;
    let (mut cpu, cpu_arena) = reference(KvDtype::F16);
    logits(&mut cpu, &tables[0], prompt, &[PROMPT]);
    let memories: [(&dyn BlockMemory, BlockOrder, f32); 2] =
        [(&*from, BlockOrder::Own, 0.0), (&*cpu_arena, BlockOrder::Canonical, F16_BOUND)];
    for (memory, order, bound) in memories {
        let (mut engine, arena) = cuda(KvDtype::F16);
        copy(memory, &tables[0], order, &*arena, &tables[1]);
        let mut plan = StepPlan::default();
        plan.push_all_logits(SequenceId(1), PROMPT, next, tables[1].ids());
        let apart = farthest(&run(&mut engine, &plan).logits, &want[last.clone()]);
        println!("{order:?}: {apart}");
        assert!(apart <= bound, "{order:?}: {apart}");
    }
}

/// A prompt's KV as the wire carries it.
fn copy(
    from: &dyn BlockMemory,
    theirs: &BlockTable,
    order: BlockOrder,
    to: &dyn BlockMemory,
    ours: &BlockTable,
) {
    let (read, write) = (theirs.read_lease(), ours.write_lease(0).expect("owned blocks"));
    for layer in 0..to.layout().num_layers {
        let mut bytes = Vec::new();
        let run = BlockRun { layer, first: 0, num_blocks: PROMPT / 16 };
        from.read_blocks(&read, run, order, &mut |piece| bytes.extend_from_slice(piece)).expect("blocks");
        for (nth, block) in bytes.chunks_exact(to.layout().block_layer_bytes()).enumerate() {
            to.write(&write, layer, nth, block).expect("written");
        }
        let tail = BlockSlice { layer, nth: PROMPT / 16, num_tokens: PROMPT % 16 };
        let mut bytes = Vec::new();
        from.gather(&read, tail, &mut bytes).expect("a tail");
        to.scatter(&write, tail, &bytes).expect("written");
    }
}

#[test]
fn bytes_come_back_from_the_device_as_they_went_and_leases_are_kept_to() {
    let Some((_turn, _fake)) = driver() else { return };
    let (_engine, arena) = cuda(KvDtype::F16);
    let table = &tables(1)[0];
    let (read, write) = (table.read_lease(), table.write_lease(0).expect("owned blocks"));
    let len = arena.layout().block_layer_bytes();
    let pattern = |seed: usize| (0..len).map(|i| (i * 7 + seed * 13) as u8).collect::<Vec<_>>();
    // More than the ring of slots has.
    for nth in 0..NUM_BLOCKS {
        arena.write(&write, 2, nth, &pattern(nth)).expect("written");
    }
    let all = |num_blocks| {
        let mut bytes = Vec::new();
        let run = BlockRun { layer: 2, first: 0, num_blocks };
        arena
            .read_blocks(&read, run, BlockOrder::Own, &mut |piece| bytes.extend_from_slice(piece))
            .map(|()| bytes)
    };
    assert_eq!(all(NUM_BLOCKS).expect("read"), (0..NUM_BLOCKS).flat_map(pattern).collect::<Vec<_>>());
    // A slice of 5 tokens is the first 5 rows of each head, and changes no other.
    let slice = BlockSlice { layer: 2, nth: 3, num_tokens: 5 };
    let mut tokens = Vec::new();
    arena.gather(&read, slice, &mut tokens).expect("gathered");
    let rows: Vec<u8> = pattern(3).chunks_exact(16 * 32).flat_map(|head| head[..5 * 32].to_vec()).collect();
    assert_eq!(tokens, rows);
    arena.scatter(&write, slice, &vec![9; rows.len()]).expect("scattered");
    let mut changed = pattern(3);
    changed.chunks_exact_mut(16 * 32).for_each(|head| head[..5 * 32].fill(9));
    assert_eq!(all(4).expect("read")[3 * len..], changed);

    assert!(matches!(all(NUM_BLOCKS + 1), Err(MemoryError::OutOfRange { .. })));
    let outside = BlockSlice { layer: 4, nth: 0, num_tokens: 1 };
    assert!(matches!(arena.gather(&read, outside, &mut tokens), Err(MemoryError::OutOfRange { .. })));
    let short = arena.write(&write, 0, 0, &[0; 3]).unwrap_err();
    assert_eq!(short, MemoryError::WrongSize { got: 3, want: len });
    write.fence().close();
    assert_eq!(arena.write(&write, 2, 0, &pattern(9)).unwrap_err(), MemoryError::Fenced);
    assert_eq!(all(1).expect("read"), pattern(0));
}

#[test]
fn layers_end_in_order_a_step_can_be_left_and_copied_blocks_are_the_same() {
    let Some((_turn, _fake)) = driver() else { return };
    let tokens = Random::from_env("cuda_left").tiny_prompt(40);
    let (mut engine, _arena) = cuda(KvDtype::F16);
    let table = &tables(1)[0];
    let mut plan = StepPlan::default();
    plan.push_all_logits(SequenceId(1), 0, &tokens, table.ids());
    let (mut output, mut ends) = (StepOutput::default(), Vec::new());
    engine
        .step(&plan, &mut output, &mut |point| {
            ends.push(point);
            if point == StepPoint::LayerEnd(1) { Flow::Stop } else { Flow::Continue }
        })
        .expect("a step");
    assert!(output.stopped && output.logits.is_empty() && output.sampled.is_empty());
    assert_eq!(ends, [StepPoint::LayerEnd(0), StepPoint::LayerEnd(1)]);
    let whole = bits(&logits(&mut engine, table, &tokens, &[40]));

    // The last token once more, over copies of its blocks: one copied twice over.
    let ids = table.ids();
    let mut plan = StepPlan::default();
    let copies = [(ids[0], ids[20]), (ids[1], ids[19]), (ids[2], ids[30]), (ids[30], ids[31])];
    plan.copies.extend(copies.map(|(from, to)| BlockCopy { from, to }));
    plan.push_all_logits(SequenceId(1), 39, &tokens[39..], &[ids[20], ids[19], ids[31]]);
    let copied = bits(&run(&mut engine, &plan).logits);
    assert_eq!(copied, whole[39 * engine.vocab_size()..]);

    // A plan against the arena's bounds is refused and leaves the engine sound.
    let mut plan = StepPlan::default();
    plan.push_all_logits(SequenceId(1), 0, &[1], &[NUM_BLOCKS as u32]);
    let mut output = StepOutput::default();
    let error = engine.step(&plan, &mut output, &mut |_| Flow::Continue).unwrap_err();
    assert!(error.to_string().contains("step plan refused"), "{error}");
    assert_eq!(bits(&logits(&mut engine, table, &tokens, &[40])), whole);
}

#[test]
fn a_device_that_is_not_there_or_has_too_little_memory_is_one_line() {
    let Some((_turn, fake)) = driver() else { return };
    let before = fake.counts();
    let config = CudaEngineConfig {
        ordinal: 7,
        num_blocks: 1,
        block_size: 16,
        kv_dtype: KvDtype::F16,
        quantize: Quantize::None,
        graphs: true,
        max_step_tokens: 64,
    };
    let error = CudaEngine::new(&Model::tiny(), &config).err().expect("refused").to_string();
    assert!(error.contains("no cuda:7") && !error.contains('\n'), "{error}");
    let huge = CudaEngineConfig { ordinal: 0, num_blocks: 1 << 20, ..config };
    let error = CudaEngine::new(&Model::tiny(), &huge).err().expect("refused").to_string();
    assert!(error.contains("8589934592 bytes") && error.contains("out of memory"), "{error}");
    assert_eq!(fake.counts().held, before.held, "what was taken before the failure is given back");
}
