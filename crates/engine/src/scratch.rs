//! Memory for the activations of one step, taken once.

use std::cell::UnsafeCell;

use baton_model::ModelConfig;

use crate::config::{CpuEngineConfig, Precision};
use crate::error::EngineBuildError;
use crate::kernels::{
    ATTEND_SCRATCH_FLOATS, INT8_SCRATCH_FLOATS, LANES, MATMUL_SCRATCH_FLOATS, ROW_GROUP, group_bytes,
};
use crate::region::Region;
use crate::sampler::SamplerScratch;
use crate::weights::QUANT_BLOCK;

/// Rows whose logits are computed together.
pub(crate) const LOGIT_ROWS: usize = 16;

/// Rows of floats at a fixed stride, shared by the members of a team.
///
/// Every stage of a step writes rows or column tiles that belong to one member by its share, and reads only what
/// was written before the last barrier; each use says why that holds.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    base: *mut f32,
    stride: usize,
}

// SAFETY: an address and a number; access through it is unsafe and argued for where it happens.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// Rows at `base`, `stride` floats apart.
    pub(crate) const fn new(base: *mut f32, stride: usize) -> Matrix {
        Matrix { base, stride }
    }

    /// Address of a row.
    pub(crate) const fn row(self, row: usize) -> *mut f32 {
        self.base.wrapping_add(row * self.stride)
    }

    pub(crate) const fn stride(self) -> usize {
        self.stride
    }
}

/// What one member keeps to itself.
pub(crate) struct MemberScratch {
    pub(crate) matmul: Matrix,
    pub(crate) attend: Matrix,
    /// Touched by its member alone.
    pub(crate) sampler: UnsafeCell<SamplerScratch>,
}

// SAFETY: matrices are addresses; each member reaches only its own sampler, through an unsafe access that says so.
unsafe impl Sync for MemberScratch {}

/// Activations; `T` rows are as many as a step may hold.
pub(crate) struct Scratch {
    /// `T` x hidden: the residual stream.
    pub(crate) residual: Matrix,
    /// `T` x hidden: normalised.
    pub(crate) normed: Matrix,
    /// `T` x q, k and v, each rounded up to whole tiles.
    pub(crate) qkv: Matrix,
    /// `T` x q: what attention gives.
    pub(crate) attended: Matrix,
    /// `T` x hidden: what is to be added to the residual.
    pub(crate) projected: Matrix,
    /// `T` x ffn: gate, then the feed-forward's inner activations.
    pub(crate) gate: Matrix,
    /// `T` x ffn.
    pub(crate) up: Matrix,
    /// `T` x head: cosines, then sines.
    pub(crate) turns: Matrix,
    /// Row 0 begins the quantised input of the next matrix product, in groups of 16 rows of records.
    pub(crate) quantised: Matrix,
    /// The same of the feed-forward's inner activations, which are quantised while others still read what they come from.
    pub(crate) inner: Matrix,
    /// [`LOGIT_ROWS`] x vocabulary.
    pub(crate) logits: Matrix,
    pub(crate) members: Vec<MemberScratch>,
    /// Holds all of the above.
    _region: Region,
}

/// Floats from one row to the next: whole vectors, and one more so that rows of a power of two do not all fall on the
/// same cache sets.
fn stride(cols: usize) -> usize {
    cols.next_multiple_of(LANES) + LANES
}

/// (rows, floats of a row) of each matrix in the order of [`Scratch`]; the members' come last.
fn shapes(model: &ModelConfig, config: &CpuEngineConfig) -> Vec<(usize, usize)> {
    let t = config.max_step_tokens;
    let (q, kv) = (model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim);
    let qkv = q.next_multiple_of(LANES) + 2 * kv.next_multiple_of(LANES);
    let mut all = vec![
        (t, stride(model.hidden)),
        (t, stride(model.hidden)),
        (t, stride(qkv)),
        (t, stride(q)),
        (t, stride(model.hidden)),
        (t, stride(model.ffn)),
        (t, stride(model.ffn)),
        (t, stride(model.head_dim)),
        (1, quantised_floats(model.hidden.max(q), config)),
        (1, quantised_floats(model.ffn, config)),
        (LOGIT_ROWS, stride(model.vocab)),
    ];
    for _ in 0..config.num_threads {
        all.push((1, MATMUL_SCRATCH_FLOATS.max(INT8_SCRATCH_FLOATS)));
        all.push((1, ATTEND_SCRATCH_FLOATS));
    }
    all
}

/// What a step's rows of `cols` take when they are quantised.
fn quantised_floats(cols: usize, config: &CpuEngineConfig) -> usize {
    if config.precision == Precision::F32 {
        return 0;
    }
    let groups = config.max_step_tokens.max(LOGIT_ROWS).div_ceil(ROW_GROUP);
    groups * group_bytes(cols.next_multiple_of(QUANT_BLOCK)) / size_of::<f32>()
}

/// Bytes of scratch, the samplers' included.
pub(crate) fn bytes_needed(model: &ModelConfig, config: &CpuEngineConfig) -> usize {
    let floats: usize = shapes(model, config).iter().map(|(rows, cols)| rows * cols).sum();
    floats * size_of::<f32>() + config.num_threads * SamplerScratch::bytes_needed(model.vocab)
}

impl Scratch {
    /// Takes it.
    ///
    /// # Errors
    /// The system has no memory.
    pub(crate) fn new(model: &ModelConfig, config: &CpuEngineConfig) -> Result<Scratch, EngineBuildError> {
        let shapes = shapes(model, config);
        let bytes = shapes.iter().map(|(rows, cols)| rows * cols).sum::<usize>() * size_of::<f32>();
        let region = Region::new(bytes).map_err(EngineBuildError::out_of_memory("scratch", bytes))?;
        let mut next = region.base().cast::<f32>();
        let mut matrices = shapes.into_iter().map(|(rows, stride)| {
            let matrix = Matrix::new(next, stride);
            next = next.wrapping_add(rows * stride);
            matrix
        });
        let mut take = || matrices.next().unwrap_or(Matrix::new(std::ptr::null_mut(), 0));
        Ok(Scratch {
            residual: take(),
            normed: take(),
            qkv: take(),
            attended: take(),
            projected: take(),
            gate: take(),
            up: take(),
            turns: take(),
            quantised: take(),
            inner: take(),
            logits: take(),
            members: (0..config.num_threads)
                .map(|_| MemberScratch {
                    matmul: take(),
                    attend: take(),
                    sampler: UnsafeCell::new(SamplerScratch::new(model.vocab)),
                })
                .collect(),
            _region: region,
        })
    }
}
