//! The rules: after every event, and at the end.

use std::time::Duration;

use crate::context::Context;
use crate::router::Router;
use crate::worker::{Passed, Worker};

/// Sequences that may pass the first one in a line, and for how long; the scheduler's clock may stand still between two events.
const MAX_PASSED: u32 = 16;
const PASS_TIME: Duration = Duration::from_millis(2_000 + 600);

/// After an event on this worker.
pub(crate) fn worker(context: &mut Context, worker: &mut Worker) {
    let counts = worker.steps.scheduler().pool().counts();
    if counts.free + counts.held + counts.cached + counts.draining != counts.total {
        context.violate(|| format!("worker {}: {counts:?} do not add up", worker.index));
    }
    // A recount looks at every block and every table, so that large ones are recounted less often, and where only time is asked for
    // seldom. Among its rules: no step writes into a block that another sequence, or the prefix cache, can read.
    worker.num_unchecked += 1;
    let blocks_per_event = if context.fidelity.empty { 4 } else { 256 };
    if worker.num_unchecked * blocks_per_event < counts.total {
        return;
    }
    if let Err(what) = worker.steps.scheduler().check() {
        context.violate(|| format!("worker {}: {what}", worker.index));
    }
    // Of a process that was killed while it stood still nobody knows more.
    if worker.alive && worker.holds().any(|(key, blocks)| context.graph.knows(key, worker.index) != blocks) {
        context.violate(|| format!("worker {}: the wait-for graph is not of its legs", worker.index));
    }
    if worker.alive && !worker.is_alarm_in_time() {
        context.violate(|| format!("worker {}: something is due and no alarm is set", worker.index));
    }
    worker.num_unchecked = 0;
}

/// After a service out of turn.
pub(crate) fn passed(context: &mut Context, passed: Passed) {
    context.report.max_passed = context.report.max_passed.max(passed.num);
    let waited = context.now - passed.since;
    if passed.num > MAX_PASSED || waited > PASS_TIME {
        context.violate(|| format!("the first in line was passed {} times in {waited:.1?}", passed.num));
    }
}

/// The wait-for graph over workers' blocks has no cycle.
pub(crate) fn no_deadlock(context: &mut Context) {
    if let Some(cycle) = context.graph.cycle() {
        let all = "a handoff that holds blocks of one and waits for the next one's, each, and the last for the first's";
        context.violate(|| format!("handoffs wait for each other over blocks of workers {cycle:?}: {all}"));
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
        if let Err(what) = scheduler.check() {
            context.violate(|| format!("worker {}: {what}", worker.index));
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
    if !context.graph.is_empty() {
        context.violate(|| "somebody holds blocks, or waits for some, by the wait-for graph".into());
    }
    for router in routers {
        if router.num_open() + router.num_streams() > 0 {
            context.violate(|| "a router has requests or streams left".into());
        }
    }
}

/// Without faults every router knows at the end what every prefix cache has.
pub(crate) fn views(context: &mut Context, workers: &[Worker], routers: &[Router]) {
    let mut hashes: Vec<_> =
        workers.iter().flat_map(|worker| worker.steps.scheduler().cached_hashes()).collect();
    hashes.sort_unstable();
    hashes.dedup();
    for router in routers {
        let known = router.fleet.num_known_blocks();
        if known != Some(hashes.len()) {
            let num = hashes.len();
            context.violate(|| format!("a router knows {known:?} cached blocks, there are {num}"));
        }
    }
}
