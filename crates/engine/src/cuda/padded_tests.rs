use baton_kv::{KvDtype, KvLayout};
use baton_scheduler::{BlockCopy, RowSampling, SamplingParams, SequenceId};

use super::*;
use crate::batch::Bounds;

const SHAPE: Shape = Shape { group: 4, block_size: 16, max_decode_items: 9, max_padded_items: 40 };

fn sampling(seed: u64) -> RowSampling {
    RowSampling { params: SamplingParams { seed, ..SamplingParams::GREEDY }, sequence: 3, position: 7 }
}

/// Rows at these positions, each over blocks of its own.
fn decode(positions: &[usize]) -> StepPlan {
    let (mut plan, mut block) = (StepPlan::default(), 0);
    for (nth, position) in positions.iter().enumerate() {
        let num = (position / 16 + 1) as u32;
        let blocks: Vec<u32> = (block..block + num).collect();
        block += num;
        plan.push(SequenceId(nth as u64), *position, &[50 + nth as u32], &blocks, &[sampling(nth as u64)]);
    }
    plan
}

fn built(plan: &StepPlan, padded: Padded) -> Tables {
    let layout = KvLayout {
        model_digest: [0; 32],
        num_layers: 1,
        num_kv_heads: 2,
        head_dim: 16,
        block_size: 16,
        dtype: KvDtype::F16,
        arrangement: String::new(),
        numerics_id: String::new(),
    };
    let bounds =
        Bounds { num_blocks: 512, vocab: 300, context: 1024, max_step_tokens: 256, num_layers: 4, group: 4 };
    let mut batch = Batch::new(&bounds);
    batch.prepare(plan, &layout, &bounds).unwrap();
    let mut tables = Tables::default();
    tables.build_padded(plan, &batch, SHAPE, padded);
    tables
}

#[test]
fn rows_and_tiles_are_padded_to_sizes_that_come_again() {
    let of = |positions: &[usize]| Padded::of(&decode(positions), SHAPE, 256);
    assert_eq!(of(&[5]), Some(Padded { rows: 1, items: 1 }));
    assert_eq!(of(&[5, 127, 0]), Some(Padded { rows: 4, items: 4 }));
    assert_eq!(of(&[5, 128, 300]), Some(Padded { rows: 4, items: 8 }));
    // 33 tiles: the next power of two is more than there is room for.
    assert_eq!(of(&[5; 33]), Some(Padded { rows: 40, items: 40 }));
    assert_eq!(of(&[200; 21]), None);
    let sizes = [1, 2, 3, 8, 9, 25, 64, 65, 129, 256].map(padded_rows);
    assert_eq!(sizes, [1, 2, 4, 8, 16, 32, 64, 80, 160, 256]);
}

#[test]
fn what_is_not_plain_decoding_is_not_for_a_graph() {
    let mut chunk = decode(&[5]);
    chunk.push(SequenceId(9), 0, &[1, 2], &[100], &[sampling(1)]);
    let mut no_logits = decode(&[5]);
    no_logits.push(SequenceId(9), 0, &[1], &[100], &[]);
    let mut many = decode(&[5]);
    many.push(SequenceId(9), 0, &[1], &[100], &[sampling(1), sampling(2)]);
    let mut all = decode(&[5]);
    all.push_all_logits(SequenceId(9), 0, &[1], &[100]);
    for plan in [StepPlan::default(), chunk, no_logits, many, all] {
        assert_eq!(Padded::of(&plan, SHAPE, 256), None, "{plan:?}");
    }
    // Scratch has rows for so many tokens.
    assert_eq!(Padded::of(&decode(&[5, 6, 7]), SHAPE, 3), None);
}

#[test]
fn everything_begins_where_it_always_does_and_padding_is_nobodys() {
    let padded = Padded { rows: 4, items: 8 };
    let mut long = decode(&[5, 300, 40]);
    long.copies.push(BlockCopy { from: 1, to: 500 });
    let (long, short) = (built(&long, padded), built(&decode(&[9]), padded));
    for (a, b) in [
        (&long.samplings, &short.samplings),
        (&long.tokens, &short.tokens),
        (&long.positions, &short.positions),
        (&long.slots, &short.slots),
        (&long.select, &short.select),
        (&long.decode[0].rows, &short.decode[0].rows),
        (&long.decode[0].items, &short.decode[0].items),
    ] {
        assert_eq!(a, b);
    }
    assert_eq!(long.blocks.start, short.blocks.start);
    assert_eq!((&long.groups, long.prefill_items.len()), (&short.groups, 0));
    let words = |tables: &Tables, range: &std::ops::Range<usize>| tables.words[range.clone()].to_vec();
    assert_eq!(words(&short, &short.tokens), [50, 0, 0, 0]);
    assert_eq!(words(&short, &short.slots), [9, NONE, NONE, NONE]);
    assert_eq!(words(&short, &short.decode[0].rows)[5..], [0; 15]);
    assert_eq!(words(&short, &short.decode[0].items)[..4], [0, 0, NONE, NONE]);
    let expected =
        [[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [NONE, NONE], [NONE, NONE], [NONE, NONE]].concat();
    assert_eq!(words(&long, &long.decode[0].items), expected);
    assert_eq!(words(&long, &long.copies[0]), [1, 500]);
    assert_eq!(long.decode[0].capacity, 4);
    // Greedy, from the first logits of the group.
    assert_eq!(words(&short, &short.samplings)[SAMPLING_WORDS..], [0; 3 * SAMPLING_WORDS]);
}

#[test]
fn groups_of_logits_are_those_of_the_padded_rows() {
    let positions = [5; 66];
    let padded = Padded { rows: 80, items: 128 };
    let tables = built(&decode(&positions), padded);
    let group = |range: std::ops::Range<usize>| LogitGroup { wanted: range.clone(), samplings: range };
    assert_eq!(tables.groups, [group(0..64), group(64..80)]);
    // Its row within the group is the ninth word of a sampling.
    let row = |nth: usize| tables.words[nth * SAMPLING_WORDS + 8];
    assert_eq!([row(0), row(63), row(64), row(65), row(66)], [0, 63, 0, 1, 0]);
    assert_eq!(tables.num_samplings(), 80);
}
