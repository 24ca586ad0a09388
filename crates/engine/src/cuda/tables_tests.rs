use baton_kv::{KvDtype, KvLayout};
use baton_scheduler::{BlockCopy, SamplingParams, SequenceId};

use super::*;
use crate::batch::Bounds;

fn sampling(seed: u64) -> RowSampling {
    RowSampling { params: SamplingParams { seed, ..SamplingParams::GREEDY }, sequence: 3, position: 7 }
}

fn built(plan: &StepPlan, max_decode_items: usize) -> Tables {
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
        Bounds { num_blocks: 64, vocab: 300, context: 1024, max_step_tokens: 256, num_layers: 4, group: 4 };
    let mut batch = Batch::new(&bounds);
    batch.prepare(plan, &layout, &bounds).unwrap();
    let mut tables = Tables::default();
    tables.build(
        plan,
        &batch,
        Shape { group: 4, block_size: 16, max_decode_items, max_padded_items: max_decode_items },
    );
    tables
}

fn words(tables: &Tables, range: &Range<usize>) -> Vec<u32> {
    tables.words[range.clone()].to_vec()
}

/// A decode row at position 300, a chunk of 40 tokens, a row of 4 tokens.
fn mixed() -> StepPlan {
    let mut plan = StepPlan::default();
    let blocks: Vec<u32> = (0..19).collect();
    plan.push(SequenceId(1), 300, &[9], &blocks, &[sampling(1 << 40 | 5), sampling(6)]);
    plan.push(SequenceId(2), 16, &[8; 40], &[30, 31, 32, 33], &[]);
    plan.push(SequenceId(3), 0, &[1, 2, 3, 4], &[40], &[sampling(2)]);
    plan
}

#[test]
fn rows_of_few_tokens_are_decoded_in_tiles_and_the_others_prefilled_from_their_end() {
    let tables = built(&mixed(), 100);
    let [launch] = &tables.decode[..] else { panic!("{:?}", tables.decode) };
    assert_eq!(words(&tables, &launch.rows), [0, 1, 300, 0, 0, 41, 4, 0, 23, 3]);
    assert_eq!(words(&tables, &launch.items), [0, 0, 0, 1, 0, 2, 1, 0]);
    assert_eq!(words(&tables, &tables.prefill_rows), [1, 40, 16, 19, 0]);
    assert_eq!(words(&tables, &tables.prefill_items), [0, 2, 0, 1, 0, 0]);
    assert_eq!(words(&tables, &tables.slots)[..2], [18 * 16 + 300 % 16, 31 * 16]);
    assert_eq!(words(&tables, &tables.positions)[40..], [55, 0, 1, 2, 3]);
    assert_eq!(words(&tables, &tables.select), [0, 44]);
}

#[test]
fn decode_rows_beyond_the_scratch_go_into_a_further_launch() {
    let tables = built(&mixed(), 3);
    let [first, second] = &tables.decode[..] else { panic!("{:?}", tables.decode) };
    assert_eq!(words(&tables, &first.rows), [0, 1, 300, 0, 0]);
    assert_eq!(words(&tables, &second.rows), [41, 4, 0, 23, 0]);
    assert_eq!(words(&tables, &second.items), [0, 0]);
}

#[test]
fn samplings_come_first_in_order_with_the_row_of_their_group() {
    let tables = built(&mixed(), 100);
    assert_eq!(tables.samplings, 0..30);
    assert_eq!(tables.words[..10], [5, 1 << 8, 3, 7, 0, 1f32.to_bits(), 0, 0, 0, 0]);
    assert_eq!((tables.words[10], tables.words[20], tables.words[28]), (6, 2, 1));
    assert_eq!(tables.groups, [LogitGroup { wanted: 0..2, samplings: 0..3 }]);
}

#[test]
fn copies_that_depend_on_each_other_are_launched_apart() {
    let mut plan = StepPlan::default();
    plan.copies.extend([(1, 2), (1, 3), (3, 4), (6, 4)].map(|(from, to)| BlockCopy { from, to }));
    let tables = built(&plan, 100);
    let copies: Vec<_> = tables.copies.iter().map(|range| words(&tables, range)).collect();
    assert_eq!(copies, [vec![1, 2, 1, 3], vec![3, 4], vec![6, 4]]);
}
