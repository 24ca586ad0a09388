//! What holds for every policy, and what the simple ones answer.

use baton_dispatch::{Layout, Mode, Need, PlaceError, Placer, Policy, Role, WorkerState, WorkerView};
use proptest::prelude::*;

use crate::fleets::{Cluster, PROMPT_TOKENS, cluster, instance, need, prompt, view};

fn may_decode(view: &WorkerView, need: &Need<'_>) -> bool {
    let blocks = (need.prompt_tokens + need.max_new_tokens).div_ceil(need.block_size);
    view.role == Role::Decode
        && view.state == WorkerState::Ready
        && view.total_blocks >= blocks
        && view.num_waiting < need.max_waiting
}

fn may_prefill(view: &WorkerView, need: &Need<'_>) -> bool {
    let blocks = need.prompt_tokens.div_ceil(need.block_size);
    view.role == Role::Prefill && view.state == WorkerState::Ready && view.total_blocks >= blocks
}

fn policy() -> impl Strategy<Value = Policy> {
    (0..4_usize).prop_map(|nth| Policy::ALL[nth])
}

proptest! {
    #[test]
    fn only_able_workers_are_chosen_and_those_to_avoid_last(
        cluster in cluster(14), policy in policy(), avoid in prop::collection::vec(0..14_usize, 0..8), draws in 0..5_u64,
    ) {
        let hashes = prompt();
        let avoid: Vec<_> = avoid.into_iter().map(instance).collect();
        let need = Need { avoid: &avoid, max_waiting: 3, ..need(PROMPT_TOKENS, &hashes) };
        let mut placer = Placer::new(Layout::Disaggregated, policy, 7);
        for _ in 0..draws {
            let _ = placer.place(&cluster.fleet(), &need);
        }
        let decodes: Vec<_> = cluster.workers.iter().filter(|view| may_decode(view, &need)).collect();
        let prefills: Vec<_> = cluster.workers.iter().filter(|view| may_prefill(view, &need)).collect();
        let is_to_avoid = |index: usize| avoid.contains(&instance(index));
        let fresh = |able: &[&WorkerView]| able.iter().any(|view| !is_to_avoid(view.index));
        match placer.place(&cluster.fleet(), &need) {
            Ok(placement) => {
                prop_assert!(decodes.iter().any(|view| view.index == placement.decode));
                prop_assert!(!(is_to_avoid(placement.decode) && fresh(&decodes)));
                match placement.prefill {
                    Some(prefill) => {
                        prop_assert!(prefills.iter().any(|view| view.index == prefill));
                        prop_assert!(!(is_to_avoid(prefill) && fresh(&prefills)));
                        prop_assert_eq!(placement.mode, Mode::Disaggregated);
                    }
                    None => {
                        prop_assert_eq!(placement.mode, Mode::Local);
                        let cheaper = ["short_prompt", "slow_link"].contains(&placement.reason);
                        prop_assert!(cheaper != (placement.reason == "no_prefill_worker"));
                        prop_assert!(prefills.is_empty() != cheaper);
                        prop_assert!(!cheaper || PROMPT_TOKENS - placement.decode_hit_tokens <= Placer::MAX_LOCAL_TOKENS);
                    }
                }
                prop_assert!(placement.expected_ms.is_finite() && placement.expected_ms >= 0.0);
            }
            Err(error) => {
                prop_assert!(decodes.is_empty());
                let ready: Vec<_> = cluster.workers.iter()
                    .filter(|view| view.role == Role::Decode && view.state == WorkerState::Ready).collect();
                let large = ready.iter().any(|view| view.total_blocks >= 67);
                let right = match (ready.is_empty(), large) {
                    (true, _) => PlaceError::NoWorker,
                    (false, true) => PlaceError::Saturated,
                    (false, false) => PlaceError::TooLarge,
                };
                prop_assert_eq!(error, right);
            }
        }
    }

    #[test]
    fn least_loaded_is_by_requests_then_tokens_then_index(cluster in cluster(14)) {
        let need = need(PROMPT_TOKENS, &[]);
        let load = |v: &&WorkerView| (v.in_flight + v.num_waiting + v.num_running, v.queued_tokens, v.index);
        if let Ok(placement) = cluster.place(&need, Policy::LeastLoaded) {
            let decode = cluster.workers.iter().filter(|view| may_decode(view, &need)).min_by_key(load);
            let prefill = cluster.workers.iter().filter(|view| may_prefill(view, &need)).min_by_key(load);
            prop_assert_eq!(decode.map(|view| view.index), Some(placement.decode));
            prop_assert_eq!(prefill.map(|view| view.index), placement.prefill);
        }
    }

    #[test]
    fn colocated_never_uses_a_prefill_worker(cluster in cluster(14), policy in policy()) {
        let hashes = prompt();
        let mut placer = Placer::new(Layout::Colocated, policy, 7);
        if let Ok(placement) = placer.place(&cluster.fleet(), &need(PROMPT_TOKENS, &hashes)) {
            prop_assert_eq!((placement.prefill, placement.mode), (None, Mode::Colocated));
            prop_assert_eq!(placement.reason, "colocated");
        }
    }
}

