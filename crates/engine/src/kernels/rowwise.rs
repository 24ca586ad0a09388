//! Kernels over single rows. Rows are padded with zeros to whole vectors, so there are no tails.

use super::simd::{LANES, Simd};

/// Root mean square normalisation: `out = x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich, 2019).
pub(crate) struct Norm {
    /// Input, zero-padded.
    pub(crate) x: *const f32,
    /// Weight, zero-padded.
    pub(crate) weight: *const f32,
    /// Output; its padding becomes 0.
    pub(crate) out: *mut f32,
    /// Elements without padding.
    pub(crate) len: usize,
    /// Added to the mean square.
    pub(crate) eps: f32,
}

/// # Safety
/// The CPU has `S`; the pointers cover `len` rounded up to 16.
#[inline(always)]
pub(super) unsafe fn norm<S: Simd>(n: &Norm) {
    let padded = n.len.next_multiple_of(LANES);
    // SAFETY: by contract.
    unsafe {
        let mut squares = S::zero();
        for i in (0..padded).step_by(LANES) {
            let x = S::load(n.x.add(i));
            squares = S::fma(x, x, squares);
        }
        let scale = 1.0 / (S::sum(squares) / n.len as f32 + n.eps).sqrt();
        for i in (0..padded).step_by(LANES) {
            let x = S::mul(S::load(n.x.add(i)), S::splat(scale));
            S::store(n.out.add(i), S::mul(x, S::load(n.weight.add(i))));
        }
    }
}

/// `out = gate / (1 + e^-gate) * up`.
pub(crate) struct SiluMul {
    /// Gate.
    pub(crate) gate: *const f32,
    /// Up.
    pub(crate) up: *const f32,
    /// Output.
    pub(crate) out: *mut f32,
    /// Elements, a multiple of 16.
    pub(crate) len: usize,
}

/// # Safety
/// The CPU has `S`; the pointers cover `len`.
#[inline(always)]
pub(super) unsafe fn silu_mul<S: Simd>(s: &SiluMul) {
    // SAFETY: by contract.
    unsafe {
        for i in (0..s.len).step_by(LANES) {
            let gate = S::load(s.gate.add(i));
            let below = S::add(S::splat(1.0), S::exp(S::sub(S::zero(), gate)));
            S::store(s.out.add(i), S::mul(S::div(gate, below), S::load(s.up.add(i))));
        }
    }
}

/// `out = e^((x - largest) * scale)`; returns the sum.
pub(crate) struct Exponentials {
    /// Input.
    pub(crate) x: *const f32,
    /// Output, rounded up to 16 elements; may be the input. Null: only the sum is wanted.
    pub(crate) out: *mut f32,
    /// Elements, any number; input memory is rounded up to 16.
    pub(crate) len: usize,
    /// Subtracted.
    pub(crate) largest: f32,
    /// Inverse temperature.
    pub(crate) scale: f32,
}

/// # Safety
/// The CPU has `S`; the pointers cover `len` rounded up to 16.
#[inline(always)]
pub(super) unsafe fn exponentials<S: Simd>(e: &Exponentials) -> f32 {
    // SAFETY: by contract.
    unsafe {
        let (largest, scale) = (S::splat(e.largest), S::splat(e.scale));
        let mut sum = S::zero();
        for i in (0..e.len).step_by(LANES) {
            let x = S::exp(S::mul(S::sub(S::load(e.x.add(i)), largest), scale));
            let x = S::first_lanes(e.len - i, x, S::zero());
            sum = S::add(sum, x);
            if !e.out.is_null() {
                S::store(e.out.add(i), x);
            }
        }
        S::sum(sum)
    }
}

/// The largest element; NaN if there is a NaN.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(super) unsafe fn largest<S: Simd>(x: &[f32]) -> f32 {
    let (whole, rest) = x.as_chunks::<LANES>();
    // SAFETY: each chunk is 16 floats.
    let (mut best, spoiled) = unsafe {
        let mut best = S::splat(f32::NEG_INFINITY);
        // A NaN or an infinity turns into a NaN here and stays; a maximum may lose it.
        let mut spoiled = S::zero();
        for chunk in whole {
            let v = S::load(chunk.as_ptr());
            best = S::max(best, v);
            spoiled = S::fma(v, S::zero(), spoiled);
        }
        (S::largest(best), S::sum(spoiled))
    };
    for &v in rest {
        if v > best {
            best = v;
        }
    }
    if spoiled.is_nan() || rest.iter().any(|v| !v.is_finite()) { f32::NAN } else { best }
}
