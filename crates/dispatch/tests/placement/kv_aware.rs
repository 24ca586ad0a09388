//! What KV-aware placement weighs, one thing at a time, and what never depends on numbers.

use baton_dispatch::{Layout, Mode, Need, Placement, Placer, Policy, Role, WorkerView};
use proptest::prelude::*;

use crate::fleets::{Cluster, PROMPT_BLOCKS, PROMPT_TOKENS, chain, cluster, instance, need, prompt, view};

fn place(cluster: &Cluster, need: &Need<'_>) -> Placement {
    cluster.place(need, Policy::KvAware).expect("placed")
}

proptest! {
    #[test]
    fn the_answer_depends_on_the_arguments_alone(cluster in cluster(14), others in 0..6_u32) {
        let hashes = prompt();
        let need = need(PROMPT_TOKENS, &hashes);
        let mut used = Placer::new(Layout::Disaggregated, Policy::KvAware, 99);
        for other in 0..others {
            let _ = used.place(&cluster.fleet(), &Need { prompt_tokens: 40 + other * 100, ..need });
        }
        prop_assert_eq!(used.place(&cluster.fleet(), &need), cluster.place(&need, Policy::KvAware));
    }

    #[test]
    fn more_cached_is_never_passed_over_for_less_when_all_else_is_equal(
        cluster in cluster(14), which in any::<prop::sample::Index>(), at in any::<bool>(), blocks in (0..PROMPT_BLOCKS, 1..30_u32),
    ) {
        prop_assume!(!cluster.workers.is_empty());
        let hashes = prompt();
        let mut cluster = cluster;
        // A twin of some worker, equal but for what it has cached, with a number before or behind all others.
        let original = which.index(cluster.workers.len());
        let twin = WorkerView { index: 100, ..cluster.workers[original] };
        if at {
            cluster.workers.push(twin);
        } else {
            cluster.workers.insert(0, twin);
        }
        let (less, more) = (blocks.0, (blocks.0 + blocks.1).min(PROMPT_BLOCKS));
        let original = cluster.workers[if at { original } else { original + 1 }].index;
        let (poor, rich) = if at { (original, 100) } else { (100, original) };
        cluster.cache.replace(poor, &hashes[..less as usize]);
        cluster.cache.replace(rich, &hashes[..more as usize]);
        if let Ok(placement) = cluster.place(&need(PROMPT_TOKENS, &hashes), Policy::KvAware) {
            prop_assert_ne!(placement.decode, poor);
            prop_assert_ne!(placement.prefill, Some(poor));
        }
    }
}

fn pair() -> Cluster {
    Cluster::of([
        view(0, Role::Prefill),
        view(1, Role::Prefill),
        view(2, Role::Decode),
        view(3, Role::Decode),
    ])
}

#[test]
fn cached_blocks_on_both_sides_attract() {
    let hashes = prompt();
    let cluster = pair().cached(1, &hashes, 40).cached(3, &hashes, 45);
    let placement = place(&cluster, &need(PROMPT_TOKENS, &hashes));
    assert_eq!((placement.prefill, placement.decode, placement.reason), (Some(1), 3, "cost"));
    assert_eq!((placement.prefill_hit_tokens, placement.decode_hit_tokens), (640, 720));
    // Prefill of 360 tokens, 36 ms, hides a transfer of 280 tokens, 28 ms, but for the last 256 of them.
    assert!((placement.expected_ms - 61.6).abs() < 1e-9, "{}", placement.expected_ms);
}

#[test]
fn a_queue_outweighs_cached_blocks() {
    let hashes = prompt();
    let mut cluster = pair().cached(1, &hashes, 40);
    // With little to transfer: where the transfer takes longer than the prefill, a faster prefill wins nothing.
    let need = Need { kv_bytes_per_token: 10_000, ..need(PROMPT_TOKENS, &hashes) };
    cluster.workers[1].queued_tokens = 630;
    assert_eq!(place(&cluster, &need).prefill, Some(1));
    cluster.workers[1].queued_tokens = 650;
    assert_eq!(place(&cluster, &need).prefill, Some(0));
}

#[test]
fn a_burst_within_one_status_interval_spreads() {
    let mut cluster = Cluster::of((0..8).map(|n| view(n, if n < 4 { Role::Prefill } else { Role::Decode })));
    for _ in 0..8 {
        let placement = place(&cluster, &need(PROMPT_TOKENS, &[]));
        cluster.workers[placement.prefill.unwrap()].in_flight += 1;
        cluster.workers[placement.decode].in_flight += 1;
    }
    assert!(cluster.workers.iter().all(|view| view.in_flight == 2), "{:?}", cluster.workers);
}

