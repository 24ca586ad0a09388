//! The cheapest placement.

use std::cmp::Ordering;

use crate::able::Able;
use crate::cost::Costs;
use crate::{Fleet, WorkerView};

/// Prefill workers, and decode workers, whose pairs are all looked at.
const BEST: usize = 16;

/// What was chosen, and why.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chosen<'a> {
    pub(crate) prefill: Option<&'a WorkerView>,
    pub(crate) decode: &'a WorkerView,
    pub(crate) reason: &'static str,
    pub(crate) expected_ms: f64,
}

/// A worker by what it costs; among equals the one that has more cached, then the one with the lower index.
#[derive(Clone, Copy, Debug)]
struct Ranked<'a> {
    cost_ms: f64,
    uncached: u32,
    view: &'a WorkerView,
}

impl Ranked<'_> {
    fn order(&self, other: &Self) -> Ordering {
        let ties = || (self.uncached, self.view.index).cmp(&(other.uncached, other.view.index));
        self.cost_ms.total_cmp(&other.cost_ms).then_with(ties)
    }
}

/// The best few, best first.
#[derive(Debug)]
struct Best<'a, const MAX: usize>(Vec<Ranked<'a>>);

impl<'a, const MAX: usize> Best<'a, MAX> {
    fn new() -> Self {
        Self(Vec::with_capacity(MAX + 1))
    }

    #[inline]
    fn offer(&mut self, new: Ranked<'a>) {
        // Most are too dear; in a fleet where nothing goes on all cost the same.
        if self.0.get(MAX - 1).is_none_or(|last| new.order(last).is_lt()) {
            self.insert(new);
        }
    }

    fn insert(&mut self, new: Ranked<'a>) {
        let at = self.0.partition_point(|kept| kept.order(&new).is_lt());
        self.0.insert(at, new);
        self.0.truncate(MAX);
    }

    fn first(&self) -> Option<&Ranked<'a>> {
        self.0.first()
    }
}

/// The cheapest pair, or local where that is cheaper or the only way. `None` without a decode worker.
pub(crate) fn cheapest<'a>(
    fleet: &Fleet<'a>,
    able: &Able,
    costs: &Costs<'_>,
    max_local_tokens: u32,
) -> Option<Chosen<'a>> {
    let mut prefills = Best::<BEST>::new();
    for view in able.prefills.iter().map(|at| &fleet.workers[*at]) {
        let (cost_ms, uncached) = (costs.prefill(view).total_ms(), costs.uncached(view));
        prefills.offer(Ranked { view, cost_ms, uncached });
    }
    let mut local = Best::<1>::new();
    let Some(nearest) = prefills.first() else {
        for view in able.decodes.iter().map(|at| &fleet.workers[*at]) {
            local.offer(Ranked { view, cost_ms: costs.local_ms(view), uncached: costs.uncached(view) });
        }
        return local.first().map(|best| best.locally("no_prefill_worker"));
    };
    let prefill = costs.prefill(nearest.view);
    let mut decodes = Best::<BEST>::new();
    for view in able.decodes.iter().map(|at| &fleet.workers[*at]) {
        let uncached = costs.uncached(view);
        decodes.offer(Ranked { view, cost_ms: costs.typical_ms(&prefill, view), uncached });
        if uncached <= max_local_tokens && costs.is_within_stall_bound(view) {
            local.offer(Ranked { view, cost_ms: costs.local_ms(view), uncached });
        }
    }
    let pair = cheapest_pair(fleet, costs, &prefills, &decodes)?;
    match (local.first(), pair.prefill) {
        (Some(local), Some(prefill)) if local.cost_ms < pair.expected_ms => {
            let slow = costs.wire_ms(prefill, pair.decode) > costs.local_compute_ms(local.view);
            Some(local.locally(if slow { "slow_link" } else { "short_prompt" }))
        }
        _ => Some(pair),
    }
}

fn cheapest_pair<'a>(
    fleet: &Fleet<'a>,
    costs: &Costs<'_>,
    prefills: &Best<'a, BEST>,
    decodes: &Best<'a, BEST>,
) -> Option<Chosen<'a>> {
    let mut best: Option<Chosen<'a>> = None;
    let loads: Vec<f64> = decodes.0.iter().map(|decode| costs.load_ms(decode.view)).collect();
    for prefill in &prefills.0 {
        let (cost, links) = (costs.prefill(prefill.view), fleet.links.row(prefill.view.instance));
        for (decode, load_ms) in decodes.0.iter().zip(&loads) {
            // However fast the link.
            let least_ms = prefill.cost_ms + load_ms;
            if best.is_some_and(|best| least_ms >= best.expected_ms) {
                continue;
            }
            let expected_ms = costs.pair_ms(&cost, links, decode.view);
            // Among equals the first: both lists have those with more cached in front.
            if best.is_none_or(|best| expected_ms < best.expected_ms) {
                let (prefill, decode) = (Some(prefill.view), decode.view);
                best = Some(Chosen { prefill, decode, reason: "cost", expected_ms });
            }
        }
    }
    best
}

impl<'a> Ranked<'a> {
    const fn locally(&self, reason: &'static str) -> Chosen<'a> {
        Chosen { prefill: None, decode: self.view, reason, expected_ms: self.cost_ms }
    }
}
