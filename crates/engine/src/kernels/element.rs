//! How elements of K and V are stored, and how rows of them are rounded.

use half::{bf16, f16};

use super::simd::{LANES, Simd};

/// How an element of K and V is stored.
pub(super) trait Element: Copy {
    /// Whether each row has a factor of its own: a byte, see [`scales`].
    const SCALED: bool = false;

    /// # Safety
    /// The CPU has `S`; `p` covers 16 elements.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load(p) }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f16) -> S::F {
        // SAFETY: the caller's; f16 is a u16 inside.
        unsafe { S::load_f16(p.cast()) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const bf16) -> S::F {
        // SAFETY: the caller's; bf16 is a u16 inside.
        unsafe { S::load_bf16(p.cast()) }
    }
}

/// An 8-bit float: sign, 4 bits of exponent biased by 7, 3 bits of mantissa; 448 at most. A row's values are its elements times
/// `2^(scale - 135)`, `scale` being the row's byte, chosen so that the largest element is in 224..=448. The code of NaN is not used: a
/// row with a value that is not finite is zeros with the scale 255, which is read as infinity, so that all of it is NaN.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct E4m3(u8);

impl Element for E4m3 {
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const E4m3) -> S::F {
        // SAFETY: the caller's; E4m3 is a u8 inside.
        unsafe { S::load_e4m3(p.cast()) }
    }
}

/// The factors of 16 rows, for elements as [`Simd::load_e4m3`] widens them.
///
/// # Safety
/// The CPU has `S`; `p` covers 16 bytes.
#[inline(always)]
pub(super) unsafe fn scales<S: Simd>(p: *const u8) -> S::F {
    // SAFETY: the caller's.
    unsafe { S::load_powers(p) }
}

/// Rounds one head of one token, ties to even.
pub(crate) struct StoreRow {
    /// Input.
    pub(crate) x: *const f32,
    /// Output: elements of the type that the kernel is for.
    pub(crate) out: *mut u8,
    /// Elements, a multiple of 16.
    pub(crate) len: usize,
}

/// Each of these returns the row's scale; 0 for types without one.
///
/// # Safety
/// The pointers cover `len` elements.
#[inline(always)]
pub(super) unsafe fn store_f32(s: &StoreRow) -> u8 {
    // SAFETY: by contract.
    unsafe { std::ptr::copy_nonoverlapping(s.x.cast::<u8>(), s.out, s.len * size_of::<f32>()) };
    0
}

/// # Safety
/// The CPU has `S`; the pointers cover `len` elements.
#[inline(always)]
pub(super) unsafe fn store_f16<S: Simd>(s: &StoreRow) -> u8 {
    for i in (0..s.len).step_by(LANES) {
        // SAFETY: by contract.
        unsafe { S::store_f16(s.out.cast::<u16>().add(i), S::load(s.x.add(i))) }
    }
    0
}

/// # Safety
/// The pointers cover `len` elements.
#[inline(always)]
pub(super) unsafe fn store_bf16(s: &StoreRow) -> u8 {
    for i in 0..s.len {
        // SAFETY: by contract.
        unsafe { s.out.cast::<bf16>().add(i).write_unaligned(bf16::from_f32(s.x.add(i).read())) }
    }
    0
}

/// A row whose largest value is below 2^-111 becomes zeros, one with a value above 1.75 * 2^127 NaN.
///
/// # Safety
/// The pointers cover `len` elements.
#[inline(always)]
pub(super) unsafe fn store_e4m3(s: &StoreRow) -> u8 {
    /// The scale of a row that is NaN.
    const NAN: u32 = 255;
    /// Below this the factor would leave the normal range.
    const LEAST: u32 = 16;
    // SAFETY: by contract.
    let (x, out) =
        unsafe { (std::slice::from_raw_parts(s.x, s.len), std::slice::from_raw_parts_mut(s.out, s.len)) };
    // Bits of magnitudes are ordered as the magnitudes, infinity and NaN above all.
    let largest = x.iter().fold(0, |largest, x| (x.to_bits() & !SIGN).max(largest));
    // The exponent of the largest value, one more if its mantissa is above 1.75.
    let scale = ((largest + 0x1f_ffff) >> 23).min(NAN);
    if !(LEAST..NAN).contains(&scale) {
        out.fill(0);
        return if scale == NAN { NAN as u8 } else { 0 };
    }
    // 2^(135 - scale)
    let factor = f32::from_bits((127 + 135 - scale) << 23);
    for (out, x) in out.iter_mut().zip(x) {
        *out = to_e4m3(x * factor);
    }
    scale as u8
}

const SIGN: u32 = 1 << 31;

