//! Launches of the kernels, by the contract of `cuda/ABI.md`. Every method checks that the memory it was given is as long as the
//! kernel will reach; what the tables name was checked when the plan was.

use std::sync::Arc;

use baton_model::ModelConfig;

use super::config::Half;
use super::driver::{Arg, Device, DeviceError, Geometry, Kernel, Module, Span, Stream};
use super::int8::Int8Kernels;

/// Machine code for sm_80 and sm_90, and PTX for later cards.
static IMAGE: &Aligned<[u8]> = &Aligned(*include_bytes!("../../cuda/built/baton.fatbin"));

/// The driver reads words of the image where they lie.
#[repr(C, align(64))]
struct Aligned<B: ?Sized>(B);

/// What every launch is told of model and arena.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dims {
    pub(super) num_heads: u32,
    pub(super) num_kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) hidden: u32,
    pub(super) ffn: u32,
    pub(super) vocab: u32,
    pub(super) num_layers: u32,
    pub(super) block_size: u32,
    pub(super) block_layer_bytes: u32,
    pub(super) eps: f32,
    pub(super) interleaved: u32,
}

/// The kernels of one engine.
pub(super) struct Kernels {
    dims: Dims,
    embed: Kernel,
    add_norm: Kernel,
    rope_kv: Kernel,
    attend_decode: Kernel,
    attend_combine: Kernel,
    attend_prefill: Kernel,
    silu_mul: Kernel,
    sample: Kernel,
    copy_blocks: Kernel,
    pub(super) int8: Int8Kernels,
    // Last: what is above lies in it.
    _module: Module,
}

/// What `add_norm` reads beside the residual.
#[derive(Clone, Copy)]
pub(super) struct Norm {
    pub(super) residual: Span,
    /// Added to the residual first.
    pub(super) projected: Option<Span>,
    pub(super) weight: Span,
    /// The tokens whose rows are wanted; all in order without it.
    pub(super) select: Option<Span>,
    pub(super) normed: Span,
}

/// What `rope_kv` reads and writes.
#[derive(Clone, Copy)]
pub(super) struct RopeKv {
    pub(super) qkv: Span,
    pub(super) bias: Option<Span>,
    pub(super) q_norm: Option<Span>,
    pub(super) k_norm: Option<Span>,
    pub(super) turns: Span,
    pub(super) positions: Span,
    pub(super) slots: Span,
    pub(super) q: Span,
    pub(super) layer: Span,
}

/// What attention reads and writes.
#[derive(Clone, Copy)]
pub(super) struct Attend {
    pub(super) q: Span,
    pub(super) layer: Span,
    pub(super) rows: Span,
    pub(super) items: Span,
    pub(super) blocks: Span,
    pub(super) out: Span,
}

/// What is drawn from.
#[derive(Clone, Copy)]
pub(super) struct Sample {
    pub(super) logits: Span,
    pub(super) samplings: Span,
    pub(super) probabilities: Span,
    pub(super) tokens: Span,
    pub(super) logprobs: Span,
    pub(super) num: u32,
}

const THREADS: u32 = 256;
/// Bytes of a row of the table `rows`, of an item, and of a sampling.
const ROW_BYTES: usize = 20;
const ITEM_BYTES: usize = 8;
const SAMPLING_BYTES: usize = 40;

type Outcome = Result<(), DeviceError>;

pub(super) fn launch(
    stream: &Stream,
    kernel: Kernel,
    grid: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    args: &[Arg],
) -> Outcome {
    if grid.contains(&0) {
        return Ok(());
    }
    let geometry = Geometry { grid, block: [threads, 1, 1], shared_bytes };
    // SAFETY: arguments stand as the kernel's row in ABI.md has them; spans were checked by the caller and are the engine's own, which
    // finishes the stream before it frees or rewrites them.
    unsafe { stream.launch(kernel, geometry, args) }
}

/// Every kernel reaches so far and no further.
pub(super) fn reaches(span: Span, bytes: usize) {
    assert!(bytes <= span.len, "a kernel would reach {bytes} bytes of {}", span.len);
}

