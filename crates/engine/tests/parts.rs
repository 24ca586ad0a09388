//! A row computed a few layers a step gives the bits of one computed at once, whatever is beside it in each of those steps, for
//! every instruction set, both precisions and every element type of KV.

mod support;

use baton_engine::{CpuEngineConfig, Isa, Precision};
use baton_kv::KvDtype;
use baton_model::{ModelConfig, WeightType};
use baton_scheduler::{Engine, EngineError, Flow, RowPart, StepPoint};
use support::random_model::{RandomModel, config};
use support::{Logits, Random, Rig, Sequence, bits};

const LAYERS: usize = 5;
const PROMPT: usize = 300;
const DECODED: usize = 8;

fn model() -> RandomModel {
    let shape = ModelConfig { num_layers: LAYERS, ..config(WeightType::Q4_1) };
    RandomModel::new(31, shape, WeightType::Q4_1)
}

fn engine(isa: Isa, num_threads: usize) -> CpuEngineConfig {
    let num_blocks = 4 * (PROMPT + DECODED).div_ceil(16) + 8;
    CpuEngineConfig {
        num_blocks,
        num_threads,
        isa: Some(isa),
        max_step_tokens: 64,
        ..CpuEngineConfig::default()
    }
}

/// Adds a part of the row of one token that follows the sequence, with its logits when it is done.
fn add_part(rig: &mut Rig, sequence: &mut Sequence, token: u32, layers: std::ops::Range<usize>) {
    let part = RowPart { layers, num_layers: LAYERS };
    let (is_last, done) = (part.is_last(), sequence.done);
    rig.add(sequence, &[token], if is_last { Logits::All } else { Logits::None });
    rig.plan.part = Some(part);
    sequence.done = if is_last { done + 1 } else { done };
}

/// Logits of the decoded tokens: each in parts of random sizes, beside others that come and go.
fn in_parts(rig: &mut Rig, tokens: &[u32], random: &mut Random, vocab: usize) -> Vec<f32> {
    let mut own = rig.sequence(tokens.len());
    rig.prefill(&mut own, &tokens[..PROMPT], 50);
    let mut others: Vec<_> = (0..3).map(|_| rig.sequence(tokens.len())).collect();
    let mut all = Vec::new();
    for &token in &tokens[PROMPT..] {
        let mut from = 0;
        while from < LAYERS {
            for other in &mut others {
                let num = [0, 1, 1, 2, 7][random.below(5)].min(tokens.len() - other.done);
                if num > 0 {
                    rig.add(other, &random.tokens(num, vocab), Logits::None);
                }
            }
            // Now and then it does not take part at all.
            if rig.plan.is_empty() || random.below(4) > 0 {
                let to = from + 1 + random.below(LAYERS - from);
                add_part(rig, &mut own, token, from..to);
                from = to;
            }
            rig.step();
        }
        all.extend_from_slice(&rig.output.logits);
    }
    others.into_iter().chain([own]).for_each(|sequence| rig.release(sequence));
    all
}

#[test]
fn a_row_in_parts_has_the_bits_of_a_whole_one() {
    let model = model();
    let vocab = model.config.vocab;
    let tokens = Random(32).tokens(PROMPT + DECODED, vocab);
    for isa in Isa::available() {
        let precisions = [Precision::Int8, Precision::F32].into_iter().map(|p| (p, KvDtype::F16));
        let types = KvDtype::ALL.into_iter().map(|kv_dtype| (Precision::Int8, kv_dtype));
        for (precision, kv_dtype) in precisions.chain(types) {
            let mut want = None;
            for num_threads in [1, 2, 3] {
                let what = format!("{isa:?}, {precision:?}, {kv_dtype}, {num_threads} threads");
                let engine = CpuEngineConfig { precision, kv_dtype, ..engine(isa, num_threads) };
                let mut rig = Rig::new(&model, engine);
                let mut whole = rig.sequence(tokens.len());
                let got = rig.logits(&mut whole, &tokens, 50);
                rig.release(whole);
                let want = want.get_or_insert_with(|| bits(&got[PROMPT * vocab..]));
                let seed = 300 + num_threads as u64;
                let got = bits(&in_parts(&mut rig, &tokens, &mut Random(seed), vocab));
                assert!(*want == got, "{what}, seed {seed}");
            }
        }
    }
}

