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
        fn byte8(x: __m256i) -> __m256 = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(255)));
        fn low8(x: __m256i) -> __m256i = _mm256_and_si256(x, _mm256_set1_epi8(15));
        fn word(x: *const u8) -> __m256i = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
        // Lanes of 16 bits: 8 times 2 products of at most 15 * 127 stay below 2^15.
        fn dot8(sum: __m256i, w: __m256i, x: __m256i) -> __m256i =
            _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
        fn bf16x8(p: *const u16) -> __m256 = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(
            _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))));
        // Shifted into a half's place, bias 15 instead of 7; the sign's copy below it is cleared.
        fn e4m3x8(p: *const u8) -> __m256 = _mm256_cvtph_ps(_mm_and_si128(
            _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast()))), _mm_set1_epi16(0xbf80u16 as i16)));
        fn powers8(p: *const u8) -> __m256 = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))));
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
    /// Of 32 lanes of 16 bits each.
    type Dots = IntPair;
    const MAX_ROWS: usize = 6;
    const VECTORS: usize = 8;
    const MAX_ACCUMULATORS: usize = 6;
    const MAX_QUANT_ROWS: usize = 4;
    const NIBBLE_DOTS: bool = true;

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
        fn load_e4m3(p: *const u8) -> Pair = (Self::e4m3x8(p), Self::e4m3x8(p.add(8)));
        fn load_powers(p: *const u8) -> Pair = (Self::powers8(p), Self::powers8(p.add(8)));
        fn load_u32(p: *const u32) -> IntPair =
            (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast()));
        fn store_u32(p: *mut u32, x: IntPair) = {
            _mm256_storeu_si256(p.cast(), x.0);
            _mm256_storeu_si256(p.add(8).cast(), x.1);
        };
        fn low_byte(x: IntPair) -> Pair = (Self::byte8(x.0), Self::byte8(x.1));
        fn next_byte(x: IntPair) -> IntPair = (_mm256_srli_epi32::<8>(x.0), _mm256_srli_epi32::<8>(x.1));
        fn low_nibbles(x: IntPair) -> IntPair = (Self::low8(x.0), Self::low8(x.1));
        fn high_nibbles(x: IntPair) -> IntPair =
            (Self::low8(_mm256_srli_epi32::<4>(x.0)), Self::low8(_mm256_srli_epi32::<4>(x.1)));
        fn zero_i32() -> IntPair = (_mm256_setzero_si256(), _mm256_setzero_si256());
        fn splat_i32(p: *const u8) -> IntPair = (Self::word(p), Self::word(p));
        fn to_float(x: IntPair) -> Pair = (_mm256_cvtepi32_ps(x.0), _mm256_cvtepi32_ps(x.1));
        fn store_quants(p: *mut u8, x: Pair) = {
            // Packing works within 128 bits: the lanes end as 0-3, 8-11, 4-7, 12-15 and are put back in order.
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.0), _mm256_cvtps_epi32(x.1));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            let order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
            _mm_storeu_si128(p.cast(), _mm_shuffle_epi8(bytes, order));
        };
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
        fn prefetch_near(p: *const u8) = _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }

    #[inline(always)]
    unsafe fn first_dot(_start: IntPair, w: IntPair, x: *const u8) -> IntPair {
        // SAFETY: by the trait's contract the CPU has AVX2 and `x` covers 4 bytes.
        unsafe {
            let x = Self::word(x);
            (_mm256_maddubs_epi16(w.0, x), _mm256_maddubs_epi16(w.1, x))
        }
    }

    #[inline(always)]
    unsafe fn dot(sum: IntPair, w: IntPair, x: *const u8) -> IntPair {
        // SAFETY: by the trait's contract the CPU has AVX2 and `x` covers 4 bytes.
        unsafe {
            let x = Self::word(x);
            (Self::dot8(sum.0, w.0, x), Self::dot8(sum.1, w.1, x))
        }
    }

    #[inline(always)]
    unsafe fn total<const FACTOR: i16>(start: IntPair, sum: IntPair) -> IntPair {
        // SAFETY: by the trait's contract the CPU has AVX2.
        unsafe {
            let factor = _mm256_set1_epi16(FACTOR);
            (
                _mm256_add_epi32(start.0, _mm256_madd_epi16(sum.0, factor)),
                _mm256_add_epi32(start.1, _mm256_madd_epi16(sum.1, factor)),
            )
        }
    }
}

super::table!(Avx2, super::Isa::Avx2, true, "avx2,fma,f16c", "avx2,fma,f16c");
