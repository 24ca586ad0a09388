//! What a run says at its end.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use baton_handoff::Time;

use crate::{Durations, Faults};

/// Counts of one run, or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Runs added up.
    pub num_runs: u64,
    /// Requests that came to a router.
    pub num_requests: u64,
    /// Their sequences.
    pub num_sequences: u64,
    /// Complete, every sequence with exactly the undisturbed run's tokens.
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
    /// From a client's request to its first token.
    pub ttft: Durations,
    /// Between two tokens of one sequence.
    pub itl: Durations,
    /// Attempts of a group after its first.
    pub num_retries: u64,
    /// Attempts that go on behind delivered tokens.
    pub num_resumes: u64,
    /// Requests that were completed although tokens had to be resumed.
    pub num_resumed: u64,
    /// Sequences that went on as a group of their own.
    pub num_splits: u64,
    /// Sequences whose decode worker was told that nothing more is wanted.
    pub num_stops: u64,
    /// Handoffs committed at a decode worker.
    pub num_commits: u64,
    /// Handoffs that ended at a decode worker without a commit, by cause.
    pub failed_handoffs: BTreeMap<&'static str, u64>,
    /// Attempts whose prompt the decode worker computed.
    pub num_local: u64,
    /// Placements by reason.
    pub placements: BTreeMap<&'static str, u64>,
    /// Frames that a receiver found damaged.
    pub num_damaged_frames: u64,
    /// Sequences preempted.
    pub num_preemptions: u64,
    /// Those of them that were computed again where they were.
    pub num_recomputed: u64,
    /// Attempts that were opened for preempted sequences.
    pub num_preempted_legs: u64,
    /// Held blocks that went to another decode worker.
    pub num_redirects: u64,
    /// Most sequences that were served before the first one in a line.
    pub max_passed: u32,
    /// Prompt tokens that workers computed, recomputed ones included.
    pub num_prompt_tokens: u64,
    /// Prompt tokens found in prefix caches: not computed, or not sent.
    pub num_cached_tokens: u64,
    /// Snapshots of prefix caches that routers asked for, and gaps that they noticed.
    pub num_snapshots: u64,
    /// Gaps in streams of cache updates.
    pub num_gaps: u64,
    /// Faults injected, by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Facts that came late, early or twice and that a machine ignored.
    pub num_ignored: u64,
    /// The longest wait of each kind.
    pub longest_waits: BTreeMap<&'static str, Duration>,
    /// Events.
    pub num_events: u64,
    /// Virtual time.
    pub time: Duration,
    /// Hash over all events: equal configurations give equal digests.
    pub digest: u64,
}

impl Report {
    pub(crate) fn fail(&mut self, cause: &'static str) {
        self.num_failed += 1;
        *self.failures.entry(cause).or_default() += 1;
    }

    /// Faults of this kind that were injected.
    pub fn num_faults(&self, kind: &str) -> u64 {
        self.faults.get(kind).copied().unwrap_or(0)
    }

