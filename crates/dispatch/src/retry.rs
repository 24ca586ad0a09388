//! What follows a failed attempt.

use std::time::Duration;

use baton_handoff::Cause;

/// How often and how fast a request is tried again; for all its groups together, so that more sequences get no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryLimits {
    /// Failures of workers that may be followed by another attempt. One worker that fails several groups at once is one failure.
    pub max_retries: u32,
    /// Placements after the first one that follow `Busy` or a full fleet, before the first token.
    pub max_replacements: u32,
    /// Placements of a group in a row that find no worker, once an attempt has run; a worker may be starting again.
    pub max_unplaced: u32,
    /// Wait before the first retry; doubled each time.
    pub first_backoff: Duration,
    /// Longest wait.
    pub max_backoff: Duration,
    /// What a shed client is told.
    pub retry_after_ms: u64,
    /// Workers that may be lost under this request before it is given up as the likely reason.
    pub max_workers_lost: u32,
    /// Tokens of a sequence kept from a decode leg that runs ahead of the first tokens.
    pub max_early_tokens: usize,
}

impl Default for RetryLimits {
    fn default() -> Self {
        Self {
            max_retries: 3,
            max_replacements: 2,
            max_unplaced: 6,
            first_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(5),
            retry_after_ms: 1_000,
            max_workers_lost: 2,
            max_early_tokens: 1_024,
        }
    }
}

impl RetryLimits {
    /// Wait before try `nth` (from 0).
    pub fn backoff(&self, nth: u32) -> Duration {
        let factor = 1_u32.checked_shl(nth).filter(|f| *f > 0).unwrap_or(u32::MAX);
        self.first_backoff.saturating_mul(factor).min(self.max_backoff)
    }
}

/// What a cause means for the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Try again elsewhere, within the retry budget.
    Retry,
    /// A worker fell over: try again, but a request that took down too many is given up.
    WorkerLost,
    /// Full: place again twice, then shed.
    PlaceAgain,
    /// Nobody is to blame: resume at once, at the expense of no budget.
    Resume,
    /// The worker lets go in good order: go on elsewhere at once, at the expense of no budget the first time that it says so.
    MoveOn,
    /// Trying again would give the same.
    GiveUp,
    /// Not a failure of the attempt; the other leg says how it goes on.
    Ignore,
}

impl Verdict {
    /// Decided for every cause:
    /// * `TooLarge` and `Protocol` come back wherever the request goes (workers of a fleet are alike), so they end it;
    /// * `Engine` stops the worker that says it, so it counts like a lost worker: tried once more, then given up;
    /// * `Deadline` and `SlowReader` are about the client;
    /// * `Draining` is a worker that was asked to end: a fleet that is restarted worker by worker uses up no request's budget;
    /// * `Cancelled` without a cancel of ours is a worker that lets go, for no reason that is known;
    /// * `Preempted` gave its blocks to others, as a worker must when its pool is full;
    /// * `NotNeeded` follows finished first tokens, which end the group when they arrive.
    pub const fn of(cause: Cause) -> Self {
        match cause {
            Cause::Busy => Self::PlaceAgain,
            Cause::Engine => Self::WorkerLost,
            Cause::TooLarge | Cause::Protocol | Cause::Deadline | Cause::SlowReader => Self::GiveUp,
            Cause::NotNeeded => Self::Ignore,
            Cause::Preempted => Self::Resume,
            Cause::Draining => Self::MoveOn,
            Cause::Cancelled
            | Cause::Duplicate
            | Cause::WrongInstance
            | Cause::Layout
            | Cause::Corrupt
            | Cause::PeerLost
            | Cause::NotFound
            | Cause::Expired => Self::Retry,
        }
    }
}
