//! Whole clusters under every fault, by the thousand. `BATON_SEED` repeats one, `BATON_RUNS` says how many.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use baton_sim::{Faults, Report, SimConfig, run, run_many};

/// Fresh schedules in CI, and elsewhere.
const RUNS: (u64, u64) = (10_000, 1_000);

fn all_of(first_seed: u64, runs: u64, faults: Faults) -> Report {
    match run_many(first_seed, runs, faults, |_| {}) {
        Ok(report) => report,
        Err(violation) => panic!("{violation}"),
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// The same on two threads.
fn in_halves(first_seed: u64, runs: u64) -> Report {
    std::thread::scope(|scope| {
        let half = runs / 2;
        let other = scope.spawn(move || all_of(first_seed + half, runs - half, Faults::All));
        let mut report = all_of(first_seed, half, Faults::All);
        match other.join() {
            Ok(theirs) => report.add(&theirs),
            Err(panic) => std::panic::resume_unwind(panic),
        }
        report
    })
}

#[test]
fn fresh_schedules_with_every_fault_keep_every_rule() {
    if let Some(seed) = number("BATON_SEED") {
        println!("{}", all_of(seed, 1, Faults::All));
        return;
    }
    let first_seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_secs()) * 100_000;
    let in_ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    let runs = number("BATON_RUNS").unwrap_or(if in_ci { RUNS.0 } else { RUNS.1 });
    println!("seeds from {first_seed}");
    let began = Instant::now();
    let report = in_halves(first_seed, runs);
    println!("{report}\n{runs} schedules took {:.1?}", began.elapsed());
    // The schedules must reach what they are for; a few hundred of them do.
    if runs < 500 {
        return;
    }
    let reached = [
        ("commits", report.num_commits),
        ("finished", report.num_finished.saturating_sub(report.num_requests / 3)),
        ("failed handoffs", report.failed_handoffs.len() as u64),
        ("resumed", report.num_resumed),
        ("redirects", report.num_redirects),
        ("splits", report.num_splits),
        ("stops", report.num_stops),
        ("preemptions", report.num_preemptions),
        ("recomputed", report.num_recomputed),
        ("legs of preempted", report.num_preempted_legs),
        ("passed in line", report.max_passed.into()),
        ("cached tokens", report.num_cached_tokens),
        ("gaps", report.num_gaps),
        ("damaged frames", report.num_damaged_frames),
        ("local", report.num_local),
    ];
    for (what, num) in reached {
        assert!(num > 0, "no {what}:\n{report}");
    }
    let kinds = [
        "kill",
        "pause",
        "drain",
        "cut",
        "partition",
        "kill_router",
        "delayed",
        "repeated",
        "corrupted",
        "late_writer",
    ];
    for kind in kinds {
        assert!(report.num_faults(kind) > 0, "no {kind}:\n{report}");
    }
}

#[test]
fn without_faults_nothing_fails() {
    let report = all_of(1, 300, Faults::None);
    println!("{report}");
    assert_eq!(report.num_cancelled + report.num_damaged_frames, 0, "{report}");
    assert!(report.faults.is_empty() && report.failures.is_empty(), "{report}");
    assert!(report.num_finished * 10 > report.num_requests * 8, "{report}");
    // First tokens that end every sequence, and stop strings, make the decode leg superfluous; a preempted one is resumed; a full
    // queue, on either worker, lets the router place again.
    let no_failure = |cause: &&str| ["not_needed", "cancelled", "preempted", "busy"].contains(cause);
    assert!(report.failed_handoffs.keys().all(no_failure), "{report}");
}

/// Run in any case. What one of them once broke is pinned by name where it was mended, since a seed means another run once the
/// simulation draws something more. 17960275781085: tokens that had run ahead were delivered after a stop string. 179605057600386: a line
/// moves on after its worker stood still. 179610385602585: an alarm overtook what had come while its worker stood still.
const SEEDS: &[u64] = &[
    0,
    1,
    2,
    u64::MAX - 1,
    17_960_275_781_085,
    17_960_278_040_219,
    179_605_057_600_386,
    179_610_385_602_585,
];

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
