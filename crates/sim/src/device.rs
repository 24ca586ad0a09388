//! Devices, models and links that a cluster can be given: what decides how long its steps and transfers take.

use std::time::Duration;

use baton_scheduler::StepCost;
use baton_timing::{ModelShape, Roofline, catalog};

/// What all workers of a cluster run on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Device {
    /// How fast a step is.
    pub roofline: Roofline,
    /// The model whose time is predicted.
    pub model: ModelShape,
    /// Bytes per second that one worker can send.
    pub link_bytes_per_s: f64,
    /// Shortest and longest time of a message on its way, in microseconds.
    pub latency_us: (u64, u64),
}

impl Device {
    /// H200s that serve Llama 3 8B over 400 Gb/s links.
    pub const LLAMA_ON_H200: Self = Self {
        roofline: catalog::H200.roofline(),
        model: catalog::LLAMA_3_8B.shape,
        link_bytes_per_s: 45e9,
        latency_us: (20, 60),
    };

    /// A100s that serve Llama 3 8B over 200 Gb/s links.
    pub const LLAMA_ON_A100: Self = Self {
        roofline: catalog::A100.roofline(),
        model: catalog::LLAMA_3_8B.shape,
        link_bytes_per_s: 22e9,
        latency_us: (20, 60),
    };

    /// CPU cores that serve SmolLM2 135M over 10 Gb/s links.
    pub const SMOLLM2_ON_CPU: Self = Self {
        roofline: catalog::CPU_CORE.roofline(),
        model: catalog::SMOLLM2_135M.shape,
        link_bytes_per_s: 1.1e9,
        latency_us: (50, 200),
    };

    /// What schedulers expect of a step: the roofline with a sum in place of the larger of compute and memory time, so that
    /// no step is longer.
    pub(crate) fn step_cost(&self) -> StepCost {
        self.roofline.step_cost(&self.model)
    }

    /// Time that the KV of this many tokens takes on a link.
    pub(crate) fn wire_time(&self, num_tokens: f64) -> Duration {
        let seconds = num_tokens * self.model.kv_token_bytes as f64 / self.link_bytes_per_s;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(60))
    }
}
