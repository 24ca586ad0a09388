//! What enters and leaves the prefix cache, told to whoever wants to know.

use std::sync::Arc;

use baton_kv::{BlockHash, CacheChanges};
use baton_scheduler::Scheduler;
use tokio::sync::broadcast;

/// Batches of changes that a reader may be behind, at most; a slower one misses some.
const CHANGES_BUFFER: usize = 256;

/// What the prefix cache holds, and what changes from then on.
#[derive(Debug)]
pub struct CacheView {
    /// Hashes of all blocks it knows.
    pub snapshot: Vec<BlockHash>,
    /// Changes after the snapshot, in order, a batch a step. An error means that some were missed: take another view.
    pub changes: broadcast::Receiver<Arc<CacheChanges>>,
}

/// The loop's side: collects nothing while nobody reads.
pub(super) struct CacheFeed {
    readers: broadcast::Sender<Arc<CacheChanges>>,
    is_reporting: bool,
}

impl CacheFeed {
    pub(super) fn new() -> Self {
        Self { readers: broadcast::Sender::new(CHANGES_BUFFER), is_reporting: false }
    }

    /// A new reader's view.
    pub(super) fn open(&mut self, scheduler: &mut Scheduler) -> CacheView {
        // What happened before is for those who were here before.
        self.publish(scheduler);
        if !self.is_reporting {
            scheduler.set_report_cache(true);
            self.is_reporting = true;
        }
        CacheView { snapshot: scheduler.cached_hashes(), changes: self.readers.subscribe() }
    }

    /// Tells what changed since the last call.
    pub(super) fn publish(&mut self, scheduler: &mut Scheduler) {
        if !self.is_reporting {
            return;
        }
        if self.readers.receiver_count() == 0 {
            scheduler.set_report_cache(false);
            self.is_reporting = false;
            return;
        }
        let mut changes = CacheChanges::default();
        scheduler.drain_cache_changes(&mut changes);
        if changes.overflowed {
            // Some are lost for all: closing the channel tells every reader.
            self.readers = broadcast::Sender::new(CHANGES_BUFFER);
        } else if !changes.stored.is_empty() || !changes.removed.is_empty() {
            // The last reader may have left in this moment.
            let _ = self.readers.send(Arc::new(changes));
        }
    }
}
