//! Matrix products by cuBLASLt: `out = x * weights^T`, 16-bit in, f32 out.
//!
//! Each weight has one algorithm, chosen when it is loaded, for any number of rows: no split of k, no workspace. So a row's bits
//! don't depend on how many rows are computed with it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};

use super::config::Half;
use super::driver::{Device, DeviceError, Reason, Span, Stream, failed};

/// Rows come in multiples of this; buffers have room for them.
pub(super) const ROW_UNIT: usize = 16;
/// The number of rows that algorithms are chosen for.
const TYPICAL_ROWS: usize = 128;
/// `CUBLAS_OP_T`, which is `cublasLt`'s word for reading a row-major matrix.
static TRANSPOSED: i32 = 1;
/// Shapes of activations kept; a step has a handful.
const MAX_LAYOUTS: usize = 128;

/// cuBLASLt, ready for products of one type.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    product: sys::cublasLtMatmulDesc_t,
    half: Half,
    /// Layouts of activations by (columns, rows, whether f32).
    layouts: HashMap<(usize, usize, bool), Layout>,
    _device: Arc<Device>,
}

// SAFETY: handles of the library, used by one thread at a time; nothing in them is bound to a thread.
unsafe impl Send for Products {}

/// A weight matrix of `rows` outputs by `cols` inputs.
pub(super) struct Weight {
    span: Span,
    rows: usize,
    cols: usize,
    layout: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: as for products.
unsafe impl Send for Weight {}

/// One product: rows of `x` as wide as the weight's inputs, rows of `out` as wide as its outputs.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    pub(super) x: Span,
    pub(super) out: Span,
    pub(super) num_rows: usize,
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// Of a row-major matrix, which is a column-major one of its columns by its rows.
    fn new(kind: sys::cudaDataType, cols: usize, rows: usize) -> Result<Layout, DeviceError> {
        result::create_matrix_layout(kind, cols as u64, rows as u64, cols as i64)
            .map(Layout)
            .map_err(failed("describe a matrix"))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    /// Algorithms that need no workspace and add up each element in one place.
    fn new() -> Result<Preference, DeviceError> {
        use sys::cublasLtMatmulPreferenceAttributes_t::{
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        };
        let preference = result::create_matmul_pref().map(Preference).map_err(failed("choose products"))?;
        let (none, no_bytes) = (0u32, 0usize);
        let attributes = [
            (
                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const no_bytes).cast::<c_void>(),
                size_of::<usize>(),
            ),
            (CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const none).cast(), size_of::<u32>()),
        ];
        for (attribute, value, len) in attributes {
            // SAFETY: the value is of the attribute's type and read before the call returns.
            unsafe { result::set_matmul_pref_attribute(preference.0, attribute, value, len) }
                .map_err(failed("choose products"))?;
        }
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

const fn data_type(half: Half) -> sys::cudaDataType {
    match half {
        Half::F16 => sys::cudaDataType::CUDA_R_16F,
        Half::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    }
}

impl Products {
    pub(super) fn new(device: &Arc<Device>, half: Half) -> Result<Products, DeviceError> {
        device.bind()?;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let handle = result::create_handle().map_err(failed("start cuBLASLt"))?;
        let made = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F);
        let product = made.map_err(|error| {
            // SAFETY: made above, and not used any more.
            let _ = unsafe { result::destroy_handle(handle) };
            DeviceError::new("describe a product", error.reason())
        })?;
        let products =
            Products { handle, product, half, layouts: HashMap::new(), _device: Arc::clone(device) };
        // SAFETY: the value is of the attribute's type and read before the call returns.
        unsafe {
            result::set_matmul_desc_attribute(
                product,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const TRANSPOSED).cast(),
                size_of_val(&TRANSPOSED),
            )
        }
        .map_err(failed("describe a product"))?;
        Ok(products)
    }

    /// Chooses the algorithm of a weight that lies at `span`.
    pub(super) fn weight(&self, span: Span, rows: usize, cols: usize) -> Result<Weight, DeviceError> {
        assert_eq!(span.len, rows * cols * size_of::<u16>(), "a weight of another size");
        let half = data_type(self.half);
        let layout = Layout::new(half, cols, rows)?;
        let x = Layout::new(half, cols, TYPICAL_ROWS)?;
        let out = Layout::new(sys::cudaDataType::CUDA_R_32F, rows, TYPICAL_ROWS)?;
        let preference = Preference::new()?;
        // SAFETY: everything named lives.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                self.handle,
                self.product,
                layout.0,
                x.0,
                out.0,
                out.0,
                preference.0,
            )
        };
        let algorithm = found
            .map_err(|error| {
                DeviceError::new("choose a product", format!("{rows} x {cols}: {}", error.reason()))
            })?
            .algo;
        Ok(Weight { span, rows, cols, layout, algorithm })
    }

    fn layout(
        &mut self,
        cols: usize,
        rows: usize,
        wide: bool,
    ) -> Result<sys::cublasLtMatrixLayout_t, DeviceError> {
        if self.layouts.len() >= MAX_LAYOUTS {
            self.layouts.clear();
        }
        let kind = if wide { sys::cudaDataType::CUDA_R_32F } else { data_type(self.half) };
        Ok(match self.layouts.entry((cols, rows, wide)) {
            std::collections::hash_map::Entry::Occupied(known) => known.get().0,
            std::collections::hash_map::Entry::Vacant(new) => new.insert(Layout::new(kind, cols, rows)?).0,
        })
    }

    /// Queues a product.
    ///
    /// # Safety
    /// Weight, `x` and `out` live and are not touched by others until the stream is past this; the spans hold `num_rows` rounded up to
    /// [`ROW_UNIT`].
    pub(super) unsafe fn multiply(
        &mut self,
        stream: &Stream,
        weight: &Weight,
        factors: Factors,
    ) -> Result<(), DeviceError> {
        let rows = factors.num_rows.next_multiple_of(ROW_UNIT);
        let x = factors.x.part(0, rows * weight.cols * size_of::<u16>());
        let out = factors.out.part(0, rows * weight.rows * size_of::<f32>());
        if self.layouts.len() + 2 > MAX_LAYOUTS {
            // Both below stay while the call is made.
            self.layouts.clear();
        }
        let x_layout = self.layout(weight.cols, rows, false)?;
        let out_layout = self.layout(weight.rows, rows, true)?;
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: layouts live in `self` and the weight; the memory is the caller's, its sizes were checked.
        unsafe {
            result::matmul(
                self.handle,
                self.product,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                weight.span.address as *const c_void,
                weight.layout.0,
                x.address as *const c_void,
                x_layout,
                out.address as *const c_void,
                out_layout,
                out.address as *mut c_void,
                out_layout,
                &raw const weight.algorithm,
                std::ptr::null_mut(),
                0,
                stream.raw().cast(),
            )
        }
        .map_err(failed("multiply"))
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.layouts.clear();
        // SAFETY: both made in `new`, destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            let _ = result::destroy_handle(self.handle);
        }
    }
}
