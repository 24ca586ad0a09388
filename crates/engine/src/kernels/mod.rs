//! The kernels, as one table of functions for each instruction set.
//!
//! Rules that every kernel keeps, so that the same tokens come out however the work was cut:
//! a number is one chain of operations in one order, whatever other rows are computed with it; a lane never depends
//! on its neighbours; reductions over a row have a fixed tree; attention tiles sit on absolute positions.

mod ahead;
#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
#[cfg(test)]
mod attention_tests;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod element;
mod int8;
#[cfg(test)]
mod int8_tests;
mod matmul;
mod peak;
mod portable;
mod quantise;
mod rowwise;
mod simd;
#[cfg(test)]
mod tests;
mod tile;
mod unpack;

pub(crate) use ahead::ahead;
pub(crate) use attention::{
    Attend, MAX_HEAD_DIM, MAX_QUERIES, SCRATCH_FLOATS as ATTEND_SCRATCH_FLOATS, TILE_TOKENS,
};
pub(crate) use element::StoreRow;
pub(crate) use int8::Int8Matmul;
pub(crate) use matmul::{Matmul, SCRATCH_FLOATS as MATMUL_SCRATCH_FLOATS};
pub(crate) use peak::Peak;
pub(crate) use quantise::{Quantise, ROW_GROUP, group_bytes, record};
pub(crate) use rowwise::{Exponentials, Norm, SiluMul};
pub(crate) use simd::LANES;

use baton_kv::KvDtype;

/// Floats that [`Int8Matmul::scratch`] must have, whichever instruction set it is.
pub(crate) const INT8_SCRATCH_FLOATS: usize = {
    #[cfg(target_arch = "x86_64")]
    let most =
        if amx::SCRATCH_FLOATS > int8::SCRATCH_FLOATS { amx::SCRATCH_FLOATS } else { int8::SCRATCH_FLOATS };
    #[cfg(not(target_arch = "x86_64"))]
    let most = int8::SCRATCH_FLOATS;
    most
};

/// Which instruction set the kernels use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with VNNI, and AMX (TILE, INT8) for integer products, x86-64 on Linux.
    Amx,
    /// AVX-512 (F, BW, DQ, VL), x86-64.
    Avx512,
    /// AVX2 with FMA and F16C, x86-64.
    Avx2,
    /// Plain Rust.
    Portable,
}

impl Isa {
    /// Every instruction set that this CPU has, best first; never empty.
    pub fn available() -> Vec<Isa> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if amx::detected() {
                found.push(Isa::Amx);
            }
            if avx512::detected() {
                found.push(Isa::Avx512);
            }
            if avx2::detected() {
                found.push(Isa::Avx2);
            }
        }
        found.push(Isa::Portable);
        found
    }

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Amx => "amx",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        }
    }
}

