//! Random sequences over a prefix cache against a model that remembers every prompt's blocks.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use proptest::prelude::*;

use crate::{BlockHash, BlockPool, BlockTable, CacheChanges, Inserted, PrefixCache, Replacement};

const BLOCK: usize = 2;

/// Computes a sequence the way a scheduler does: looks up, allocates the rest (evicting), inserts full blocks.
fn run(cache: &mut PrefixCache, pool: &BlockPool, tokens: &[u32]) -> Option<(BlockTable, usize)> {
    let hashes = cache.hashes(tokens, BLOCK);
    let hits = cache.lookup(&hashes);
    let num_hits = hits.len();
    let need = tokens.len().div_ceil(BLOCK) - num_hits;
    let free = pool.counts().free;
    if free < need {
        cache.evict(need - free);
    }
    let mut table = BlockTable::new();
    table.extend_shared(hits);
    table.extend(pool.allocate(need)?);
    for nth in num_hits..hashes.len() {
        let parent = if nth == 0 { cache.root() } else { hashes[nth - 1] };
        let block = table.share(nth).unwrap();
        if let Inserted::Existing(known) = cache.insert(parent, hashes[nth], &block) {
            table.replace(nth, Replacement::Shared(known));
        }
    }
    Some((table, num_hits))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn hits_are_exactly_the_known_prefix_and_no_block_is_lost(
        total in 1usize..24,
        ops in prop::collection::vec((prop::collection::vec(0u32..2, 1..12), any::<bool>(), 0usize..4), 1..80),
    ) {
        let pool = BlockPool::new(total);
        let mut cache = PrefixCache::new(&pool, b"test");
        let mut live: Vec<(Vec<u32>, BlockTable)> = Vec::new();
        // What each cached block holds: the tokens from the start to its end.
        let mut contents: HashMap<u32, Vec<u32>> = HashMap::new();
        for (tokens, fork, drop_nth) in ops {
            let known = cache.peek(&cache.hashes(&tokens, BLOCK));
            let before = pool.counts();
            let (hits, num_idle) = cache.peek_idle(&cache.hashes(&tokens, BLOCK));
            let held = cache.lookup(&cache.hashes(&tokens, BLOCK));
            prop_assert_eq!((hits, num_idle), (held.len(), before.cached - pool.counts().cached));
            drop(held);
            if let Some((mut table, hits)) = run(&mut cache, &pool, &tokens) {
                prop_assert_eq!(hits, known);
                for (nth, &id) in table.ids().iter().enumerate().take(tokens.len() / BLOCK) {
                    let prefix = tokens[..(nth + 1) * BLOCK].to_vec();
                    if nth < hits {
                        prop_assert_eq!(&contents[&id], &prefix, "a hit holds this very prefix");
                    }
                    contents.insert(id, prefix);
                }
                if fork {
                    let other = table.fork(0);
                    prop_assert_eq!(other.ids(), table.ids());
                    live.push((tokens.clone(), other));
                }
                live.push((tokens, table));
            } else {
                prop_assert!(pool.counts().free < tokens.len().div_ceil(BLOCK));
            }
            if drop_nth < live.len() {
                live.swap_remove(drop_nth);
            }
            prop_assert_eq!(pool.check(), Ok(()));
            let referenced: HashSet<u32> = live.iter().flat_map(|(_, t)| t.ids().to_vec()).collect();
            let counts = pool.counts();
            prop_assert_eq!(counts.held, referenced.len(), "distinct blocks in use");
            prop_assert_eq!(counts.free + counts.cached + counts.held, total);
        }
        live.clear();
        let cached = pool.counts().cached;
        prop_assert_eq!(cache.evict(usize::MAX), cached, "every idle block can be evicted");
        prop_assert_eq!(pool.counts().free, total);
        prop_assert!(cache.is_empty());
    }

    #[test]
    fn copy_on_write_keeps_one_writer(forks in 1usize..5) {
        let pool = BlockPool::new(16);
        let mut parent = BlockTable::new();
        parent.extend(pool.allocate(3).unwrap());
        let mut tables: Vec<BlockTable> = (0..forks).map(|_| parent.fork(0)).collect();
        prop_assert!(!parent.is_writable(2), "others read it");
        tables.push(parent);
        prop_assert_eq!(pool.counts().held, 3);
        let mut owned = HashSet::new();
        for table in &mut tables {
            if !table.is_writable(2) {
                let block = pool.allocate(1).unwrap().pop().unwrap();
                table.replace(2, Replacement::Owned(block));
            }
            prop_assert!(table.is_writable(2));
            prop_assert!(owned.insert(table.ids()[2]), "a writable block has one holder");
        }
        // The last table took the original back instead of copying it.
        prop_assert_eq!(pool.counts().held, 2 + tables.len());
    }
}

