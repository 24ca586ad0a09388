//! What a prompt's computation took, on this worker's clock.

use baton_handoff::Time;
use baton_proto::v1;

/// Marks of one prompt.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Times {
    accepted: Time,
    opened: Option<Time>,
    cached_tokens: usize,
    num_chunks: u32,
}

impl Times {
    pub(crate) fn accepted(at: Time) -> Self {
        Self { accepted: at, ..Self::default() }
    }

    pub(crate) fn opened(&mut self, at: Time, cached_tokens: usize) {
        self.opened = Some(at);
        self.cached_tokens = cached_tokens;
    }

    pub(crate) fn chunk(&mut self) {
        self.num_chunks += 1;
    }

    /// With the first token sampled at `at`.
    pub(crate) fn sampled(&self, at: Time) -> v1::PrefillTimes {
        let opened = self.opened.unwrap_or(at);
        v1::PrefillTimes {
            queue_us: micros(opened.saturating_sub(self.accepted)),
            compute_us: micros(at.saturating_sub(opened)),
            num_chunks: self.num_chunks,
            cached_tokens: u32::try_from(self.cached_tokens).unwrap_or(u32::MAX),
        }
    }
}

pub(crate) fn micros(time: Time) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn queueing_ends_where_computing_begins() {
        let at = Duration::from_millis;
        let mut times = Times::accepted(at(100));
        times.opened(at(130), 32);
        times.chunk();
        times.chunk();
        let wire = times.sampled(at(180));
        assert_eq!((wire.queue_us, wire.compute_us), (30_000, 50_000));
        assert_eq!((wire.num_chunks, wire.cached_tokens), (2, 32));
    }
}
