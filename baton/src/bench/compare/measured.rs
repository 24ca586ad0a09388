//! What a worker measured of its own steps: what a simulation of the same cluster needs.

use baton_telemetry::metrics::STEP_SHARES;
use baton_telemetry::scrape::{
    BLOCKS_CONFIGURED, KIND, PART, SHARE, STEP_COST, STEP_COST_RESIDUAL, STEP_PROFILE, STEP_PROFILE_RATIO,
    Scrape,
};
use baton_worker::StepKind;
use serde::{Deserialize, Serialize};

/// A worker, and what its steps cost. What its scheduler plans with is null before enough steps ran.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeasuredWorker {
    /// prefill or decode.
    pub(crate) role: String,
    /// Blocks of its pool.
    pub(crate) blocks: Option<u64>,
    /// What its scheduler plans with by the end: seconds of every step.
    pub(crate) fixed_s: Option<f64>,
    /// Seconds of a new token.
    pub(crate) per_token_s: Option<f64>,
    /// Seconds of one token that a new one attends over.
    pub(crate) per_context_token_s: Option<f64>,
    /// Mean of |expected - measured| / measured over recent steps.
    pub(crate) residual: Option<f64>,
    /// What turns of its loop took, by kind of step; those of which any was seen.
    #[serde(default)]
    pub(crate) kinds: Vec<MeasuredKind>,
}

/// The steps of one kind, as the worker fitted them: seconds from one boundary to the next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeasuredKind {
    /// decode, few or many.
    pub(crate) kind: String,
    /// Prompt tokens of such a step, at least; it has fewer than the next kind.
    pub(crate) from_prompt_tokens: usize,
    /// Seconds of every step.
    pub(crate) fixed_s: f64,
    /// Seconds of a new token.
    pub(crate) per_token_s: f64,
    /// Seconds of one token that a new one attends over.
    pub(crate) per_context_token_s: f64,
    /// Shares of the steps, ascending, and how many times their expected time these took at most.
    pub(crate) ratios: Vec<(f64, f64)>,
}

/// Seconds by part of a cost.
struct Parts<'a>(Vec<(&'a str, f64)>);

impl Parts<'_> {
    fn of(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(part, _)| *part == name).map(|(_, seconds)| *seconds)
    }
}

impl MeasuredWorker {
    pub(super) fn of(role: &str, scrape: &Scrape) -> Self {
        let parts = Parts(scrape.by_label(STEP_COST, PART));
        Self {
            role: role.to_owned(),
            blocks: scrape.sum(BLOCKS_CONFIGURED).map(|blocks| blocks as u64),
            fixed_s: parts.of("fixed"),
            per_token_s: parts.of("token"),
            per_context_token_s: parts.of("context_token"),
            residual: scrape.sum(STEP_COST_RESIDUAL),
            kinds: StepKind::ALL.into_iter().filter_map(|kind| MeasuredKind::of(kind, scrape)).collect(),
        }
    }
}

impl MeasuredKind {
    fn of(kind: StepKind, scrape: &Scrape) -> Option<Self> {
        let scrape = scrape.only(KIND, kind.name());
        let parts = Parts(scrape.by_label(STEP_PROFILE, PART));
        let ratios = scrape.by_label(STEP_PROFILE_RATIO, SHARE);
        let ratio = |(share, name): (f64, &str)| {
            ratios.iter().find(|(found, _)| *found == name).map(|(_, ratio)| (share, *ratio))
        };
        Some(Self {
            kind: kind.name().to_owned(),
            from_prompt_tokens: kind.from_prompt_tokens(),
            fixed_s: parts.of("fixed")?,
            per_token_s: parts.of("token")?,
            per_context_token_s: parts.of("context_token")?,
            ratios: STEP_SHARES.into_iter().filter_map(ratio).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use baton_telemetry::metrics::{StepCostGauges, StepKindGauges, WorkerMetrics};

    use super::*;

    #[test]
    fn what_a_worker_shows_is_what_is_read() {
        let metrics = WorkerMetrics::new();
        let cost = StepCostGauges { fixed_s: 0.5, residual: 0.125, ..StepCostGauges::default() };
        metrics.read_step_cost(move || Some(cost));
        metrics.read_step_profile(|| {
            let many = StepKindGauges { kind: "many", fixed_s: 2.0, per_token_s: 0.25, ..Default::default() };
            vec![StepKindGauges { ratios: [1.5; STEP_SHARES.len()], ..many }]
        });
        let worker = MeasuredWorker::of("decode", &Scrape::parse(&metrics.encode()));
        assert_eq!((worker.fixed_s, worker.residual, worker.blocks), (Some(0.5), Some(0.125), None));
        let [kind] = worker.kinds.as_slice() else { panic!("{worker:?}") };
        assert_eq!((kind.kind.as_str(), kind.from_prompt_tokens), ("many", 64));
        assert_eq!((kind.fixed_s, kind.per_token_s, kind.per_context_token_s), (2.0, 0.25, 0.0));
        let expected: Vec<(f64, f64)> = STEP_SHARES.iter().map(|(share, _)| (*share, 1.5)).collect();
        assert_eq!(kind.ratios, expected);
    }
}
