//! What a prompt that was computed elsewhere would have cost the sequences that ran here meanwhile. A model: a step's cost is linear, so a
//! chunk costs the same whatever it shares a step with and however the prompt is cut.

use std::time::Duration;

use baton_scheduler::StepCost;

/// What computing a prompt here would have cost others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AvoidedStall {
    /// Sequences that ran.
    pub victims: u32,
    /// Of all of them together, in seconds.
    pub total_s: f64,
}

impl AvoidedStall {
    /// Each of `victims` would have waited `each_s` seconds.
    pub(super) fn new(victims: usize, each_s: f64) -> Self {
        Self { victims: u32::try_from(victims).unwrap_or(u32::MAX), total_s: victims as f64 * each_s }
    }
}

/// What computing the tokens of a prompt from `skip_tokens` on adds to the steps it is in, in seconds, by the cost of a step on the kind of
/// device that computed it. `None` for a cost that can't be.
pub fn prefill_seconds(cost: &StepCost, prompt_tokens: usize, skip_tokens: usize) -> Option<f64> {
    let (skipped, tokens) = (skip_tokens as f64, prompt_tokens.saturating_sub(skip_tokens) as f64);
    let context = tokens * skipped + tokens * (tokens + 1.0) / 2.0;
    let seconds = cost.per_token_s * tokens + cost.per_context_token_s * context;
    // A day: beyond it somebody tells nonsense.
    let limit = Duration::from_secs(24 * 3600).as_secs_f64();
    (seconds.abs() <= limit).then_some(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: StepCost = StepCost { fixed_s: 7.0, per_token_s: 0.5, per_context_token_s: 0.25 };

    #[test]
    fn a_prompt_costs_its_uncached_tokens_and_all_they_attend_over() {
        // Tokens 2 and 3 attend over 3 and 4.
        assert_eq!(prefill_seconds(&COST, 4, 2), Some(2.0 * 0.5 + 7.0 * 0.25));
        assert_eq!(prefill_seconds(&COST, 4, 4), Some(0.0));
        // However it is cut.
        let whole = prefill_seconds(&COST, 96, 0);
        let parts = [(32, 0), (64, 32), (96, 64)].map(|(to, from)| prefill_seconds(&COST, to, from).unwrap());
        assert_eq!(whole, Some(parts.iter().sum()));
    }

    #[test]
    fn nonsense_is_no_cost() {
        for per_token_s in [f64::NAN, f64::INFINITY, 1e9] {
            assert_eq!(prefill_seconds(&StepCost { per_token_s, ..COST }, 100, 0), None);
        }
        assert_eq!(prefill_seconds(&StepCost { per_token_s: -0.5, ..COST }, 1, 0), Some(-0.25));
    }

    #[test]
    fn each_victim_counts_once() {
        assert_eq!(AvoidedStall::new(3, 0.5), AvoidedStall { victims: 3, total_s: 1.5 });
    }
}
