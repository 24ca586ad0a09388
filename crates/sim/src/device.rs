//! Devices, models and links that a cluster can be given: what decides how long its steps and transfers take.

use std::time::Duration;

use baton_scheduler::StepCost;
use baton_timing::{ModelShape, Roofline};

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

/// Share of a GPU's peak operations that a prefill reaches, and share of its peak bandwidth that a decode step reaches.
const REACHED: (f64, f64) = (0.6, 0.8);

const fn gpu(peak_flops_per_s: f64, peak_bytes_per_s: f64) -> Roofline {
    Roofline {
        flops_per_s: peak_flops_per_s * REACHED.0,
        bytes_per_s: peak_bytes_per_s * REACHED.1,
        overhead: Duration::from_micros(200),
    }
}

/// NVIDIA A100 SXM 80 GB: 312 Tflop/s dense bf16, 2.04 TB/s.
pub const A100: Roofline = gpu(312e12, 2.039e12);

/// NVIDIA H200 SXM: 989 Tflop/s dense bf16, 4.8 TB/s.
pub const H200: Roofline = gpu(989e12, 4.8e12);

/// One server core with AVX-512 VNNI, as measured with this repository's engine on [`SMOLLM2_135M`]: 1,350 prompt tokens and 221
/// decode steps a second.
pub const CPU_CORE: Roofline =
    Roofline { flops_per_s: 3.6e11, bytes_per_s: 3.0e10, overhead: Duration::from_micros(50) };

/// Llama 3 8B in bf16.
pub const LLAMA_3_8B: ModelShape = ModelShape {
    num_params: 8.03e9,
    weight_bytes: 2.0,
    num_layers: 32,
    hidden: 4096,
    kv_token_bytes: 131_072,
};

/// SmolLM2 135M with int8 weights and f16 KV.
pub const SMOLLM2_135M: ModelShape = ModelShape {
    num_params: 1.345e8,
    weight_bytes: 1.0,
    num_layers: 30,
    hidden: 576,
    kv_token_bytes: 23_040,
};

impl Device {
    /// H200s that serve Llama 3 8B over 400 Gb/s links.
    pub const LLAMA_ON_H200: Self =
        Self { roofline: H200, model: LLAMA_3_8B, link_bytes_per_s: 45e9, latency_us: (20, 60) };

    /// A100s that serve Llama 3 8B over 200 Gb/s links.
    pub const LLAMA_ON_A100: Self =
        Self { roofline: A100, model: LLAMA_3_8B, link_bytes_per_s: 22e9, latency_us: (20, 60) };

    /// CPU cores that serve SmolLM2 135M over 10 Gb/s links.
    pub const SMOLLM2_ON_CPU: Self =
        Self { roofline: CPU_CORE, model: SMOLLM2_135M, link_bytes_per_s: 1.1e9, latency_us: (50, 200) };

    /// What schedulers expect of a step: the roofline with a sum in place of the larger of compute and memory time, so that
    /// no step is longer.
    pub(crate) fn step_cost(&self) -> StepCost {
        let Self { roofline, model, .. } = self;
        let attention = 4.0 * model.num_layers as f64 * model.hidden as f64;
        StepCost {
            fixed_s: roofline.overhead.as_secs_f64()
                + model.num_params * model.weight_bytes / roofline.bytes_per_s,
            per_token_s: 2.0 * model.num_params / roofline.flops_per_s,
            per_context_token_s: attention / roofline.flops_per_s,
        }
    }

    /// Time that the KV of this many tokens takes on a link.
    pub(crate) fn wire_time(&self, num_tokens: f64) -> Duration {
        let seconds = num_tokens * self.model.kv_token_bytes as f64 / self.link_bytes_per_s;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(60))
    }
}
