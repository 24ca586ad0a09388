//! Tokens to what the client reads: detokenized, cut at stop strings, counted and timed.

use std::time::Instant;

use baton_telemetry::metrics::RouterMetrics;
use baton_text::{Detokenizer, StopStrings};

/// The answer of one request so far.
pub(super) struct Answer {
    detokenizer: Detokenizer,
    stops: StopStrings,
    /// Every token delivered; forced on a later attempt.
    token_ids: Vec<u32>,
    arrived: Instant,
    first_at: Option<Instant>,
    last_at: Option<Instant>,
}

/// What a token brought.
pub(super) struct Step {
    pub(super) text: String,
    /// A stop string is complete: nothing after it is wanted.
    pub(super) stopped: bool,
}

impl Answer {
    pub(super) fn new(detokenizer: Detokenizer, stops: StopStrings, arrived: Instant) -> Self {
        Self { detokenizer, stops, token_ids: Vec::new(), arrived, first_at: None, last_at: None }
    }

    /// Takes the next token.
    pub(super) fn push(&mut self, token: u32, now: Instant, metrics: &RouterMetrics) -> Step {
        self.token_ids.push(token);
        match self.last_at {
            None => {
                metrics.ttft.observe(now.saturating_duration_since(self.arrived).as_secs_f64());
                self.first_at = Some(now);
            }
            Some(last) => metrics.itl.observe(now.saturating_duration_since(last).as_secs_f64()),
        }
        self.last_at = Some(now);
        let Some(piece) = self.detokenizer.push(token) else {
            return Step { text: String::new(), stopped: false };
        };
        let step = self.stops.push(&piece);
        Step { text: step.text, stopped: step.matched.is_some() }
    }

    /// Text that waited for more; a stop string may still be completed by the end of a broken character.
    pub(super) fn flush(&mut self) -> String {
        if self.stops.is_matched() {
            return String::new();
        }
        let mut text = String::new();
        if let Some(piece) = self.detokenizer.flush() {
            text.push_str(&self.stops.push(&piece).text);
        }
        text.push_str(&self.stops.flush());
        text
    }

    pub(super) fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    pub(super) fn ttft_ms(&self) -> f64 {
        self.first_at.map_or(0.0, |at| at.saturating_duration_since(self.arrived).as_secs_f64() * 1e3)
    }

    /// Records what is known only at the end.
    pub(super) fn observe_end(&self, now: Instant, metrics: &RouterMetrics) {
        metrics.e2e.observe(now.saturating_duration_since(self.arrived).as_secs_f64());
        if let (Some(first), Some(last), gaps @ 1..) =
            (self.first_at, self.last_at, self.token_ids.len().saturating_sub(1))
        {
            metrics.tpot.observe(last.saturating_duration_since(first).as_secs_f64() / gaps as f64);
        }
    }
}
