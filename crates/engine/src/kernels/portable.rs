//! Sixteen lanes as an array: what every CPU can do, and what the other instruction sets are tested against.

use half::{bf16, f16};

use super::simd::{LANES, Simd};

/// No instruction set in particular.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// Whether a multiply-add here rounds once, as FMA instructions do: where the target always has the instruction.
/// Elsewhere it would be a library call, so product and sum round separately.
pub(crate) const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

type V = [f32; LANES];

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(always)]
fn tree(x: V, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut x = x;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            x[i] = f(x[i], x[i + width]);
        }
        width /= 2;
    }
    x[0]
}

macro_rules! ops {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($arg: $type),*) $(-> $out)? {
            $body
        }
    )*};
}

macro_rules! pointer_ops {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($arg: $type),*) $(-> $out)? {
            // SAFETY: by the trait's contract the pointer covers 16 elements, of any alignment.
            unsafe { $body }
        }
    )*};
}

impl Simd for Portable {
    type F = V;
    type I = [u32; LANES];
    type Dots = [u32; LANES];
    const MAX_ROWS: usize = 4;
    const VECTORS: usize = 8;
    const MAX_ACCUMULATORS: usize = 4;
    const MAX_QUANT_ROWS: usize = 1;
    const NIBBLE_DOTS: bool = false;

    pointer_ops! {
        fn load(p: *const f32) -> V = p.cast::<V>().read_unaligned();
        fn store(p: *mut f32, x: V) = p.cast::<V>().write_unaligned(x);
        fn load_f16(p: *const u16) -> V =
            p.cast::<[u16; LANES]>().read_unaligned().map(|h| f16::from_bits(h).to_f32());
        fn store_f16(p: *mut u16, x: V) =
            p.cast::<[u16; LANES]>().write_unaligned(x.map(|v| f16::from_f32(v).to_bits()));
        fn load_bf16(p: *const u16) -> V =
            p.cast::<[u16; LANES]>().read_unaligned().map(|h| bf16::from_bits(h).to_f32());
        // Shifted into a half's place, bias 15 instead of 7; the sign's copy below it is cleared.
        fn load_e4m3(p: *const u8) -> V = p.cast::<[i8; LANES]>().read_unaligned()
            .map(|x| f16::from_bits((i16::from(x) << 7).cast_unsigned() & 0xbf80).to_f32());
        fn load_powers(p: *const u8) -> V =
            p.cast::<[u8; LANES]>().read_unaligned().map(|x| f32::from_bits(u32::from(x) << 23));
        fn load_u32(p: *const u32) -> [u32; LANES] = p.cast::<[u32; LANES]>().read_unaligned();
        fn store_u32(p: *mut u32, x: [u32; LANES]) = p.cast::<[u32; LANES]>().write_unaligned(x);
        fn splat_i32(p: *const u8) -> [u32; LANES] = [p.cast::<u32>().read_unaligned(); LANES];
        fn store_quants(p: *mut u8, x: V) = p.cast::<[u8; LANES]>().write_unaligned(std::array::from_fn(|i| {
            let (eight, odd, n) = (i / 8 * 8, i % 8 / 4, i % 4);
            (x[eight + 2 * n + odd] as i8).cast_unsigned()
        }));
    }

    ops! {
        fn zero() -> V = [0.0; LANES];
        fn splat(x: f32) -> V = [x; LANES];
        fn low_nibble(x: [u32; LANES]) -> V = x.map(|v| (v & 15) as f32);
        fn next_nibble(x: [u32; LANES]) -> [u32; LANES] = x.map(|v| v >> 4);
        fn zero_i32() -> [u32; LANES] = [0; LANES];
        fn low_byte(x: [u32; LANES]) -> V = x.map(|v| (v & 255) as f32);
        fn next_byte(x: [u32; LANES]) -> [u32; LANES] = x.map(|v| v >> 8);
        fn low_nibbles(x: [u32; LANES]) -> [u32; LANES] = x.map(|v| v & 0x0f0f_0f0f);
        fn high_nibbles(x: [u32; LANES]) -> [u32; LANES] = x.map(|v| v >> 4 & 0x0f0f_0f0f);
        fn to_float(x: [u32; LANES]) -> V = x.map(|v| v.cast_signed() as f32);
        fn add(a: V, b: V) -> V = zip(a, b, |a, b| a + b);
        fn sub(a: V, b: V) -> V = zip(a, b, |a, b| a - b);
        fn mul(a: V, b: V) -> V = zip(a, b, |a, b| a * b);
        fn div(a: V, b: V) -> V = zip(a, b, |a, b| a / b);
        fn fma(a: V, b: V, c: V) -> V = std::array::from_fn(|i| {
            if FUSED { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] }
        });
        fn max(a: V, b: V) -> V = zip(a, b, |a, b| if a > b { a } else { b });
        fn min(a: V, b: V) -> V = zip(a, b, |a, b| if a < b { a } else { b });
        fn first_lanes(n: usize, a: V, b: V) -> V = std::array::from_fn(|i| if i < n { a[i] } else { b[i] });
        fn zero_below(x: V, bound: V, y: V) -> V =
            std::array::from_fn(|i| if x[i] < bound[i] { 0.0 } else { y[i] });
        fn pow2_of_rounded(x: V) -> V = x.map(|v| f32::from_bits(v.to_bits().wrapping_add(127) << 23));
        fn sum(x: V) -> f32 = tree(x, |a, b| a + b);
        fn largest(x: V) -> f32 = tree(x, |a, b| if a > b { a } else { b });
        fn prefetch_far(_p: *const u8) = ();
        fn prefetch_near(_p: *const u8) = ();
    }

    #[inline(always)]
    unsafe fn first_dot(start: [u32; LANES], w: [u32; LANES], x: *const u8) -> [u32; LANES] {
        // SAFETY: the caller's.
        unsafe { Self::dot(start, w, x) }
    }

    #[inline(always)]
    unsafe fn dot(sum: [u32; LANES], w: [u32; LANES], x: *const u8) -> [u32; LANES] {
        // SAFETY: by the trait's contract `x` covers 4 bytes.
        let x = unsafe { x.cast::<[i8; 4]>().read_unaligned() };
        let product = |w: u32| {
            let products = w.to_le_bytes().into_iter().zip(x).map(|(w, x)| i32::from(w) * i32::from(x));
            products.sum::<i32>().cast_unsigned()
        };
        std::array::from_fn(|i| sum[i].wrapping_add(product(w[i])))
    }

    #[inline(always)]
    unsafe fn total<const FACTOR: i16>(_start: [u32; LANES], sum: [u32; LANES]) -> [u32; LANES] {
        sum
    }
}

super::table!(Portable, super::Isa::Portable, FUSED);
