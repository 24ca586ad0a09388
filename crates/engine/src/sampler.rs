//! From logits to a token.

use baton_scheduler::{RowSampling, SamplingParams};

use crate::kernels::{Exponentials, Kernels, LANES};

/// Below this temperature the most probable token is taken.
const GREEDY_BELOW: f32 = 1e-5;

/// What sampling writes to; sized for one vocabulary, so that a draw allocates nothing.
pub(crate) struct SamplerScratch {
    weights: Vec<f32>,
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy)]
struct Candidate {
    weight: f32,
    token: u32,
}

impl SamplerScratch {
    pub(crate) fn new(vocab: usize) -> SamplerScratch {
        SamplerScratch {
            weights: vec![0.0; vocab.next_multiple_of(LANES)],
            candidates: Vec::with_capacity(vocab),
        }
    }

    pub(crate) const fn bytes_needed(vocab: usize) -> usize {
        vocab.next_multiple_of(LANES) * size_of::<f32>() + vocab * size_of::<Candidate>()
    }
}

/// A drawn token with the natural logarithm of its probability before temperature and truncation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Drawn {
    pub(crate) token: u32,
    pub(crate) logprob: f32,
}

/// Logits hold a NaN or an infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotFinite;

/// Whether parameters are within their bounds; the reason if not.
pub(crate) fn check(params: &SamplingParams) -> Result<(), String> {
    let SamplingParams { temperature, top_p, min_p, .. } = *params;
    if !(temperature.is_finite() && temperature >= 0.0) {
        return Err(format!("temperature is {temperature}, from 0 up is possible"));
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(format!("top_p is {top_p}, above 0 up to 1 is possible"));
    }
    if !(0.0..1.0).contains(&min_p) {
        return Err(format!("min_p is {min_p}, 0 to below 1 is possible"));
    }
    Ok(())
}

/// Draws from `logits`, whose memory goes on to the next multiple of 16.
///
/// Greedy takes the largest logit, the lowest id among equals. Otherwise logits are divided by the temperature; the
/// `top_k` most probable tokens are kept, of these the smallest set of most probable ones with at least `top_p` of their
/// probability, of these the ones with at least `min_p` of the largest probability; equals rank by id. One token
/// is drawn from what is left by [`uniform`].
///
/// # Safety
/// The CPU has the kernels' instruction set, and memory beyond the slice is as said above.
pub(crate) unsafe fn draw(
    kernels: &Kernels,
    logits: &[f32],
    sampling: &RowSampling,
    scratch: &mut SamplerScratch,
) -> Result<Drawn, NotFinite> {
    let params = &sampling.params;
    // SAFETY: the caller's.
    let largest = unsafe { (kernels.largest)(logits) };
    if !largest.is_finite() {
        return Err(NotFinite);
    }
    let softmax = |scale, out| {
        let e = Exponentials { x: logits.as_ptr(), out, len: logits.len(), largest, scale };
        // SAFETY: the caller's; `out` is null or the scratch's weights, rounded up as the logits are.
        unsafe { (kernels.exponentials)(&e) }
    };
    let normaliser = softmax(1.0, std::ptr::null_mut()).ln();
    let token = if params.temperature < GREEDY_BELOW {
        logits.iter().position(|&l| l == largest).unwrap_or(0)
    } else {
        let sum = softmax(1.0 / params.temperature, scratch.weights.as_mut_ptr());
        let weights = &scratch.weights[..logits.len()];
        choose(params, weights, f64::from(sum), uniform(sampling), &mut scratch.candidates)
    };
    Ok(Drawn { token: token as u32, logprob: logits[token] - largest - normaliser })
}

/// Picks a token; `weights` are proportional to probabilities, the largest is 1, and `sum` is theirs.
fn choose(
    params: &SamplingParams,
    weights: &[f32],
    sum: f64,
    uniform: f64,
    candidates: &mut Vec<Candidate>,
) -> usize {
    let all = || weights.iter().enumerate().map(|(token, &weight)| Candidate { weight, token: token as u32 });
    candidates.clear();
    if params.top_k == 0 && params.top_p >= 1.0 {
        candidates.extend(all().filter(|c| c.weight >= params.min_p));
        return pick(candidates, uniform);
    }
    let order = |a: &Candidate, b: &Candidate| b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token));
    let mut total = sum;
    if params.top_k > 0 {
        candidates.extend(all());
        let k = (params.top_k as usize).min(candidates.len());
        if k < candidates.len() {
            candidates.select_nth_unstable_by(k - 1, order);
            candidates.truncate(k);
        }
        candidates.sort_unstable_by(order);
        total = candidates.iter().map(|c| f64::from(c.weight)).sum();
    } else {
        // Tokens below this have less than 1 - top_p together: the set is found without them, and most need no sorting.
        let floor = (1.0 - f64::from(params.top_p)) * sum / weights.len() as f64;
        candidates.extend(all().filter(|c| f64::from(c.weight) >= floor));
        candidates.sort_unstable_by(order);
    }
    keep_top_p(candidates, f64::from(params.top_p) * total);
    let kept = candidates.partition_point(|c| c.weight >= params.min_p).max(1);
    candidates.truncate(kept);
    pick(candidates, uniform)
}

/// Keeps the shortest prefix that weighs at least `wanted`.
fn keep_top_p(candidates: &mut Vec<Candidate>, wanted: f64) {
    let mut weight = 0.0;
    let enough = candidates.iter().position(|c| {
        weight += f64::from(c.weight);
        weight >= wanted
    });
    candidates.truncate(enough.map_or(candidates.len(), |n| n + 1));
}

fn pick(candidates: &[Candidate], uniform: f64) -> usize {
    let total: f64 = candidates.iter().map(|c| f64::from(c.weight)).sum();
    let mut left = uniform * total;
    for c in candidates {
        left -= f64::from(c.weight);
        if left < 0.0 {
            return c.token as usize;
        }
    }
    // Rounding can leave a crumb: the last token of any weight takes it.
    candidates.iter().rev().find(|c| c.weight > 0.0).map_or(0, |c| c.token as usize)
}

/// The random number of a token, in [0, 1): a function of (seed, sequence, position) alone. SplitMix64's finaliser
/// (Steele, Lea, Flood, 2014) three times: over the seed, over that with sequence and position mixed in, and once more;
/// the upper 53 bits are the fraction.
pub(crate) fn uniform(sampling: &RowSampling) -> f64 {
    let key = finalise(sampling.params.seed.wrapping_add(INCREMENT));
    let counter = u64::from(sampling.sequence) << 32 | u64::from(sampling.position);
    let bits = finalise(finalise(key ^ counter).wrapping_add(INCREMENT));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// SplitMix64's: the golden ratio in 64 bits.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

const fn finalise(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
