//! The index of cached blocks against a map of sets.

use std::collections::{BTreeMap, BTreeSet};

use baton_dispatch::CacheIndex;
use baton_kv::BlockHash;
use proptest::prelude::*;

use crate::fleets::chain;

const WORKERS: usize = 20;
const PROMPTS: u32 = 3;
const BLOCKS: u32 = 6;

/// A worker comes to have exactly the first so many blocks of a prompt; or forgets all; or sends a snapshot.
#[derive(Clone, Copy, Debug)]
enum Change {
    To { worker: usize, prompt: u32, blocks: u32 },
    Forget { worker: usize },
    Replace { worker: usize, prompt: u32, blocks: u32 },
}

fn change() -> impl Strategy<Value = Change> {
    let what = || (0..WORKERS, 0..PROMPTS, 0..=BLOCKS);
    prop_oneof![
        12 => what().prop_map(|(worker, prompt, blocks)| Change::To { worker, prompt, blocks }),
        1 => (0..WORKERS).prop_map(|worker| Change::Forget { worker }),
        2 => what().prop_map(|(worker, prompt, blocks)| Change::Replace { worker, prompt, blocks }),
    ]
}

#[derive(Default)]
struct Model(BTreeMap<usize, BTreeSet<BlockHash>>);

impl Model {
    fn leading(&self, worker: usize, hashes: &[BlockHash]) -> u32 {
        let Some(has) = self.0.get(&worker) else { return 0 };
        hashes.iter().take_while(|hash| has.contains(hash)).count() as u32
    }
}

proptest! {
    #[test]
    fn the_index_knows_what_a_map_of_sets_knows(changes in prop::collection::vec(change(), 0..120)) {
        let chains: Vec<_> = (0..PROMPTS).map(|prompt| chain(prompt, BLOCKS)).collect();
        let (mut index, mut model) = (CacheIndex::default(), Model::default());
        for change in changes {
            match change {
                Change::To { worker, prompt, blocks } => {
                    let (kept, rest) = chains[prompt as usize].split_at(blocks as usize);
                    index.apply(worker, kept, rest);
                    let has = model.0.entry(worker).or_default();
                    has.extend(kept);
                    has.retain(|hash| !rest.contains(hash));
                }
                Change::Forget { worker } => {
                    index.forget(worker);
                    model.0.remove(&worker);
                }
                Change::Replace { worker, prompt, blocks } => {
                    let kept = &chains[prompt as usize][..blocks as usize];
                    index.replace(worker, kept);
                    model.0.insert(worker, kept.iter().copied().collect());
                }
            }
            let known: BTreeSet<_> = model.0.values().flatten().collect();
            let mut tidied = index.clone();
            while tidied.tidy() {}
            prop_assert_eq!(tidied.num_blocks(), known.len());
            prop_assert!(index.num_blocks() >= known.len());
            for hashes in &chains {
                let mut found = BTreeMap::new();
                index.leading_blocks(hashes, |worker, num| assert_eq!(found.insert(worker, num), None));
                let right: BTreeMap<_, _> =
                    (0..WORKERS).map(|w| (w, model.leading(w, hashes))).filter(|(_, num)| *num > 0).collect();
                prop_assert_eq!(found, right);
            }
        }
    }
}

#[test]
fn a_worker_is_forgotten_at_once_and_its_blocks_go_in_small_pieces() {
    const BLOCKS: u32 = 20_000;
    let (own, shared) = (chain(0, BLOCKS), chain(1, BLOCKS));
    let mut index = CacheIndex::default();
    (0..9).for_each(|worker| index.apply(worker, &shared, &[]));
    index.apply(0, &own, &[]);
    index.forget(0);
    let has = |index: &CacheIndex, hashes: &[BlockHash]| {
        let mut workers = BTreeSet::new();
        index.leading_blocks(hashes, |worker, num| assert!(num == BLOCKS && workers.insert(worker)));
        workers
    };
    let (mut left, mut num_pieces) = (index.num_blocks(), 0);
    assert_eq!(left, 2 * BLOCKS as usize, "nothing is looked at");
    loop {
        assert!(has(&index, &own).is_empty() && has(&index, &shared).into_iter().eq(1..9));
        if !index.tidy() {
            break;
        }
        num_pieces += 1;
        let now = index.num_blocks();
        assert!(left - now < BLOCKS as usize / 100, "{} blocks in one piece", left - now);
        left = now;
    }
    assert!(left == BLOCKS as usize && num_pieces > 200, "{left} blocks after {num_pieces} pieces");
    // What it has anew is not what was forgotten, tidied or not.
    index.forget(1);
    index.apply(1, &own, &[]);
    assert_eq!((has(&index, &own), has(&index, &shared)), (BTreeSet::from([1]), (2..9).collect()));
}

#[test]
fn a_block_that_went_and_came_is_there() {
    let hashes = chain(0, 1);
    let mut index = CacheIndex::default();
    index.apply(0, &hashes, &[]);
    index.apply(0, &hashes, &hashes);
    assert_eq!(index.num_blocks(), 1);
}

#[test]
fn a_worker_beyond_the_limit_is_not_known() {
    let hashes = chain(0, 1);
    let mut index = CacheIndex::default();
    index.apply(CacheIndex::MAX_WORKERS, &hashes, &[]);
    assert_eq!(index.num_blocks(), 0);
    index.apply(CacheIndex::MAX_WORKERS - 1, &hashes, &[]);
    assert_eq!(index.num_blocks(), 1);
}
