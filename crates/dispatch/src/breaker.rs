//! A circuit breaker: a worker that keeps failing gets no requests for a while.

use std::collections::VecDeque;
use std::time::Duration;

use crate::Time;

/// When a breaker opens, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerLimits {
    /// Failures within `window` that open it; at least 1.
    pub max_failures: usize,
    /// How long a failure counts.
    pub window: Duration,
    /// How long it stays open the first time; doubled each time that the trial after it fails.
    pub first_backoff: Duration,
    /// Longest time.
    pub max_backoff: Duration,
}

impl Default for BreakerLimits {
    fn default() -> Self {
        Self {
            max_failures: 3,
            window: Duration::from_secs(30),
            first_backoff: Duration::from_secs(1),
            max_backoff: Duration::from_secs(60),
        }
    }
}

#[derive(Debug)]
enum Stage {
    /// Requests go there; the times of the failures that count, oldest first, fewer than `max_failures`.
    Closed(VecDeque<Time>),
    /// Nothing goes there before this time; one request then.
    Open { until: Time, backoff: Duration },
    /// One request is there. One that says nothing by this time, since its client left for example, is followed by another.
    HalfOpen { until: Time, backoff: Duration },
}

/// The breaker of one worker process; a process that takes its place at the same address gets a new one.
///
/// It counts lost and unreachable streams, nothing else: a worker that answers, with whatever cause, is no broken one.
#[derive(Debug)]
pub struct Breaker {
    limits: BreakerLimits,
    stage: Stage,
}

impl Breaker {
    /// A closed breaker: requests may go there.
    pub const fn new(limits: BreakerLimits) -> Self {
        Self { limits, stage: Stage::Closed(VecDeque::new()) }
    }

    /// Whether no request may go there now: to be left out of the view that placement sees.
    pub fn is_open(&self, now: Time) -> bool {
        match self.stage {
            Stage::Closed(_) => false,
            Stage::Open { until, .. } | Stage::HalfOpen { until, .. } => now < until,
        }
    }

    /// A request goes there. The first one after the backoff is the trial: no other may go before it has an answer.
    pub fn begin(&mut self, now: Time) {
        match self.stage {
            Stage::Open { until, backoff } | Stage::HalfOpen { until, backoff } if now >= until => {
                self.stage = Stage::HalfOpen { until: now + backoff, backoff };
            }
            Stage::Closed(_) | Stage::Open { .. } | Stage::HalfOpen { .. } => {}
        }
    }

    /// A request that went there was answered: a first token came, or a sequence started, or the worker said why not.
    pub fn succeeded(&mut self) {
        match self.stage {
            Stage::HalfOpen { .. } => self.stage = Stage::Closed(VecDeque::new()),
            // Requests that were there before say nothing about whether new ones get through; and a worker that
            // answers most requests and drops some is still broken.
            Stage::Closed(_) | Stage::Open { .. } => {}
        }
    }

    /// A stream to the worker could not be opened, or broke.
    pub fn failed(&mut self, now: Time) {
        let backoff = match &mut self.stage {
            Stage::Closed(failures) => {
                while failures.front().is_some_and(|at| *at + self.limits.window <= now) {
                    failures.pop_front();
                }
                failures.push_back(now);
                if failures.len() < self.limits.max_failures {
                    return;
                }
                self.limits.first_backoff
            }
            // Those that break after it opened are the same breakdown.
            Stage::Open { .. } => return,
            Stage::HalfOpen { backoff, .. } => backoff.saturating_mul(2),
        };
        let backoff = backoff.min(self.limits.max_backoff);
        self.stage = Stage::Open { until: now + backoff, backoff };
    }
}
