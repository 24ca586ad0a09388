//! Dot products as fast as they come.

use super::simd::{LANES, Simd};

/// Bytes of a dot product's operand on one side.
const DEPTH: usize = 4;
/// Dot products that do not wait for each other.
const CHAINS: usize = 8;
/// How many may follow each other in one chain, the first one included, see [`Simd::dot`].
const IN_A_ROW: usize = 8;

/// How long to go on.
pub(crate) struct Peak {
    /// Dot products of 16 lanes; a multiple of 128.
    pub(crate) num_dots: usize,
}

impl Peak {
    /// Multiply-adds.
    pub(crate) const fn macs(&self) -> usize {
        self.num_dots * LANES * DEPTH
    }
}

/// Returns something that depends on all of them.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(peak: &Peak) -> f32 {
    let weights = [0x0302_0100u32; LANES];
    let x = [1u8; CHAINS * DEPTH];
    // SAFETY: the caller's CPU has `S`; weights cover 16 lanes, x covers 4 bytes for each chain.
    unsafe {
        let mut total = S::zero();
        for _ in 0..peak.num_dots / (CHAINS * IN_A_ROW) {
            let mut dots = [S::first_dot(S::zero_i32(), S::zero_i32(), x.as_ptr()); CHAINS];
            for nth in 0..IN_A_ROW {
                // The compiler must not know that these are always the same.
                let weights = S::load_u32(std::hint::black_box(weights.as_ptr()));
                let x = std::hint::black_box(x.as_ptr());
                for (chain, dots) in dots.iter_mut().enumerate() {
                    let x = x.add(DEPTH * chain);
                    *dots = match nth {
                        0 => S::first_dot(S::zero_i32(), weights, x),
                        _ => S::dot(*dots, weights, x),
                    };
                }
            }
            for dots in dots {
                total = S::add(total, S::to_float(S::total::<1>(S::zero_i32(), dots)));
            }
        }
        S::sum(total)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::tables;
    use super::*;

    #[test]
    fn every_dot_product_is_made() {
        for table in tables() {
            // SAFETY: the table is available.
            let sum = unsafe { (table.peak)(&Peak { num_dots: 640 }) };
            assert_eq!(sum, (640 * LANES * (1 + 2 + 3)) as f32, "{:?}", table.isa);
        }
    }
}