impl Kernels {
    pub(super) fn load(device: &Arc<Device>, half: Half, dims: Dims) -> Result<Kernels, DeviceError> {
        let module = Module::load(device, &IMAGE.0)?;
        let (t, d) = (half.name(), dims.head_dim);
        let find = |name: String, shared_bytes| module.kernel(&name, shared_bytes);
        Ok(Kernels {
            dims,
            embed: find(format!("embed_{t}"), 0)?,
            add_norm: find(format!("add_norm_{t}"), 64)?,
            rope_kv: find(format!("rope_kv_{t}"), 0)?,
            attend_decode: find(format!("attend_decode_{t}_d{d}"), decode_shared(d))?,
            attend_combine: find(format!("attend_combine_{t}"), 0)?,
            attend_prefill: find(format!("attend_prefill_{t}_d{d}"), prefill_shared(d))?,
            silu_mul: find(format!("silu_mul_{t}"), 0)?,
            sample: find("sample".to_owned(), SAMPLE_SHARED)?,
            copy_blocks: find("copy_blocks".to_owned(), 0)?,
            int8: Int8Kernels::find(&module, half)?,
            _module: module,
        })
    }

    fn hidden(&self, rows: u32, element: usize) -> usize {
        rows as usize * self.dims.hidden as usize * element
    }

    pub(super) fn embed(&self, stream: &Stream, residual: Span, embedding: Span, tokens: Span) -> Outcome {
        let num = (tokens.len / 4) as u32;
        reaches(residual, self.hidden(num, 4));
        reaches(embedding, self.hidden(self.dims.vocab, 2));
        let args: &[Arg] = &[residual.into(), embedding.into(), tokens.into(), self.dims.hidden.into()];
        launch(stream, self.embed, [num, 1, 1], THREADS, 0, args)
    }

    pub(super) fn add_norm(&self, stream: &Stream, norm: Norm, num: u32) -> Outcome {
        reaches(norm.normed, self.hidden(num, 2));
        reaches(norm.weight, self.hidden(1, 4));
        match norm.select {
            Some(select) => reaches(select, 4 * num as usize),
            None => reaches(norm.residual, self.hidden(num, 4)),
        }
        let args: &[Arg] = &[
            norm.normed.into(),
            norm.residual.into(),
            norm.projected.into(),
            norm.weight.into(),
            norm.select.into(),
            self.dims.hidden.into(),
            self.dims.eps.into(),
        ];
        launch(stream, self.add_norm, [num, 1, 1], THREADS, 64, args)
    }

    pub(super) fn rope_kv(&self, stream: &Stream, rope: RopeKv) -> Outcome {
        let d = self.dims;
        let num = (rope.positions.len / 4) as u32;
        let heads = d.num_heads + 2 * d.num_kv_heads;
        let elements = |heads: u32| num as usize * (heads * d.head_dim) as usize;
        reaches(rope.qkv, elements(heads) * 4);
        reaches(rope.q, elements(d.num_heads) * 2);
        reaches(rope.slots, 4 * num as usize);
        let args: &[Arg] = &[
            rope.q.into(),
            rope.layer.into(),
            rope.qkv.into(),
            rope.bias.into(),
            rope.q_norm.into(),
            rope.k_norm.into(),
            rope.turns.into(),
            rope.positions.into(),
            rope.slots.into(),
            d.num_heads.into(),
            d.num_kv_heads.into(),
            d.head_dim.into(),
            d.block_size.into(),
            d.interleaved.into(),
            d.eps.into(),
        ];
        launch(stream, self.rope_kv, [num, heads.div_ceil(8), 1], THREADS, 0, args)
    }

    /// Rows of few tokens. `capacity` is the most (query head, token) pairs of one of them.
    pub(super) fn decode(&self, stream: &Stream, attend: Attend, partials: Span, capacity: u32) -> Outcome {
        let d = self.dims;
        let (num_rows, num_items) =
            ((attend.rows.len / ROW_BYTES) as u32, (attend.items.len / ITEM_BYTES) as u32);
        reaches(partials, (num_items * d.num_kv_heads * capacity * (d.head_dim + 2)) as usize * 4);
        let args: &[Arg] = &[
            partials.into(),
            attend.q.into(),
            attend.layer.into(),
            attend.rows.into(),
            attend.items.into(),
            attend.blocks.into(),
            d.num_heads.into(),
            d.num_kv_heads.into(),
            d.block_size.into(),
            capacity.into(),
            d.scale().into(),
        ];
        let grid = [num_items, d.num_kv_heads, 1];
        launch(stream, self.attend_decode, grid, 128, decode_shared(d.head_dim), args)?;
        let args: &[Arg] = &[
            attend.out.into(),
            partials.into(),
            attend.rows.into(),
            d.num_heads.into(),
            d.num_kv_heads.into(),
            d.head_dim.into(),
            capacity.into(),
        ];
        launch(stream, self.attend_combine, [num_rows, d.num_kv_heads, capacity], 128, 0, args)
    }

