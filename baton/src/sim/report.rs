//! Quantiles of what clients of a simulated cluster saw.

use std::time::Duration;

use baton_sim::Durations;
use serde::Serialize;

/// Quantiles of a duration, in milliseconds; at most 1/64 too large.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Quantiles {
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
    pub(super) count: u64,
}

impl Quantiles {
    pub(super) fn of(durations: &Durations) -> Self {
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|q| ms(durations.quantile(q)));
        Self { p50, p90, p99, max: ms(durations.max()), count: durations.num() }
    }

    /// A row of a table.
    pub(super) fn row(&self, name: &str) -> String {
        let Self { p50, p90, p99, max, count } = self;
        format!("{name:<14}{p50:>10.1}{p90:>10.1}{p99:>10.1}{max:>10.1}{count:>12}\n")
    }
}

/// The head of a table of such rows.
pub(super) fn head() -> String {
    format!("{:<14}{:>10}{:>10}{:>10}{:>10}{:>12}\n", "ms", "p50", "p90", "p99", "max", "count")
}
