//! Sixteen f32 lanes, as each instruction set offers them. Every kernel is written once over [`Simd`], so the order
//! of floating-point operations is the same on all of them; only whether a multiply-add rounds once or twice differs.

/// Lanes of one vector.
pub(crate) const LANES: usize = 16;

/// 1.5 * 2^23: adding it rounds a small float to an integer, whose value then stands in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;
/// Below this, `exp` is 0: the result would leave the normal range.
const EXP_MIN: f32 = -86.5;
/// Above this, `exp` stays at its value here.
const EXP_MAX: f32 = 88.0;

/// An instruction set.
///
/// # Safety
/// Every method may only be called on a CPU that has the instruction set. Pointers must be valid for 16 elements of
/// their type; no alignment is needed.
pub(crate) trait Simd: Copy {
    /// Sixteen f32.
    type F: Copy;
    /// Sixteen u32.
    type I: Copy;
    /// Sixteen running dot products.
    type Dots: Copy;

    /// Most rows of a matrix product in registers together: 12, 6 or 4.
    const MAX_ROWS: usize;
    /// Vectors that fit in registers at all.
    const VECTORS: usize;
    /// Vectors that fit in registers as sums, with a few left for operands.
    const MAX_ACCUMULATORS: usize;
    /// Most rows of an integer matrix product in registers together: 12, 4 or 1.
    const MAX_QUANT_ROWS: usize;
    /// Bytes of quantised rows that pass over all column tiles before the next rows: half of the second-level cache, which is small
    /// where there is nothing but AVX2.
    const ROWS_BYTES: usize = 1 << 17;
    /// Whether dot products take no bytes above 15, so that a byte's nibbles are multiplied one after the other.
    const NIBBLE_DOTS: bool;

    unsafe fn zero() -> Self::F;
    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    /// Widens 16 IEEE halves.
    unsafe fn load_f16(p: *const u16) -> Self::F;
    /// Rounds to IEEE halves, ties to even.
    unsafe fn store_f16(p: *mut u16, x: Self::F);
    /// Widens 16 bfloat16.
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    /// Widens 16 floats of 4 exponent and 3 mantissa bits (e4m3), as a 256th of their values; NaN's code becomes a number.
    unsafe fn load_e4m3(p: *const u8) -> Self::F;
    /// 2^(b - 127) of 16 bytes; 0 for 0, infinity for 255.
    unsafe fn load_powers(p: *const u8) -> Self::F;
    unsafe fn load_u32(p: *const u32) -> Self::I;
    unsafe fn store_u32(p: *mut u32, x: Self::I);
    /// The lowest byte of each lane as a float in 0..=255.
    unsafe fn low_byte(x: Self::I) -> Self::F;
    /// Each lane shifted right by one byte.
    unsafe fn next_byte(x: Self::I) -> Self::I;
    /// The lowest nibble of each lane as a float in 0..=15.
    unsafe fn low_nibble(x: Self::I) -> Self::F;
    /// Each lane shifted right by one nibble.
    unsafe fn next_nibble(x: Self::I) -> Self::I;
    /// The low nibble of each byte.
    unsafe fn low_nibbles(x: Self::I) -> Self::I;
    /// The high nibble of each byte, moved down.
    unsafe fn high_nibbles(x: Self::I) -> Self::I;

    unsafe fn zero_i32() -> Self::I;
    /// All lanes the i32 at `p`, which covers 4 bytes.
    unsafe fn splat_i32(p: *const u8) -> Self::I;
    /// As [`Self::dot`], beginning at `start`, which has 32-bit lanes.
    unsafe fn first_dot(start: Self::I, w: Self::I, x: *const u8) -> Self::Dots;
    /// To each lane the dot product of its 4 unsigned bytes in `w`, with [`Self::NIBBLE_DOTS`] below 16, and the 4 signed bytes
    /// at `x`, none of which is -128. Exact for 7 of them after [`Self::first_dot`].
    unsafe fn dot(sum: Self::Dots, w: Self::I, x: *const u8) -> Self::Dots;
    /// `start`, as it was given to [`Self::first_dot`], plus `FACTOR` times the dot products; without [`Self::NIBBLE_DOTS`] `FACTOR` is 1.
    unsafe fn total<const FACTOR: i16>(start: Self::I, sum: Self::Dots) -> Self::I;
    /// Each lane, an i32 of magnitude below 2^24, as a float.
    unsafe fn to_float(x: Self::I) -> Self::F;
    /// Whole numbers in -127..=127 as bytes; of each eight, those of even index come before those of odd index.
    unsafe fn store_quants(p: *mut u8, x: Self::F);

    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`: a NaN in either gives `b`.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`: a NaN in either gives `b`.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// Lane `i` from `a` where `i < n`, else from `b`.
    unsafe fn first_lanes(n: usize, a: Self::F, b: Self::F) -> Self::F;
    /// 0 where `x < bound`, else `y`.
    unsafe fn zero_below(x: Self::F, bound: Self::F, y: Self::F) -> Self::F;
    /// 2^n for a lane that holds `ROUND + n`, -126 <= n <= 127.
    unsafe fn pow2_of_rounded(x: Self::F) -> Self::F;
    /// Sum of all lanes as a tree: 8 + 8, 4 + 4, 2 + 2, 1 + 1, upper half added to lower.
    unsafe fn sum(x: Self::F) -> f32;
    /// Largest lane, by the same tree.
    unsafe fn largest(x: Self::F) -> f32;
    /// [`Self::sum`] of each, of numbers that add up to the same in any order.
    #[inline(always)]
    unsafe fn sum_of_each(x: [Self::F; 4]) -> [f32; 4] {
        let [a, b, c, d] = x;
        // SAFETY: the caller has the instruction set.
        unsafe { [Self::sum(a), Self::sum(b), Self::sum(c), Self::sum(d)] }
    }
    /// [`Self::largest`] of each.
    #[inline(always)]
    unsafe fn largest_of_each(x: [Self::F; 4]) -> [f32; 4] {
        let [a, b, c, d] = x;
        // SAFETY: the caller has the instruction set.
        unsafe { [Self::largest(a), Self::largest(b), Self::largest(c), Self::largest(d)] }
    }
    /// Asks for the cache line at `p`, into the second cache; any address is allowed.
    unsafe fn prefetch_far(p: *const u8);
    /// Asks for the cache line at `p`, into the first cache; any address is allowed.
    unsafe fn prefetch_near(p: *const u8);

    /// e^x by the polynomial of Cephes' `expf` (relative error about 2e-7); 0 below -86.5, NaN for NaN.
    #[inline(always)]
    unsafe fn exp(x: Self::F) -> Self::F {
        // SAFETY: the caller has the instruction set.
        unsafe {
            let clamped = Self::max(Self::splat(EXP_MIN), Self::min(Self::splat(EXP_MAX), x));
            let magic = Self::splat(ROUND);
            let shifted = Self::fma(clamped, Self::splat(std::f32::consts::LOG2_E), magic);
            let n = Self::sub(shifted, magic);
            // ln 2 in two pieces, so that n times the first is exact.
            let r = Self::fma(n, Self::splat(-0.693_359_4), clamped);
            let r = Self::fma(n, Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(1.987_569_1e-4);
            for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
                p = Self::fma(p, r, Self::splat(c));
            }
            let y = Self::fma(p, Self::mul(r, r), r);
            let y = Self::add(y, Self::splat(1.0));
            let y = Self::mul(y, Self::pow2_of_rounded(shifted));
            Self::zero_below(x, Self::splat(EXP_MIN), y)
        }
    }
}