/// The nearest e4m3 of a value of at most 448, ties to even.
#[inline(always)]
fn to_e4m3(x: f32) -> u8 {
    /// 2^-6, the least normal one.
    const NORMAL: u32 = (127 - 6) << 23;
    let bits = x.to_bits();
    let size = bits & !SIGN;
    // 20 bits of mantissa go; the exponent's bias changes from 127 to 7.
    let normal = ((size + 0x7_ffff + (size >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    // Numbers near 2^14 are 2^-9 apart, as are those below 2^-6 here.
    let small = (f32::from_bits(size) + 16_384.0).to_bits() & 15;
    let code = if size < NORMAL { small } else { normal };
    (code | bits >> 24 & 0x80) as u8
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tests::{Random, tables};
    use super::*;
    use baton_kv::KvDtype;

    /// By the book: OCP's 8-bit floating point specification.
    pub(in super::super) fn e4m3_value(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let size = match exponent {
            0 => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if code & 0x80 == 0 { size } else { -size }
    }

    fn store(kernels: &super::super::Kernels, dtype: KvDtype, x: &[f32]) -> (Vec<u8>, u8) {
        let mut out = vec![0xaa; x.len() * dtype.size()];
        let row = StoreRow { x: x.as_ptr(), out: out.as_mut_ptr(), len: x.len() };
        // SAFETY: the table is available, and both slices cover `len` elements.
        let scale = unsafe { (kernels.store(dtype))(&row) };
        (out, scale)
    }

    #[test]
    fn every_e4m3_is_its_own_nearest_and_halfway_goes_to_even() {
        for code in (0..=0x7e).chain(0x80..=0xfe) {
            let value = e4m3_value(code);
            assert_eq!(to_e4m3(value as f32), code, "{value}");
            if !matches!(code & 0x7f, 0x7e) {
                let next = e4m3_value(code + 1);
                let halfway = f64::midpoint(value, next) as f32;
                let even = if code & 1 == 0 { code } else { code + 1 };
                assert_eq!(to_e4m3(halfway), even, "{halfway}");
                let beyond = f32::from_bits(halfway.to_bits() + 1);
                assert_eq!(to_e4m3(beyond), code + 1, "{beyond}");
            }
        }
    }

    #[test]
    fn a_row_of_e4m3_is_within_a_sixteenth_of_each_value_or_of_the_smallest_step() {
        let mut random = Random(31);
        for kernels in tables() {
            for exponent in [-100, -30, -6, 0, 3, 8, 60, 120] {
                let mut x = random.floats(64);
                x.iter_mut().for_each(|x| *x *= 2f32.powi(exponent));
                let (codes, scale) = store(kernels, KvDtype::Fp8, &x);
                let factor = 2f64.powi(i32::from(scale) - 135);
                let largest = codes.iter().map(|&code| e4m3_value(code & 0x7f)).fold(0.0, f64::max);
                assert!((224.0..=448.0).contains(&largest), "2^{exponent}: {largest}");
                for (&x, &code) in x.iter().zip(&codes) {
                    let (x, got) = (f64::from(x), e4m3_value(code) * factor);
                    let bound = (x.abs() / 16.0).max(factor * 2f64.powi(-10));
                    assert!((x - got).abs() <= bound, "2^{exponent}: {x} became {got}");
                }
            }
        }
    }

    #[test]
    fn rows_of_zeros_and_rows_that_are_not_finite_stay_what_they_are() {
        for kernels in tables() {
            let row = |value: f32| {
                let mut x = vec![1.0; 32];
                x[17] = value;
                store(kernels, KvDtype::Fp8, &x).1
            };
            assert_eq!(store(kernels, KvDtype::Fp8, &[0.0; 16]), (vec![0; 16], 0));
            assert_eq!(store(kernels, KvDtype::Fp8, &[1e-38; 16]), (vec![0; 16], 0));
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                assert_eq!(row(bad), 255);
            }
            assert_eq!(row(1.0), 127, "256 times 2^(127 - 135) is 1");
        }
    }

    #[test]
    fn every_table_rounds_to_nearest_even() {
        let mut random = Random(32);
        for kernels in tables() {
            let x: Vec<f32> = (0..256).map(|i| random.signed() * 2f32.powi(i / 4 % 40 - 20)).collect();
            for (dtype, round) in [
                (KvDtype::F16, (|x| f16::from_f32(x).to_le_bytes().to_vec()) as fn(f32) -> Vec<u8>),
                (KvDtype::BF16, |x| bf16::from_f32(x).to_le_bytes().to_vec()),
                (KvDtype::F32, |x| x.to_le_bytes().to_vec()),
            ] {
                let want: Vec<u8> = x.iter().flat_map(|&x| round(x)).collect();
                assert_eq!(store(kernels, dtype, &x), (want, 0), "{:?}, {dtype}", kernels.isa);
            }
        }
    }
}
