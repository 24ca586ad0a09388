//! What a worker tells routers of itself: its load, measured rates, and what its prefix cache knows.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use baton_dispatch::{LinkView, Role, WorkerView};
use baton_handoff::{InstanceId, Time};
use baton_kv::{BlockHash, CacheChanges};

use super::Worker;
use super::steps::Load;
use crate::context::Context;
use crate::queue::{RouterEvent, WorkerEvent};
use crate::status::{CacheUpdate, CacheWriter, MAX_HASHES, Status};

/// Longest time between two statuses, and shortest.
const HEARTBEAT: Duration = Duration::from_millis(500);
const SPACING: Duration = Duration::from_millis(10);

/// Heartbeats go on for so long after the last request ended, so that routers hear how it ended.
const AFTERGLOW: Duration = Duration::from_secs(1);

/// Between two messages of one snapshot, so that they rarely overtake each other.
const PACE: Duration = Duration::from_millis(2);

/// Weight of the newest handoff in a link's measured rate.
const NEWEST: f64 = 0.3;

/// Links that are remembered, as on a real worker; the one that was used least recently is forgotten first.
const MAX_LINKS: usize = 64;

struct Link {
    bytes_per_s: f64,
    /// Number of its latest transfer.
    used: u64,
}

#[derive(Default)]
pub(super) struct Publisher {
    num_statuses: u64,
    /// What routers were told last.
    told: Option<WorkerView>,
    /// When the last message of the last publication leaves.
    last_at: Time,
    /// A publication is in the queue.
    scheduled: bool,
    /// One for each router.
    caches: Vec<CacheWriter>,
    changes: CacheChanges,
    links: BTreeMap<InstanceId, Link>,
    num_transfers: u64,
    /// What routers are told of them; made anew with a heartbeat.
    told_links: Arc<[LinkView]>,
    links_changed: bool,
}

impl Publisher {
    pub(super) fn new(num_routers: usize) -> Self {
        Self { caches: vec![CacheWriter::default(); num_routers.max(1)], ..Self::default() }
    }

    /// A router opens a stream of cache updates; the next heartbeat begins it with a snapshot.
    pub(super) fn watch(&mut self, router: usize, stream: u64) {
        if let Some(writer) = self.caches.get_mut(router)
            && stream > writer.stream
        {
            *writer = CacheWriter { stream, next: 0, wants_snapshot: true };
        }
    }

    pub(super) const fn is_scheduled(&self) -> bool {
        self.scheduled
    }

    pub(super) fn measured(&mut self, destination: InstanceId, bytes_per_s: f64) {
        self.num_transfers += 1;
        let used = self.num_transfers;
        let link = self.links.entry(destination).or_insert(Link { bytes_per_s, used });
        *link = Link { bytes_per_s: link.bytes_per_s * (1.0 - NEWEST) + bytes_per_s * NEWEST, used };
        if self.links.len() > MAX_LINKS {
            let oldest = self.links.iter().min_by_key(|(_, link)| link.used).map(|(to, _)| *to);
            oldest.and_then(|oldest| self.links.remove(&oldest));
        }
        self.links_changed = true;
    }

    fn renew_links(&mut self) {
        if std::mem::take(&mut self.links_changed) {
            let link =
                |(to, link): (&InstanceId, &Link)| LinkView { decode: *to, bytes_per_s: link.bytes_per_s };
            self.told_links = self.links.iter().map(link).collect();
        }
    }
}

impl Worker {
    pub(super) fn heartbeat(&mut self, context: &mut Context) {
        self.publisher.renew_links();
        self.publish(context);
        self.check_waits(context);
        if context.over.is_none_or(|over| context.now < over + AFTERGLOW) {
            context.worker(HEARTBEAT, self.me(), WorkerEvent::Heartbeat);
        }
    }

