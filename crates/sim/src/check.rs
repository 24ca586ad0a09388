//! The rules: after every event, and at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use baton_handoff::HandoffKey;

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

/// Of a cluster this large, the graph is not looked at after each event.
const SMALL: usize = 64;

/// The wait-for graph over workers' blocks has no cycle. Of large clusters it is looked at each `num_workers` changes, so that what it costs
/// a request does not grow with the cluster.
pub(crate) fn no_deadlock(context: &mut Context, workers: &[Worker]) {
    context.num_unchecked_holds += 1;
    if workers.len() > SMALL && context.num_unchecked_holds < workers.len() {
        return;
    }
    context.num_unchecked_holds = 0;
    let mut held: BTreeMap<HandoffKey, Vec<usize>> = BTreeMap::new();
    let mut wanted: Vec<(HandoffKey, usize)> = Vec::new();
    for worker in workers.iter().filter(|worker| worker.alive) {
        for (key, holds, waits) in worker.holds() {
            if holds {
                held.entry(key).or_default().push(worker.index);
            }
            if waits {
                wanted.push((key, worker.index));
            }
        }
    }
    // A handoff that waits for blocks of one worker waits for those who hold some there. If it holds blocks of another worker itself, that
    // worker's blocks are not back before the first one's are. So these pairs of workers are the graph's edges, with handoffs
    // that hold nothing, or wait for nothing, left out: no cycle goes through them.
    let waits = wanted.iter().flat_map(|(key, on)| {
        let holds = held.get(key).map_or(&[][..], Vec::as_slice);
        holds.iter().map(|at| (*at, *on)).filter(|(at, on)| at != on)
    });
    let edges: Vec<(usize, usize)> = waits.collect();
    if let Some(worker) = on_a_cycle(&edges) {
        let all = "a handoff that holds blocks of the first and waits for the second's, each";
        context.violate(|| {
            format!("handoffs wait for each other over blocks of worker {worker}; {all}: {edges:?}")
        });
    }
}

/// A worker whose blocks come back only after they came back. An edge `(a, b)`: the blocks of `b` must come back before those of `a` do.
fn on_a_cycle(edges: &[(usize, usize)]) -> Option<usize> {
    let mut left: Vec<(usize, usize)> = edges.to_vec();
    // Whoever waits for nobody comes back; what waits for that one only does so next.
    loop {
        let waiting: BTreeSet<usize> = left.iter().map(|(a, _)| *a).collect();
        let before = left.len();
        left.retain(|(_, b)| waiting.contains(b));
        if left.len() == before {
            // The first one left waits for one that is left, and so on.
            return left.first().map(|(a, _)| *a);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Workers 0 and 1 prefill, 2 and 3 decode.
    #[test]
    fn waiting_in_one_order_is_no_cycle_and_in_both_is_one() {
        // Decode's blocks first, then prefill's: whoever waits on a prefill worker holds blocks of a decode worker.
        assert_eq!(on_a_cycle(&[(2, 0), (3, 0), (2, 1)]), None);
        // One that computed before it was granted waits for blocks whose holder waits for its own.
        assert!(on_a_cycle(&[(2, 0), (0, 2)]).is_some());
        assert_eq!(on_a_cycle(&[(2, 0), (0, 3)]), None);
        // The same over two of each kind, with others that wait for them and are on no cycle themselves.
        assert!(on_a_cycle(&[(2, 0), (0, 3), (3, 1), (1, 2)]).is_some());
        assert!(on_a_cycle(&[(9, 2), (2, 0), (0, 3), (3, 1), (1, 2), (1, 8)]).is_some());
        assert_eq!(on_a_cycle(&[(9, 2), (2, 0), (0, 3), (3, 1), (1, 8)]), None);
    }
}
