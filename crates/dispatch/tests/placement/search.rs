//! The few pairs that are looked at, against all pairs.

use baton_dispatch::{Fleet, Layout, Need, Placer, Policy, Role, WorkerView};

use crate::fleets::{Cluster, PROMPT_BLOCKS, PROMPT_TOKENS, need, prompt, view};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// Workers of each kind.
const NUM: usize = 60;

/// How fast links are.
#[derive(Clone, Copy, Debug)]
enum Wires {
    /// From 0.1 to 10 GB/s, whatever the workers.
    Any,
    /// 10 GB/s within a rack of a quarter of the workers, 0.5 between racks.
    Racks,
    /// Not measured.
    Default,
}

/// Prefill and decode workers with every kind of load.
fn cluster(random: &mut Random, wires: Wires) -> Cluster {
    let hashes = prompt();
    let mut cluster = Cluster::default();
    for index in 0..2 * NUM {
        let role = if index < NUM { Role::Prefill } else { Role::Decode };
        cluster.workers.push(WorkerView {
            num_running: random.below(16) as u32,
            num_waiting: random.below(3) as u32,
            queued_tokens: random.below(4) * random.below(1_500),
            in_flight: random.below(4) as u32,
            free_blocks: 40 + random.below(400) as u32,
            prefill_tokens_per_s: 5_000.0 + random.below(10_000) as f64,
            decode_step_ms: 5.0 + random.below(30) as f64,
            ..view(index, role)
        });
        let cached = random.below(3) * random.below(32);
        cluster = cluster.cached(index, &hashes, (cached as u32).min(PROMPT_BLOCKS));
    }
    for prefill in 0..NUM {
        let mut rate = |decode: usize| match wires {
            Wires::Any => Some(1e8 * 10_f64.powf(random.below(200) as f64 / 100.0)),
            Wires::Racks if prefill % 4 == decode % 4 => Some(1e10),
            Wires::Racks => Some(5e8),
            Wires::Default => None,
        };
        let links: Vec<_> = (NUM..2 * NUM).filter_map(|decode| Some((decode, rate(decode)?))).collect();
        cluster = cluster.linked(prefill, &links);
    }
    cluster
}

/// The cost of the best of all pairs: each is placed in a fleet of its own.
fn best_of_all(cluster: &Cluster, need: &Need<'_>, placer: &mut Placer) -> f64 {
    let (prefills, decodes) = cluster.workers.split_at(NUM);
    let pairs = prefills.iter().flat_map(|prefill| decodes.iter().map(|decode| [*prefill, *decode]));
    pairs
        .map(|pair| {
            let fleet = Fleet { workers: &pair, ..cluster.fleet() };
            placer.place(&fleet, need).expect("placed").expected_ms
        })
        .fold(f64::INFINITY, f64::min)
}

/// How far above the best of all pairs placements are: in the mean, and at worst.
fn above_best(wires: Wires) -> (f64, f64) {
    const RUNS: u64 = 60;
    let hashes = prompt();
    let need = need(PROMPT_TOKENS, &hashes);
    // Without local, so that pairs are what is compared.
    let mut placer = Placer::new(Layout::Disaggregated, Policy::KvAware, 0).with_max_local_tokens(0);
    let (mut sum, mut worst) = (0.0, 0.0_f64);
    for seed in 0..RUNS {
        let cluster = cluster(&mut Random(seed), wires);
        let found = placer.place(&cluster.fleet(), &need).expect("placed").expected_ms;
        let best = best_of_all(&cluster, &need, &mut placer);
        assert!(found >= best - 1e-9, "seed {seed}: {found} is better than the best, {best}");
        sum += found / best - 1.0;
        worst = worst.max(found / best - 1.0);
    }
    let mean = sum / RUNS as f64;
    println!("{wires:?}: {:.3} % above the best in the mean, {:.1} % at worst", mean * 100.0, worst * 100.0);
    (mean, worst)
}

#[test]
fn the_best_few_pairs_hold_nearly_the_best_of_all() {
    for wires in [Wires::Any, Wires::Racks, Wires::Default] {
        let (mean, worst) = above_best(wires);
        assert!(mean < 0.01 && worst < 0.2, "{wires:?}: {mean} in the mean, {worst} at worst");
    }
}
