//! Fleets and requests to place.

use baton_dispatch::{
    CacheIndex, Fleet, Layout, LinkView, Links, Need, PlaceError, Placement, Placer, Policy, Role,
    WorkerState, WorkerView,
};
use baton_handoff::InstanceId;
use baton_kv::BlockHash;
use proptest::prelude::*;

pub(crate) const BLOCK: u32 = 16;

/// An idle worker that measured 10,000 tokens/s and 20 ms a step.
pub(crate) fn view(index: usize, role: Role) -> WorkerView {
    WorkerView {
        instance: instance(index),
        index,
        role,
        state: WorkerState::Ready,
        num_waiting: 0,
        num_running: 0,
        free_blocks: 1_000,
        total_blocks: 1_000,
        queued_tokens: 0,
        in_flight: 0,
        prefill_tokens_per_s: 10_000.0,
        decode_step_ms: 20.0,
    }
}

pub(crate) fn instance(index: usize) -> InstanceId {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&(index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    id[8..].copy_from_slice(&(index as u64).to_le_bytes());
    InstanceId(id)
}

/// The chain of a prompt that differs from others in its first block on.
pub(crate) fn chain(prompt: u32, num_blocks: u32) -> Vec<BlockHash> {
    let mut hash = BlockHash::root(&prompt.to_le_bytes());
    let next = |nth: u32| {
        hash = hash.next(&[nth]);
        hash
    };
    (0..num_blocks).map(next).collect()
}

/// 100,000 bytes of KV a token; `prompt_tokens` of one prompt.
pub(crate) fn need(prompt_tokens: u32, hashes: &[BlockHash]) -> Need<'_> {
    Need {
        prompt_tokens,
        max_new_tokens: 60,
        num_sequences: 1,
        block_size: BLOCK,
        kv_bytes_per_token: 100_000,
        max_waiting: 64,
        avoid: &[],
        hashes,
    }
}

/// Workers with what they have cached and how they are connected.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cluster {
    pub(crate) workers: Vec<WorkerView>,
    pub(crate) cache: CacheIndex,
    pub(crate) links: Links,
}

impl Cluster {
    pub(crate) fn of(workers: impl IntoIterator<Item = WorkerView>) -> Self {
        Self { workers: workers.into_iter().collect(), ..Self::default() }
    }

    pub(crate) fn fleet(&self) -> Fleet<'_> {
        Fleet { workers: &self.workers, cache: &self.cache, links: &self.links }
    }

    pub(crate) fn place(&self, need: &Need<'_>, policy: Policy) -> Result<Placement, PlaceError> {
        Placer::new(Layout::Disaggregated, policy, 7).place(&self.fleet(), need)
    }

    /// The worker has the first `num` blocks cached.
    pub(crate) fn cached(mut self, worker: usize, hashes: &[BlockHash], num: u32) -> Self {
        self.cache.apply(worker, &hashes[..num as usize], &[]);
        self
    }

    pub(crate) fn linked(mut self, prefill: usize, links: &[(usize, f64)]) -> Self {
        let links = links
            .iter()
            .map(|(decode, bytes_per_s)| LinkView { decode: instance(*decode), bytes_per_s: *bytes_per_s });
        self.links.set(instance(prefill), links);
        self
    }
}

/// What is random of a worker: role, state, load, size, cached blocks, rates.
type Dice = (bool, usize, (u32, u32, u32), u32, (u64, u32), (u32, u32));

fn dice() -> impl Strategy<Value = Dice> {
    (
        any::<bool>(),
        0..10_usize,
        (0..4_u32, 0..12_u32, 0..6_u32),
        20..200_u32,
        (0..4_u64, 0..70_u32),
        (0..6_u32, 0..6_u32),
    )
}

const STATES: [WorkerState; 4] =
    [WorkerState::Loading, WorkerState::Draining, WorkerState::Failed, WorkerState::Unreachable];

/// Up to `max` workers, most of them ready, for the prompt of [`prompt`].
pub(crate) fn cluster(max: usize) -> impl Strategy<Value = Cluster> {
    let links = prop::collection::vec((0..max, 0..max, 6..11_i32), 0..max * 2);
    (prop::collection::vec(dice(), 0..max), links).prop_map(|(workers, links)| {
        let hashes = prompt();
        let mut cluster = Cluster::default();
        for (index, worker) in workers.into_iter().enumerate() {
            let (decode, state, (waiting, running, in_flight), total, (queued, cached), (rate, step)) =
                worker;
            cluster.workers.push(WorkerView {
                role: if decode { Role::Decode } else { Role::Prefill },
                state: STATES.get(state).copied().unwrap_or(WorkerState::Ready),
                num_waiting: waiting,
                num_running: running,
                total_blocks: total,
                free_blocks: total / 2,
                queued_tokens: queued * 700,
                in_flight,
                prefill_tokens_per_s: f64::from(rate) * 4_000.0,
                decode_step_ms: f64::from(step) * 8.0,
                ..view(index, Role::Decode)
            });
            cluster.cache.apply(index, &hashes[..cached.min(PROMPT_BLOCKS) as usize], &[]);
        }
        for (prefill, decode, magnitude) in links {
            cluster = cluster.linked(prefill, &[(decode, 10_f64.powi(magnitude))]);
        }
        cluster
    })
}

pub(crate) const PROMPT_BLOCKS: u32 = 62;
pub(crate) const PROMPT_TOKENS: u32 = 1_000;

pub(crate) fn prompt() -> Vec<BlockHash> {
    chain(1, PROMPT_BLOCKS)
}
