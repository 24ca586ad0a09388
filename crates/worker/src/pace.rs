//! An engine slowed to a given rate, so that a small model takes the time of a large one: real bytes and real processes,
//! with the proportions of another device.

use std::time::{Duration, Instant};

use baton_kv::KvLayout;
use baton_scheduler::{Engine, EngineError, Flow, StepOutput, StepPlan, StepPoint};

/// Longest sleep between two looks at whether the step is to be left.
const NAP: Duration = Duration::from_millis(1);

/// Makes every step of the inner engine take at least a fixed time for each token, spread evenly over the layers.
pub(crate) struct PacedEngine<E> {
    inner: E,
    /// Time of one token in one layer.
    layer_token: Duration,
}

impl<E: Engine> PacedEngine<E> {
    /// `tokens_per_s` must be above 0.
    pub(crate) fn new(inner: E, tokens_per_s: f64) -> Self {
        let layers = inner.layout().num_layers.max(1) as f64;
        Self { inner, layer_token: Duration::from_secs_f64(1.0 / (tokens_per_s * layers)) }
    }
}

impl<E: Engine> Engine for PacedEngine<E> {
    fn layout(&self) -> &KvLayout {
        self.inner.layout()
    }

    fn max_step_tokens(&self) -> usize {
        self.inner.max_step_tokens()
    }

    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn splits_rows(&self) -> bool {
        self.inner.splits_rows()
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        on_point: &mut dyn FnMut(StepPoint) -> Flow,
    ) -> Result<(), EngineError> {
        let layer_time = self.layer_token.mul_f64(plan.load().0);
        let started = Instant::now();
        self.inner.step(plan, output, &mut |point| {
            if let StepPoint::LayerEnd(layer) = point {
                let due = layer_time.saturating_mul(u32::try_from(layer + 1).unwrap_or(u32::MAX));
                if sleep_until(due, started, on_point) == Flow::Stop {
                    return Flow::Stop;
                }
            }
            on_point(point)
        })
    }
}

/// Sleeps until `due` after `started`, or until the step is to be left.
fn sleep_until(due: Duration, started: Instant, on_point: &mut dyn FnMut(StepPoint) -> Flow) -> Flow {
    loop {
        let left = due.saturating_sub(started.elapsed());
        if left.is_zero() {
            return Flow::Continue;
        }
        if on_point(StepPoint::Within) == Flow::Stop {
            return Flow::Stop;
        }
        std::thread::sleep(left.min(NAP));
    }
}

#[cfg(test)]
mod tests {
    use baton_kv::KvDtype;
    use baton_scheduler::SequenceId;

    use super::*;

    /// Four layers that take no time.
    struct Instantly(KvLayout);

    impl Engine for Instantly {
        fn layout(&self) -> &KvLayout {
            &self.0
        }

        fn max_step_tokens(&self) -> usize {
            16
        }

        fn vocab_size(&self) -> usize {
            1
        }

        fn step(
            &mut self,
            _: &StepPlan,
            output: &mut StepOutput,
            on_point: &mut dyn FnMut(StepPoint) -> Flow,
        ) -> Result<(), EngineError> {
            output.stopped = (0..4).any(|layer| on_point(StepPoint::LayerEnd(layer)) == Flow::Stop);
            Ok(())
        }
    }

    fn engine() -> PacedEngine<Instantly> {
        let layout = KvLayout {
            model_digest: [0; 32],
            num_layers: 4,
            num_kv_heads: 1,
            head_dim: 1,
            block_size: 4,
            dtype: KvDtype::F32,
            arrangement: String::new(),
            numerics_id: String::new(),
        };
        // 8 tokens at 200 a second: 40 ms in four layers.
        PacedEngine::new(Instantly(layout), 200.0)
    }

    fn plan() -> StepPlan {
        let mut plan = StepPlan::default();
        plan.push(SequenceId(0), 0, &[0; 8], &[0, 1], &[]);
        plan
    }

    #[test]
    fn a_step_takes_its_time_layer_by_layer() {
        let (started, mut at) = (Instant::now(), Vec::new());
        let mut note = |point| {
            if let StepPoint::LayerEnd(_) = point {
                at.push(started.elapsed());
            }
            Flow::Continue
        };
        engine().step(&plan(), &mut StepOutput::default(), &mut note).unwrap();
        assert_eq!(at.len(), 4);
        for (nth, at) in (1..).zip(at) {
            assert!(at >= Duration::from_millis(10) * nth, "layer {nth} after {at:?}");
        }
    }

    #[test]
    fn a_step_is_left_within_a_layer() {
        let (mut points, mut output) = (Vec::new(), StepOutput::default());
        let mut stop = |point| {
            points.push(point);
            // In the second layer's sleep.
            let left = points.contains(&StepPoint::LayerEnd(0)) && point == StepPoint::Within;
            if left { Flow::Stop } else { Flow::Continue }
        };
        engine().step(&plan(), &mut output, &mut stop).unwrap();
        assert!(output.stopped);
        assert_eq!(points[points.len() - 2..], [StepPoint::LayerEnd(0), StepPoint::Within]);
    }
}
