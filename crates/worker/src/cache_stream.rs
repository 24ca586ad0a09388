//! One reader's stream of what enters and leaves the prefix cache.

use std::time::Duration;

use baton_handoff::InstanceId;
use baton_kv::{BlockHash, CacheChanges};
use baton_proto::v1;
use tokio::sync::mpsc;
use tonic::Status;

use crate::Core;
use crate::steps::{CacheView, StepHandle};

/// Cache streams at once, at most.
pub const MAX_CACHE_WATCHERS: usize = 64;

/// Hashes of one message, at most: 64 KiB.
const MAX_HASHES: usize = 4096;

/// Shortest time between two snapshots for one reader: each costs the step loop a walk over the whole cache.
const SNAPSHOT_SPACING: Duration = Duration::from_secs(1);

type Updates = mpsc::Sender<Result<v1::CacheUpdate, Status>>;

/// Streams until the reader leaves or the worker ends; ends at once without a prefix cache.
pub(crate) async fn run(core: &Core, updates: Updates) {
    let Ok(loaded) = core.loaded() else { return };
    if !core.config.prefix_cache {
        return;
    }
    let mut closing = core.closing.subscribe();
    let mut writer = Writer { updates: &updates, instance: core.instance, sequence: 0 };
    tokio::select! {
        _ = closing.wait_for(|closing| *closing) => {}
        () = updates.closed() => {}
        () = writer.stream(&loaded.steps) => {}
    }
}

struct Writer<'a> {
    updates: &'a Updates,
    instance: InstanceId,
    sequence: u64,
}

impl Writer<'_> {
    /// Until the step loop ends.
    async fn stream(&mut self, steps: &StepHandle) {
        while let Some(CacheView { snapshot, mut changes }) = steps.watch_cache().await {
            let mut parts = snapshot.chunks(MAX_HASHES);
            self.send(true, parts.next().unwrap_or_default(), &[]).await;
            for part in parts {
                self.send(false, part, &[]).await;
            }
            drop(snapshot);
            // An error says that some were missed, or that the loop ended; asking again tells which.
            while let Ok(batch) = changes.recv().await {
                self.send_changes(&batch).await;
            }
            tokio::time::sleep(SNAPSHOT_SPACING).await;
        }
    }

    /// In as many messages as it takes. No hash is in both lists, so their order does not matter.
    async fn send_changes(&mut self, changes: &CacheChanges) {
        let (mut stored, mut removed) = (changes.stored.as_slice(), changes.removed.as_slice());
        while !stored.is_empty() || !removed.is_empty() {
            let (first, rest) = stored.split_at(stored.len().min(MAX_HASHES));
            let room = MAX_HASHES - first.len();
            let (gone, kept) = removed.split_at(removed.len().min(room));
            self.send(false, first, gone).await;
            (stored, removed) = (rest, kept);
        }
    }

    async fn send(&mut self, snapshot: bool, stored: &[BlockHash], removed: &[BlockHash]) {
        self.sequence += 1;
        let update = v1::CacheUpdate {
            instance_id: self.instance.0.to_vec().into(),
            sequence: self.sequence,
            snapshot,
            stored: concat(stored).into(),
            removed: concat(removed).into(),
        };
        // A reader that left is noticed by `closed`.
        let _ = self.updates.send(Ok(update)).await;
    }
}

fn concat(hashes: &[BlockHash]) -> Vec<u8> {
    hashes.iter().flat_map(|hash| hash.0).collect()
}
