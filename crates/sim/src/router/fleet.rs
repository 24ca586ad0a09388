//! What a router knows of workers, and where it places.

use std::sync::Arc;

use baton_dispatch::{
    CacheIndex, Fleet, LinkView, Links, Need, PlaceError, Placement, Placer, Role, WorkerState, WorkerView,
};
use baton_handoff::{InstanceId, Time};

use crate::Shape;
use crate::context::Context;
use crate::queue::WorkerEvent;
use crate::status::{CacheReader, CacheUpdate, Heard, Status};

/// A worker that has not been heard of for so long is not placed on.
const SILENCE: Time = Time::from_secs(3);

/// Everything heard of the fleet.
pub(crate) struct FleetView {
    router: usize,
    /// One for each worker, heard of or not, as placement is to see it.
    views: Vec<WorkerView>,
    heard: Vec<Time>,
    /// No worker that was heard of becomes silent before.
    next_silence: Time,
    /// What [`FleetView::links`] has of each worker.
    told_links: Vec<Arc<[LinkView]>>,
    sequences: Vec<u64>,
    readers: Vec<CacheReader>,
    cache: CacheIndex,
    links: Links,
    placer: Placer,
}

const fn unknown(index: usize, role: Role) -> WorkerView {
    WorkerView {
        instance: InstanceId([0; 16]),
        index,
        role,
        state: WorkerState::Unreachable,
        num_waiting: 0,
        num_running: 0,
        free_blocks: 0,
        total_blocks: 0,
        queued_tokens: 0,
        in_flight: 0,
        prefill_tokens_per_s: 0.0,
        decode_step_ms: 0.0,
    }
}

impl FleetView {
    pub(crate) fn new(router: usize, shape: &Shape, seed: u64) -> Self {
        let num = shape.num_workers();
        let role = |index| if index < shape.num_prefill_workers { Role::Prefill } else { Role::Decode };
        Self {
            router,
            views: (0..num).map(|index| unknown(index, role(index))).collect(),
            heard: vec![Time::ZERO; num],
            next_silence: SILENCE,
            told_links: vec![Arc::default(); num],
            sequences: vec![0; num],
            readers: (0..num).map(|_| CacheReader::default()).collect(),
            cache: CacheIndex::default(),
            links: Links::default(),
            placer: Placer::new(shape.layout, shape.policy, seed)
                .with_max_local_tokens(shape.max_local_tokens),
        }
    }

    pub(crate) fn status(&mut self, context: &mut Context, status: &Status) {
        let (index, instance) = (status.view.index, status.view.instance);
        let is_new = self.views[index].instance != instance;
        if !is_new && status.sequence <= self.sequences[index] {
            return;
        }
        if is_new {
            self.links.forget(self.views[index].instance);
            self.cache.forget(index);
            while self.cache.tidy() {}
        }
        self.sequences[index] = status.sequence;
        self.views[index] = WorkerView { in_flight: self.views[index].in_flight, ..status.view };
        self.heard[index] = context.now;
        if is_new || !Arc::ptr_eq(&self.told_links[index], &status.links) {
            self.links.set(instance, status.links.iter().copied());
            self.told_links[index] = Arc::clone(&status.links);
        }
        if context.shape.worker.cache
            && let Some(stream) = self.readers[index].beat(instance, context.now)
        {
            context.report.num_snapshots += 1;
            let event = WorkerEvent::WatchCache { router: self.router, stream };
            context.ask_worker((self.router, index), event);
        }
    }

    pub(crate) fn cache_update(&mut self, context: &mut Context, update: &CacheUpdate) {
        let worker = update.worker;
        match self.readers[worker].hear(update) {
            Heard::Snapshot => self.cache.replace(worker, &update.stored),
            Heard::Changes => self.cache.apply(worker, &update.stored, &update.removed),
            Heard::Foreign => {}
            Heard::Gap => {
                context.report.num_gaps += 1;
                self.cache.forget(worker);
            }
        }
        while self.cache.tidy() {}
    }

    pub(crate) fn status_lost(&mut self, worker: usize) {
        self.views[worker].state = WorkerState::Unreachable;
    }

    /// Blocks that are known to be in the workers' caches, if every worker's is known.
    pub(crate) fn num_known_blocks(&self) -> Option<usize> {
        self.readers.iter().all(CacheReader::is_current).then(|| self.cache.num_blocks())
    }

    pub(crate) fn instance(&self, worker: usize) -> InstanceId {
        self.views[worker].instance
    }

    pub(crate) fn entered(&mut self, worker: usize) {
        self.views[worker].in_flight += 1;
    }

    pub(crate) fn left(&mut self, worker: usize) {
        let count = &mut self.views[worker].in_flight;
        *count = count.saturating_sub(1);
    }

    pub(crate) fn place(&mut self, now: Time, need: &Need<'_>) -> Result<Placement, PlaceError> {
        if now > self.next_silence {
            self.notice_silence(now);
        }
        self.placer.place(&Fleet { workers: &self.views, cache: &self.cache, links: &self.links }, need)
    }

    /// Whoever was not heard of for too long is not placed on until the next status.
    fn notice_silence(&mut self, now: Time) {
        self.next_silence = now + SILENCE;
        for (view, heard) in self.views.iter_mut().zip(&self.heard) {
            if now.saturating_sub(*heard) > SILENCE {
                view.state = WorkerState::Unreachable;
            } else {
                self.next_silence = self.next_silence.min(*heard + SILENCE);
            }
        }
    }
}
