//! The engine in f32 against a plain f64 forward pass, for every instruction set and every storage of weights.

mod support;

use baton_engine::{CpuEngineConfig, Isa, Precision, WeightSource};
use baton_kv::{BlockMemory, BlockPool, BlockSlice, BlockTable, KvDtype};
use baton_model::{ModelConfig, RopeStyle, WeightType};
use half::f16;
use support::naive::{LayerCache, forward};
use support::random_model::{RandomModel, config};
use support::{Logits, Random, Rig, Sequence};

fn worst_difference(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(&g, w)| (f64::from(g) - w).abs()).fold(0.0, f64::max)
}

fn compare(model: &RandomModel, engine: CpuEngineConfig, num_tokens: usize, chunk: usize) {
    let engine = CpuEngineConfig { precision: Precision::F32, ..engine };
    let kind = model.tensor("token_embd.weight").unwrap().kind;
    let what = format!("{:?}, {kind}, blocks of {}", engine.isa, engine.block_size);
    let mut rig = Rig::new(model, engine);
    let tokens = Random(5).tokens(num_tokens, model.config.vocab);
    let mut sequence = rig.sequence(num_tokens);
    let got = rig.logits(&mut sequence, &tokens, chunk);
    let mut cache = vec![LayerCache::default(); model.config.num_layers];
    for (token, got) in tokens.iter().zip(got.chunks_exact(model.config.vocab)) {
        let want = forward(model, &mut cache, *token);
        let worst = worst_difference(got, &want);
        assert!(worst < 1e-4, "{what}: off by {worst} at position {}", cache[0].k.len() - 1);
        assert!(want.iter().any(|l| l.abs() > 0.3), "logits that mean something");
    }
}

#[test]
fn logits_are_those_of_a_plain_forward_pass() {
    for isa in Isa::available() {
        for kind in WeightType::ALL {
            let model = RandomModel::new(7, config(kind), kind);
            let engine = CpuEngineConfig {
                num_blocks: 4,
                kv_dtype: KvDtype::F32,
                isa: Some(isa),
                ..CpuEngineConfig::default()
            };
            compare(&model, engine, 37, 11);
        }
    }
}

#[test]
fn shapes_of_other_models_too() {
    let base = config(WeightType::F32);
    let shapes = [
        // One query head per KV head; the query is wider than the stream.
        ModelConfig { num_heads: 5, num_kv_heads: 5, head_dim: 32, ..base.clone() },
        // More query heads than fit in registers together.
        ModelConfig { num_heads: 20, num_kv_heads: 1, rope_style: RopeStyle::Interleaved, ..base.clone() },
        // Large heads, a tied output.
        ModelConfig { num_heads: 4, num_kv_heads: 2, head_dim: 256, tied_embedding: true, ..base.clone() },
        ModelConfig { num_heads: 2, num_kv_heads: 1, head_dim: 80, hidden: 200, vocab: 33, ..base },
    ];
    for shape in shapes {
        let model = RandomModel::new(8, shape, WeightType::F32);
        for block_size in [16, 64, 256] {
            let engine = CpuEngineConfig {
                num_blocks: 4,
                block_size,
                kv_dtype: KvDtype::F32,
                num_threads: 2,
                ..CpuEngineConfig::default()
            };
            compare(&model, engine, 23, 9);
        }
    }
}

/// K and V of a sequence that was never computed here, put into blocks in canonical order.
fn import(rig: &Rig, table: &BlockTable, cache: &[LayerCache], dtype: KvDtype) {
    let layout = rig.arena.layout();
    let lease = table.write_lease(0).unwrap();
    for (layer, cache) in cache.iter().enumerate() {
        for nth in 0..table.len() {
            let first = nth * layout.block_size;
            let num_tokens = layout.block_size.min(cache.k.len().saturating_sub(first));
            let mut bytes = Vec::new();
            for part in [&cache.k, &cache.v] {
                for head in 0..layout.num_kv_heads {
                    for token in &part[first..first + num_tokens] {
                        for &x in &token[head * layout.head_dim..][..layout.head_dim] {
                            match dtype {
                                KvDtype::F32 => bytes.extend((x as f32).to_le_bytes()),
                                _ => bytes.extend(f16::from_f64(x).to_le_bytes()),
                            }
                        }
                    }
                }
            }
            rig.arena.scatter(&lease, BlockSlice { layer, nth, num_tokens }, &bytes).unwrap();
        }
    }
}

/// 131,072 positions: the last token attends over all of them, whose K and V came from outside.
#[test]
fn the_last_of_131072_positions_sees_all_others() {
    const CONTEXT: usize = 131_072;
    let shape =
        ModelConfig { num_layers: 1, context: CONTEXT, rope_base: 500_000.0, ..config(WeightType::F32) };
    let model = RandomModel::new(9, shape, WeightType::F32);
    let mut random = Random(10);
    // Multiples of 1/64 are exact in f16, so one cache serves both element types.
    let mut row =
        |size: f32| (0..16).map(|_| f64::from((random.signed() * size * 64.0).round() / 64.0)).collect();
    let mut cache = LayerCache::default();
    for _ in 0..CONTEXT - 1 {
        cache.k.push(row(4.0));
        cache.v.push(row(2.0));
    }
    let want = forward(&model, &mut [cache.clone()], 3);
    for isa in Isa::available() {
        for kv_dtype in [KvDtype::F32, KvDtype::F16] {
            let num_blocks = CONTEXT / 16;
            let engine =
                CpuEngineConfig { num_blocks, kv_dtype, isa: Some(isa), ..CpuEngineConfig::default() };
            let mut rig = Rig::new(&model, engine);
            let mut table = BlockTable::new();
            table.extend(BlockPool::new(num_blocks).allocate(num_blocks).unwrap());
            import(&rig, &table, std::slice::from_ref(&cache), kv_dtype);
            let mut sequence = Sequence { id: 1, blocks: table.ids().to_vec(), done: CONTEXT - 1 };
            rig.add(&mut sequence, &[3], Logits::All);
            rig.step();
            let worst = worst_difference(&rig.output.logits, &want);
            let bound = if kv_dtype == KvDtype::F32 { 1e-4 } else { 2e-3 };
            assert!(worst < bound, "{isa:?}, {kv_dtype}: off by {worst}");
        }
    }
}
