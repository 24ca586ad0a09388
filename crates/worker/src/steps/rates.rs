//! How fast something goes, measured while it goes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_scheduler::{StepCost, StepPlan};

use super::cost_fit::CostFit;

/// What an observation still weighs after one more.
const KEEP: f64 = 0.9;

/// A ratio of two sums in which an observation weighs less the older it is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DecayingRatio {
    over: f64,
    under: f64,
}

impl DecayingRatio {
    pub(crate) fn add(&mut self, over: f64, under: f64) {
        self.over = KEEP * self.over + over;
        self.under = KEEP * self.under + under;
    }

    /// 0 before anything was observed.
    pub(crate) fn get(&self) -> f64 {
        if self.under > 0.0 { self.over / self.under } else { 0.0 }
    }
}

/// What the loop measured of its own steps; read at any time.
#[derive(Debug, Default)]
pub struct StepRates {
    prefill_tokens_per_s: AtomicF64,
    decode_step_ms: AtomicF64,
}

impl StepRates {
    /// Prompt tokens computed a second, in steps that computed nothing else; 0 before any.
    pub fn prefill_tokens_per_s(&self) -> f64 {
        self.prefill_tokens_per_s.get()
    }

    /// Milliseconds of a step that only decodes; 0 before any.
    pub fn decode_step_ms(&self) -> f64 {
        self.decode_step_ms.get()
    }
}

/// The loop's side of [`StepRates`].
#[derive(Debug, Default)]
pub(super) struct StepMeter {
    prefill: DecayingRatio,
    decode: DecayingRatio,
    /// Rows of steps that only decode.
    rows: DecayingRatio,
    fit: CostFit,
}

impl StepMeter {
    /// A step was computed to its end. A row with one token costs what a decoding one does, whatever it belongs to; steps with
    /// rows of both kinds say nothing about either rate. Now and then says what a step is expected to take.
    pub(super) fn observe(&mut self, plan: &StepPlan, took: Duration, rates: &StepRates) -> Option<StepCost> {
        let num_prefill = plan.rows.iter().filter(|row| row.tokens.len() > 1).count();
        if num_prefill == 0 {
            self.decode.add(took.as_secs_f64() * 1e3, 1.0);
            self.rows.add(plan.rows.len() as f64, 1.0);
            rates.decode_step_ms.set(self.decode.get());
        } else if num_prefill == plan.rows.len() {
            self.prefill.add(plan.tokens.len() as f64, took.as_secs_f64());
            rates.prefill_tokens_per_s.set(self.prefill.get());
        }
        self.fit.observe(plan, took.as_secs_f64())
    }

    /// How far the expected times of recent steps were off: mean of |expected - measured| / measured.
    pub(super) fn residual(&self) -> f64 {
        self.fit.residual()
    }

    /// By what factor the last steps took longer than expected.
    pub(super) fn level(&self) -> f64 {
        self.fit.level()
    }

    /// What a step with so many decoding rows takes, were there nothing else in it: that of recent ones that only decoded, and of more rows
    /// than they had at most in proportion. `None` before any.
    pub(super) fn decode_alone(&self, num_rows: u32) -> Option<Duration> {
        let (ms, rows) = (self.decode.get(), self.rows.get());
        let more = (f64::from(num_rows) / rows.max(1.0)).max(1.0);
        Duration::try_from_secs_f64(ms * more / 1e3).ok().filter(|expected| !expected.is_zero())
    }
}

#[derive(Debug, Default)]
struct AtomicF64(AtomicU64);

impl AtomicF64 {
    fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }

    fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use baton_scheduler::SequenceId;

    use super::*;

    fn plan(rows: &[usize]) -> StepPlan {
        let mut plan = StepPlan::default();
        for (id, &num_tokens) in rows.iter().enumerate() {
            plan.push(SequenceId(id as u64), 0, &vec![1; num_tokens], &[0], &[]);
        }
        plan
    }

    #[test]
    fn each_rate_hears_only_of_steps_of_its_kind() {
        let (mut meter, rates) = (StepMeter::default(), StepRates::default());
        assert_eq!((rates.prefill_tokens_per_s(), rates.decode_step_ms()), (0.0, 0.0));
        meter.observe(&plan(&[30, 20]), Duration::from_millis(100), &rates);
        assert!((rates.prefill_tokens_per_s() - 500.0).abs() < 1e-9);
        meter.observe(&plan(&[1, 1, 1]), Duration::from_millis(8), &rates);
        meter.observe(&plan(&[1, 16]), Duration::from_millis(900), &rates);
        assert!((rates.prefill_tokens_per_s() - 500.0).abs() < 1e-9);
        assert!((rates.decode_step_ms() - 8.0).abs() < 1e-9);
    }

    #[test]
    fn decoding_alone_takes_what_it_took_and_more_rows_at_most_in_proportion() {
        let (mut meter, rates) = (StepMeter::default(), StepRates::default());
        assert_eq!(meter.decode_alone(1), None);
        meter.observe(&plan(&[1, 64]), Duration::from_millis(900), &rates);
        assert_eq!(meter.decode_alone(1), None);
        meter.observe(&plan(&[1, 1]), Duration::from_millis(8), &rates);
        let ms = |rows| meter.decode_alone(rows).unwrap().as_secs_f64() * 1e3;
        assert!((ms(1) - 8.0).abs() < 1e-6 && (ms(2) - 8.0).abs() < 1e-6 && (ms(6) - 24.0).abs() < 1e-6);
    }

    #[test]
    fn what_is_old_weighs_less() {
        let mut ratio = DecayingRatio::default();
        ratio.add(10.0, 1.0);
        for _ in 0..100 {
            ratio.add(2.0, 1.0);
        }
        assert!((ratio.get() - 2.0).abs() < 0.01, "{ratio:?}");
    }
}
