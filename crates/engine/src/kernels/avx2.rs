//! Sixteen lanes in two AVX2 registers.

use std::arch::x86_64::*;

use super::simd::Simd;

/// AVX2 with FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Whether this CPU has everything that [`Avx2`] uses.
pub(crate) fn detected() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

type Pair = (__m256, __m256);
type IntPair = (__m256i, __m256i);

/// Sum of eight lanes by a tree, upper half added to lower.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn sum8(x: __m256) -> f32 {
    // SAFETY: the caller's CPU has AVX2.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

/// Largest of eight lanes.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn largest8(x: __m256) -> f32 {
    // SAFETY: the caller's CPU has AVX2.
    unsafe {
        let four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

macro_rules! ops {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($arg: $type),*) $(-> $out)? {
            // SAFETY: by the trait's contract the CPU has AVX2, FMA and F16C and pointers cover 16 elements.
            unsafe { $body }
        }
    )*};
}

impl Avx2 {
    ops! {
        fn nibble8(x: __m256i) -> __m256 = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15)));
        fn i8x8(p: *const i8) -> __m256 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())));
        fn bf16x8(p: *const u16) -> __m256 = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(
            _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))));
        fn f16x8(p: *mut u16, x: __m256) =
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
        fn pow2(x: __m256) -> __m256 = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(
            _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(127))));
        fn zero8_below(x: __m256, bound: __m256, y: __m256) -> __m256 =
            _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, bound), y);
        // Lanes whose index, counted from `base`, is below n.
        fn below(n: usize, base: i32) -> __m256 = _mm256_castsi256_ps(_mm256_cmpgt_epi32(
            _mm256_set1_epi32(n.min(16) as i32 - base), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
    }
}

impl Simd for Avx2 {
    type F = Pair;
    type I = IntPair;
    const MAX_ROWS: usize = 6;
    const MAX_ACCUMULATORS: usize = 6;

    ops! {
        fn zero() -> Pair = (_mm256_setzero_ps(), _mm256_setzero_ps());
        fn splat(x: f32) -> Pair = (_mm256_set1_ps(x), _mm256_set1_ps(x));
        fn load(p: *const f32) -> Pair = (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8)));
        fn store(p: *mut f32, x: Pair) = {
            _mm256_storeu_ps(p, x.0);
            _mm256_storeu_ps(p.add(8), x.1);
        };
        fn load_f16(p: *const u16) -> Pair = (
            _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
        );
        fn store_f16(p: *mut u16, x: Pair) = {
            Self::f16x8(p, x.0);
            Self::f16x8(p.add(8), x.1);
        };
        fn load_bf16(p: *const u16) -> Pair = (Self::bf16x8(p), Self::bf16x8(p.add(8)));
        fn load_i8(p: *const i8) -> Pair = (Self::i8x8(p), Self::i8x8(p.add(8)));
        fn load_u32(p: *const u32) -> IntPair =
            (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast()));
        fn low_nibble(x: IntPair) -> Pair = (Self::nibble8(x.0), Self::nibble8(x.1));
        fn next_nibble(x: IntPair) -> IntPair = (_mm256_srli_epi32::<4>(x.0), _mm256_srli_epi32::<4>(x.1));
        fn add(a: Pair, b: Pair) -> Pair = (_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1));
        fn sub(a: Pair, b: Pair) -> Pair = (_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1));
        fn mul(a: Pair, b: Pair) -> Pair = (_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1));
        fn div(a: Pair, b: Pair) -> Pair = (_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1));
        fn fma(a: Pair, b: Pair, c: Pair) -> Pair =
            (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1));
        fn max(a: Pair, b: Pair) -> Pair = (_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1));
        fn min(a: Pair, b: Pair) -> Pair = (_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1));
        fn first_lanes(n: usize, a: Pair, b: Pair) -> Pair = (
            _mm256_blendv_ps(b.0, a.0, Self::below(n, 0)),
            _mm256_blendv_ps(b.1, a.1, Self::below(n, 8)),
        );
        fn zero_below(x: Pair, bound: Pair, y: Pair) -> Pair =
            (Self::zero8_below(x.0, bound.0, y.0), Self::zero8_below(x.1, bound.1, y.1));
        fn pow2_of_rounded(x: Pair) -> Pair = (Self::pow2(x.0), Self::pow2(x.1));
        fn sum(x: Pair) -> f32 = sum8(_mm256_add_ps(x.0, x.1));
        fn largest(x: Pair) -> f32 = largest8(_mm256_max_ps(x.0, x.1));
        fn prefetch_far(p: *const u8) = _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
}

super::table!(Avx2, super::Isa::Avx2, true, "avx2,fma,f16c");