fn three_and_three() -> Cluster {
    let roles = [Role::Decode, Role::Decode, Role::Decode, Role::Prefill, Role::Prefill, Role::Prefill];
    Cluster::of(roles.into_iter().enumerate().map(|(index, role)| view(index, role)))
}

#[test]
fn round_robin_takes_turns() {
    let mut placer = Placer::new(Layout::Disaggregated, Policy::RoundRobin, 7);
    let cluster = three_and_three();
    let placements: Vec<_> = (0..4)
        .map(|_| placer.place(&cluster.fleet(), &need(100, &[])).unwrap())
        .map(|placement| (placement.prefill, placement.decode, placement.reason))
        .collect();
    let turn = |nth: usize| (Some(3 + nth % 3), nth % 3, "policy");
    assert_eq!(placements, [turn(0), turn(1), turn(2), turn(3)]);
}

#[test]
fn random_of_two_draws_by_seed_and_never_takes_the_most_loaded() {
    let mut cluster = three_and_three();
    cluster.workers[1].num_running = 5;
    cluster.workers[4].num_running = 5;
    let draws = |seed| {
        let mut placer = Placer::new(Layout::Disaggregated, Policy::RandomOfTwo, seed);
        let mut counts = [0; 6];
        for _ in 0..300 {
            let placement = placer.place(&cluster.fleet(), &need(100, &[])).unwrap();
            counts[placement.decode] += 1;
            counts[placement.prefill.unwrap()] += 1;
        }
        counts
    };
    let counts = draws(1);
    assert_eq!((counts[1], counts[4]), (0, 0), "two different ones are drawn");
    assert!(counts[0] > 60 && counts[2] > 60 && counts[3] > 60 && counts[5] > 60, "{counts:?}");
    assert_eq!(counts, draws(1));
    assert_ne!(counts, draws(2));
}

#[test]
fn policies_are_named_as_options_are() {
    for policy in Policy::ALL {
        assert_eq!(policy.to_string().parse(), Ok(policy));
    }
    assert_eq!(Policy::default(), Policy::KvAware);
    let error = "fastest".parse::<Policy>().unwrap_err().to_string();
    assert_eq!(
        error,
        "'fastest' is no placement policy: kv-aware, least-loaded, round-robin or random-of-two"
    );
}

#[test]
fn no_prefill_worker_is_local_with_its_reason() {
    for policy in Policy::ALL {
        let placement = Cluster::of([view(0, Role::Decode)]).place(&need(1_000, &[]), policy).unwrap();
        assert_eq!((placement.mode, placement.reason), (Mode::Local, "no_prefill_worker"));
    }
}
