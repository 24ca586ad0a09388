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
    let failed = report.num_failed + report.num_cancelled + report.num_damaged_frames + report.num_kills;
    assert_eq!((failed, report.num_retries), (0, 0), "{report}");
    // A first token that ends its sequence, and a stop string, make the decode leg superfluous; that is no failure.
    let superfluous = |cause: &&str| ["not_needed", "cancelled"].contains(cause);
    assert!(report.failed_handoffs.keys().all(superfluous), "{report}");
}

/// Run in any case. What one of them once broke is pinned by name where it was mended, since a seed means another run once the
/// simulation draws something more. 17960275781085: tokens that had run ahead were delivered after a stop string.
const SEEDS: &[u64] = &[0, 1, 2, u64::MAX - 1, 17_960_275_781_085, 17_960_278_040_219];

#[test]
fn fixed_seeds_keep_every_rule() {
    for seed in SEEDS {
        all_of(*seed, 1, Faults::All);
    }
    all_of(1_000, 100, Faults::All);
}

#[test]
fn a_run_is_a_function_of_its_seed() {
    for seed in 1..40 {
        let config = SimConfig { seed, ..SimConfig::default() };
        assert_eq!(run(&config), run(&config), "seed {seed}");
    }
}
