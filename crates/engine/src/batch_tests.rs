//! Plans that contradict the arena, the model or themselves are refused before any work.

use baton_kv::KvDtype;
use baton_scheduler::{BlockCopy, RowSampling, SamplingParams, SequenceId};
use proptest::prelude::*;

use super::*;

fn layout() -> KvLayout {
    KvLayout {
        model_digest: [0; 32],
        num_layers: 2,
        num_kv_heads: 2,
        head_dim: 16,
        block_size: 16,
        dtype: KvDtype::F16,
        arrangement: "test".into(),
        numerics_id: "test".into(),
    }
}

fn bounds() -> Bounds {
    Bounds { num_blocks: 10, vocab: 100, context: 64, max_step_tokens: 40, num_layers: 4, group: 3 }
}

fn row(position: usize, num_tokens: usize, blocks: &[u32]) -> StepPlan {
    let mut plan = StepPlan::default();
    plan.push(SequenceId(7), position, &vec![5; num_tokens], blocks, &[]);
    plan
}

fn refusal(plan: &StepPlan) -> String {
    Batch::new(&bounds()).prepare(plan, &layout(), &bounds()).expect_err("to be refused")
}

#[test]
fn every_contradiction_is_named() {
    let mut token = row(0, 3, &[1]);
    token.tokens[2] = 100;
    let mut behind = row(0, 3, &[1]);
    behind.rows[0].tokens = 1..3;
    let mut empty = row(0, 3, &[1]);
    empty.rows[0].tokens = 0..0;
    let mut beyond = row(0, 3, &[1]);
    beyond.rows[0].tokens = 0..9;
    let mut left = row(0, 3, &[1]);
    left.tokens.push(1);
    let mut table = row(0, 3, &[1]);
    table.rows[0].blocks = 0..2;
    let mut twice = row(0, 3, &[1]);
    twice.push(SequenceId(8), 0, &[5], &[1], &[]);
    // Whichever row comes first.
    let mut read = row(0, 3, &[1]);
    read.push(SequenceId(8), 16, &[5], &[1, 2], &[]);
    let mut read_before = row(17, 3, &[1, 2]);
    read_before.push(SequenceId(8), 0, &[5], &[1], &[]);
    let mut copy = row(0, 3, &[1]);
    copy.copies.push(BlockCopy { from: 1, to: 10 });
    let mut own = row(0, 3, &[1]);
    own.copies.push(BlockCopy { from: 2, to: 2 });
    let mut cold = row(0, 3, &[1]);
    let params = SamplingParams { temperature: -1.0, ..SamplingParams::GREEDY };
    cold.samplings = vec![RowSampling { params, sequence: 0, position: 3 }];
    cold.rows[0].logits = Logits::Sample(0..1);
    let mut nothing = row(0, 3, &[1]);
    nothing.rows[0].logits = Logits::Sample(0..0);
    let mut unknown = row(0, 3, &[1]);
    unknown.rows[0].logits = Logits::Sample(0..1);
    for (plan, want) in [
        (row(0, 41, &[1, 2, 3]), "41 tokens, the limit is 40"),
        (token, "token 100 is outside the vocabulary of 100"),
        (behind, "row 0 (sequence 7): tokens 1..3 do not follow the row before"),
        (empty, "row 0 (sequence 7): tokens 0..0 do not follow the row before"),
        (beyond, "row 0 (sequence 7): tokens 0..9 of 3"),
        (left, "rows hold 3 of 4 tokens"),
        (table, "row 0 (sequence 7): blocks 0..2 of 1"),
        (row(14, 3, &[1]), "row 0 (sequence 7): 1 blocks in its table, 17 tokens need 2"),
        (row(0, 3, &[10]), "row 0 (sequence 7): block 10 of 10"),
        (row(16, 3, &[10, 1]), "row 0 (sequence 7): block 10 of 10"),
        (row(62, 3, &[1, 2, 3, 4, 5]), "row 0 (sequence 7): position 64 is beyond the context of 64"),
        (
            row(usize::MAX, 3, &[1]),
            "row 0 (sequence 7): position 18446744073709551615 is beyond the context of 64",
        ),
        (twice, "row 1 (sequence 8): block 1 is written twice in this step"),
        (row(16, 20, &[1, 2, 2]), "row 0 (sequence 7): block 2 is written twice in this step"),
        (read, "row 1 (sequence 8): block 1 is read and written in this step"),
        (read_before, "row 0 (sequence 7): block 1 is read and written in this step"),
        (row(16, 3, &[1, 1]), "row 0 (sequence 7): block 1 is read and written in this step"),
        (copy, "copy of block 1 to 10 of 10"),
        (own, "copy of block 2 to 2 of 10"),
        (cold, "row 0 (sequence 7): temperature is -1, from 0 up is possible"),
        (nothing, "row 0 (sequence 7): samplings 0..0 of 0"),
        (unknown, "row 0 (sequence 7): samplings 0..1 of 0"),
    ] {
        assert_eq!(refusal(&plan), want);
    }
}

