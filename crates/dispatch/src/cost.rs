//! What a placement is expected to cost, in milliseconds.

use crate::fleet::LinkRow;
use crate::{DEFAULT_LINK_BYTES_PER_S, Fleet, Need, Role, WorkerView};

/// Prompt tokens per second of a worker that never computed any, in a fleet where none did.
const DEFAULT_PREFILL_TOKENS_PER_S: f64 = 10_000.0;
/// A rate or a time above this was not measured.
const MAX_MEASURED: f64 = 1e12;
/// Time of a decode step, likewise.
const DEFAULT_DECODE_STEP_MS: f64 = 20.0;
/// How many decode steps a request on a decode worker costs the next one.
const STEPS_PER_REQUEST: f64 = 0.5;
/// Decode steps until blocks come free on a worker that has no room for the prompt.
const STEPS_WITHOUT_ROOM: f64 = 128.0;
/// Tokens of the last chunk, whose transfer nothing hides.
const CHUNK_TOKENS: u32 = 256;
/// By what share of itself a decode step may grow for a prompt that is computed beside it.
const STALL_SHARE: f64 = 0.25;
/// Prompt tokens that a decode worker computes in a step beside decoding rows.
const LOCAL_PREFILL_TOKENS: u32 = 256;

/// What prefill on a worker takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefillCost {
    /// Until it begins.
    pub(crate) queue_ms: f64,
    /// Computing what is not cached there.
    pub(crate) compute_ms: f64,
}

impl PrefillCost {
    pub(crate) fn total_ms(&self) -> f64 {
        self.queue_ms + self.compute_ms
    }
}

/// The best that workers measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// Prompt tokens per second, by role; 0 before any was computed.
    rates: [f64; 2],
    /// The shortest decode step; infinite before any.
    step_ms: f64,
}

impl Measured {
    pub(crate) const NONE: Self = Self { rates: [0.0; 2], step_ms: f64::INFINITY };

    #[inline]
    pub(crate) fn take_in(&mut self, view: &WorkerView) {
        let rate = &mut self.rates[role(view)];
        *rate = rate.max(known(view.prefill_tokens_per_s).unwrap_or(0.0));
        self.step_ms = self.step_ms.min(known(view.decode_step_ms).unwrap_or(f64::INFINITY));
    }
}

/// The costs of one request in a fleet.
///
/// Every cost falls, or stays, when a worker has more of the prompt cached and all else is equal. It is computed in an order that keeps
/// that true after rounding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs<'a> {
    fleet: &'a Fleet<'a>,
    need: &'a Need<'a>,
    /// Leading cached blocks by worker index; shorter than the fleet when the rest has none.
    hits: &'a [u32],
    /// For workers that have measured nothing: the best of their role that others measured.
    prefill_token_ms: [f64; 2],
    decode_step_ms: f64,
    /// Over a link that was not measured.
    wire_token_ms: f64,
}

impl<'a> Costs<'a> {
    pub(crate) fn new(
        fleet: &'a Fleet<'a>,
        need: &'a Need<'a>,
        hits: &'a [u32],
        Measured { rates, step_ms }: Measured,
    ) -> Self {
        let fastest = rates[0].max(rates[1]);
        let any = known(fastest).unwrap_or(DEFAULT_PREFILL_TOKENS_PER_S);
        Self {
            fleet,
            need,
            hits,
            prefill_token_ms: rates.map(|rate| 1_000.0 / known(rate).unwrap_or(any)),
            decode_step_ms: known(step_ms).unwrap_or(DEFAULT_DECODE_STEP_MS),
            wire_token_ms: wire_token_ms(need, DEFAULT_LINK_BYTES_PER_S),
        }
    }

    /// Leading tokens that a worker has; the last one of a prompt is always computed.
    pub(crate) fn hit_tokens(&self, view: &WorkerView) -> u32 {
        let blocks = self.hits.get(view.index).copied().unwrap_or(0);
        blocks.saturating_mul(self.need.block_size).min(self.need.prompt_tokens.saturating_sub(1))
    }

    /// Tokens that a worker does not have.
    pub(crate) fn uncached(&self, view: &WorkerView) -> u32 {
        self.need.prompt_tokens - self.hit_tokens(view)
    }

