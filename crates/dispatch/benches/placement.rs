//! What a placement costs at 1,000 workers and 1,000,000 cached blocks.

use baton_dispatch::{
    CacheIndex, Fleet, Layout, LinkView, Links, Need, Placer, Policy, Role, WorkerState, WorkerView,
};
use baton_handoff::InstanceId;
use baton_kv::BlockHash;
use criterion::{Criterion, criterion_group, criterion_main};

const WORKERS: usize = 1_000;
const BLOCKS: u32 = 1_000_000;
const BLOCK: u32 = 16;
/// Blocks of a prompt of 2,048 tokens.
const CHAIN: u32 = 128;
/// Prompts that take turns, so that what one decision brings into the processor's caches does not serve the next.
const PROMPTS: u32 = 512;

fn chain(prompt: u32) -> Vec<BlockHash> {
    let mut hash = BlockHash::root(&prompt.to_le_bytes());
    let next = |nth: u32| {
        hash = hash.next(&[nth]);
        hash
    };
    (0..CHAIN).map(next).collect()
}

fn instance(index: usize) -> InstanceId {
    let hash = BlockHash::root(&index.to_le_bytes());
    InstanceId(hash.0)
}

/// Half of each kind, none like the other.
fn workers() -> Vec<WorkerView> {
    (0..WORKERS)
        .map(|index| WorkerView {
            instance: instance(index),
            index,
            role: if index % 2 == 0 { Role::Prefill } else { Role::Decode },
            state: WorkerState::Ready,
            num_waiting: 0,
            num_running: (index * 7 % 23) as u32,
            free_blocks: 2_000,
            total_blocks: 4_000,
            queued_tokens: (index * 31 % 1_700) as u64,
            in_flight: (index % 3) as u32,
            prefill_tokens_per_s: 9_000.0 + (index * 13 % 2_000) as f64,
            decode_step_ms: 15.0 + (index * 11 % 100) as f64 / 10.0,
        })
        .collect()
}

/// Every prefill worker measured its links to 64 decode workers.
fn links() -> Links {
    let mut links = Links::default();
    for prefill in (0..WORKERS).step_by(2) {
        let row = (0..64).map(|nth| LinkView {
            decode: instance(((prefill + 1 + nth * 14) % WORKERS) | 1),
            bytes_per_s: 5e8 + ((prefill + nth) * 17 % 50) as f64 * 1e8,
        });
        links.set(instance(prefill), row);
    }
    links
}

/// The prompts that are asked for, held as far and by as many workers as `holds` says; the rest of the million are others'.
fn cache(prompts: &[Vec<BlockHash>], holders: usize, blocks: usize) -> CacheIndex {
    let mut cache = CacheIndex::default();
    for (nth, hashes) in prompts.iter().enumerate() {
        for holder in 0..holders {
            // Prefill and decode workers both.
            let worker = (nth * 37 + holder * (WORKERS / holders.max(1))) % WORKERS;
            // Not all hold equally much, so that the set shrinks along the chain.
            cache.apply(worker, &hashes[..blocks - holder % 4], &[]);
        }
    }
    let mut other = PROMPTS;
    while cache.num_blocks() < BLOCKS as usize {
        cache.apply(other as usize % WORKERS, &chain(other), &[]);
        other += 1;
    }
    cache
}

fn bench(c: &mut Criterion) {
    let prompts: Vec<_> = (0..PROMPTS).map(chain).collect();
    let (workers, measured) = (workers(), links());
    let cases = [
        ("nothing cached", 0, 0),
        ("half cached on 4 workers", 4, CHAIN as usize / 2),
        ("all cached on 4 workers", 4, CHAIN as usize),
        ("all cached on 250 workers", 250, CHAIN as usize),
    ];
    for (name, holders, blocks) in cases {
        let cache = cache(&prompts, holders, blocks);
        let fleet = Fleet { workers: &workers, cache: &cache, links: &measured };
        let mut placer = Placer::new(Layout::Disaggregated, Policy::KvAware, 1);
        let mut nth = 0;
        c.bench_function(&format!("place among 1,000 workers, {name}"), |b| {
            b.iter(|| {
                nth = (nth + 1) % prompts.len();
                let need = Need {
                    prompt_tokens: CHAIN * BLOCK,
                    max_new_tokens: 256,
                    num_sequences: 1,
                    block_size: BLOCK,
                    kv_bytes_per_token: 100_000,
                    max_waiting: 256,
                    avoid: &[],
                    hashes: &prompts[nth],
                };
                placer.place(&fleet, &need)
            });
        });
    }
    let mut cache = cache(&prompts, 4, CHAIN as usize);
    let mut nth = 0;
    c.bench_function("apply 128 stored and 128 removed blocks of 1,000,000", |b| {
        b.iter(|| {
            nth = (nth + 1) % prompts.len();
            let gone = &prompts[(nth + prompts.len() / 2) % prompts.len()];
            cache.apply(999, &prompts[nth], gone);
        });
    });
    c.bench_function("forget a worker among 1,000,000 blocks", |b| b.iter(|| cache.forget(999)));
}

criterion_group! {
    name = benches;
    config = Criterion::default().measurement_time(std::time::Duration::from_secs(3)).sample_size(30);
    targets = bench
}
criterion_main!(benches);