    /// Tells routers soon, when anything of its load changed.
    pub(super) fn publish_changes(&mut self, context: &mut Context) {
        if self.publisher.scheduled || self.publisher.told == Some(self.view()) {
            return;
        }
        self.publisher.scheduled = true;
        let after = (self.publisher.last_at + SPACING).saturating_sub(context.now);
        context.worker(after, self.me(), WorkerEvent::Publish);
    }

    pub(super) fn publish(&mut self, context: &mut Context) {
        let view = self.view();
        self.publisher.num_statuses += 1;
        self.publisher.scheduled = false;
        self.publisher.told = Some(view);
        self.publisher.last_at = context.now;
        for router in 0..context.shape.num_routers {
            let links = Arc::clone(&self.publisher.told_links);
            let status = Status { sequence: self.publisher.num_statuses, view, links };
            context.tell_router(Duration::ZERO, (self.index, router), RouterEvent::Status(Box::new(status)));
        }
        if context.shape.worker.cache {
            self.publish_cache(context);
        }
    }

    fn publish_cache(&mut self, context: &mut Context) {
        let changes = &mut self.publisher.changes;
        *changes = CacheChanges::default();
        self.steps.scheduler_mut().drain_cache_changes(changes);
        let overflowed = changes.overflowed;
        for router in 0..self.publisher.caches.len() {
            let writer = &mut self.publisher.caches[router];
            if writer.stream == 0 {
                continue;
            }
            let snapshot = std::mem::take(&mut writer.wants_snapshot) || overflowed;
            let (stored, removed) = if snapshot {
                (self.steps.scheduler().cached_hashes(), Vec::new())
            } else {
                let changes = &self.publisher.changes;
                (changes.stored.clone(), changes.removed.clone())
            };
            if snapshot || !stored.is_empty() || !removed.is_empty() {
                self.send_update(context, router, snapshot, (stored, removed));
            }
        }
    }

    fn send_update(
        &mut self,
        context: &mut Context,
        router: usize,
        snapshot: bool,
        (stored, removed): (Vec<BlockHash>, Vec<BlockHash>),
    ) {
        let (worker, instance) = (self.index, self.instance);
        // What was removed goes first: a hash that came back after it went must not be taken for gone.
        let first = stored.len().min(MAX_HASHES);
        let mut parts = vec![(&stored[..first], removed.as_slice())];
        parts.extend(stored[first..].chunks(MAX_HASHES).map(|part| (part, &[][..])));
        for (nth, (stored, removed)) in parts.into_iter().enumerate() {
            let writer = &mut self.publisher.caches[router];
            let update = CacheUpdate {
                worker,
                instance,
                stream: writer.stream,
                sequence: writer.next,
                snapshot: snapshot && nth == 0,
                stored: stored.to_vec(),
                removed: removed.to_vec(),
            };
            writer.next += 1;
            let after = PACE * u32::try_from(nth).unwrap_or(u32::MAX);
            self.publisher.last_at = self.publisher.last_at.max(context.now + after);
            context.tell_router(after, (worker, router), RouterEvent::Cache(Box::new(update)));
        }
    }

    fn view(&self) -> WorkerView {
        let pool = self.steps.scheduler().pool().counts();
        let (Load { counts, queued_tokens }, rates) = (self.steps.load(), self.steps.rates());
        let running = if self.role == Role::Prefill { counts.prefilling } else { counts.running };
        WorkerView {
            instance: self.instance,
            index: self.index,
            role: self.role,
            state: self.state,
            num_waiting: counts.waiting as u32,
            num_running: running as u32,
            free_blocks: (pool.free + pool.cached) as u32,
            total_blocks: pool.total as u32,
            queued_tokens,
            in_flight: 0,
            prefill_tokens_per_s: rates.prefill_tokens_per_s,
            decode_step_ms: rates.decode_step_ms,
        }
    }

    /// Nobody waits for longer than its kind of wait allows.
    fn check_waits(&self, context: &mut Context) {
        for leg in self.legs.values() {
            let state = leg.state();
            context.waited(state.stage.wait(), state.since);
        }
    }
}