/// One instruction set's kernels.
///
/// # Safety
/// The functions may only be called on a CPU that has `isa`, and their arguments' contracts must hold.
pub(crate) struct Kernels {
    pub(crate) isa: Isa,
    /// Whether a multiply-add rounds once. Tables that agree in this compute the same bits.
    pub(crate) fused: bool,
    pub(crate) matmul: unsafe fn(&Matmul<'_>),
    pub(crate) matmul_int8: unsafe fn(&Int8Matmul<'_>),
    pub(crate) peak: unsafe fn(&Peak) -> f32,
    pub(crate) quantise: unsafe fn(&Quantise),
    attend_f32: unsafe fn(&Attend<'_>),
    attend_f16: unsafe fn(&Attend<'_>),
    attend_bf16: unsafe fn(&Attend<'_>),
    attend_fp8: unsafe fn(&Attend<'_>),
    pub(crate) norm: unsafe fn(&Norm),
    pub(crate) silu_mul: unsafe fn(&SiluMul),
    store_f32: unsafe fn(&StoreRow) -> u8,
    store_f16: unsafe fn(&StoreRow) -> u8,
    store_bf16: unsafe fn(&StoreRow) -> u8,
    store_fp8: unsafe fn(&StoreRow) -> u8,
    pub(crate) exponentials: unsafe fn(&Exponentials) -> f32,
    pub(crate) largest: unsafe fn(&[f32]) -> f32,
}

impl Kernels {
    /// The table of `isa`, if this CPU has it.
    pub(crate) fn of(isa: Isa) -> Option<&'static Kernels> {
        if !Isa::available().contains(&isa) {
            return None;
        }
        Some(match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => &amx::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::table(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::TABLE,
            _ => &portable::TABLE,
        })
    }

    /// Attention over blocks of this element type.
    pub(crate) const fn attend(&self, dtype: KvDtype) -> unsafe fn(&Attend<'_>) {
        match dtype {
            KvDtype::F32 => self.attend_f32,
            KvDtype::F16 => self.attend_f16,
            KvDtype::BF16 => self.attend_bf16,
            KvDtype::Fp8 => self.attend_fp8,
        }
    }

    /// Rounding to this element type; returns the row's scale.
    pub(crate) const fn store(&self, dtype: KvDtype) -> unsafe fn(&StoreRow) -> u8 {
        match dtype {
            KvDtype::F32 => self.store_f32,
            KvDtype::F16 => self.store_f16,
            KvDtype::BF16 => self.store_bf16,
            KvDtype::Fp8 => self.store_fp8,
        }
    }
}

/// Instantiates every kernel for one [`simd::Simd`], inside functions that enable its instructions.
macro_rules! table {
    ($simd:ident, $isa:expr, $fused:expr $(, $features:literal, $integer:literal)?) => {
        mod entry {
            use super::$simd;
            use crate::kernels::{attention, element, int8, matmul, peak, quantise, rowwise};

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn matmul(arg: &crate::kernels::Matmul<'_>) {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { matmul::run::<$simd>(arg) }
            }

            $(#[target_feature(enable = $integer)])?
            pub(super) unsafe fn matmul_int8(arg: &crate::kernels::Int8Matmul<'_>) {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { int8::run::<$simd>(arg) }
            }

            $(#[target_feature(enable = $integer)])?
            pub(super) unsafe fn peak(arg: &crate::kernels::Peak) -> f32 {
                // SAFETY: this CPU has the instructions.
                unsafe { peak::run::<$simd>(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn quantise(arg: &crate::kernels::Quantise) {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { quantise::quantise::<$simd>(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn attend_f32(arg: &crate::kernels::Attend<'_>) {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { attention::run::<$simd, f32>(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn attend_f16(arg: &crate::kernels::Attend<'_>) {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { attention::run::<$simd, half::f16>(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn attend_bf16(arg: &crate::kernels::Attend<'_>) {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { attention::run::<$simd, half::bf16>(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn attend_fp8(arg: &crate::kernels::Attend<'_>) {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { attention::run::<$simd, element::E4m3>(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn norm(arg: &crate::kernels::Norm) {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { rowwise::norm::<$simd>(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn silu_mul(arg: &crate::kernels::SiluMul) {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { rowwise::silu_mul::<$simd>(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn store_f32(arg: &crate::kernels::StoreRow) -> u8 {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { element::store_f32(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn store_f16(arg: &crate::kernels::StoreRow) -> u8 {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { element::store_f16::<$simd>(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn store_bf16(arg: &crate::kernels::StoreRow) -> u8 {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { element::store_bf16(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn store_fp8(arg: &crate::kernels::StoreRow) -> u8 {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { element::store_e4m3(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn exponentials(arg: &crate::kernels::Exponentials) -> f32 {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { rowwise::exponentials::<$simd>(arg) }
            }

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn largest(arg: &[f32]) -> f32 {
                // SAFETY: the caller keeps the argument's contract, and this CPU has the instructions.
                unsafe { rowwise::largest::<$simd>(arg) }
            }
        }

        /// The kernels of this instruction set.
        pub(super) static TABLE: crate::kernels::Kernels = crate::kernels::Kernels {
            isa: $isa,
            fused: $fused,
            matmul: entry::matmul,
            matmul_int8: entry::matmul_int8,
            peak: entry::peak,
            quantise: entry::quantise,
            attend_f32: entry::attend_f32,
            attend_f16: entry::attend_f16,
            attend_bf16: entry::attend_bf16,
            attend_fp8: entry::attend_fp8,
            norm: entry::norm,
            silu_mul: entry::silu_mul,
            store_f32: entry::store_f32,
            store_f16: entry::store_f16,
            store_bf16: entry::store_bf16,
            store_fp8: entry::store_fp8,
            exponentials: entry::exponentials,
            largest: entry::largest,
        };
    };
}
pub(crate) use table;
