//! Colocated workers: each computes prompts in chunks beside its decoding sequences.
//!
//! A queue whose server is shared by chunks and by as many sequences as happen to decode has no closed form: what a chunk waits for depends on who decodes, and
//! how long they decode on the chunks that come. So each worker's steps are followed one after the other, as D. V. Lindley's recursion follows waiting times
//! (Mathematical Proceedings of the Cambridge Philosophical Society 48(2), 1952): a step begins when the one before it ends, with a row of every decoding
//! sequence and what fits of the prompts that wait, and takes what the roofline says ([`crate::step_loop`]). Requests go where [`Placer`] sends them, by
//! statuses as old as a router's are.

use baton_dispatch::{
    CacheIndex, Fleet, InstanceId, Layout, Links, Need, Placer, Policy, Role, WorkerState, WorkerView,
};

use crate::PlanInput;
use crate::decode::most_sequences;
use crate::queue::{ARRIVALS, WARM_UP, arrival_times, quantile};
use crate::search::Figures;
use crate::step_loop::{Kind, Seen, StepLoop};
use crate::steps::{BLOCK_TOKENS, Steps};

/// Chunks that are tried, in tokens.
pub const CHUNKS: [u32; 5] = [128, 256, 512, 1_024, 2_048];

/// Rounds of the fixed point between the batch and how long steps are: it is halved towards, so that this many leave nothing.
const ROUNDS: usize = 40;
/// A worker that has prompts in its steps for longer than this share of the time does not keep up.
const BUSIEST: f64 = 0.97;

/// Whether a worker keeps up to which `rate` requests a second come.
///
/// A prompt takes `n` steps of `Tm` each, so that a worker has `rate n` steps a second with a chunk and `(1 - rate n Tm) / T(b)` others, `s` in all; a sequence decodes
/// for `(O - 1) / s`, so that by Little's law `b = rate (O - 1) / s`.
fn keeps_up(input: &PlanInput, steps: &Steps, rate: f64, chunk: u32) -> bool {
    let new_tokens = f64::from(input.output_tokens) - 1.0;
    let mut batch = 1.0;
    for _ in 0..ROUNDS {
        let (num, seconds) = steps.prompt_steps(&steps.decoding(batch), input.input_tokens, chunk);
        let busy = rate * seconds;
        if busy > BUSIEST || batch > f64::from(most_sequences(input)) {
            return false;
        }
        let steps_per_s = rate * f64::from(num) + (1.0 - busy) / steps.decode(batch);
        // Halfway, since more sequences make longer steps, and those more sequences.
        batch = f64::midpoint(batch, (rate * new_tokens / steps_per_s).max(1.0));
    }
    true
}

fn view(index: usize, blocks: u32) -> WorkerView {
    WorkerView {
        instance: InstanceId((index as u128).to_le_bytes()),
        index,
        role: Role::Decode,
        state: WorkerState::Ready,
        num_waiting: 0,
        num_running: 0,
        free_blocks: blocks,
        total_blocks: blocks,
        queued_tokens: 0,
        in_flight: 0,
        prefill_tokens_per_s: 0.0,
        decode_step_ms: 0.0,
    }
}

/// The recursion over the list of arrivals, and how long it was, in seconds.
fn run(kind: &Kind<'_>, num_workers: u32) -> (Seen, f64) {
    let input = kind.input;
    let mut workers: Vec<StepLoop> = (0..num_workers.max(1)).map(|_| StepLoop::default()).collect();
    let blocks = (input.kv_tokens() / f64::from(BLOCK_TOKENS)).min(f64::from(u32::MAX)) as u32;
    let mut views: Vec<WorkerView> = (0..workers.len()).map(|index| view(index, blocks)).collect();
    let (cache, links) = (CacheIndex::default(), Links::default());
    let mut placer = Placer::new(Layout::Colocated, Policy::KvAware, 0);
    let need = Need {
        prompt_tokens: input.input_tokens,
        max_new_tokens: input.output_tokens,
        num_sequences: 1,
        block_size: BLOCK_TOKENS,
        kv_bytes_per_token: input.model.shape.kv_token_bytes as u64,
        max_waiting: u32::MAX,
        avoid: &[],
        hashes: &[],
    };
    let (mut seen, mut horizon) = (Seen::default(), 0.0);
    for (nth, now) in arrival_times(input.rate).take(ARRIVALS).enumerate() {
        (horizon, seen.measures) = (now, nth >= WARM_UP);
        for (worker, view) in workers.iter_mut().zip(&mut views) {
            worker.advance(kind, now, &mut seen);
            let told = worker.told(now);
            view.num_running = told.running;
            view.free_blocks = blocks.saturating_sub(told.held_blocks(input));
            view.queued_tokens = told.queued_tokens;
            view.in_flight = worker.num_sent;
            view.prefill_tokens_per_s = told.prefill_tokens_per_s;
            view.decode_step_ms = told.decode_step_ms;
        }
        let placed = placer.place(&Fleet { workers: &views, cache: &cache, links: &links }, &need);
        // It fits an empty worker: that was checked with the input.
        if let Some(worker) = placed.ok().and_then(|placed| workers.get_mut(placed.decode)) {
            worker.send(now, seen.measures);
        }
    }
    for worker in &mut workers {
        worker.advance(kind, f64::INFINITY, &mut seen);
    }
    seen.ttft.sort_unstable_by(f64::total_cmp);
    (seen, horizon)
}

/// What `num_workers` colocated workers with this chunk come to. `None`: they don't keep up.
pub(crate) fn colocated(input: &PlanInput, steps: &Steps, num_workers: u32, chunk: u32) -> Option<Figures> {
    let workers = f64::from(num_workers);
    if !keeps_up(input, steps, input.rate / workers, chunk) {
        return None;
    }
    let (seen, horizon) = run(&Kind { input, steps, chunk }, num_workers);
    Some(Figures {
        ttft_p50_ms: quantile(&seen.ttft, 0.5) * 1e3,
        ttft_p99_ms: quantile(&seen.ttft, 0.99) * 1e3,
        itl_p50_ms: seen.itl.quantile(0.5) * 1e3,
        itl_p99_ms: seen.itl.quantile(0.99) * 1e3,
        batch: seen.decoded_s / (horizon * workers),
        exposed_p99_ms: 0.0,
    })
}
