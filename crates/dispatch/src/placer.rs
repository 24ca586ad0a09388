//! Answering where a request runs.

use crate::able::Able;
use crate::cost::Costs;
use crate::search::{self, Chosen};
use crate::{CacheIndex, Fleet, Layout, Mode, Need, PlaceError, Placement, Policy, WorkerView};

/// Chooses the workers of each attempt.
///
/// Properties:
/// * The answer depends on the arguments alone; with [`Policy::RoundRobin`] and [`Policy::RandomOfTwo`] also on the seed and on
///   how many answers came before.
/// * Only ready workers of the right role that could ever hold the request are chosen; one to avoid only when there is no other.
/// * With [`Policy::KvAware`], a worker with more of the prompt cached is never passed over for one with less that is equal otherwise.
/// * No ready prefill worker means local, never an error.
///
/// Cost of a pair, in ms: `queue on P + max(prefill on P, transfer of what D lacks) + transfer of the last chunk + load on D`.
/// Cost of local: `queue on D + prefill on D + a decode step a chunk + what running sequences wait for it + load on D`.
///
/// Not every pair is looked at: of 500 workers of each kind that would be 250,000. The sixteen prefill workers where the prompt is computed
/// soonest are kept, then the sixteen decode workers that go best with the first of those over a link like any other, then all
/// pairs of these, over their own links. What this can miss is a pair that is good only together: a fast link between
/// workers of which one is not among the best by itself. Queue and prefill do not depend on D, load and cached blocks of D do
/// not depend on P, and most transfers hide behind the prefill, so that is rare. Over random fleets of 60 and 60 workers the answer is the best of
/// all pairs where links are alike, and in the mean 0.3 % (at worst 12 %) above it where links within a rack are twenty times as
/// fast as others; a test holds it under 1 % and 20 %.
#[derive(Debug)]
pub struct Placer {
    layout: Layout,
    policy: Policy,
    max_local_tokens: u32,
    seed: u64,
    /// Answers given.
    turn: u64,
    able: Able,
    hits: Hits,
}

impl Placer {
    /// Uncached tokens that a decode worker computes itself at most while a prefill worker is ready.
    pub const MAX_LOCAL_TOKENS: u32 = 16;

    /// `seed` is for [`Policy::RandomOfTwo`]: two routers with the same one draw the same.
    pub const fn new(layout: Layout, policy: Policy, seed: u64) -> Self {
        let hits = Hits { blocks: Vec::new(), touched: Vec::new() };
        let max_local_tokens = Self::MAX_LOCAL_TOKENS;
        Self { layout, policy, max_local_tokens, seed, turn: 0, able: Able::new(), hits }
    }

    /// Another bound than [`Placer::MAX_LOCAL_TOKENS`]; 0: local only when no prefill worker is ready.
    #[must_use]
    pub const fn with_max_local_tokens(mut self, max_local_tokens: u32) -> Self {
        self.max_local_tokens = max_local_tokens;
        self
    }

    /// How the fleet is used.
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// How workers are chosen.
    pub const fn policy(&self) -> Policy {
        self.policy
    }

    /// Chooses the workers for one attempt of a group.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn place(&mut self, fleet: &Fleet<'_>, need: &Need<'_>) -> Result<Placement, PlaceError> {
        self.able.survey(fleet.workers, need, self.layout)?;
        self.hits.count(fleet.cache, need.hashes);
        let costs = Costs::new(fleet, need, &self.hits.blocks, self.able.measured);
        let chosen = match self.policy {
            Policy::KvAware => search::cheapest(fleet, &self.able, &costs, self.max_local_tokens),
            Policy::LeastLoaded | Policy::RoundRobin | Policy::RandomOfTwo => self.by_rule(fleet, &costs),
        };
        self.turn = self.turn.wrapping_add(1);
        let Chosen { prefill, decode, reason, expected_ms } = chosen.ok_or(PlaceError::NoWorker)?;
        let (mode, reason) = match (self.layout, prefill) {
            (Layout::Colocated, _) => (Mode::Colocated, "colocated"),
            (Layout::Disaggregated, Some(_)) => (Mode::Disaggregated, reason),
            (Layout::Disaggregated, None) => (Mode::Local, reason),
        };
        Ok(Placement {
            decode: decode.index,
            prefill: prefill.map(|view| view.index),
            mode,
            reason,
            prefill_hit_tokens: prefill.map_or(0, |view| costs.hit_tokens(view)),
            decode_hit_tokens: costs.hit_tokens(decode),
            expected_ms,
        })
    }

    /// By a policy that looks at no cost.
    fn by_rule<'a>(&self, fleet: &Fleet<'a>, costs: &Costs<'_>) -> Option<Chosen<'a>> {
        let decode = self.pick(fleet.workers, &self.able.decodes)?;
        Some(match self.pick(fleet.workers, &self.able.prefills) {
            Some(prefill) => Chosen {
                prefill: Some(prefill),
                decode,
                reason: "policy",
                expected_ms: costs.pair_ms(
                    &costs.prefill(prefill),
                    fleet.links.row(prefill.instance),
                    decode,
                ),
            },
            None => Chosen {
                prefill: None,
                decode,
                reason: "no_prefill_worker",
                expected_ms: costs.local_ms(decode),
            },
        })
    }

    fn pick<'a>(&self, workers: &'a [WorkerView], able: &[usize]) -> Option<&'a WorkerView> {
        let num = able.len() as u64;
        let nth = |nth: u64| able.get(usize::try_from(nth).ok()?).map(|at| &workers[*at]);
        match self.policy {
            Policy::KvAware | Policy::LeastLoaded => {
                able.iter().map(|at| &workers[*at]).min_by_key(|view| view.load())
            }
            Policy::RandomOfTwo if num > 1 => {
                let first = draw(self.seed, self.turn * 2) % num;
                let second = (first + 1 + draw(self.seed, self.turn * 2 + 1) % (num - 1)) % num;
                [nth(first)?, nth(second)?].into_iter().min_by_key(|view| view.load())
            }
            Policy::RoundRobin | Policy::RandomOfTwo => nth(self.turn.checked_rem(num)?),
        }
    }
}

/// A number for each (seed, counter): SplitMix64.
const fn draw(seed: u64, counter: u64) -> u64 {
    let mut z = seed.wrapping_add(counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Leading cached blocks by worker index, of the request that is being placed.
#[derive(Debug)]
struct Hits {
    blocks: Vec<u32>,
    /// Entries that are not 0.
    touched: Vec<usize>,
}

impl Hits {
    fn count(&mut self, cache: &CacheIndex, hashes: &[baton_kv::BlockHash]) {
        let Self { blocks, touched } = self;
        for worker in touched.drain(..) {
            blocks[worker] = 0;
        }
        cache.leading_blocks(hashes, |worker, num| {
            if worker >= blocks.len() {
                blocks.resize(worker + 1, 0);
            }
            blocks[worker] = num;
            touched.push(worker);
        });
    }
}
