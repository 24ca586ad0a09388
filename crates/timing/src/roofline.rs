//! How long a step takes: the larger of compute time and memory time.

use std::time::Duration;

use baton_scheduler::StepCost;

/// A device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Floating point operations per second.
    pub flops_per_s: f64,
    /// Bytes per second from memory.
    pub bytes_per_s: f64,
    /// Fixed cost of a step.
    pub overhead: Duration,
}

/// What of a model decides the time of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelShape {
    /// Weights that a token passes through.
    pub num_params: f64,
    /// Bytes of one weight.
    pub weight_bytes: f64,
    /// Layers.
    pub num_layers: usize,
    /// Elements of a hidden state (attention heads times head size).
    pub hidden: usize,
    /// Bytes of K and V of one token over all layers.
    pub kv_token_bytes: usize,
}

/// What one step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// New tokens of all rows.
    pub num_tokens: u64,
    /// For each new token, the tokens it attends over; summed.
    pub num_attended: u64,
    /// For each row, the tokens whose KV is read; summed.
    pub num_context: u64,
}

impl Roofline {
    /// `overhead + max(flops / flops_per_s, bytes / bytes_per_s)`, where
    /// `flops = 2 * params * tokens + 4 * layers * hidden * attended` (a multiply and an add per weight; QK and PV per attended token) and
    /// `bytes = params * weight_bytes + kv_token_bytes * context` (all weights once a step, each row's KV once).
    pub fn step_time(&self, shape: &ModelShape, work: &StepWork) -> Duration {
        let work = [work.num_tokens as f64, work.num_attended as f64, work.num_context as f64];
        let seconds = self.busy_seconds(shape, work);
        // A device of speed 0 would take forever; a day is as good.
        self.overhead + Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(86_400))
    }

    /// The same in seconds, of a mean step: `work` holds tokens, attended and context as [`StepWork`] counts them, which need not be whole.
    pub fn seconds(&self, shape: &ModelShape, work: [f64; 3]) -> f64 {
        self.overhead.as_secs_f64() + self.busy_seconds(shape, work)
    }

    fn busy_seconds(&self, shape: &ModelShape, [tokens, attended, context]: [f64; 3]) -> f64 {
        let attention = 4.0 * shape.num_layers as f64 * shape.hidden as f64 * attended;
        let flops = 2.0 * shape.num_params * tokens + attention;
        let bytes = shape.num_params * shape.weight_bytes + shape.kv_token_bytes as f64 * context;
        (flops / self.flops_per_s).max(bytes / self.bytes_per_s)
    }

    /// The costs by which a scheduler cuts chunks: all of [`Roofline::step_time`] but the reading of KV, with weights read and
    /// computed one after the other. So a step of prompts takes at most what they say.
    pub fn step_cost(&self, shape: &ModelShape) -> StepCost {
        StepCost {
            fixed_s: self.overhead.as_secs_f64() + shape.num_params * shape.weight_bytes / self.bytes_per_s,
            per_token_s: 2.0 * shape.num_params / self.flops_per_s,
            per_context_token_s: 4.0 * shape.num_layers as f64 * shape.hidden as f64 / self.flops_per_s,
        }
    }
}
