//! Rings in device memory between two engines' arenas, on a driver for machines without a card: the bytes and sums of what was put are those of what is
//! taken, leases are kept to, and nothing is kept. Both ends are in one process here, which a real driver refuses; `cuda_peer` has two.

use std::sync::Arc;

use baton_engine::{CudaArena, CudaEngine, CudaEngineConfig, CudaFound, Quantize};
use baton_kv::{
    BlockMemory, BlockOrder, BlockPool, BlockRun, BlockTable, KvDtype, MemoryError, PeerCopy, peer_sum,
};
use baton_model::Model;
use baton_tests::Turn;
use baton_tests::fake_cuda::FakeCuda;
use baton_tests::seed::Random;

const NUM_BLOCKS: usize = 24;
const RING_BYTES: usize = 8 << 20;

fn driver() -> Option<(Turn, FakeCuda)> {
    let turn = Turn::take();
    let fake = FakeCuda::build_or_skip()?.loaded().opening_own();
    assert!(CudaFound::look().is_usable(), "{}", CudaFound::look());
    Some((turn, fake))
}

fn arena(ordinal: u32) -> (CudaEngine, Arc<CudaArena>) {
    let config = CudaEngineConfig {
        ordinal,
        num_blocks: NUM_BLOCKS,
        block_size: 16,
        kv_dtype: KvDtype::F16,
        quantize: Quantize::None,
        graphs: true,
        max_step_tokens: 64,
    };
    CudaEngine::new(&Model::tiny(), &config).expect("a CUDA engine")
}

/// A table whose blocks are in no order.
fn table(random: &mut Random) -> BlockTable {
    let mut blocks = BlockPool::new(NUM_BLOCKS).allocate(NUM_BLOCKS).expect("blocks");
    let mut table = BlockTable::new();
    while !blocks.is_empty() {
        let at = random.within(0..blocks.len());
        table.extend(vec![blocks.swap_remove(at)]);
    }
    table
}

fn bytes(arena: &CudaArena, table: &BlockTable, run: BlockRun) -> Vec<u8> {
    let mut bytes = Vec::new();
    let lease = table.read_lease();
    arena
        .read_blocks(&lease, run, BlockOrder::Own, &mut |piece| bytes.extend_from_slice(piece))
        .expect("read");
    bytes
}

