//! An engine slowed to a given rate, so that a small model takes the time of a large one: real bytes and real processes,
//! with the proportions of another device.

use std::time::{Duration, Instant};

use baton_kv::KvLayout;
use baton_scheduler::{Engine, EngineError, Flow, StepOutput, StepPlan};

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

    fn step(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        on_layer: &mut dyn FnMut(usize) -> Flow,
    ) -> Result<(), EngineError> {
        let num_tokens = u32::try_from(plan.tokens.len()).unwrap_or(u32::MAX);
        let layer_time = self.layer_token.saturating_mul(num_tokens);
        let started = Instant::now();
        self.inner.step(plan, output, &mut |layer| {
            let due = layer_time.saturating_mul(u32::try_from(layer + 1).unwrap_or(u32::MAX));
            std::thread::sleep(due.saturating_sub(started.elapsed()));
            on_layer(layer)
        })
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
            on_layer: &mut dyn FnMut(usize) -> Flow,
        ) -> Result<(), EngineError> {
            output.stopped = (0..4).any(|layer| on_layer(layer) == Flow::Stop);
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
        let mut note = |_| {
            at.push(started.elapsed());
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
        let mut num_layers = 0;
        let mut output = StepOutput::default();
        let mut stop = |_| {
            num_layers += 1;
            Flow::Stop
        };
        engine().step(&plan(), &mut output, &mut stop).unwrap();
        assert_eq!((num_layers, output.stopped), (1, true));
    }
}
