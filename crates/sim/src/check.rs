//! The rules: after every event, and at the end.

use crate::context::Context;
use crate::router::Router;
use crate::worker::Worker;

/// After an event on this worker.
pub(crate) fn worker(context: &mut Context, worker: &Worker) {
    let pool = worker.steps.scheduler().pool();
    if let Err(what) = pool.check() {
        context.violate(|| format!("worker {}: {what}", worker.index));
    }
    let counts = pool.counts();
    if counts.free + counts.held + counts.cached + counts.draining != counts.total {
        context.violate(|| format!("worker {}: {counts:?} do not add up", worker.index));
    }
}

/// When nothing happens any more: everything returned to its baseline.
pub(crate) fn baseline(context: &mut Context, workers: &[Worker], routers: &[Router]) {
    for worker in workers {
        let scheduler = worker.steps.scheduler();
        let counts = scheduler.pool().counts();
        if counts.held + counts.draining > 0 || counts.free + counts.cached != counts.total {
            context.violate(|| format!("worker {}: blocks leaked: {counts:?}", worker.index));
        }
        if !scheduler.is_empty() || !worker.steps.is_idle() {
            context.violate(|| format!("worker {}: sequences left: {:?}", worker.index, scheduler.counts()));
        }
        let left = worker.num_left();
        if left != (0, 0, 0) || worker.registry.num_legs() + worker.registry.num_parked() > 0 {
            context
                .violate(|| format!("worker {}: legs, parked offers, machines left: {left:?}", worker.index));
        }
    }
    for router in routers {
        if router.num_open() + router.num_streams() > 0 {
            context.violate(|| "a router has requests or streams left".into());
        }
    }
}