    /// Rows of many tokens.
    pub(super) fn prefill(&self, stream: &Stream, attend: Attend) -> Outcome {
        let d = self.dims;
        let num_items = (attend.items.len / ITEM_BYTES) as u32;
        let args: &[Arg] = &[
            attend.out.into(),
            attend.q.into(),
            attend.layer.into(),
            attend.rows.into(),
            attend.items.into(),
            attend.blocks.into(),
            d.num_heads.into(),
            d.num_kv_heads.into(),
            d.block_size.into(),
            d.scale().into(),
        ];
        let grid = [num_items, d.num_kv_heads, 1];
        launch(stream, self.attend_prefill, grid, 128, prefill_shared(d.head_dim), args)
    }

    /// `gate_up` has gate and up of each token side by side.
    pub(super) fn silu_mul(&self, stream: &Stream, gate_up: Span, out: Span, num: u32) -> Outcome {
        let ffn = self.dims.ffn;
        reaches(gate_up, num as usize * 2 * ffn as usize * 4);
        reaches(out, num as usize * ffn as usize * 2);
        let up = gate_up.part(4 * ffn as usize, gate_up.len - 4 * ffn as usize);
        let args: &[Arg] = &[out.into(), gate_up.into(), up.into(), ffn.into(), (2 * ffn).into()];
        launch(stream, self.silu_mul, [num, ffn.div_ceil(1024), 1], THREADS, 0, args)
    }

    pub(super) fn sample(&self, stream: &Stream, sample: Sample) -> Outcome {
        let vocab = self.dims.vocab;
        let num = sample.num as usize;
        reaches(sample.samplings, num * SAMPLING_BYTES);
        reaches(sample.probabilities, num * vocab as usize * 4);
        reaches(sample.tokens, 4 * num);
        reaches(sample.logprobs, 4 * num);
        let args: &[Arg] = &[
            sample.tokens.into(),
            sample.logprobs.into(),
            sample.probabilities.into(),
            sample.logits.into(),
            sample.samplings.into(),
            vocab.into(),
            vocab.into(),
        ];
        launch(stream, self.sample, [sample.num, 1, 1], 1024, SAMPLE_SHARED, args)
    }

    /// In all layers.
    pub(super) fn copy_blocks(&self, stream: &Stream, arena: Span, pairs: Span, num_blocks: u32) -> Outcome {
        let d = self.dims;
        reaches(arena, d.num_layers as usize * num_blocks as usize * d.block_layer_bytes as usize);
        let args: &[Arg] = &[arena.into(), pairs.into(), num_blocks.into(), d.block_layer_bytes.into()];
        launch(stream, self.copy_blocks, [(pairs.len / 8) as u32, d.num_layers, 1], THREADS, 0, args)
    }
}

const SAMPLE_SHARED: u32 = 16_384;

const fn decode_shared(head_dim: u32) -> u32 {
    512 * head_dim + 4096
}

const fn prefill_shared(head_dim: u32) -> u32 {
    512 * head_dim + 2048
}

impl Dims {
    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    pub(super) fn new(model: &ModelConfig, layout: &baton_kv::KvLayout) -> Dims {
        Dims {
            num_heads: model.num_heads as u32,
            num_kv_heads: model.num_kv_heads as u32,
            head_dim: model.head_dim as u32,
            hidden: model.hidden as u32,
            ffn: model.ffn as u32,
            vocab: model.vocab as u32,
            num_layers: model.num_layers as u32,
            block_size: layout.block_size as u32,
            block_layer_bytes: layout.block_layer_bytes() as u32,
            eps: model.rms_eps,
            interleaved: u32::from(model.rope_style == baton_model::RopeStyle::Interleaved),
        }
    }
}
