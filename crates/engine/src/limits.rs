//! What a core can do at most, measured, to hold an engine's speed against.

use std::time::Instant;

use crate::error::EngineBuildError;
use crate::kernels::{Kernels, Peak};
use crate::region::Region;
use crate::{Isa, WeightSource};

/// Rounds of one measurement, of which the best counts: other programs only ever make it slower.
const ROUNDS: usize = 5;
/// Dot products of a round.
const DOTS: usize = 1 << 22;

/// Multiply-adds a second of one core, of 8-bit integers from the first cache, by the instructions that `isa`'s products use. The
/// calling thread is kept busy for about 0.1 s.
///
/// # Errors
/// [`EngineBuildError::IsaUnavailable`].
pub fn int8_macs_per_s(isa: Isa) -> Result<f64, EngineBuildError> {
    let kernels = Kernels::of(isa).ok_or_else(|| EngineBuildError::isa_unavailable(isa))?;
    let peak = Peak { num_dots: DOTS };
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        // SAFETY: the table is available.
        std::hint::black_box(unsafe { (kernels.peak)(&peak) });
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(peak.macs() as f64 / best)
}

/// Bytes a second that `num_threads` threads together read, each again and again the same part of `num_bytes`, of memory like the engine's.
///
/// # Errors
/// [`EngineBuildError::OutOfMemory`]; [`EngineBuildError::Threads`].
pub fn read_bytes_per_s(num_bytes: usize, num_threads: usize) -> Result<f64, EngineBuildError> {
    let share = (num_bytes / num_threads.max(1)).max(64) / 64 * 64;
    let regions = (0..num_threads)
        .map(|_| Region::new(share).map_err(EngineBuildError::out_of_memory("the memory to be read", share)))
        .collect::<Result<Vec<_>, _>>()?;
    let mut best = f64::INFINITY;
    for round in 0..ROUNDS * AHEAD.len() {
        let ahead = AHEAD[round % AHEAD.len()];
        let barrier = std::sync::Barrier::new(num_threads);
        let slowest = std::thread::scope(|scope| {
            let threads: Vec<_> = regions
                .iter()
                .map(|region| {
                    let barrier = &barrier;
                    std::thread::Builder::new().spawn_scoped(scope, move || {
                        barrier.wait();
                        let start = Instant::now();
                        std::hint::black_box(sum(region, ahead));
                        start.elapsed().as_secs_f64()
                    })
                })
                .collect::<Result<_, _>>()
                .map_err(EngineBuildError::Threads)?;
            let times = threads.into_iter().map(|thread| thread.join().unwrap_or(f64::INFINITY));
            Ok::<f64, EngineBuildError>(times.fold(0.0, f64::max))
        })?;
        best = best.min(slowest);
    }
    Ok((share * num_threads) as f64 / best)
}

/// How far ahead of its turn memory is asked for, in turn: which of them lets a core read the most differs between CPUs.
const AHEAD: [usize; 3] = [0, 2 * 1024, 16 * 1024];

/// Asks for the cache line at `p`; any address is allowed.
fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, and it reads nothing that could be seen.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Eight chains, so that no addition waits for another.
fn sum(region: &Region, ahead: usize) -> u64 {
    // SAFETY: nobody writes to a region that was made for this.
    let (words, _) = unsafe { region.bytes(0, region.len()) }.as_chunks::<64>();
    let mut sums = [0u64; 8];
    for line in words {
        prefetch(line.as_ptr().wrapping_add(ahead));
        let (eights, _) = line.as_chunks::<8>();
        for (sum, &eight) in sums.iter_mut().zip(eights) {
            *sum = sum.wrapping_add(u64::from_le_bytes(eight));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

/// What one token of a step asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCost {
    /// Multiply-adds of all layers' matrices.
    pub layer_macs: usize,
    /// And of the matrix that gives logits.
    pub logit_macs: usize,
    /// Multiply-adds of attention for each token that is seen.
    pub attention_macs: usize,
}

impl TokenCost {
    /// By the model's shape.
    pub fn of(source: &dyn WeightSource) -> TokenCost {
        let c = source.config();
        let (q, kv) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
        let layer = c.hidden * (q + 2 * kv) + q * c.hidden + 3 * c.hidden * c.ffn;
        TokenCost {
            layer_macs: c.num_layers * layer,
            logit_macs: c.vocab * c.hidden,
            attention_macs: c.num_layers * 2 * q,
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_model::Model;

    use super::*;

    #[test]
    fn limits_are_positive_for_every_instruction_set_of_this_cpu() {
        for isa in Isa::available() {
            let rate = int8_macs_per_s(isa).unwrap();
            assert!(rate > 1e7 && rate < 1e14, "{isa:?}: {rate}");
        }
        for threads in [1, 2] {
            let rate = read_bytes_per_s(1 << 22, threads).unwrap();
            assert!(rate > 1e7 && rate < 1e13, "{threads} threads: {rate}");
        }
    }

    #[test]
    fn a_tokens_cost_follows_from_the_shape() {
        let tiny = Model::tiny();
        let c = &tiny.config;
        let cost = TokenCost::of(&tiny);
        assert_eq!(cost.logit_macs, c.vocab * c.hidden);
        assert_eq!(cost.attention_macs, 2 * c.num_layers * c.num_heads * c.head_dim);
        let square = c.num_layers * (c.hidden * 3 * c.ffn);
        assert!(cost.layer_macs > square && cost.layer_macs < 2 * square);
    }
}
