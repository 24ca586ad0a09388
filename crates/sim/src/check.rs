//! The rules: after every event, and at the end.

use std::collections::BTreeMap;
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
    // A recount looks at every block and every table, so that large ones are recounted less often. Among its rules: no step writes into
    // a block that another sequence, or the prefix cache, can read.
    worker.num_unchecked += 1;
    if worker.num_unchecked * 256 < counts.total {
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

/// What a handoff holds and waits for: a bit for each worker.
#[derive(Clone, Copy, Debug, Default)]
struct Blocks {
    held: u64,
    wanted: u64,
}

/// The wait-for graph over workers' blocks has no cycle.
pub(crate) fn no_deadlock(context: &mut Context, workers: &[Worker]) {
    let mut handoffs: BTreeMap<HandoffKey, Blocks> = BTreeMap::new();
    for worker in workers.iter().filter(|worker| worker.alive) {
        for (key, holds, waits) in worker.holds() {
            let blocks = handoffs.entry(key).or_default();
            blocks.held |= u64::from(holds) << worker.index;
            blocks.wanted |= u64::from(waits) << worker.index;
        }
    }
    if let Some(worker) = on_a_cycle(handoffs.values(), workers.len()) {
        handoffs.retain(|_, blocks| blocks.held > 0 && blocks.wanted > 0);
        context
            .violate(|| format!("handoffs wait for each other over blocks of worker {worker}: {handoffs:?}"));
    }
}

/// A worker whose blocks come back only after they came back.
///
/// A handoff that waits for blocks of one worker waits for those who hold some there. If it holds blocks of another worker itself, that
/// worker's blocks are not back before the first one's are. So these pairs of workers are the graph's edges, with handoffs
/// that hold nothing, or wait for nothing, left out: no cycle goes through them.
fn on_a_cycle<'a>(handoffs: impl Iterator<Item = &'a Blocks>, num_workers: usize) -> Option<usize> {
    // `after[w]`: workers whose blocks must come back before those of `w` do.
    let mut after = vec![0_u64; num_workers];
    for Blocks { held, wanted } in handoffs {
        for (worker, after) in after.iter_mut().enumerate().filter(|(worker, _)| held >> worker & 1 == 1) {
            *after |= wanted & !(1 << worker);
        }
    }
    // Transitive closure: a path goes through each worker at most once.
    for through in 0..num_workers {
        for worker in 0..num_workers {
            if after[worker] >> through & 1 == 1 {
                after[worker] |= after[through];
            }
        }
    }
    (0..num_workers).find(|worker| after[*worker] >> worker & 1 == 1)
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

    fn on_a_cycle_of(handoffs: &[(u64, u64)]) -> bool {
        let blocks: Vec<Blocks> = handoffs.iter().map(|&(held, wanted)| Blocks { held, wanted }).collect();
        on_a_cycle(blocks.iter(), 4).is_some()
    }

    /// Workers 0 and 1 prefill, 2 and 3 decode.
    #[test]
    fn waiting_in_one_order_is_no_cycle_and_in_both_is_one() {
        // Decode's blocks first, then prefill's.
        assert!(!on_a_cycle_of(&[(0b0100, 0b0001), (0b1000, 0b0001), (0b0101, 0), (0, 0b0100)]));
        // One that computed before it was granted waits for blocks whose holder waits for its own.
        assert!(on_a_cycle_of(&[(0b0100, 0b0001), (0b0001, 0b0100)]));
        assert!(!on_a_cycle_of(&[(0b0100, 0b0001), (0b0001, 0b1000)]));
        // The same over two of each kind.
        assert!(on_a_cycle_of(&[(0b0100, 0b0001), (0b0001, 0b1000), (0b1000, 0b0010), (0b0010, 0b0100)]));
        // A group whose sequences run and wait on one worker waits for nobody else.
        assert!(!on_a_cycle_of(&[(0b0100, 0b0100)]));
    }
}
