//! Random operations on pool, tables and leases against a simple model.

use std::collections::HashSet;

use proptest::prelude::*;

use crate::{BlockPool, BlockTable, ReadLease, WriteLease};

#[derive(Debug, Clone)]
enum Op {
    Allocate(usize),
    DropTable(usize),
    LeaseRead(usize),
    LeaseWrite(usize),
    DropRead(usize),
    DropWrite(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0usize..6).prop_map(Op::Allocate),
        any::<usize>().prop_map(Op::DropTable),
        any::<usize>().prop_map(Op::LeaseRead),
        any::<usize>().prop_map(Op::LeaseWrite),
        any::<usize>().prop_map(Op::DropRead),
        any::<usize>().prop_map(Op::DropWrite),
    ]
}

fn take<T>(items: &mut Vec<T>, n: usize) -> Option<T> {
    (!items.is_empty()).then(|| items.swap_remove(n % items.len()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn a_block_is_free_exactly_when_neither_held_nor_leased(
        total in 0usize..20,
        ops in prop::collection::vec(op(), 0..200),
    ) {
        let pool = BlockPool::new(total);
        let mut tables: Vec<BlockTable> = Vec::new();
        let mut reads: Vec<ReadLease> = Vec::new();
        let mut writes: Vec<WriteLease> = Vec::new();
        for op in ops {
            let free_before = pool.counts().free;
            match op {
                Op::Allocate(n) => match pool.allocate(n) {
                    Some(blocks) => {
                        prop_assert!(n <= free_before);
                        let mut table = BlockTable::new();
                        table.extend(blocks);
                        tables.push(table);
                    }
                    None => prop_assert!(n > free_before),
                },
                Op::DropTable(n) => drop(take(&mut tables, n)),
                Op::LeaseRead(n) if !tables.is_empty() => reads.push(tables[n % tables.len()].read_lease()),
                Op::LeaseWrite(n) if !tables.is_empty() => writes.push(tables[n % tables.len()].write_lease(0).unwrap()),
                Op::DropRead(n) => drop(take(&mut reads, n)),
                Op::DropWrite(n) => drop(take(&mut writes, n)),
                _ => {}
            }
            let held: Vec<u32> = tables.iter().flat_map(|t| t.ids().to_vec()).collect();
            let distinct: HashSet<u32> = held.iter().copied().collect();
            prop_assert_eq!(distinct.len(), held.len(), "a writable block has one holder");
            let mut in_use = distinct.clone();
            in_use.extend(reads.iter().flat_map(|l| (0..l.len()).filter_map(|i| l.block(i))));
            in_use.extend(writes.iter().flat_map(|l| (0..l.len()).filter_map(|i| l.block(i))));
            let counts = pool.counts();
            prop_assert_eq!(counts.held, held.len());
            prop_assert_eq!(counts.free, total - in_use.len());
            prop_assert_eq!(counts.draining, in_use.len() - held.len());
            prop_assert_eq!(pool.check(), Ok(()));
        }
        tables.clear();
        reads.clear();
        writes.clear();
        prop_assert_eq!(pool.counts().free, total);
    }
}

#[test]
fn a_fenced_lease_keeps_its_blocks_until_the_writer_drops_it() {
    let pool = BlockPool::new(4);
    let mut table = BlockTable::new();
    table.extend(pool.allocate(3).unwrap());
    let lease = table.write_lease(1).unwrap();
    assert_eq!((lease.skip(), lease.len(), lease.block(0)), (1, 3, None), "indices are the sequence's");
    assert!(lease.block(1).is_some());
    let fence = lease.fence();
    drop(table);
    fence.close();
    assert!(lease.is_fenced());
    assert!(pool.allocate(3).is_none(), "two blocks still belong to the writer");
    drop(lease);
    assert_eq!(pool.counts().free, 4);
}

/// Blocks come from one stack, whether they were given out before or not: so a run is a function of what is asked for.
#[test]
fn blocks_come_in_the_order_of_a_stack_that_has_all_of_them() {
    const TOTAL: u32 = 50;
    let pool = BlockPool::new(TOTAL as usize);
    let mut stack: Vec<u32> = (0..TOTAL).collect();
    let mut tables: Vec<BlockTable> = Vec::new();
    let mut random = 1_u32;
    for _ in 0..5_000 {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let count = (random >> 16) as usize % 9;
        let mut table = BlockTable::new();
        if random >> 31 == 0 && !tables.is_empty() {
            // In the order of the table.
            stack.extend(tables.swap_remove(count % tables.len()).ids());
        } else if count == 1 {
            let block = pool.allocate_one();
            assert_eq!(block.as_ref().map(|block| block.id()), stack.pop());
            block.into_iter().for_each(|block| table.push(block));
            tables.push(table);
        } else {
            let blocks = pool.allocate(count);
            assert_eq!(blocks.is_some(), count <= stack.len());
            let keep = stack.len() - blocks.as_ref().map_or(0, Vec::len);
            table.extend(blocks.unwrap_or_default());
            assert_eq!(table.ids(), stack.split_off(keep));
            tables.push(table);
        }
        assert_eq!((pool.counts().free, pool.check()), (stack.len(), Ok(())));
    }
}

#[test]
fn freeing_calls_the_hook() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    let pool = BlockPool::new(2);
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&calls);
    pool.on_free(Box::new(move || {
        seen.fetch_add(1, Ordering::SeqCst);
    }));
    let mut table = BlockTable::new();
    table.extend(pool.allocate(1).unwrap());
    let lease = table.read_lease();
    drop(table);
    assert_eq!(calls.load(Ordering::SeqCst), 0, "still leased");
    drop(lease);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    // However many blocks a table has: some of them shared, one with a table that stays.
    let pool = BlockPool::new(5000);
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&calls);
    pool.on_free(Box::new(move || {
        seen.fetch_add(1, Ordering::SeqCst);
    }));
    let mut table = BlockTable::new();
    table.extend(pool.allocate(5000).unwrap());
    let mut other = BlockTable::new();
    other.extend_shared(vec![table.share(7).unwrap()]);
    table.share(8).unwrap();
    calls.store(0, Ordering::SeqCst);
    drop(table);
    assert_eq!((calls.load(Ordering::SeqCst), pool.counts().free), (1, 4999));
    drop(other);
    assert_eq!((calls.load(Ordering::SeqCst), pool.counts().free), (2, 5000));
    assert_eq!(pool.check(), Ok(()));
}
