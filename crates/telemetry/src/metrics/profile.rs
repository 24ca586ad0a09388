//! What a worker's turns take by kind of step, as `/metrics` shows it.

use super::gauges::Sample;
use crate::scrape::{KIND, PART, SHARE};

/// Shares of steps of which a profile says how many times their expected time they take at most, and how they are written.
pub const STEP_SHARES: [(f64, &str); 13] = [
    (0.0, "0"),
    (0.01, "0.01"),
    (0.05, "0.05"),
    (0.1, "0.1"),
    (0.25, "0.25"),
    (0.5, "0.5"),
    (0.75, "0.75"),
    (0.9, "0.9"),
    (0.95, "0.95"),
    (0.98, "0.98"),
    (0.99, "0.99"),
    (0.999, "0.999"),
    (1.0, "1"),
];

/// Steps of one kind: what a turn of the loop with one is expected to take, in parts as [`super::StepCostGauges`] has them, and how far turns were from that.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepKindGauges {
    /// `decode`, `few` or `many` prompt tokens.
    pub kind: &'static str,
    /// Seconds of every step.
    pub fixed_s: f64,
    /// Seconds of a new token.
    pub per_token_s: f64,
    /// Seconds of one token that a new one attends over.
    pub per_context_token_s: f64,
    /// For each of [`STEP_SHARES`]: how many times the expected time.
    pub ratios: [f64; STEP_SHARES.len()],
}

impl StepKindGauges {
    pub(super) fn seconds(&self) -> [Sample; 3] {
        let sample = |part, seconds| self.sample((PART, part), seconds);
        [
            sample("fixed", self.fixed_s),
            sample("token", self.per_token_s),
            sample("context_token", self.per_context_token_s),
        ]
    }

    pub(super) fn shares(&self) -> Vec<Sample> {
        let sample = |((_, share), ratio): ((f64, &'static str), f64)| self.sample((SHARE, share), ratio);
        STEP_SHARES.into_iter().zip(self.ratios).map(sample).collect()
    }

    fn sample(&self, label: (&'static str, &'static str), value: f64) -> Sample {
        Sample { labels: vec![(KIND, self.kind), label], ..Sample::real(value) }
    }
}