#[test]
fn what_touches_the_limits_is_accepted_and_a_refusal_leaves_no_trace() {
    let mut batch = Batch::new(&bounds());
    let full = row(24, 40, &[0, 9, 3, 4]);
    for _ in 0..3 {
        batch.prepare(&full, &layout(), &bounds()).unwrap();
        batch.prepare(&row(0, 41, &[1, 2, 3]), &layout(), &bounds()).unwrap_err();
    }
    batch.prepare(&full, &layout(), &bounds()).unwrap();
    let places: Vec<_> = batch.places.iter().map(|p| (p.position, p.block, p.slot)).collect();
    assert_eq!(places.first(), Some(&(24, 9, 8)));
    assert_eq!(places.last(), Some(&(63, 4, 15)));
    // A block that is only read may be shared.
    let mut shared = row(16, 3, &[1, 2]);
    shared.push(SequenceId(8), 16, &[5], &[1, 3], &[]);
    batch.prepare(&shared, &layout(), &bounds()).unwrap();
}

proptest! {
    #[test]
    fn attention_shares_cover_every_pair_once(
        rows in prop::collection::vec((0usize..50_000, 1usize..60), 1..12),
        num_kv_heads in 1usize..9,
        count in 1usize..9,
    ) {
        let bounds = Bounds { num_blocks: 1, vocab: 1, context: 1, max_step_tokens: 1, num_layers: 4, group: 3 };
        let mut batch = Batch::new(&bounds);
        let mut first = 0;
        for (position, num_tokens) in rows {
            batch.add_units(first..first + num_tokens, position, 0..0, &bounds);
            first += num_tokens;
        }
        prop_assert_eq!(batch.units.iter().map(|u| u.num_tokens).sum::<usize>(), first);
        // A last row of which only layer 1 is computed.
        batch.add_units(first..first + 1, 9, 0..0, &bounds);
        let place = Place { position: 0, block: 0, slot: 0 };
        batch.places = vec![place; first + 1];
        batch.part = Some(1..2);
        for (layer, left_out) in [(0, 1), (1, 0), (2, 1)] {
            prop_assert_eq!(batch.num_tokens(layer), first + 1 - left_out);
            let attending = batch.attending(layer);
            let mut next = 0;
            for index in 0..count {
                let share = attending.share(index, count, num_kv_heads);
                prop_assert_eq!(share.start, next);
                prop_assert!(share.end >= share.start);
                next = share.end;
            }
            prop_assert_eq!(next, num_kv_heads * (batch.units.len() - left_out));
            let pairs = (0..next).map(|pair| attending.pair(pair, num_kv_heads).1.first_token);
            prop_assert!(pairs.max() <= Some(first - left_out));
        }
    }

    #[test]
    fn steps_of_single_tokens_go_unit_by_unit_and_heads_together(
        positions in prop::collection::vec(0usize..50_000, 1..12),
        num_kv_heads in 1usize..9,
        group in 1usize..15,
        count in 1usize..9,
    ) {
        let bounds = Bounds { num_blocks: 1, vocab: 1, context: 1, max_step_tokens: 1, num_layers: 4, group };
        let mut batch = Batch::new(&bounds);
        for (first, &position) in positions.iter().enumerate() {
            batch.add_units(first..first + 1, position, 0..0, &bounds);
            batch.places.push(Place { position: position as u32, block: 0, slot: 0 });
        }
        let (mut seen, attending) = (Vec::new(), batch.attending(0));
        for index in 0..count {
            let share = attending.share(index, count, num_kv_heads);
            let mut pair = share.start;
            while pair < share.end {
                let (kv_head, unit) = attending.pair(pair, num_kv_heads);
                let num = attending.together(pair..share.end, num_kv_heads, group);
                prop_assert!(num == 1 || num * group <= MAX_QUERIES);
                prop_assert!(num > 0 && kv_head + num <= num_kv_heads);
                seen.extend((kv_head..kv_head + num).map(|head| (unit.first_token, head)));
                pair += num;
            }
            prop_assert_eq!(pair, share.end);
        }
        let all = (0..positions.len()).flat_map(|unit| (0..num_kv_heads).map(move |head| (unit, head)));
        prop_assert_eq!(seen, all.collect::<Vec<_>>());
    }
}
