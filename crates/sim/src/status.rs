//! What workers tell routers of themselves. These messages may be lost and overtake each other; a numbered stream shows it.

use std::sync::Arc;
use std::time::Duration;

use baton_dispatch::{LinkView, WorkerView};
use baton_handoff::{InstanceId, Time};
use baton_kv::BlockHash;

/// A worker's heartbeat.
#[derive(Clone, Debug)]
pub(crate) struct Status {
    /// Grows by one a heartbeat; an older one that comes late is dropped.
    pub(crate) sequence: u64,
    pub(crate) view: WorkerView,
    /// Measured rates to decode workers. The same list until another was measured.
    pub(crate) links: Arc<[LinkView]>,
}

/// What entered and left a prefix cache.
#[derive(Clone, Debug)]
pub(crate) struct CacheUpdate {
    pub(crate) worker: usize,
    pub(crate) instance: InstanceId,
    /// Which of the router's streams this is.
    pub(crate) stream: u64,
    /// Grows by one a message; a gap makes the router open another stream.
    pub(crate) sequence: u64,
    /// The first message of a snapshot: everything known before is void.
    pub(crate) snapshot: bool,
    pub(crate) stored: Vec<BlockHash>,
    pub(crate) removed: Vec<BlockHash>,
}

/// A router asks again when nothing came of a stream that it asked for.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// A router's end of one worker's stream of cache updates.
#[derive(Debug, Default)]
pub(crate) struct CacheReader {
    instance: Option<InstanceId>,
    stream: u64,
    /// Number of the next message; 0 while the snapshot is awaited.
    next: u64,
    asked: Option<Time>,
}

/// What a router is to do with an update.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Everything known before is void; then take it.
    Snapshot,
    /// Take it.
    Changes,
    /// It is of another stream or process: drop it.
    Foreign,
    /// Messages are missing: what is known is void until a snapshot comes.
    Gap,
}

impl CacheReader {
    /// A heartbeat of this process came. `Some`: open this stream now.
    pub(crate) fn beat(&mut self, instance: InstanceId, now: Time) -> Option<u64> {
        let waits = self.asked.is_some_and(|asked| now.saturating_sub(asked) < ASK_AGAIN);
        if self.instance == Some(instance) && (self.next > 0 || waits) {
            return None;
        }
        self.instance = Some(instance);
        self.asked = Some(now);
        self.stream += 1;
        self.next = 0;
        Some(self.stream)
    }

    /// Whether nothing is known to be missing.
    pub(crate) const fn is_current(&self) -> bool {
        self.next > 0
    }

    pub(crate) fn hear(&mut self, update: &CacheUpdate) -> Heard {
        if self.instance != Some(update.instance) || self.stream != update.stream {
            return Heard::Foreign;
        }
        if update.sequence == self.next && (self.next > 0 || update.snapshot) {
            self.next += 1;
            return if update.snapshot { Heard::Snapshot } else { Heard::Changes };
        }
        if self.next == 0 || update.sequence < self.next {
            // The snapshot is still to come, or this one came twice.
            return Heard::Foreign;
        }
        (self.next, self.asked) = (0, None);
        self.stream += 1;
        Heard::Gap
    }
}

/// A worker's end of one router's stream.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CacheWriter {
    pub(crate) stream: u64,
    pub(crate) next: u64,
    pub(crate) wants_snapshot: bool,
}

/// Hashes of one message at most.
pub(crate) const MAX_HASHES: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: InstanceId = InstanceId([1; 16]);

    fn update(stream: u64, sequence: u64, snapshot: bool) -> CacheUpdate {
        let (stored, removed) = (vec![], vec![]);
        CacheUpdate { worker: 0, instance: HERE, stream, sequence, snapshot, stored, removed }
    }

    #[test]
    fn a_gap_voids_the_view_until_another_snapshot() {
        let mut reader = CacheReader::default();
        let ms = Time::from_millis;
        let stream = reader.beat(HERE, ms(0)).unwrap();
        assert_eq!(reader.beat(HERE, ms(100)), None);
        assert_eq!(reader.hear(&update(stream, 1, false)), Heard::Foreign);
        assert_eq!(reader.hear(&update(stream, 0, true)), Heard::Snapshot);
        assert_eq!(reader.hear(&update(stream, 1, false)), Heard::Changes);
        assert_eq!(reader.hear(&update(stream, 1, false)), Heard::Foreign);
        assert_eq!(reader.hear(&update(stream, 3, false)), Heard::Gap);
        assert_eq!(reader.hear(&update(stream, 2, false)), Heard::Foreign);
        let again = reader.beat(HERE, ms(200)).unwrap();
        assert!(again > stream);
        assert_eq!(reader.hear(&update(stream, 4, false)), Heard::Foreign);
        assert_eq!(reader.hear(&update(again, 0, true)), Heard::Snapshot);
    }

    #[test]
    fn another_process_and_a_lost_answer_are_asked_again() {
        let mut reader = CacheReader::default();
        let first = reader.beat(HERE, Time::ZERO).unwrap();
        let second = reader.beat(HERE, ASK_AGAIN).unwrap();
        assert!(second > first);
        assert!(reader.beat(InstanceId([2; 16]), ASK_AGAIN).is_some());
        assert_eq!(reader.hear(&update(second, 0, true)), Heard::Foreign);
    }
}
