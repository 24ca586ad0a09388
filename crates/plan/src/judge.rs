//! The same cluster and load in the simulator: the code that serves, in virtual time.

use std::time::Duration;

use baton_dispatch::{DoorLimits, Layout};
use baton_sim::workload::{Arrival, Prompt, Streams, Workload};
use baton_sim::{Device, ServeConfig, Shape, WorkerShape, serve};

use crate::queue::arrival_times;
use crate::search::{Cluster, Figures};
use crate::steps::{BLOCK_TOKENS, LATENCY_US, MAX_NUM_SEQS, MAX_OPEN_PROMPTS, MAX_STEP_MS, MAX_STEP_TOKENS};
use crate::{PlanError, PlanInput};

/// What the simulator saw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judged {
    /// Like the model's; [`Figures::batch`] and [`Figures::exposed_p99_ms`] are 0, since clients don't see them.
    pub figures: Figures,
    /// Requests that were answered in full.
    pub num_answered: u64,
    /// Requests that came.
    pub num_requests: u64,
}

/// The cluster as the simulator takes it, configured as the model has it, for so many requests.
pub fn shape(input: &PlanInput, cluster: Cluster, num_requests: usize) -> Shape {
    let base = Shape::llama_on_h200();
    let blocks = (input.kv_tokens() / f64::from(BLOCK_TOKENS)) as usize;
    // No more than all that can be there at once would ever hold.
    let request = (input.input_tokens + input.output_tokens).div_ceil(BLOCK_TOKENS) as usize + 1;
    let blocks = blocks.min(request * (MAX_NUM_SEQS as usize + 16));
    let (num_prefill_workers, num_decode_workers, layout, chunk, max_step_tokens) = match cluster {
        Cluster::Disaggregated { prefill, decode } => {
            (prefill, decode, Layout::Disaggregated, BLOCK_TOKENS, MAX_STEP_TOKENS)
        }
        Cluster::Colocated { workers, chunk } => (0, workers, Layout::Colocated, chunk, chunk + MAX_NUM_SEQS),
    };
    Shape {
        num_prefill_workers: num_prefill_workers as usize,
        num_decode_workers: num_decode_workers as usize,
        layout,
        max_local_tokens: 0,
        door: DoorLimits { max_concurrent: num_requests, max_queue: num_requests },
        worker: WorkerShape {
            block_size: BLOCK_TOKENS as usize,
            prefill_blocks: blocks,
            decode_blocks: blocks,
            max_step_tokens: max_step_tokens as usize,
            local_prefill_tokens: chunk as usize,
            max_step_ms: MAX_STEP_MS,
            max_num_seqs: MAX_NUM_SEQS as usize,
            max_queue: num_requests,
            max_open_prompts: MAX_OPEN_PROMPTS,
            ..base.worker
        },
        device: Device {
            roofline: input.device.roofline(),
            model: input.model.shape,
            link_bytes_per_s: input.link_bytes_per_s(),
            latency_us: LATENCY_US,
        },
        ..base
    }
}

/// Simulates `num_requests` Poisson arrivals, at the moments of the model's own, the first tenth of them unmeasured.
///
/// # Errors
/// [`PlanError::Simulation`] when a rule broke.
pub fn judge(input: &PlanInput, cluster: Cluster, num_requests: u32) -> Result<Judged, PlanError> {
    let arrival = |(nth, at): (u64, f64)| Arrival {
        at: Duration::try_from_secs_f64(at).unwrap_or(Duration::MAX),
        prompt: Prompt::Unique { nth, tokens: input.input_tokens },
        output_tokens: input.output_tokens,
    };
    let arrivals = (0..u64::from(num_requests)).zip(arrival_times(input.rate)).map(arrival).collect();
    let served = serve(&ServeConfig {
        seed: 1,
        shape: shape(input, cluster, num_requests as usize),
        workload: Workload { streams: Streams::default(), quiet: Duration::ZERO, arrivals },
        num_warm_up: num_requests as usize / 10,
        contents: false,
        measured: None,
    })
    .map_err(|violation| PlanError::Simulation(violation.to_string()))?;
    let ms = |value: Duration| value.as_secs_f64() * 1e3;
    Ok(Judged {
        figures: Figures {
            ttft_p50_ms: ms(served.ttft.quantile(0.5)),
            ttft_p99_ms: ms(served.ttft.quantile(0.99)),
            itl_p50_ms: ms(served.itl.quantile(0.5)),
            itl_p99_ms: ms(served.itl.quantile(0.99)),
            batch: 0.0,
            exposed_p99_ms: 0.0,
        },
        num_answered: served.num_answered,
        num_requests: num_requests.into(),
    })
}
