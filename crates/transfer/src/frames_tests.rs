use std::collections::BTreeSet;

use baton_kv::{KvDtype, KvLayout};
use proptest::prelude::*;

use super::*;
use crate::progress::Computed;

fn layout(num_layers: usize, num_kv_heads: usize, head_dim: usize, block_size: usize) -> KvLayout {
    KvLayout {
        model_digest: [1; 32],
        num_layers,
        num_kv_heads,
        head_dim,
        block_size,
        dtype: KvDtype::F16,
        arrangement: "test".into(),
        numerics_id: "test".into(),
    }
}

#[derive(Debug, Clone)]
struct Case {
    layout: KvLayout,
    span: TokenSpan,
    frame_bytes: usize,
    /// Sizes of the chunks that the step loop computes, repeated; in blocks.
    chunks: Vec<usize>,
    /// How many of its announcements the sender misses between two looks.
    misses: Vec<usize>,
}

fn case() -> impl Strategy<Value = Case> {
    (
        (
            1usize..5,
            1usize..3,
            prop_oneof![Just(4usize), Just(8)],
            prop_oneof![Just(1usize), Just(4), Just(16)],
        ),
        1usize..300,
        0usize..20,
        1usize..40_000,
        proptest::collection::vec(1usize..9, 1..6),
        proptest::collection::vec(0usize..7, 1..6),
    )
        .prop_map(
            |((layers, heads, dim, block), prompt_tokens, skip_blocks, frame_bytes, chunks, misses)| Case {
                layout: layout(layers, heads, dim, block),
                span: TokenSpan {
                    prompt_tokens,
                    skip_tokens: (skip_blocks * block).min((prompt_tokens - 1) / block * block),
                },
                frame_bytes,
                chunks,
                misses,
            },
        )
}

/// Everything that the step loop announces, in order.
fn announcements(case: &Case) -> Vec<Computed> {
    let (mut all, mut start) = (Vec::new(), 0);
    for blocks in case.chunks.iter().cycle() {
        let end = (start + blocks * case.layout.block_size).min(case.span.prompt_tokens);
        all.extend((1..=case.layout.num_layers).map(|chunk_layers| Computed {
            tokens: start,
            chunk_end: end,
            chunk_layers,
        }));
        all.push(Computed { tokens: end, chunk_end: end, chunk_layers: 0 });
        start = end;
        if start == case.span.prompt_tokens {
            break;
        }
    }
    all
}

/// A plan that looked at some of the announcements; checks on the way that only computed bytes count as computed.
fn plan_of(case: &Case) -> FramePlan {
    let mut plan = FramePlan::new(&case.layout, case.span, case.frame_bytes).unwrap();
    let all = announcements(case);
    let mut misses = case.misses.iter().cycle();
    let (mut at, mut computed) = (0, 0);
    loop {
        at = (at + misses.next().unwrap()).min(all.len() - 1);
        let before = computed;
        computed = plan.advance(all[at], before);
        assert!(computed >= before, "never back");
        for frame in
            (0..plan.num_frames()).filter_map(|index| plan.frame(index)).filter(|f| f.end() <= computed)
        {
            let end_token = frame.first_block as usize * case.layout.block_size
                + frame
                    .tail_tokens
                    .max(frame.num_blocks * case.layout.block_size as u32 * u32::from(frame.tail_tokens == 0))
                    as usize;
            let in_chunk = end_token <= all[at].chunk_end && (frame.layer as usize) < all[at].chunk_layers;
            assert!(end_token <= all[at].tokens || in_chunk, "{frame:?} is sendable at {:?}", all[at]);
        }
        if at == all.len() - 1 {
            break;
        }
        at += 1;
    }
    assert_eq!(computed, plan.total_bytes(), "all is computed in the end");
    plan
}

proptest! {
    #[test]
    fn every_layer_and_token_is_covered_once_and_offsets_have_no_gap(case in case()) {
        let plan = plan_of(&case);
        prop_assert!(plan.is_complete());
        let slot_bytes = case.layout.token_bytes() / case.layout.num_layers;
        let mut covered = BTreeSet::new();
        let mut offset = 0;
        for index in 0..plan.num_frames() {
            let frame = plan.frame(index).unwrap();
            prop_assert_eq!(frame.index, index);
            prop_assert_eq!(frame.offset, offset);
            offset = frame.end();
            let first = frame.first_block as usize * case.layout.block_size;
            let tokens = match frame.tail_tokens {
                0 => frame.num_blocks as usize * case.layout.block_size,
                tail => {
                    prop_assert_eq!(frame.num_blocks, 1);
                    tail as usize
                }
            };
            prop_assert_eq!(frame.len as usize, tokens * slot_bytes);
            let one_block = frame.num_blocks == 1;
            prop_assert!(frame.len as usize <= case.frame_bytes || one_block);
            for token in first..first + tokens {
                prop_assert!(covered.insert((frame.layer, token)), "layer {} token {} twice", frame.layer, token);
            }
        }
        let wanted = (case.span.prompt_tokens - case.span.skip_tokens) * case.layout.num_layers;
        prop_assert_eq!(covered.len(), wanted);
        prop_assert!(covered.iter().all(|&(_, t)| t >= case.span.skip_tokens && t < case.span.prompt_tokens));
        prop_assert_eq!(offset, plan.total_bytes());
        prop_assert_eq!(offset, case.span.bytes(&case.layout));
        prop_assert_eq!(offset as usize, (case.span.prompt_tokens - case.span.skip_tokens) * case.layout.token_bytes());
        prop_assert_eq!(plan.frame(plan.num_frames()), None);
    }

    #[test]
    fn the_frame_that_holds_an_offset_is_found(case in case(), at in 0.0f64..1.0) {
        let plan = plan_of(&case);
        let offset = (plan.total_bytes() as f64 * at) as u64;
        let frame = plan.frame(plan.index_at(offset)).unwrap();
        prop_assert!(frame.offset <= offset && offset < frame.end());
        prop_assert_eq!(plan.index_at(plan.total_bytes()), plan.num_frames());
    }
}

#[test]
fn the_default_model_in_numbers() {
    // 30 layers of 12 KiB a block: 100 tokens from 32 on are 4 whole blocks and 4 tokens.
    let layout = layout(30, 3, 64, 16);
    let span = TokenSpan { prompt_tokens: 100, skip_tokens: 32 };
    let mut plan = FramePlan::new(&layout, span, 256 * 1024).unwrap();
    plan.extend_to(100);
    assert_eq!((plan.num_frames(), plan.total_bytes()), (60, 68 * 23_040));
    let tail = plan.frame(1).unwrap();
    assert_eq!((tail.first_block, tail.num_blocks, tail.tail_tokens, tail.len), (6, 1, 4, 4 * 768));
}

#[test]
fn a_skip_off_a_block_boundary_or_beyond_the_prompt_is_refused() {
    let layout = layout(2, 1, 4, 16);
    for (prompt_tokens, skip_tokens) in [(100, 8), (100, 112)] {
        let error = FramePlan::new(&layout, TokenSpan { prompt_tokens, skip_tokens }, 1).unwrap_err();
        assert!(error.to_string().contains("skip_tokens"), "{error}");
    }
    let long = TokenSpan { prompt_tokens: crate::MAX_TOKENS + 1, skip_tokens: 0 };
    assert!(FramePlan::new(&layout, long, 1).unwrap_err().to_string().contains("16777215"));
}
