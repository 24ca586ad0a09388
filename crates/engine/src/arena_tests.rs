//! The arena through leases, as network tasks use it.

use std::sync::Arc;

use baton_kv::{BlockOrder, BlockPool, BlockRun, BlockSlice, BlockTable, KvDtype};

use super::*;

fn arena(num_blocks: usize) -> Arena {
    arena_of(KvDtype::F16, num_blocks)
}

fn arena_of(dtype: KvDtype, num_blocks: usize) -> Arena {
    let layout = KvLayout {
        model_digest: [0; 32],
        num_layers: 3,
        num_kv_heads: 2,
        head_dim: 16,
        block_size: 16,
        dtype,
        arrangement: "test".into(),
        numerics_id: "test".into(),
    };
    Arena::new(layout, num_blocks).unwrap()
}

fn table(pool: &BlockPool, count: usize) -> BlockTable {
    let mut table = BlockTable::new();
    table.extend(pool.allocate(count).unwrap());
    table
}

/// Bytes that tell layer and block.
fn pattern(len: usize, layer: usize, block: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + layer * 31 + block * 13) as u8).collect()
}

#[test]
fn every_block_of_every_layer_keeps_its_own_bytes() {
    let arena = arena(9);
    let pool = BlockPool::new(9);
    let held = table(&pool, 9);
    let len = arena.layout().block_layer_bytes();
    let write = held.write_lease(0).unwrap();
    for layer in 0..3 {
        for nth in 0..9 {
            arena.write(&write, layer, nth, &pattern(len, layer, nth)).unwrap();
        }
    }
    let read = held.read_lease();
    for layer in 0..3 {
        for nth in 0..9 {
            assert_eq!(arena.read(&read, layer, nth).unwrap(), pattern(len, layer, nth));
        }
    }
    assert_eq!(arena.num_bytes(), 9 * arena.layout().block_bytes());
}

#[test]
fn what_is_outside_is_refused_and_writes_nothing() {
    let arena = arena(4);
    let pool = BlockPool::new(4);
    let held = table(&pool, 2);
    let (read, write) = (held.read_lease(), held.write_lease(0).unwrap());
    let len = arena.layout().block_layer_bytes();
    let outside = |layer, nth| MemoryError::OutOfRange { layer, nth, num_blocks: 2 };
    assert_eq!(arena.read(&read, 3, 0).unwrap_err(), outside(3, 0));
    assert_eq!(arena.read(&read, 0, 2).unwrap_err(), outside(0, 2));
    assert_eq!(arena.write(&write, 0, 2, &vec![1; len]).unwrap_err(), outside(0, 2));
    let short = arena.write(&write, 0, 0, &vec![1; len - 1]).unwrap_err();
    assert_eq!(short, MemoryError::WrongSize { got: len - 1, want: len });
    // A pool larger than the arena is a bug elsewhere; its blocks are still no way out of the arena.
    let foreign = table(&BlockPool::new(100), 100);
    let far = foreign.write_lease(0).unwrap();
    let nth = (0..100).find(|&nth| far.block(nth) == Some(99)).unwrap();
    assert!(matches!(arena.write(&far, 0, nth, &vec![1; len]), Err(MemoryError::OutOfRange { .. })));
    assert!(arena.read(&read, 0, 0).unwrap().iter().all(|&b| b == 0));
}

#[test]
fn a_fenced_lease_can_not_write() {
    let arena = arena(2);
    let pool = BlockPool::new(2);
    let held = table(&pool, 1);
    let write = held.write_lease(0).unwrap();
    let len = arena.layout().block_layer_bytes();
    arena.write(&write, 1, 0, &vec![5; len]).unwrap();
    write.fence().close();
    assert_eq!(arena.write(&write, 1, 0, &vec![6; len]).unwrap_err(), MemoryError::Fenced);
    assert_eq!(arena.read(&held.read_lease(), 1, 0).unwrap(), vec![5; len]);
}

