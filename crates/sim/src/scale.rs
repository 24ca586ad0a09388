//! The same load per worker on clusters of any size, to see what size costs.

use std::time::Duration;

use crate::workload::{Gaps, Lengths, Pace, Streams, TooMany, UniqueShape, Workload, unique_arrivals};
use crate::{DoorLimits, ServeConfig, Shape, WorkerShape};

/// Requests a second for each prefill worker: 0.6 of what one computes.
pub const REQUESTS_PER_S: f64 = 10.0;

/// Llama 3 8B on `num_workers` H200s, half of them of each kind, at [`REQUESTS_PER_S`]: prompts of 2,048 tokens, answers of 128.
///
/// # Errors
/// [`TooMany`] requests.
pub fn scaled(seed: u64, num_workers: usize, num_requests: u32) -> Result<ServeConfig, TooMany> {
    let shape = Shape::llama_on_h200();
    let num_prefill_workers = (num_workers / 2).max(1);
    let gaps = Gaps::Poisson(REQUESTS_PER_S * num_prefill_workers as f64);
    let pace = Pace { gaps, duration: Duration::ZERO, at_least: num_requests };
    let lengths =
        UniqueShape { prompt_tokens: Lengths::exactly(2_048), output_tokens: Lengths::exactly(128) };
    let arrivals = unique_arrivals(seed, pace, lengths)?;
    let all = num_requests as usize;
    Ok(ServeConfig {
        seed,
        shape: Shape {
            num_prefill_workers,
            num_decode_workers: (num_workers - num_prefill_workers).max(1),
            door: DoorLimits { max_concurrent: all, max_queue: all },
            worker: WorkerShape { max_queue: all, ..shape.worker },
            ..shape
        },
        workload: Workload { streams: Streams::default(), quiet: Duration::ZERO, arrivals },
        num_warm_up: all / 10,
        contents: false,
        measured: None,
    })
}
