//! Whole clusters under every fault, by the thousand. `BATON_SEED` repeats one, `BATON_RUNS` runs more.

use std::time::{SystemTime, UNIX_EPOCH};

use baton_sim::{Faults, Report, SimConfig, run, run_many};

const RUNS: u64 = 1_200;

fn all_of(first_seed: u64, runs: u64, faults: Faults) -> Report {
    match run_many(first_seed, runs, faults) {
        Ok(report) => report,
        Err(violation) => panic!("{violation}"),
    }
}

fn chosen_seed() -> Option<u64> {
    std::env::var("BATON_SEED").ok().and_then(|seed| seed.parse().ok())
}

#[test]
fn fresh_schedules_with_every_fault_keep_every_rule() {
    if let Some(seed) = chosen_seed() {
        println!("{}", all_of(seed, 1, Faults::All));
        return;
    }
    let first_seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_secs()) * 10_000;
    println!("seeds from {first_seed}");
    let runs = std::env::var("BATON_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(RUNS);
    let report = all_of(first_seed, runs, Faults::All);
    println!("{report}");
    // The schedules must reach what they are for.
    assert!(
        report.num_commits > RUNS && !report.failed_handoffs.is_empty() && report.num_resumed > 0,
        "{report}"
    );
    assert!(report.num_damaged_frames > 0 && report.num_kills > 0 && report.num_preemptions > 0, "{report}");
    assert!(report.num_finished > report.num_requests / 3, "{report}");
}

#[test]
fn without_faults_nothing_fails() {
    let report = all_of(1, 300, Faults::None);
    println!("{report}");
    assert_eq!(
        (report.num_failed_handoffs, report.num_damaged_frames, report.num_kills),
        (0, 0, 0),
        "{report}"
    );
}

/// Seeds that once broke a rule.
const REGRESSIONS: &[u64] = &[];

#[test]
fn seeds_that_once_failed_hold() {
    for seed in REGRESSIONS {
        all_of(*seed, 1, Faults::All);
    }
}

#[test]
fn a_run_is_a_function_of_its_seed() {
    for seed in 1..40 {
        let config = SimConfig { seed, ..SimConfig::default() };
        assert_eq!(run(&config), run(&config), "seed {seed}");
    }
}