#[test]
fn what_is_kept_of_a_table_is_what_nobody_else_holds() {
    let pool = BlockPool::new(4);
    let mut table = BlockTable::new();
    table.extend(pool.allocate(2).unwrap());
    let mut fork = table.fork(0);
    fork.push(pool.allocate_one().unwrap());
    let [shared, _, own] = *fork.ids() else { panic!("three blocks") };
    assert!(!table.frees_any() && fork.frees_any());
    assert!(fork.keep(shared).is_none() && fork.keep(99).is_none());
    let kept = fork.keep(own).unwrap();
    drop(fork);
    assert!(table.frees_any(), "the last holder of two");
    assert!(!table.is_empty() && table.is_writable(0));
    assert_eq!((kept.id(), pool.counts().held), (own, 3));
    drop((table, kept));
    assert_eq!(pool.counts().free, 4);
}

#[test]
fn least_recently_used_leaf_goes_first() {
    let pool = BlockPool::new(6);
    let mut cache = PrefixCache::new(&pool, b"test");
    let (a, b) = ([1, 1, 2, 2], [1, 1, 3, 3]);
    drop(run(&mut cache, &pool, &a).unwrap());
    drop(run(&mut cache, &pool, &b).unwrap());
    assert_eq!(pool.counts().cached, 3, "the first block is shared");
    drop(run(&mut cache, &pool, &a).unwrap());
    assert_eq!(cache.evict(1), 1);
    let peek = |tokens: &[u32]| cache.peek(&cache.hashes(tokens, BLOCK));
    assert_eq!((peek(&a), peek(&b)), (2, 1), "b's own leaf was older");
}

#[test]
fn a_block_in_use_is_not_evicted() {
    let pool = BlockPool::new(4);
    let mut cache = PrefixCache::new(&pool, b"test");
    let (table, _) = run(&mut cache, &pool, &[1, 2, 3, 4]).unwrap();
    assert_eq!(cache.evict(10), 0);
    let lease = table.read_lease();
    drop(table);
    assert_eq!(cache.evict(10), 0, "leased");
    drop(lease);
    assert_eq!(cache.evict(10), 2);
}

#[test]
fn a_salt_separates_models() {
    let hash = |salt: &[u8]| BlockHash::root(salt).next(&[1, 2]);
    assert_ne!(hash(b"a"), hash(b"b"));
    assert_eq!(hash(b"a"), hash(b"a"));
}

/// A set of prefixes with the order in which idle ones were used last.
#[derive(Default)]
struct Model {
    /// Every known prefix and when it was last looked up or inserted.
    known: BTreeMap<Vec<u32>, usize>,
    /// Idle leaves, least recently used first.
    leaves: Vec<Vec<u32>>,
    now: usize,
}

impl Model {
    fn is_leaf(&self, prefix: &[u32]) -> bool {
        !self.known.keys().any(|other| other.len() > prefix.len() && other.starts_with(prefix))
    }