#[test]
fn threads_write_disjoint_blocks_at_once() {
    let arena = Arc::new(arena(32));
    let pool = BlockPool::new(32);
    let len = arena.layout().block_layer_bytes();
    let tables: Vec<_> = (0..4).map(|_| table(&pool, 8)).collect();
    std::thread::scope(|scope| {
        for (n, held) in tables.iter().enumerate() {
            let arena = Arc::clone(&arena);
            let lease = held.write_lease(0).unwrap();
            scope.spawn(move || {
                for round in 0..20 {
                    for layer in 0..3 {
                        for nth in 0..8 {
                            arena.write(&lease, layer, nth, &pattern(len, layer + round, n)).unwrap();
                        }
                    }
                }
            });
        }
    });
    for (n, held) in tables.iter().enumerate() {
        let lease = held.read_lease();
        for layer in 0..3 {
            for nth in 0..8 {
                assert_eq!(arena.read(&lease, layer, nth).unwrap(), pattern(len, layer + 19, n));
            }
        }
    }
}

#[test]
fn a_copy_takes_a_block_in_all_layers_and_leaves_the_others() {
    let arena = arena(3);
    let pool = BlockPool::new(3);
    let held = table(&pool, 3);
    let write = held.write_lease(0).unwrap();
    let len = arena.layout().block_layer_bytes();
    for layer in 0..3 {
        for nth in 0..3 {
            arena.write(&write, layer, nth, &pattern(len, layer, nth)).unwrap();
        }
    }
    let id = |nth| write.block(nth).unwrap() as usize;
    // SAFETY: one thread, no slice of the arena alive.
    unsafe { arena.copy_block(id(0), id(2)) };
    let read = held.read_lease();
    for layer in 0..3 {
        for (nth, from) in [(0, 0), (1, 1), (2, 0)] {
            assert_eq!(arena.read(&read, layer, nth).unwrap(), pattern(len, layer, from));
        }
    }
}

#[test]
fn no_blocks_and_too_many_are_errors() {
    let layout = arena(1).layout.clone();
    assert!(Arena::new(layout.clone(), 0).is_err());
    assert!(Arena::new(layout, usize::MAX).is_err());
}

/// A block in canonical order, from the bytes of a block in the arena's.
fn canonical(layout: &KvLayout, block: &[u8], num_tokens: usize) -> Vec<u8> {
    let (heads, dims, tokens) = (layout.num_kv_heads, layout.head_dim, layout.block_size);
    let (size, scale) = (layout.dtype.size(), layout.dtype.scale_bytes());
    let mut out = Vec::new();
    for (half, is_v) in block.chunks_exact(block.len() / 2).zip([false, true]) {
        let (elements, scales) = half.split_at(heads * dims * tokens * size);
        for head in 0..heads {
            for token in 0..num_tokens {
                for dim in 0..dims {
                    let nth = match is_v {
                        false => (head * dims + dim) * tokens + token,
                        true => (head * tokens + token) * dims + dim,
                    };
                    out.extend_from_slice(&elements[nth * size..][..size]);
                }
                out.extend_from_slice(&scales[(head * tokens + token) * scale..][..scale]);
            }
        }
    }
    out
}

#[test]
fn gather_gives_canonical_order_and_scatter_takes_it_back() {
    KvDtype::ALL.into_iter().for_each(canonical_there_and_back);
}