#[test]
fn what_is_put_is_what_is_taken_and_both_ends_sum_it_alike() {
    let Some((_turn, fake)) = driver() else { return };
    let (before, ipc_before) = (fake.counts(), fake.ipc_counts());
    let mut random = Random::from_env("cuda_rings");
    {
        let ((_first, source), (_second, destination)) = (arena(0), arena(1));
        let (theirs, ours) = (table(&mut random), table(&mut random));
        let (read, write) = (theirs.read_lease(), ours.write_lease(0).expect("owned blocks"));
        let (len, num_layers) = (source.layout().block_layer_bytes(), source.layout().num_layers);
        let fill = theirs.write_lease(0).expect("owned blocks");
        for layer in 0..num_layers {
            for nth in 0..NUM_BLOCKS {
                let block: Vec<u8> = (0..len).map(|_| random.within(0..256) as u8).collect();
                source.write(&fill, layer, nth, &block).expect("written");
            }
        }
        let ring = source.peer().expect("on a device").make_ring(RING_BYTES).expect("a ring");
        let view =
            destination.peer().expect("on a device").open_ring(ring.handle(), RING_BYTES).expect("open");
        assert_eq!((view.num_bytes(), fake.ipc_counts()), (RING_BYTES, (1, ipc_before.1 + 1)));
        for _ in 0..12 {
            let first = random.within(0..NUM_BLOCKS);
            let num_blocks = random.within(1..NUM_BLOCKS - first + 1);
            let run = BlockRun { layer: random.within(0..num_layers), first, num_blocks };
            let offset = 16 * random.within(0..RING_BYTES / 32);
            let copy = PeerCopy { run, num_tokens: 16, offset };
            let wanted = bytes(&source, &theirs, run);
            let put = ring.put(&read, copy).expect("put");
            assert_eq!(put, peer_sum(&wanted), "{copy:?}");
            assert_eq!(view.take(&write, copy).expect("taken"), put, "{copy:?}");
            assert!(bytes(&destination, &ours, run) == wanted, "{copy:?}");
        }
        // Of the last block its first 5 tokens: 5 rows of each head, and no other byte.
        let run = BlockRun { layer: 1, first: NUM_BLOCKS - 1, num_blocks: 1 };
        let empty = vec![9; len];
        destination.write(&write, 1, NUM_BLOCKS - 1, &empty).expect("written");
        let copy = PeerCopy { run, num_tokens: 5, offset: 32 };
        let put = ring.put(&read, copy).expect("put");
        assert_eq!(view.take(&write, copy).expect("taken"), put);
        let (from, to) = (bytes(&source, &theirs, run), bytes(&destination, &ours, run));
        let half = len / (2 * source.layout().num_kv_heads);
        let filled = |byte: usize| byte % half < half / 16 * 5;
        assert!((0..len).all(|byte| to[byte] == if filled(byte) { from[byte] } else { 9 }));

        let beyond = PeerCopy { offset: RING_BYTES - 16, ..copy };
        let odd = PeerCopy { offset: 8, ..copy };
        let outside = PeerCopy { run: BlockRun { num_blocks: 2, ..run }, ..copy };
        for wrong in
            [beyond, odd, outside, PeerCopy { num_tokens: 0, ..copy }, PeerCopy { num_tokens: 17, ..copy }]
        {
            assert!(ring.put(&read, wrong).is_err() && view.take(&write, wrong).is_err(), "{wrong:?}");
        }
        write.fence().close();
        assert_eq!(view.take(&write, copy), Err(MemoryError::Fenced));
        // A ring that was given up can't be opened any more.
        let handle = ring.handle().to_vec();
        drop((view, ring));
        let again = destination.peer().expect("on a device").open_ring(&handle, RING_BYTES);
        assert!(again.is_err_and(|error| error.to_string().contains("the handle is none")));
        assert!(destination.peer().expect("on a device").open_ring(&handle[..8], RING_BYTES).is_err());
    }
    assert_eq!(fake.counts().held, before.held, "taken from the driver and not given back");
    assert_eq!(fake.ipc_counts().0, ipc_before.0, "open and not closed");
}

/// The planted fault: a ring's place is written again before it was read.
#[test]
fn a_place_in_a_ring_that_is_used_again_too_early_gives_another_sum() {
    let Some((_turn, _fake)) = driver() else { return };
    let mut random = Random::from_env("cuda_rings_early");
    let ((_first, source), (_second, destination)) = (arena(0), arena(1));
    let (theirs, ours) = (table(&mut random), table(&mut random));
    let (read, write) = (theirs.read_lease(), ours.write_lease(0).expect("owned blocks"));
    let fill = theirs.write_lease(0).expect("owned blocks");
    let len = source.layout().block_layer_bytes();
    for nth in 0..2 {
        source.write(&fill, 0, nth, &vec![nth as u8 + 1; len]).expect("written");
    }
    let ring = source.peer().expect("on a device").make_ring(RING_BYTES).expect("a ring");
    let view = destination.peer().expect("on a device").open_ring(ring.handle(), RING_BYTES).expect("open");
    let copy =
        |first| PeerCopy { run: BlockRun { layer: 0, first, num_blocks: 1 }, num_tokens: 16, offset: 0 };
    let announced = ring.put(&read, copy(0)).expect("put");
    assert_eq!(view.take(&write, copy(0)), Ok(announced));
    ring.put(&read, copy(1)).expect("put");
    assert_ne!(view.take(&write, copy(0)), Ok(announced), "other bytes, and nobody notices");
}
