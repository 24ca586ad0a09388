//! Sixteen lanes in one AVX-512 register.

use std::arch::x86_64::*;

use super::simd::Simd;

/// AVX-512 F, BW, DQ and VL with FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// Whether this CPU has everything that [`Avx512`] uses.
pub(crate) fn detected() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && super::avx2::detected()
}

/// Whether it has the integer dot product that [`Avx512`]'s integer kernels use.
pub(super) fn vnni_detected() -> bool {
    detected() && is_x86_feature_detected!("avx512vnni")
}

/// The kernels of this instruction set; AVX2's integer kernel, which gives the same bits, where there is no VNNI.
pub(super) fn table() -> &'static super::Kernels {
    static WITHOUT_VNNI: super::Kernels = super::Kernels {
        matmul_int8: super::avx2::TABLE.matmul_int8,
        peak: super::avx2::TABLE.peak,
        ..TABLE
    };
    if vnni_detected() { &TABLE } else { &WITHOUT_VNNI }
}

macro_rules! ops {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($arg: $type),*) $(-> $out)? {
            // SAFETY: by the trait's contract the CPU has AVX-512 and pointers cover 16 elements.
            unsafe { $body }
        }
    )*};
}

/// Four vectors to a number each: first what stands in a quarter of a register, for all four in turn, then its quarters.
macro_rules! across {
    ($x:expr, $all:ident, $half:ident, $quarter:ident) => {{
        let [a, b, c, d] = $x;
        let ab = $all(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = $all(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let quarters = $all(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xee>(ab, cd));
        let halves = $half(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps::<1>(quarters));
        let each = $quarter(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
        let mut out = [0.0; 4];
        _mm_storeu_ps(out.as_mut_ptr(), each);
        out
    }};
}

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type Dots = __m512i;
    const MAX_ROWS: usize = 12;
    const VECTORS: usize = 32;
    const MAX_ACCUMULATORS: usize = 24;
    const MAX_QUANT_ROWS: usize = 12;
    const ROWS_BYTES: usize = 1 << 19;
    const NIBBLE_DOTS: bool = false;

    ops! {
        fn zero() -> __m512 = _mm512_setzero_ps();
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        fn store(p: *mut f32, x: __m512) = _mm512_storeu_ps(p, x);
        fn load_f16(p: *const u16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        fn store_f16(p: *mut u16, x: __m512) =
            _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x));
        fn load_bf16(p: *const u16) -> __m512 = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))));
        // Shifted into a half's place, bias 15 instead of 7; the sign's copy below it is cleared.
        fn load_e4m3(p: *const u8) -> __m512 = _mm512_cvtph_ps(_mm256_and_si256(
            _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()))),
            _mm256_set1_epi16(0xbf80u16 as i16)));
        fn load_powers(p: *const u8) -> __m512 = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(
            _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))));
        fn load_u32(p: *const u32) -> __m512i = _mm512_loadu_si512(p.cast());
        fn store_u32(p: *mut u32, x: __m512i) = _mm512_storeu_si512(p.cast(), x);
        fn low_byte(x: __m512i) -> __m512 = _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(255)));
        fn next_byte(x: __m512i) -> __m512i = _mm512_srli_epi32::<8>(x);
        // The permutation looks at four bits of each index: exactly a nibble, whatever stands above it.
        fn low_nibble(x: __m512i) -> __m512 = _mm512_permutexvar_ps(x, _mm512_setr_ps(
            0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0));
        fn next_nibble(x: __m512i) -> __m512i = _mm512_srli_epi32::<4>(x);
        fn low_nibbles(x: __m512i) -> __m512i = _mm512_and_si512(x, _mm512_set1_epi8(15));
        fn high_nibbles(x: __m512i) -> __m512i =
            _mm512_and_si512(_mm512_srli_epi32::<4>(x), _mm512_set1_epi8(15));
        fn zero_i32() -> __m512i = _mm512_setzero_si512();
        fn splat_i32(p: *const u8) -> __m512i = _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
        fn to_float(x: __m512i) -> __m512 = _mm512_cvtepi32_ps(x);
        fn store_quants(p: *mut u8, x: __m512) = _mm_storeu_si128(p.cast(), _mm_shuffle_epi8(
            _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)),
            _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)));
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        fn first_lanes(n: usize, a: __m512, b: __m512) -> __m512 =
            _mm512_mask_blend_ps(((1u32 << n.min(16)) - 1) as u16, b, a);
        fn zero_below(x: __m512, bound: __m512, y: __m512) -> __m512 =
            _mm512_maskz_mov_ps(!_mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, bound), y);
        fn pow2_of_rounded(x: __m512) -> __m512 = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(
            _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(127))));
        fn sum(x: __m512) -> f32 =
            super::avx2::sum8(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)));
        fn largest(x: __m512) -> f32 =
            super::avx2::largest8(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)));
        fn prefetch_far(p: *const u8) = _mm_prefetch::<_MM_HINT_T1>(p.cast());
        fn prefetch_near(p: *const u8) = _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }

    #[inline(always)]
    unsafe fn sum_of_each(x: [__m512; 4]) -> [f32; 4] {
        // SAFETY: by the trait's contract the CPU has AVX-512.
        unsafe { across!(x, _mm512_add_ps, _mm256_add_ps, _mm_add_ps) }
    }

    #[inline(always)]
    unsafe fn largest_of_each(x: [__m512; 4]) -> [f32; 4] {
        // SAFETY: by the trait's contract the CPU has AVX-512.
        unsafe { across!(x, _mm512_max_ps, _mm256_max_ps, _mm_max_ps) }
    }

    #[inline(always)]
    unsafe fn first_dot(start: __m512i, w: __m512i, x: *const u8) -> __m512i {
        // SAFETY: the caller's.
        unsafe { Self::dot(start, w, x) }
    }

    #[inline(always)]
    unsafe fn dot(sum: __m512i, w: __m512i, x: *const u8) -> __m512i {
        // SAFETY: by the trait's contract `x` covers 4 bytes; integer kernels of this table are only reachable where
        // VNNI was detected.
        unsafe { _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x.cast::<i32>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn total<const FACTOR: i16>(_start: __m512i, sum: __m512i) -> __m512i {
        sum
    }
}

super::table!(
    Avx512,
    super::Isa::Avx512,
    true,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c",
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
);
