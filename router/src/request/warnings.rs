//! Warnings that would repeat with every request: the first one, then one now and then with a count.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(10);

/// When a repeated warning was last written.
#[derive(Default)]
pub(crate) struct Warnings(Mutex<Option<(Instant, u64)>>);

impl Warnings {
    /// Warns that a request runs without a prefill worker.
    pub(crate) fn local_fallback(&self, reason: &str) {
        let Some(num) = self.due(Instant::now()) else { return };
        tracing::warn!(
            num,
            reason,
            "requests are computed wholly on a decode worker: no prefill worker is ready"
        );
    }

    /// How many there were since the last warning, if it is time for another.
    fn due(&self, now: Instant) -> Option<u64> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *last {
            Some((at, num)) if now.saturating_duration_since(*at) < INTERVAL => {
                *num += 1;
                None
            }
            other => {
                let num = other.map_or(0, |(_, num)| num) + 1;
                *other = Some((now, 0));
                Some(num)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_said_and_the_rest_are_counted() {
        let warnings = Warnings::default();
        let start = Instant::now();
        assert_eq!(warnings.due(start), Some(1));
        assert_eq!(warnings.due(start + INTERVAL / 2), None);
        assert_eq!(warnings.due(start + INTERVAL / 2), None);
        assert_eq!(warnings.due(start + INTERVAL), Some(3));
    }
}
