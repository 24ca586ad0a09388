//! Monotonic time of this process.

use std::time::{Duration, Instant};

/// Tells the time since the worker started; copies agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// Time since the start.
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// What [`Clock::now`] was at `instant`; zero for one before the start.
    pub fn at(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.start)
    }

    /// The instant at which [`Clock::now`] will be `time`, for timers.
    pub fn instant(&self, time: Duration) -> Instant {
        self.start + time
    }
}
