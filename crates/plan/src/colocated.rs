//! Colocated workers: each computes prompts in chunks beside its decoding sequences.

use crate::PlanInput;
use crate::decode::{Mixture, most_sequences};
use crate::queue::{Queue, quantile};
use crate::search::Figures;
use crate::steps::{MAX_OPEN_PROMPTS, Steps};

/// Chunks that are tried, in tokens.
pub const CHUNKS: [u32; 5] = [128, 256, 512, 1_024, 2_048];

/// Rounds of the fixed point between the batch and how often a step carries a chunk.
const ROUNDS: usize = 5;
/// A worker that has prompts in its steps for longer than this share of the time does not keep up.
const BUSIEST: f64 = 0.97;

/// What `num_workers` colocated workers with this chunk come to. `None`: they don't keep up.
///
/// With `m` steps a second that carry a chunk, taking `Tm` each, a worker has `(1 - m Tm) / T(b)` others, `s` in all; a sequence decodes for
/// `(O - 1) / s`, so that `b = rate / W (O - 1) / s`. `m` and `Tm` come from the queue, given `b`.
pub(crate) fn colocated(input: &PlanInput, steps: &Steps, num_workers: u32, chunk: u32) -> Option<Figures> {
    let workers = f64::from(num_workers);
    let rate = input.rate / workers;
    let new_tokens = f64::from(input.output_tokens) - 1.0;
    let mut batch = 1.0;
    let (mut outcome, mut parts, mut stays_s) = (None, (0.0, 0.0), new_tokens * steps.decode(1.0));
    for _ in 0..ROUNDS {
        let queue = Queue {
            steps,
            rate: input.rate,
            input_tokens: input.input_tokens,
            num_workers,
            budget: chunk,
            max_open: MAX_OPEN_PROMPTS,
            beside: steps.decoding(batch),
            grant_s: steps.decode(batch),
            num_hops: 2.0,
            wire_token_s: 0.0,
            stays_s,
            stays_weight: 1.0,
        };
        if rate * queue.alone() > BUSIEST {
            return None;
        }
        let ran = queue.run();
        let mixed_s: f64 = ran.steps.iter().sum();
        let busy = (mixed_s / (ran.horizon * workers)).min(1.0);
        let mixed_per_s = ran.steps.len() as f64 / (ran.horizon * workers);
        let pure_per_s = (1.0 - busy) / steps.decode(batch);
        stays_s = new_tokens / (mixed_per_s + pure_per_s);
        // Halfway, since more sequences make longer steps, and those more sequences.
        batch = f64::midpoint(batch, (rate * stays_s).max(1.0));
        if batch > f64::from(most_sequences(input)) {
            return None;
        }
        parts = (mixed_per_s, pure_per_s);
        outcome = Some(ran);
    }
    let ran = outcome?;
    let (mut gaps, mut mixed) = (Mixture::default(), Mixture::default());
    ran.steps.iter().for_each(|step| mixed.add(*step, 1.0));
    gaps.add_all(&mixed, parts.0);
    gaps.add(steps.decode(batch), parts.1);
    let [itl_p50, itl_p99] = gaps.quantiles([0.5, 0.99]).map(|seconds| seconds * 1e3);
    Some(Figures {
        ttft_p50_ms: quantile(&ran.ttft, 0.5) * 1e3,
        ttft_p99_ms: quantile(&ran.ttft, 0.99) * 1e3,
        itl_p50_ms: itl_p50,
        itl_p99_ms: itl_p99,
        batch,
        exposed_p99_ms: 0.0,
    })
}
