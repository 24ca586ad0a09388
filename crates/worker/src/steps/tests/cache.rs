//! What the loop tells about the prefix cache.

use std::collections::HashSet;

use baton_kv::BlockHash;

use super::*;

/// A reader that follows.
struct Mirror {
    known: HashSet<BlockHash>,
    view: CacheView,
}

impl Mirror {
    async fn open(bench: &Bench) -> Self {
        let view = bench.steps.watch_cache().await.unwrap();
        Self { known: view.snapshot.iter().copied().collect(), view }
    }

    /// Takes in changes until `num` blocks are known.
    async fn until(&mut self, num: usize) {
        while self.known.len() != num {
            let changes = tokio::time::timeout(Duration::from_secs(10), self.view.changes.recv()).await;
            let changes = changes.expect("a change within its bound").unwrap();
            for hash in &changes.stored {
                assert!(self.known.insert(*hash), "stored twice");
            }
            for hash in &changes.removed {
                assert!(self.known.remove(hash), "removed without being there");
            }
        }
    }
}

async fn cached() -> Bench {
    Bench::start_with(Duration::ZERO, usize::MAX, Some(Vec::new())).await
}

/// A prompt that shares no block with one of another `n`.
async fn compute(bench: &Bench, n: u32, num_tokens: usize) {
    let new = Submission { prompt: vec![n; num_tokens], ..submission(Origin::Local, 1, 1) };
    tokens(&mut bench.steps.submit(new).await.unwrap()).await;
}

#[tokio::test]
async fn a_snapshot_and_the_changes_after_it_are_what_the_cache_knows() {
    let bench = cached().await;
    compute(&bench, 1, 50).await;
    let mut early = Mirror::open(&bench).await;
    assert_eq!(early.known.len(), 3);
    compute(&bench, 2, 40).await;
    early.until(5).await;
    let late = Mirror::open(&bench).await;
    assert_eq!(late.known, early.known);
    // What does not fit beside it is evicted.
    compute(&bench, 3, 63 * 16).await;
    let full = Mirror::open(&bench).await;
    early.until(full.known.len()).await;
    assert_eq!(full.known, early.known);
    assert!(full.known.len() <= BLOCKS && !late.known.is_subset(&full.known));
    bench.pool.check().unwrap();
}

#[tokio::test]
async fn a_reader_that_falls_behind_is_told_so() {
    let bench = cached().await;
    let mut slow = Mirror::open(&bench).await;
    for n in 0..400 {
        compute(&bench, n, 16 + 1).await;
    }
    let error = slow.view.changes.recv().await.unwrap_err();
    assert!(matches!(error, tokio::sync::broadcast::error::RecvError::Lagged(_)), "{error}");
    let fresh = Mirror::open(&bench).await;
    assert!(!fresh.known.is_empty());
}

#[tokio::test]
async fn without_a_prefix_cache_there_is_nothing_to_tell_and_the_end_is_told() {
    let bench = Bench::fast().await;
    compute(&bench, 1, 50).await;
    let mut mirror = Mirror::open(&bench).await;
    assert!(mirror.known.is_empty());
    bench.steps.stop();
    assert!(mirror.view.changes.recv().await.is_err());
    assert!(bench.steps.watch_cache().await.is_none());
}