    /// Adds another run's counts. In which order reports are added up makes no difference.
    pub fn add(&mut self, other: &Self) {
        let counts = [
            (&mut self.num_runs, other.num_runs),
            (&mut self.num_requests, other.num_requests),
            (&mut self.num_sequences, other.num_sequences),
            (&mut self.num_finished, other.num_finished),
            (&mut self.num_cancelled, other.num_cancelled),
            (&mut self.num_shed, other.num_shed),
            (&mut self.num_failed, other.num_failed),
            (&mut self.num_lost_with_router, other.num_lost_with_router),
            (&mut self.num_tokens, other.num_tokens),
            (&mut self.num_retries, other.num_retries),
            (&mut self.num_resumes, other.num_resumes),
            (&mut self.num_resumed, other.num_resumed),
            (&mut self.num_splits, other.num_splits),
            (&mut self.num_stops, other.num_stops),
            (&mut self.num_commits, other.num_commits),
            (&mut self.num_local, other.num_local),
            (&mut self.num_damaged_frames, other.num_damaged_frames),
            (&mut self.num_preemptions, other.num_preemptions),
            (&mut self.num_recomputed, other.num_recomputed),
            (&mut self.num_preempted_legs, other.num_preempted_legs),
            (&mut self.num_redirects, other.num_redirects),
            (&mut self.num_prompt_tokens, other.num_prompt_tokens),
            (&mut self.num_cached_tokens, other.num_cached_tokens),
            (&mut self.num_snapshots, other.num_snapshots),
            (&mut self.num_gaps, other.num_gaps),
            (&mut self.num_ignored, other.num_ignored),
            (&mut self.num_events, other.num_events),
        ];
        for (mine, theirs) in counts {
            *mine += theirs;
        }
        let by_name = [
            (&mut self.failures, &other.failures),
            (&mut self.failed_handoffs, &other.failed_handoffs),
            (&mut self.placements, &other.placements),
            (&mut self.faults, &other.faults),
        ];
        for (mine, theirs) in by_name {
            for (name, count) in theirs {
                *mine.entry(name).or_default() += count;
            }
        }
        for (name, longest) in &other.longest_waits {
            let mine = self.longest_waits.entry(name).or_default();
            *mine = (*mine).max(*longest);
        }
        self.max_passed = self.max_passed.max(other.max_passed);
        self.ttft.add(&other.ttft);
        self.itl.add(&other.itl);
        self.time += other.time;
        self.digest = self.digest.wrapping_add(other.digest);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { num_runs, num_events, time, num_requests, num_sequences, .. } = self;
        writeln!(f, "{num_runs} schedules, {num_events} events, {time:.0?} of virtual time")?;
        writeln!(
            f,
            "requests    {num_requests} = {} finished + {} cancelled + {} shed + {} failed + {} lost with their router",
            self.num_finished, self.num_cancelled, self.num_shed, self.num_failed, self.num_lost_with_router
        )?;
        writeln!(
            f,
            "sequences   {num_sequences}; {} split off, {} stopped",
            self.num_splits, self.num_stops
        )?;
        writeln!(
            f,
            "attempts    {} retries, {} redirects, {} resumes, {} requests complete after a resume, {} local prefills",
            self.num_retries, self.num_redirects, self.num_resumes, self.num_resumed, self.num_local
        )?;
        writeln!(
            f,
            "preemption  {} preempted, {} recomputed in place, {} legs for preempted ones, at most {} passed the first in line",
            self.num_preemptions, self.num_recomputed, self.num_preempted_legs, self.max_passed
        )?;
        writeln!(
            f,
            "handoffs    {} committed, {} damaged frames, otherwise {:?}",
            self.num_commits, self.num_damaged_frames, self.failed_handoffs
        )?;
        writeln!(f, "placements  {:?}", self.placements)?;
        writeln!(
            f,
            "prefixes    {} prompt tokens computed, {} found in caches; {} snapshots, {} gaps",
            self.num_prompt_tokens, self.num_cached_tokens, self.num_snapshots, self.num_gaps
        )?;
        writeln!(f, "failures    {:?}", self.failures)?;
        writeln!(f, "faults      {:?}", self.faults)?;
        writeln!(f, "waits       longest {:.1?}", self.longest_waits)?;
        let ms = |value: Duration| value.as_secs_f64() * 1e3;
        for (name, durations) in [("ttft", &self.ttft), ("itl", &self.itl)] {
            let (p50, p99) = (ms(durations.quantile(0.5)), ms(durations.quantile(0.99)));
            writeln!(f, "{name:11} p50 {p50:.1} ms, p99 {p99:.1} ms, max {:.1} ms", ms(durations.max()))?;
        }
        write!(
            f,
            "tokens      {} delivered; {} facts ignored; digest {:016x}",
            self.num_tokens, self.num_ignored, self.digest
        )
    }
}

/// A rule that broke.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}\nat {at:?} of virtual time\n{}again with: {again}", indented(.trace))]
pub struct Violation {
    /// The run's seed.
    pub seed: u64,
    /// The run's faults.
    pub faults: Faults,
    /// When.
    pub at: Time,
    /// What runs it again.
    pub again: String,
    /// Which rule, and how.
    pub what: String,
    /// The last events before it.
    pub trace: Vec<String>,
}

fn indented(lines: &[String]) -> String {
    lines.iter().map(|line| format!("  {line}\n")).collect()
}