    /// What waits on a prefill worker: what its status says, and this router's requests that it does not count yet, taken to
    /// be like this one.
    pub(crate) fn prefill(&self, view: &WorkerView) -> PrefillCost {
        let uncached = f64::from(self.uncached(view));
        let token_ms = self.prefill_token_ms(view);
        let queued = view.queued_tokens as f64 + f64::from(view.num_unseen()) * uncached;
        PrefillCost { queue_ms: queued * token_ms, compute_ms: uncached * token_ms }
    }

    /// Prefill there, transfer what the decode worker lacks, decode here. A transfer runs beside the computation, but for the last chunk.
    pub(crate) fn pair_ms(&self, prefill: &PrefillCost, links: LinkRow<'_>, decode: &WorkerView) -> f64 {
        self.pair_over_ms(prefill, wire_token_ms(self.need, links.bytes_per_s(decode.instance)), decode)
    }

    /// The same over a link that was not measured.
    #[inline]
    pub(crate) fn typical_ms(&self, prefill: &PrefillCost, decode: &WorkerView) -> f64 {
        self.pair_over_ms(prefill, self.wire_token_ms, decode)
    }

    #[inline]
    fn pair_over_ms(&self, prefill: &PrefillCost, token_ms: f64, decode: &WorkerView) -> f64 {
        let lacking = self.uncached(decode);
        let wire_ms = f64::from(lacking) * token_ms;
        let chunk_ms = f64::from(lacking.min(CHUNK_TOKENS)) * token_ms;
        prefill.queue_ms + prefill.compute_ms.max(wire_ms) + chunk_ms + self.load_ms(decode)
    }

    /// Sending everything that the decode worker lacks.
    pub(crate) fn wire_ms(&self, prefill: &WorkerView, decode: &WorkerView) -> f64 {
        let bytes_per_s = self.fleet.links.bytes_per_s(prefill.instance, decode.instance);
        f64::from(self.uncached(decode)) * wire_token_ms(self.need, bytes_per_s)
    }

    /// Prefill on the decode worker itself: in chunks, each beside a decode step, and every running sequence waits for the computation.
    pub(crate) fn local_ms(&self, view: &WorkerView) -> f64 {
        let PrefillCost { queue_ms, compute_ms } = self.prefill(view);
        let running = f64::from(view.num_running);
        let steps = if view.num_running > 0 { self.uncached(view).div_ceil(LOCAL_PREFILL_TOKENS) } else { 0 };
        let stalled_ms = compute_ms * running;
        queue_ms + compute_ms + f64::from(steps) * self.step_ms(view) + stalled_ms + self.load_ms(view)
    }

    /// Computing the prompt there, with nothing else.
    pub(crate) fn local_compute_ms(&self, view: &WorkerView) -> f64 {
        f64::from(self.uncached(view)) * self.prefill_token_ms(view)
    }

    /// Whether the sequences that run there would hardly notice that it computes the prompt itself: a prompt of a few tokens is
    /// nothing to a GPU's step, and twice a step of a slow CPU.
    pub(crate) fn is_within_stall_bound(&self, view: &WorkerView) -> bool {
        view.num_running == 0 || self.local_compute_ms(view) <= STALL_SHARE * self.step_ms(view)
    }

    /// What being one more on a decode worker costs.
    pub(crate) fn load_ms(&self, view: &WorkerView) -> f64 {
        // Each sequence begins a block of its own.
        let blocks = u64::from(view.free_blocks.saturating_sub(self.need.num_sequences));
        let has_room = blocks * u64::from(self.need.block_size) >= u64::from(self.uncached(view));
        let waits = if has_room { 0.0 } else { STEPS_WITHOUT_ROOM };
        (view.num_requests() as f64 * STEPS_PER_REQUEST + waits) * self.step_ms(view)
    }

    fn prefill_token_ms(&self, view: &WorkerView) -> f64 {
        known(view.prefill_tokens_per_s).map_or(self.prefill_token_ms[role(view)], |rate| 1_000.0 / rate)
    }

    fn step_ms(&self, view: &WorkerView) -> f64 {
        known(view.decode_step_ms).unwrap_or(self.decode_step_ms)
    }
}

fn wire_token_ms(need: &Need<'_>, bytes_per_s: f64) -> f64 {
    need.kv_bytes_per_token as f64 / bytes_per_s * 1_000.0
}

fn known(measured: f64) -> Option<f64> {
    (measured > 0.0 && measured < MAX_MEASURED).then_some(measured)
}

const fn role(view: &WorkerView) -> usize {
    match view.role {
        Role::Prefill => 0,
        Role::Decode => 1,
    }
}
