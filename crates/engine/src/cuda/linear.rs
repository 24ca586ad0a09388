//! A weight matrix in the form that it is kept in, and its products.

use super::driver::{DeviceError, Span, Stream};
use super::int8::Int8Matrix;
use super::kernels::Kernels;
use super::products::{Factors, Products, Weight};

/// A matrix of outputs by inputs.
pub(super) enum Linear {
    /// 16 bits an element, multiplied by cuBLASLt.
    Half(Weight),
    /// 8 bits an element, multiplied by a kernel of ours.
    Int8(Int8Matrix),
}

/// A matrix where it lies; the rows of one of them are tokens.
#[derive(Clone, Copy)]
pub(super) enum Matrix {
    /// 16 bits an element.
    Half(Span),
    /// 8 bits an element.
    Int8(Int8Matrix),
}

impl Linear {
    /// Queues a product. Either way a row of it has the same bits whatever rows are beside it.
    ///
    /// # Safety
    /// As [`Products::multiply`].
    pub(super) unsafe fn multiply(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        products: &mut Products,
        factors: Factors,
    ) -> Result<(), DeviceError> {
        match self {
            // SAFETY: the caller's.
            Self::Half(weight) => unsafe { products.multiply(stream, weight, factors) },
            Self::Int8(matrix) => kernels.int8.multiply(stream, matrix, factors),
        }
    }
}

impl Matrix {
    /// Queues the gathering of tokens' rows into the residual stream.
    pub(super) fn gather(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        residual: Span,
        tokens: Span,
    ) -> Result<(), DeviceError> {
        match self {
            Self::Half(span) => kernels.embed(stream, residual, *span, tokens),
            Self::Int8(matrix) => kernels.int8.embed(stream, residual, matrix, tokens),
        }
    }
}
