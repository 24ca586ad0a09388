//! What a run says at its end.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use baton_handoff::Time;

use crate::Faults;

/// Counts of one run, or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Runs added up.
    pub num_runs: u64,
    /// Requests that came to a router.
    pub num_requests: u64,
    /// Complete, with exactly the undisturbed run's tokens.
    pub num_finished: u64,
    /// Ended by their client.
    pub num_cancelled: u64,
    /// Turned away at a door, or without a worker, or by `Busy`; nothing was delivered.
    pub num_shed: u64,
    /// Ended with another typed cause.
    pub num_failed: u64,
    /// Those by cause.
    pub failures: BTreeMap<&'static str, u64>,
    /// Died with their router.
    pub num_lost_with_router: u64,
    /// Tokens delivered.
    pub num_tokens: u64,
    /// Attempts after the first.
    pub num_retries: u64,
    /// Requests that were completed by a later attempt after tokens had been delivered by an earlier one.
    pub num_resumed: u64,
    /// Handoffs committed at a decode worker.
    pub num_commits: u64,
    /// Handoffs that ended at a decode worker without a commit, by cause.
    pub failed_handoffs: BTreeMap<&'static str, u64>,
    /// Attempts whose prompt the decode worker computed.
    pub num_local: u64,
    /// Frames that a receiver found damaged.
    pub num_damaged_frames: u64,
    /// Sequences preempted.
    pub num_preemptions: u64,
    /// Processes killed.
    pub num_kills: u64,
    /// Facts that came late, early or twice and that a machine ignored.
    pub num_ignored: u64,
    /// Events.
    pub num_events: u64,
    /// Virtual time.
    pub time: Duration,
    /// Hash over all events: equal configurations give equal digests.
    pub digest: u64,
}

impl Report {
    /// Adds another run's counts.
    pub fn add(&mut self, other: &Self) {
        self.num_runs += other.num_runs;
        self.num_requests += other.num_requests;
        self.num_finished += other.num_finished;
        self.num_cancelled += other.num_cancelled;
        self.num_shed += other.num_shed;
        self.num_failed += other.num_failed;
        self.num_lost_with_router += other.num_lost_with_router;
        self.num_tokens += other.num_tokens;
        self.num_retries += other.num_retries;
        self.num_resumed += other.num_resumed;
        self.num_commits += other.num_commits;
        self.num_local += other.num_local;
        self.num_damaged_frames += other.num_damaged_frames;
        self.num_preemptions += other.num_preemptions;
        self.num_kills += other.num_kills;
        self.num_ignored += other.num_ignored;
        self.num_events += other.num_events;
        self.time += other.time;
        for (mine, theirs) in
            [(&mut self.failures, &other.failures), (&mut self.failed_handoffs, &other.failed_handoffs)]
        {
            for (cause, count) in theirs {
                *mine.entry(cause).or_default() += count;
            }
        }
        self.digest = self.digest.rotate_left(5) ^ other.digest;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} runs, {} events, {:.0?} of virtual time", self.num_runs, self.num_events, self.time)?;
        writeln!(
            f,
            "requests   {} = {} finished + {} cancelled + {} shed + {} failed + {} lost with their router",
            self.num_requests,
            self.num_finished,
            self.num_cancelled,
            self.num_shed,
            self.num_failed,
            self.num_lost_with_router
        )?;
        writeln!(
            f,
            "attempts   {} retries, {} requests resumed after tokens were delivered, {} local prefills",
            self.num_retries, self.num_resumed, self.num_local
        )?;
        writeln!(
            f,
            "handoffs   {} committed, {} damaged frames, otherwise {:?}",
            self.num_commits, self.num_damaged_frames, self.failed_handoffs
        )?;
        writeln!(f, "failures   {:?}", self.failures)?;
        write!(
            f,
            "trouble    {} kills, {} preemptions, {} facts ignored; {} tokens delivered, digest {:016x}",
            self.num_kills, self.num_preemptions, self.num_ignored, self.num_tokens, self.digest
        )
    }
}

/// A rule that broke.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}\nat {at:?} of virtual time\n{}again with: baton sim --runs 1 --seed {seed} --faults {faults}", indented(.trace))]
pub struct Violation {
    /// The run's seed.
    pub seed: u64,
    /// The run's faults.
    pub faults: Faults,
    /// When.
    pub at: Time,
    /// Which rule, and how.
    pub what: String,
    /// The last events before it.
    pub trace: Vec<String>,
}

fn indented(lines: &[String]) -> String {
    lines.iter().map(|line| format!("  {line}\n")).collect()
}