fn canonical_there_and_back(dtype: KvDtype) {
    let arena = arena_of(dtype, 6);
    let pool = BlockPool::new(6);
    let (source, target) = (table(&pool, 3), table(&pool, 3));
    let len = arena.layout().block_layer_bytes();
    let bytes = pattern(len, 1, 4);
    arena.write(&source.write_lease(0).unwrap(), 2, 1, &bytes).unwrap();
    let old = pattern(len, 5, 5);
    for num_tokens in [0, 1, 7, 16] {
        let at = BlockSlice { layer: 2, nth: 1, num_tokens };
        let mut out = vec![9];
        arena.gather(&source.read_lease(), at, &mut out).unwrap();
        assert_eq!(out[0], 9, "what was there stays");
        assert_eq!(out.len() - 1, num_tokens * arena.layout().token_bytes() / arena.layout().num_layers);
        assert_eq!(out[1..], canonical(arena.layout(), &bytes, num_tokens), "{dtype}");
        let write = target.write_lease(0).unwrap();
        arena.write(&write, 2, 1, &old).unwrap();
        arena.scatter(&write, at, &out[1..]).unwrap();
        let now = arena.read(&target.read_lease(), 2, 1).unwrap().to_vec();
        assert_eq!(canonical(arena.layout(), &now, num_tokens), out[1..], "{dtype}");
        // Tokens beyond the slice keep their bytes.
        let rest = |block: &[u8]| {
            let row = dtype.row_bytes(arena.layout().head_dim);
            let all = canonical(arena.layout(), block, 16);
            all.chunks(16 * row).flat_map(|head| head[num_tokens * row..].to_vec()).collect::<Vec<u8>>()
        };
        assert_eq!(rest(&now), rest(&old), "{dtype}");
    }
}

#[test]
fn slices_outside_or_of_another_size_are_refused() {
    let arena = arena(2);
    let pool = BlockPool::new(2);
    let held = table(&pool, 1);
    let write = held.write_lease(0).unwrap();
    let at = |nth, num_tokens| BlockSlice { layer: 0, nth, num_tokens };
    let mut out = Vec::new();
    for bad in [at(0, 17), at(1, 1)] {
        assert!(matches!(
            arena.gather(&held.read_lease(), bad, &mut out),
            Err(MemoryError::OutOfRange { .. })
        ));
        assert!(matches!(arena.scatter(&write, bad, &[]), Err(MemoryError::OutOfRange { .. })));
    }
    assert!(out.is_empty());
    let want = 2 * 2 * 2 * 16 * 3;
    let error = arena.scatter(&write, at(0, 3), &vec![0; want + 1]).unwrap_err();
    assert_eq!(error, MemoryError::WrongSize { got: want + 1, want });
    write.fence().close();
    assert_eq!(arena.scatter(&write, at(0, 3), &vec![0; want]).unwrap_err(), MemoryError::Fenced);
}

#[test]
fn whole_blocks_are_read_as_they_lie_or_in_canonical_order() {
    for dtype in KvDtype::ALL {
        let arena = arena_of(dtype, 4);
        let held = table(&BlockPool::new(4), 3);
        let (read, write) = (held.read_lease(), held.write_lease(0).unwrap());
        let len = arena.layout().block_layer_bytes();
        for nth in 0..3 {
            arena.write(&write, 2, nth, &pattern(len, 2, nth)).unwrap();
        }
        let run = |order, num_blocks| {
            let mut bytes = Vec::new();
            let run = BlockRun { layer: 2, first: 1, num_blocks };
            arena.read_blocks(&read, run, order, &mut |piece| bytes.extend_from_slice(piece)).map(|()| bytes)
        };
        assert_eq!(run(BlockOrder::Own, 2).unwrap(), [pattern(len, 2, 1), pattern(len, 2, 2)].concat());
        let mut canonical = Vec::new();
        for nth in 1..3 {
            arena.gather(&read, BlockSlice { layer: 2, nth, num_tokens: 16 }, &mut canonical).unwrap();
        }
        assert_eq!(canonical.len(), 2 * len);
        assert_eq!(run(BlockOrder::Canonical, 2).unwrap(), canonical);
        for order in [BlockOrder::Own, BlockOrder::Canonical] {
            assert!(matches!(run(order, 3), Err(MemoryError::OutOfRange { nth: 3, .. })));
        }
    }
}
