//! What an operator promises about latency, and whether a request kept it.

use std::time::Duration;

use crate::SloConfig;

/// Bounds on a request's latency, as far as any are set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slo {
    /// From arrival to the first token.
    pub(crate) ttft: Option<Duration>,
    /// Between any two tokens of an answer.
    pub(crate) itl: Option<Duration>,
}

/// How long a request made its client wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waits {
    /// `None`: no token came.
    pub(crate) ttft: Option<Duration>,
    /// The longest gap between two tokens; `None`: no answer has two.
    pub(crate) longest_gap: Option<Duration>,
    /// How long it has been there.
    pub(crate) age: Duration,
    /// Its client left before the end.
    pub(crate) cancelled: bool,
}

/// Whether a bound was kept; `None` where there is none, or nothing to measure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) ttft: Option<bool>,
    pub(crate) itl: Option<bool>,
}

impl From<SloConfig> for Slo {
    fn from(config: SloConfig) -> Self {
        let bound = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        Self { ttft: config.slo_ttft_ms.map(bound), itl: config.slo_itl_ms.map(bound) }
    }
}

impl Slo {
    /// Compares.
    pub(crate) fn judge(&self, waits: &Waits) -> Kept {
        let ttft = |bound: Duration| match waits.ttft {
            Some(ttft) => Some(ttft <= bound),
            // Who leaves before the time is up proves nothing; else no token is no first token in time.
            None => (!waits.cancelled || waits.age > bound).then_some(false),
        };
        Kept {
            ttft: self.ttft.and_then(ttft),
            itl: self.itl.and_then(|bound| Some(waits.longest_gap? <= bound)),
        }
    }
}

impl Kept {
    /// Whether any bound was missed.
    pub(crate) fn is_missed(&self) -> bool {
        self.ttft == Some(false) || self.itl == Some(false)
    }
}

/// The word that metrics and spans carry.
pub(crate) const fn outcome(kept: bool) -> &'static str {
    if kept { "met" } else { "missed" }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn judged(
        ttft: Option<u64>,
        gap: Option<u64>,
        age: u64,
        cancelled: bool,
    ) -> (Option<bool>, Option<bool>) {
        let slo = Slo { ttft: Some(MS(100)), itl: Some(MS(50)) };
        let waits = Waits { ttft: ttft.map(MS), longest_gap: gap.map(MS), age: MS(age), cancelled };
        let kept = slo.judge(&waits);
        (kept.ttft, kept.itl)
    }

    #[test]
    fn a_bound_is_kept_up_to_and_with_its_value() {
        assert_eq!(judged(Some(100), Some(50), 500, false), (Some(true), Some(true)));
        assert_eq!(judged(Some(101), Some(51), 500, false), (Some(false), Some(false)));
        assert_eq!(judged(Some(100), None, 500, false), (Some(true), None), "one token has no gap");
    }

    #[test]
    fn no_token_is_a_miss_unless_its_client_left_in_time() {
        assert_eq!(judged(None, None, 10, false), (Some(false), None), "failed");
        assert_eq!(judged(None, None, 100, true), (None, None), "left before");
        assert_eq!(judged(None, None, 101, true), (Some(false), None), "left since");
    }

    #[test]
    fn without_bounds_nothing_is_judged() {
        let waits = Waits { ttft: Some(MS(1)), longest_gap: Some(MS(1)), age: MS(2), cancelled: false };
        let kept = Slo::default().judge(&waits);
        assert_eq!(kept, Kept::default());
        assert!(!kept.is_missed());
    }
}
