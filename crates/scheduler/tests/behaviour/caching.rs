//! What the prefix cache saves, and what it never costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_kv::CacheChanges;
use baton_scheduler::{NewSequence, Origin, SchedulerConfig, SequenceId};

use crate::support::{Harness, config, group, sequence};

#[test]
fn the_same_prompt_again_computes_only_the_uncached_tail() {
    for origin in [Origin::Prefill, Origin::Local] {
        let mut harness = Harness::new(SchedulerConfig { context: 1000, ..config() }, 60);
        let prompt: Vec<u32> = (10..50).collect();
        harness.submit(sequence(1, origin, prompt.clone(), 3)).unwrap();
        harness.run_to_end();
        assert_eq!(harness.scheduler.num_prompt_tokens_computed(), 40);
        harness.submit(sequence(2, origin, prompt.clone(), 3)).unwrap();
        harness.run_to_end();
        // 10 blocks of 4 are known, but the last token's logits are needed: its block is computed again.
        assert_eq!(harness.scheduler.num_prompt_tokens_computed(), 44);
        assert_eq!(harness.streams[&SequenceId(1)].produced, harness.streams[&SequenceId(2)].produced);
        let opted_out = NewSequence { cache: false, ..sequence(3, origin, prompt, 3) };
        harness.submit(opted_out).unwrap();
        harness.run_to_end();
        assert_eq!(harness.scheduler.num_prompt_tokens_computed(), 84);
        assert_eq!(harness.streams[&SequenceId(1)].produced, harness.streams[&SequenceId(3)].produced);
    }
}

#[test]
fn a_remote_prompt_skips_what_is_here_already() {
    let mut harness = Harness::new(config(), 60);
    let prompt: Vec<u32> = (10..26).collect();
    harness.submit(sequence(1, Origin::Remote, prompt.clone(), 4)).unwrap();
    assert_eq!(harness.leases[0].1.skip(), 0);
    harness.run_to_end();
    let longer: Vec<u32> = (10..30).collect();
    for (id, prompt, skip) in [(2, prompt, 3), (3, longer, 4)] {
        harness.submit(sequence(id, Origin::Remote, prompt, 4)).unwrap();
        assert_eq!(harness.leases[0].1.skip(), skip);
        harness.run_to_end();
    }
    assert_eq!(harness.scheduler.num_prompt_tokens_computed(), 0);
}

#[test]
fn idle_cached_blocks_never_keep_a_prompt_waiting() {
    let mut harness = Harness::new(config(), 12);
    for id in 0..20 {
        let prompt: Vec<u32> = (0..40).map(|i| (id as u32 * 40 + i) % 1000).collect();
        harness.submit(sequence(id, Origin::Local, prompt, 2)).unwrap();
        harness.run_to_end();
        assert!(!harness.streams[&SequenceId(id)].produced.is_empty());
    }
    assert_eq!(harness.scheduler.num_preemptions(), 0);
}

#[test]
fn a_sequence_that_waits_for_room_gives_back_nothing_and_so_wakes_nobody() {
    let mut harness = Harness::new(config(), 10);
    let num_wakes = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&num_wakes);
    harness.scheduler.pool().on_free(Box::new(move || _ = count.fetch_add(1, Ordering::Relaxed)));
    let prompt: Vec<u32> = (10..26).collect();
    harness.submit(sequence(1, Origin::Local, prompt.clone(), 1)).unwrap();
    harness.run_to_end();
    harness.submit(sequence(2, Origin::Remote, vec![1; 28], 1)).unwrap();
    harness.submit(sequence(3, Origin::Remote, prompt, 1)).unwrap();
    assert_eq!((harness.leases.len(), harness.scheduler.counts().waiting), (1, 1), "beyond the share");
    let before = num_wakes.load(Ordering::Relaxed);
    (0..5).for_each(|_| assert!(!harness.step()));
    assert_eq!(num_wakes.load(Ordering::Relaxed), before);
    harness.run_to_end();
    assert!(harness.scheduler.is_empty());
}

#[test]
fn a_reader_of_changes_knows_what_the_cache_knows() {
    let mut harness = Harness::new(config(), 12);
    harness.scheduler.set_report_cache(true);
    let mut known = std::collections::BTreeSet::new();
    for id in 0..30 {
        let prompt: Vec<u32> = (0..30).map(|i| (id as u32 % 7 * 40 + i) % 1000).collect();
        let cache = id % 5 != 4;
        harness.submit(NewSequence { cache, ..group(id * 10, 2, Origin::Local, prompt, 4) }).unwrap();
        harness.run_to_end();
        let mut changes = CacheChanges::default();
        harness.scheduler.drain_cache_changes(&mut changes);
        assert!(!changes.overflowed && (cache || changes.stored.is_empty()), "opted out");
        for hash in changes.removed {
            assert!(known.remove(&hash), "only what was known goes");
        }
        for hash in changes.stored {
            assert!(known.insert(hash), "only what was not known comes");
        }
        assert_eq!(harness.scheduler.cached_hashes(), known.iter().copied().collect::<Vec<_>>());
    }
    assert!(!known.is_empty());
}
