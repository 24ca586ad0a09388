//! What the prefix cache costs a block, with 1,000,000 blocks cached.

use baton_kv::{BlockPool, BlockTable, Inserted, PrefixCache, Replacement};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

const BLOCK: usize = 16;
const NUM_BLOCKS: usize = 1_000_000;
const PROMPT: usize = 64 * BLOCK;

fn prompt(n: u32) -> Vec<u32> {
    (0..PROMPT as u32).map(|i| n.wrapping_mul(0x9e37_79b9) ^ (i * 7)).collect()
}

fn add(cache: &mut PrefixCache, pool: &BlockPool, tokens: &[u32]) {
    let hashes = cache.hashes(tokens, BLOCK);
    let hits = cache.lookup(&hashes);
    let first = hits.len();
    let need = hashes.len() - first;
    let free = pool.counts().free;
    if free < need {
        cache.evict(need - free);
    }
    let mut table = BlockTable::new();
    table.extend_shared(hits);
    table.extend(pool.allocate(need).expect("evicted enough"));
    for nth in first..hashes.len() {
        let parent = if nth == 0 { cache.root() } else { hashes[nth - 1] };
        let block = table.share(nth).expect("in the table");
        if let Inserted::Existing(known) = cache.insert(parent, hashes[nth], &block) {
            table.replace(nth, Replacement::Shared(known));
        }
    }
}

fn bench(c: &mut Criterion) {
    let pool = BlockPool::new(NUM_BLOCKS);
    let mut cache = PrefixCache::new(&pool, b"bench");
    let num_prompts = (NUM_BLOCKS * BLOCK / PROMPT) as u32;
    for n in 0..num_prompts {
        add(&mut cache, &pool, &prompt(n));
    }
    assert!(cache.len() > NUM_BLOCKS - 64);
    let mut n = 0;
    c.bench_function("hash 64 blocks", |b| b.iter(|| cache.hashes(&prompt(7), BLOCK)));
    let hashes: Vec<_> = (0..1000).map(|n| cache.hashes(&prompt(n * 15), BLOCK)).collect();
    c.bench_function("lookup and drop 64 blocks of 1,000,000", |b| {
        b.iter(|| {
            n = (n + 1) % hashes.len();
            cache.lookup(&hashes[n]).len()
        });
    });
    let mut fresh = num_prompts;
    c.bench_function("hash, evict, allocate and insert 64 blocks of 1,000,000", |b| {
        b.iter_batched(
            || {
                fresh += 1;
                prompt(fresh)
            },
            |tokens| add(&mut cache, &pool, &tokens),
            BatchSize::SmallInput,
        );
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