#[test]
fn a_step_that_is_left_changes_nothing_of_a_row_in_parts() {
    let model = model();
    let tokens = Random(33).tokens(PROMPT + 1, model.config.vocab);
    let mut rig = Rig::new(&model, engine(Isa::available()[0], 2));
    let mut whole = rig.sequence(tokens.len());
    let want = rig.logits(&mut whole, &tokens, 50);
    let want = bits(&want[PROMPT * model.config.vocab..]);
    rig.release(whole);
    let mut own = rig.sequence(tokens.len());
    rig.prefill(&mut own, &tokens[..PROMPT], 50);
    add_part(&mut rig, &mut own, tokens[PROMPT], 0..2);
    rig.step();
    // It stops within the part, and after it.
    for (layers, stop_at) in [(2..4, 2), (2..3, 4), (2..5, 4)] {
        add_part(&mut rig, &mut own, tokens[PROMPT], layers);
        own.done = PROMPT;
        let stop =
            &mut |point| if point == StepPoint::LayerEnd(stop_at) { Flow::Stop } else { Flow::Continue };
        rig.engine.step(&rig.plan, &mut rig.output, stop).unwrap();
        assert!(rig.output.stopped);
        rig.plan.clear();
    }
    add_part(&mut rig, &mut own, tokens[PROMPT], 2..5);
    rig.step();
    assert!(want == bits(&rig.output.logits));
}

#[test]
fn a_part_that_contradicts_the_plan_or_what_was_left_off_is_refused() {
    let model = model();
    let mut rig = Rig::new(&model, engine(Isa::available()[0], 1));
    assert!(rig.engine.splits_rows());
    let mut own = rig.sequence(PROMPT + 2);
    let tokens = Random(34).tokens(PROMPT, model.config.vocab);
    rig.prefill(&mut own, &tokens, 50);
    let refused = |rig: &mut Rig, why: &str| {
        let refusal = rig.engine.step(&rig.plan, &mut rig.output, &mut |_| Flow::Continue);
        let Err(EngineError::BadPlan(reason)) = refusal else { panic!("{why}: {refusal:?}") };
        assert!(reason.contains(why), "{reason}");
        rig.plan.clear();
    };
    let mut part = |rig: &mut Rig, layers: std::ops::Range<usize>| {
        add_part(rig, &mut own, 1, layers);
        own.done = PROMPT;
    };
    part(&mut rig, 2..3);
    refused(&mut rig, "was not left there");
    part(&mut rig, 0..2);
    rig.step();
    part(&mut rig, 3..5);
    refused(&mut rig, "go on at layer 3");
    part(&mut rig, 2..2);
    refused(&mut rig, "layers 2..2 of 5");
    part(&mut rig, 2..6);
    refused(&mut rig, "layers 2..6 of 5");
    part(&mut rig, 2..4);
    rig.plan.part = Some(RowPart { layers: 2..4, num_layers: 4 });
    refused(&mut rig, "the model has 5");
    // Logits before the end, two tokens, no row.
    rig.add(&mut own, &[1], Logits::All);
    rig.plan.part = Some(RowPart { layers: 2..4, num_layers: LAYERS });
    refused(&mut rig, "logits are wanted");
    own.done = PROMPT;
    rig.add(&mut own, &[1, 2], Logits::None);
    rig.plan.part = Some(RowPart { layers: 0..4, num_layers: LAYERS });
    refused(&mut rig, "a row of 2 tokens");
    rig.plan.part = Some(RowPart { layers: 0..4, num_layers: LAYERS });
    refused(&mut rig, "a part of no row");
}
