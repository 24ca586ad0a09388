//! Who enters: bounded running and waiting requests; whoever finds both full is shed before anything is spent on it.

use std::time::Duration;

/// What a door lets in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorLimits {
    /// Requests running at once; at least 1.
    pub max_concurrent: usize,
    /// Requests waiting for a place.
    pub max_queue: usize,
}

/// How a request came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// It runs now.
    Running,
    /// It waits until [`Door::leave`] or [`Door::abandon`] lets the next one in.
    Queued,
}

/// Turned away: nothing was done for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many requests: come again in {retry_after_ms} ms")]
pub struct Shed {
    /// An estimate of when there is room, from how long requests took lately.
    pub retry_after_ms: u64,
}

/// Counts requests in and out. Which queued one goes next is the caller's order: first come, first served.
#[derive(Debug)]
pub struct Door {
    limits: DoorLimits,
    running: usize,
    queued: usize,
    /// Exponentially weighted mean of the time that a running request took.
    mean: Duration,
}

/// Bounds of the retry delay told to clients.
const RETRY_AFTER_MS: std::ops::RangeInclusive<u64> = 1_000..=30_000;

impl Door {
    /// An open door.
    pub fn new(limits: DoorLimits) -> Self {
        let limits = DoorLimits { max_concurrent: limits.max_concurrent.max(1), ..limits };
        Self { limits, running: 0, queued: 0, mean: Duration::from_secs(1) }
    }

    /// A request comes.
    ///
    /// # Errors
    /// [`Shed`] when all places and the queue are taken.
    pub fn enter(&mut self) -> Result<Entry, Shed> {
        if self.running < self.limits.max_concurrent && self.queued == 0 {
            self.running += 1;
            return Ok(Entry::Running);
        }
        if self.queued < self.limits.max_queue {
            self.queued += 1;
            return Ok(Entry::Queued);
        }
        Err(Shed { retry_after_ms: self.retry_after_ms() })
    }

    /// A running request ended after `took`. `true`: the longest waiting one runs now.
    #[must_use]
    pub fn leave(&mut self, took: Duration) -> bool {
        self.running = self.running.saturating_sub(1);
        self.mean = (self.mean * 7 + took) / 8;
        self.admit()
    }

    /// A queued request gave up (its client left). `true`: the longest waiting one runs now.
    #[must_use]
    pub fn abandon(&mut self) -> bool {
        self.queued = self.queued.saturating_sub(1);
        self.admit()
    }

    /// Requests that run.
    pub const fn num_running(&self) -> usize {
        self.running
    }

    /// Requests that wait.
    pub const fn num_queued(&self) -> usize {
        self.queued
    }

    /// The retry delay that a shed request is told now.
    pub fn retry_after_ms(&self) -> u64 {
        let turns = (self.queued + 1).div_ceil(self.limits.max_concurrent);
        let wait = self.mean.saturating_mul(u32::try_from(turns).unwrap_or(u32::MAX));
        let ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        ms.clamp(*RETRY_AFTER_MS.start(), *RETRY_AFTER_MS.end())
    }

    fn admit(&mut self) -> bool {
        let room = self.running < self.limits.max_concurrent && self.queued > 0;
        if room {
            self.queued -= 1;
            self.running += 1;
        }
        room
    }
}