#[test]
fn a_slow_link_is_avoided() {
    let cluster = pair().linked(0, &[(2, 1e8), (3, 1e8)]).linked(1, &[(2, 1e8), (3, 2e9)]);
    let placement = place(&cluster, &need(PROMPT_TOKENS, &[]));
    assert_eq!((placement.prefill, placement.decode), (Some(1), 3));
}

#[test]
fn a_loaded_decode_worker_and_a_full_one_are_avoided() {
    let mut cluster = pair();
    cluster.workers[2].num_running = 3;
    assert_eq!(place(&cluster, &need(PROMPT_TOKENS, &[])).decode, 3);
    // Three requests are better than no room.
    cluster.workers[3].free_blocks = 20;
    assert_eq!(place(&cluster, &need(PROMPT_TOKENS, &[])).decode, 2);
}

#[test]
fn a_short_rest_stays_on_its_decode_worker() {
    let hashes = chain(1, 20);
    let cluster = pair().cached(3, &hashes, 20);
    // 336 tokens, 16 of them uncached: 1.6 ms there, or 33.6 ms on P.
    let placement = place(&cluster, &need(336, &hashes));
    assert_eq!((placement.mode, placement.decode, placement.reason), (Mode::Local, 3, "short_prompt"));
    // Nothing is cached: too much for a decode worker, however cheap.
    let placement = place(&pair(), &need(336, &hashes));
    assert_eq!(placement.mode, Mode::Disaggregated);
    // With twelve running it would stall them all.
    let mut busy = cluster;
    busy.workers[3].num_running = 12;
    busy.workers[2].num_running = 12;
    assert_eq!(place(&busy, &need(336, &hashes)).mode, Mode::Disaggregated);
}

#[test]
fn a_short_rest_moves_where_it_would_stretch_a_step_of_others() {
    let hashes = chain(1, 20);
    let mut cluster = pair().cached(3, &hashes, 20);
    // 16 tokens take 5 ms, a quarter of a step, and then a little more.
    for (rate, mode) in [(3_200.0, Mode::Local), (3_199.0, Mode::Disaggregated)] {
        cluster.workers[3].prefill_tokens_per_s = rate;
        cluster.workers[3].num_running = 1;
        assert_eq!(place(&cluster, &need(336, &hashes)).mode, mode, "at {rate}");
        cluster.workers[3].num_running = 0;
        assert_eq!(place(&cluster, &need(336, &hashes)).mode, Mode::Local, "nobody runs there");
    }
}

#[test]
fn a_link_slower_than_the_computation_makes_a_short_prompt_local() {
    let slow = [(2, 1e7), (3, 1e7)];
    let cluster = pair().linked(0, &slow).linked(1, &slow);
    let place = |prompt_tokens| {
        let mut placer = Placer::new(Layout::Disaggregated, Policy::KvAware, 7).with_max_local_tokens(256);
        placer.place(&cluster.fleet(), &need(prompt_tokens, &[])).expect("placed")
    };
    let placement = place(200);
    assert_eq!((placement.mode, placement.reason), (Mode::Local, "slow_link"));
    let placement = place(PROMPT_TOKENS);
    assert_eq!(placement.mode, Mode::Disaggregated, "a long one would stall whoever runs there");
}

#[test]
fn a_worker_that_measured_nothing_counts_as_the_best_that_others_measured() {
    let mut cluster = pair();
    cluster.workers[0].prefill_tokens_per_s = 5_000.0;
    cluster.workers[1].prefill_tokens_per_s = 0.0;
    cluster.workers[2].decode_step_ms = f64::NAN;
    let placement = place(&cluster, &need(PROMPT_TOKENS, &[]));
    assert_eq!(placement.prefill, Some(0), "equal, so the first");
    cluster.workers[0].queued_tokens = 1;
    assert_eq!(place(&cluster, &need(PROMPT_TOKENS, &[])).prefill, Some(1));
}

#[test]
fn every_cached_prompt_leaves_a_token_to_compute() {
    let hashes = chain(1, 4);
    let cluster = pair().cached(0, &hashes, 4).cached(2, &hashes, 4);
    let mut placer = Placer::new(Layout::Disaggregated, Policy::KvAware, 0).with_max_local_tokens(0);
    let placement = placer.place(&cluster.fleet(), &need(64, &hashes)).unwrap();
    assert_eq!((placement.prefill_hit_tokens, placement.decode_hit_tokens), (63, 63));
    // A forgotten worker has nothing.
    let mut cluster = cluster;
    cluster.cache.forget(0);
    cluster.links.forget(instance(0));
    let placement = placer.place(&cluster.fleet(), &need(64, &hashes)).unwrap();
    assert_eq!((placement.prefill_hit_tokens, placement.decode_hit_tokens), (0, 63));
}
