//! What it costs to move a prompt's KV to another device: the timing engine says when each layer is complete, a link takes the bytes in
//! that order.

use baton_scheduler::{Engine, Flow, SequenceId, StepOutput, StepPlan, StepPoint};
use baton_timing::{TimingConfig, TimingEngine};

use crate::LabError;
use crate::device::{DEVICE, KV_TOKEN_BYTES, MODEL, seconds};
use crate::random::Random;
use crate::stall::PROMPT;

/// Gigabits a second of the links that are compared.
pub(crate) const LINKS: [f64; 4] = [10.0, 25.0, 100.0, 400.0];

/// A link of which 90 % carries KV.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) gbps: f64,
}

impl Link {
    fn seconds(self, bytes: f64) -> f64 {
        bytes / (0.9 * self.gbps * 1e9 / 8.0)
    }
}

/// A prompt that was computed and sent, in seconds from its beginning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sent {
    /// The link's time for all bytes.
    pub(crate) wire_s: f64,
    /// When the last layer was complete.
    pub(crate) computed_s: f64,
    /// When the last byte of the last layer had arrived, each layer being sent once it was complete.
    pub(crate) arrived_s: f64,
}

impl Sent {
    /// What the receiver waits for, when layers are sent as they are complete.
    pub(crate) fn exposed_s(&self) -> f64 {
        self.arrived_s - self.computed_s
    }

    /// The part of the transfer that the computation hides.
    pub(crate) fn hidden_s(&self) -> f64 {
        self.wire_s - self.exposed_s()
    }

    /// What the receiver waits for, when sending begins after the last layer.
    pub(crate) const fn exposed_at_end_s(&self) -> f64 {
        self.wire_s
    }
}

/// Computes the prompt on a timing engine with the model's layers, each of which takes an equal part of the step. The step's price is the one
/// that `stall` quotes: every token attends over the whole prompt.
pub(crate) fn send_prompt(link: Link) -> Result<Sent, LabError> {
    let num_layers = MODEL.num_layers;
    let mut engine = TimingEngine::new(TimingConfig {
        roofline: DEVICE,
        shape: MODEL,
        num_blocks: PROMPT / 16,
        block_size: 16,
        num_layers,
        vocab: 2,
        max_step_tokens: PROMPT,
    });
    let blocks: Vec<u32> = (0..).take(PROMPT / 16).collect();
    let mut plan = StepPlan::default();
    plan.push(SequenceId(1), 0, &Random::new(1).tokens(PROMPT), &blocks, &[]);
    let mut layers = Vec::with_capacity(num_layers);
    engine.step(&plan, &mut StepOutput::default(), &mut |point| {
        if let StepPoint::LayerEnd(layer) = point {
            layers.push(layer);
        }
        Flow::Continue
    })?;
    let tokens = PROMPT as u64;
    let work =
        baton_timing::StepWork { num_tokens: tokens, num_attended: tokens * tokens, num_context: tokens };
    let computed_s = seconds(&work);
    let wire_s = link.seconds((PROMPT * KV_TOKEN_BYTES) as f64);
    let arrived_s = layers.iter().fold(0.0_f64, |free, layer| {
        let complete = computed_s * (layer + 1) as f64 / num_layers as f64;
        free.max(complete) + wire_s / num_layers as f64
    });
    Ok(Sent { wire_s, computed_s, arrived_s })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gibibyte_takes_954_382_95_and_24_ms() {
        let sent = LINKS.map(|gbps| send_prompt(Link { gbps }).unwrap());
        let ms = |seconds: f64| (seconds * 1e3).round();
        assert_eq!(sent.map(|sent| ms(sent.wire_s)), [954.0, 382.0, 95.0, 24.0]);
        // The first layer is complete after 2.3 ms; from then on a slow link never rests, and a fast one waits for each layer.
        assert_eq!(sent.map(|sent| ms(sent.exposed_s())), [884.0, 311.0, 25.0, 1.0]);
        for sent in sent {
            assert!((sent.hidden_s() + sent.exposed_s() - sent.wire_s).abs() < 1e-12);
            assert!(sent.exposed_s() < sent.exposed_at_end_s());
        }
    }
}
