//! Colocated workers: each computes prompts in chunks beside its decoding sequences.

use crate::PlanInput;
use crate::decode::{Mixture, most_sequences};
use crate::queue::{Queue, quantile};
use crate::search::Figures;
use crate::steps::{MAX_OPEN_PROMPTS, Steps};

/// Chunks that are tried, in tokens.
pub const CHUNKS: [u32; 5] = [128, 256, 512, 1_024, 2_048];

/// Rounds of the fixed point between the batch and how long steps are: it is halved towards, so that this many leave nothing.
const ROUNDS: usize = 40;
/// A worker that has prompts in its steps for longer than this share of the time does not keep up.
const BUSIEST: f64 = 0.97;

/// Mean sequences that decode on one of the workers, to each of which come `rate` requests a second, and how long one decodes. `None`: it does not
/// keep up.
///
/// A prompt takes `n` steps of `Tm` each, so that a worker has `rate n` steps a second with a chunk and `(1 - rate n Tm) / T(b)` others, `s` in all; a sequence decodes
/// for `(O - 1) / s`, so that `b = rate (O - 1) / s`.
fn batch(input: &PlanInput, steps: &Steps, rate: f64, chunk: u32) -> Option<(f64, f64)> {
    let new_tokens = f64::from(input.output_tokens) - 1.0;
    let (mut batch, mut stays_s) = (1.0, 0.0);
    for _ in 0..ROUNDS {
        let (num, seconds) = steps.prompt_steps(&steps.decoding(batch), input.input_tokens, chunk);
        let busy = rate * seconds;
        if busy > BUSIEST || batch > f64::from(most_sequences(input)) {
            return None;
        }
        let steps_per_s = rate * f64::from(num) + (1.0 - busy) / steps.decode(batch);
        stays_s = new_tokens / steps_per_s;
        // Halfway, since more sequences make longer steps, and those more sequences.
        batch = f64::midpoint(batch, (rate * stays_s).max(1.0));
    }
    Some((batch, stays_s))
}

/// What `num_workers` colocated workers with this chunk come to. `None`: they don't keep up.
pub(crate) fn colocated(input: &PlanInput, steps: &Steps, num_workers: u32, chunk: u32) -> Option<Figures> {
    let workers = f64::from(num_workers);
    let (batch, stays_s) = batch(input, steps, input.rate / workers, chunk)?;
    let decode_s = steps.decode(batch);
    let ran = Queue {
        steps,
        rate: input.rate,
        input_tokens: input.input_tokens,
        num_workers,
        budget: chunk,
        max_open: MAX_OPEN_PROMPTS,
        beside: steps.decoding(batch),
        grant_s: decode_s,
        num_hops: 2.0,
        wire_token_s: 0.0,
        stays_s,
        stays_weight: 1.0,
    }
    .run();
    // Of the gaps, those of steps with a chunk and those without.
    let busy = (ran.steps.iter().sum::<f64>() / (ran.horizon * workers)).min(1.0);
    let (mut gaps, mut mixed) = (Mixture::default(), Mixture::default());
    ran.steps.iter().for_each(|step| mixed.add(*step, 1.0));
    gaps.add_all(&mixed, ran.steps.len() as f64 / (ran.horizon * workers));
    gaps.add(decode_s, (1.0 - busy) / decode_s);
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