    /// A sequence is looked up, inserted and dropped.
    fn touch(&mut self, tokens: &[u32]) {
        self.now += 1;
        for end in (BLOCK..=tokens.len()).step_by(BLOCK) {
            let prefix = &tokens[..end];
            self.leaves.retain(|leaf| leaf != prefix);
            self.known.insert(prefix.to_vec(), self.now);
        }
        let last = &tokens[..tokens.len() / BLOCK * BLOCK];
        if !last.is_empty() && self.is_leaf(last) {
            self.leaves.push(last.to_vec());
        }
    }

    fn evict(&mut self, count: usize) -> usize {
        for evicted in 0..count {
            if self.leaves.is_empty() {
                return evicted;
            }
            let leaf = self.leaves.remove(0);
            let used = self.known.remove(&leaf);
            let parent = &leaf[..leaf.len() - BLOCK];
            if let Some(&parent_used) = self.known.get(parent)
                && self.is_leaf(parent)
            {
                // Used together: its turn is now. Used alone since: as if used now.
                let at = if Some(parent_used) > used { self.leaves.len() } else { 0 };
                self.leaves.insert(at, parent.to_vec());
            }
        }
        count
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn the_cache_is_a_set_of_prefixes_that_forgets_the_least_recently_used_leaf(
        ops in prop::collection::vec((prop::collection::vec(0u32..2, 1..12), 0usize..4), 1..60),
    ) {
        let pool = BlockPool::new(1000);
        let mut cache = PrefixCache::new(&pool, b"test");
        cache.set_report(true);
        let mut model = Model::default();
        let mut reader: BTreeSet<BlockHash> = BTreeSet::new();
        for (tokens, num_evicted) in ops {
            drop(run(&mut cache, &pool, &tokens).unwrap());
            model.touch(&tokens);
            prop_assert_eq!(cache.evict(num_evicted), model.evict(num_evicted));
            let hash = |prefix: &Vec<u32>| *cache.hashes(prefix, BLOCK).last().unwrap();
            let known: BTreeSet<BlockHash> = model.known.keys().map(hash).collect();
            prop_assert_eq!(&cache.known(), &known.iter().copied().collect::<Vec<_>>());
            let mut changes = CacheChanges::default();
            cache.drain_changes(&mut changes);
            prop_assert!(changes.removed.iter().all(|hash| reader.remove(hash)));
            prop_assert!(changes.stored.into_iter().all(|hash| reader.insert(hash)));
            prop_assert_eq!(&reader, &known, "a reader of changes knows the same");
        }
    }
}

#[test]
fn changes_that_cancel_each_other_are_not_told_and_too_many_are_said_to_be_too_many() {
    let pool = BlockPool::new(70_000);
    let mut cache = PrefixCache::new(&pool, b"test");
    drop(run(&mut cache, &pool, &[1, 2]).unwrap());
    cache.set_report(true);
    assert_eq!(cache.evict(1), 1);
    drop(run(&mut cache, &pool, &[1, 2]).unwrap());
    drop(run(&mut cache, &pool, &[3, 4, 5, 6]).unwrap());
    assert_eq!(cache.evict(1), 1, "of the one looked up first");
    let mut changes = CacheChanges::default();
    cache.drain_changes(&mut changes);
    assert_eq!((changes.stored.len(), changes.removed.len()), (2, 1));
    let many: Vec<u32> = (0..140_000).collect();
    drop(run(&mut cache, &pool, &many[..132_000]).unwrap());
    let mut changes = CacheChanges::default();
    cache.drain_changes(&mut changes);
    assert_eq!(changes, CacheChanges { overflowed: true, ..CacheChanges::default() });
    assert_eq!(cache.known().len(), 66_002, "the snapshot has them");
    drop(run(&mut cache, &pool, &[7, 8]).unwrap());
    let mut changes = CacheChanges::default();
    cache.drain_changes(&mut changes);
    assert_eq!((changes.overflowed, changes.stored.len()), (false, 1), "collected again");
    cache.set_report(false);
    drop(run(&mut cache, &pool, &[9, 8]).unwrap());
    cache.drain_changes(&mut changes);
    assert_eq!(changes.stored.len(), 1, "nothing is collected for nobody");
}
