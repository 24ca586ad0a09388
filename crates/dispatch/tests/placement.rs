//! Placement: properties over random fleets, and its named answers.

use baton_dispatch::{Mode, Need, PlaceError, Policy, Role, WorkerState, WorkerView, place};
use baton_handoff::InstanceId;
use proptest::prelude::*;

const STATES: [WorkerState; 5] = [
    WorkerState::Ready,
    WorkerState::Loading,
    WorkerState::Draining,
    WorkerState::Failed,
    WorkerState::Unreachable,
];

fn view(index: usize, role: Role) -> WorkerView {
    WorkerView {
        instance: InstanceId([index as u8; 16]),
        index,
        role,
        state: WorkerState::Ready,
        num_waiting: 0,
        num_running: 0,
        free_blocks: 100,
        total_blocks: 100,
        queued_tokens: 0,
        in_flight: 0,
    }
}

fn need(avoid: &[InstanceId]) -> Need<'_> {
    Need { prompt_tokens: 100, max_new_tokens: 60, block_size: 16, max_waiting: 64, avoid }
}

prop_compose! {
    fn any_view(index: usize)(
        decode in any::<bool>(), state in 0..5_usize, waiting in 0..4_u32, running in 0..4_u32, total in 5..20_u32,
        queued_tokens in 0..3_u64, in_flight in 0..3_u32,
    ) -> WorkerView {
        WorkerView {
            role: if decode { Role::Decode } else { Role::Prefill },
            state: STATES[state],
            num_waiting: waiting,
            num_running: running,
            total_blocks: total,
            queued_tokens,
            in_flight,
            ..view(index, Role::Decode)
        }
    }
}

fn fleet() -> impl Strategy<Value = Vec<WorkerView>> {
    (0..6_usize).prop_flat_map(|n| (0..n).map(any_view).collect::<Vec<_>>())
}

proptest! {
    #[test]
    fn chosen_workers_are_ready_large_enough_and_the_least_loaded(views in fleet()) {
        let load = |v: &WorkerView| (v.in_flight + v.num_waiting + v.num_running, v.queued_tokens, v.index);
        let able = |role, blocks| {
            let ready = move |v: &&WorkerView| v.role == role && v.state == WorkerState::Ready && v.total_blocks >= blocks;
            views.iter().filter(ready).map(load).min()
        };
        match place(&views, &need(&[]), Policy::Disaggregated) {
            Ok(placement) => {
                prop_assert_eq!(able(Role::Decode, 10).map(|l| l.2), Some(placement.decode));
                prop_assert_eq!(able(Role::Prefill, 7).map(|l| l.2), placement.prefill);
                prop_assert_eq!(placement.mode == Mode::Local, placement.prefill.is_none());
            }
            Err(PlaceError::TooLarge) => prop_assert!(able(Role::Decode, 10).is_none()),
            Err(PlaceError::NoWorker) => prop_assert!(able(Role::Decode, 0).is_none()),
            Err(PlaceError::Saturated) => prop_assert!(false, "nobody has 64 waiting"),
        }
    }

    #[test]
    fn colocated_never_uses_a_prefill_worker(views in fleet()) {
        if let Ok(placement) = place(&views, &need(&[]), Policy::Colocated) {
            prop_assert_eq!((placement.prefill, placement.mode), (None, Mode::Colocated));
        }
    }
}

#[test]
fn a_worker_to_avoid_is_the_last_choice_but_a_choice() {
    let mut views = [view(0, Role::Decode), view(1, Role::Decode), view(2, Role::Prefill)];
    views[1].num_running = 9;
    let avoid = [views[0].instance, views[2].instance];
    let placement = place(&views, &need(&avoid), Policy::Disaggregated).unwrap();
    assert_eq!((placement.decode, placement.prefill), (1, Some(2)));
}

#[test]
fn no_prefill_worker_is_local_with_its_reason() {
    let placement = place(&[view(0, Role::Decode)], &need(&[]), Policy::Disaggregated).unwrap();
    assert_eq!((placement.mode, placement.reason), (Mode::Local, "no_prefill_worker"));
}

#[test]
fn full_queues_are_saturation() {
    let mut views = [view(0, Role::Decode), view(1, Role::Prefill)];
    views[0].num_waiting = 64;
    assert_eq!(place(&views, &need(&[]), Policy::Disaggregated), Err(PlaceError::Saturated));
}
