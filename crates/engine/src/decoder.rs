//! The forward pass: one decoder for all families, computed by a team in stages with a barrier between them.
//!
//! Who writes what: in a stage over rows each member writes the rows of its share, in a stage over column tiles
//! the columns of its tiles, in attention the outputs of its (head, unit) pairs. A stage reads only what stages before
//! it wrote. These two sentences are the reason why every raw access below is sound.

mod attend;
mod carry;
mod leave;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use baton_model::ModelConfig;
use baton_scheduler::StepPlan;

pub(crate) use self::carry::Carry;
use self::leave::{Leaving, OnPoint, Watch};
use crate::arena::Arena;
use crate::barrier::Broken;
use crate::batch::{Batch, Purpose};
use crate::kernels::{Int8Matmul, Kernels, LANES, Matmul, Norm, Quantise, SiluMul, ahead, record};
use crate::rope::Rope;
use crate::sampler::{self, Drawn};
use crate::scratch::{LOGIT_ROWS, Matrix, Scratch};
use crate::team::Member;
use crate::weights::{LayerWeights, Linear, ModelWeights, Packed, QUANT_BLOCK};

/// The model with everything that a step needs.
pub(crate) struct Decoder {
    pub(crate) weights: ModelWeights,
    pub(crate) config: ModelConfig,
    /// Quantised weights meet quantised activations.
    pub(crate) int8: bool,
    pub(crate) kernels: &'static Kernels,
    pub(crate) rope: Rope,
    pub(crate) scratch: Scratch,
    pub(crate) arena: Arc<Arena>,
    pub(crate) outcome: Outcome,
}

/// What members report of a step.
pub(crate) struct Outcome {
    leaving: Leaving,
    not_finite: AtomicBool,
    /// Token and bits of its log-probability, for each of the plan's samplings.
    drawn: Vec<AtomicU64>,
}

/// One step: what is computed and where wanted logits go.
#[derive(Clone, Copy)]
pub(crate) struct Step<'a> {
    pub(crate) plan: &'a StepPlan,
    pub(crate) batch: &'a Batch,
    /// `batch.num_copied` rows of the vocabulary's size.
    pub(crate) copied: Matrix,
}

/// `out = x * weights`, for some rows.
#[derive(Clone, Copy)]
struct Product {
    x: Matrix,
    /// Where `x` is as [`Quantise`] leaves it, if weights are quantised.
    quantised: Matrix,
    out: Matrix,
    rows: usize,
}

/// Multiply-adds between two looks at whether the step is left: about a millisecond, and enough that a piece of its own costs nothing.
const PIECE_MACS: usize = 32 << 20;

/// A multiple of what the kernels compute together; all there are when rows are few. `macs` are those of one column.
const fn tiles_of_a_piece(macs: usize) -> usize {
    let tiles = PIECE_MACS / (macs * LANES + 1);
    if tiles < 4 { 4 } else { tiles / 4 * 4 }
}

impl Outcome {
    pub(crate) fn new(num_samplings: usize) -> Outcome {
        Outcome {
            leaving: Leaving::default(),
            not_finite: AtomicBool::new(false),
            drawn: (0..num_samplings).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Forgets the step before. There is room for a sequence a row; groups may need more, once.
    pub(crate) fn start(&mut self, num_samplings: usize) {
        if self.drawn.len() < num_samplings {
            self.drawn.resize_with(num_samplings, AtomicU64::default);
        }
        self.leaving.start();
        self.not_finite.store(false, Ordering::Relaxed);
    }

    pub(crate) fn stopped(&self) -> bool {
        self.leaving.is_stopped()
    }

    pub(crate) fn not_finite(&self) -> bool {
        self.not_finite.load(Ordering::Relaxed)
    }

    pub(crate) fn drawn(&self, sampling: usize) -> Drawn {
        let bits = self.drawn[sampling].load(Ordering::Relaxed);
        Drawn { token: bits as u32, logprob: f32::from_bits((bits >> 32) as u32) }
    }

    fn set_drawn(&self, sampling: usize, drawn: Drawn) {
        let bits = u64::from(drawn.logprob.to_bits()) << 32 | u64::from(drawn.token);
        self.drawn[sampling].store(bits, Ordering::Relaxed);
    }
}

impl Decoder {
    /// One member's part of a step. `on_point` is given by member 0 alone.
    pub(crate) fn run<'a>(
        &'a self,
        m: Member<'_>,
        step: Step<'_>,
        on_point: Option<OnPoint<'a>>,
    ) -> Result<(), Broken> {
        let mut watch = Watch::new(&self.outcome.leaving, on_point);
        self.embed(m, step);
        for n in 0..self.weights.layers.len() {
            if step.batch.num_tokens(n) > 0 {
                self.layer(m, step, n, &mut watch)?;
            } else {
                // As a layer's own barriers do: nobody says how this layer ended before all have seen how the last one did.
                m.wait()?;
            }
            watch.layer_end(n);
            m.wait()?;
            if self.outcome.stopped() {
                return Ok(());
            }
        }
        self.logits(m, step)
    }

    /// Rows of a member's share: embeddings and rotary angles. Nobody else looks at them before a barrier, the
    /// norm that follows has the same share. A row that the first layer leaves out was restored before.
    fn embed(&self, m: Member<'_>, step: Step<'_>) {
        for t in m.share(step.batch.num_tokens(0)) {
            let (hidden, head) = (self.config.hidden, self.config.head_dim);
            // SAFETY: see the top of the file; rows are that long.
            let (x, turns) = unsafe {
                (
                    std::slice::from_raw_parts_mut(self.scratch.residual.row(t), hidden),
                    std::slice::from_raw_parts_mut(self.scratch.turns.row(t), head),
                )
            };
            self.weights.embedding.row(step.plan.tokens[t] as usize, x);
            self.rope.fill(step.batch.places[t].position, turns);
        }
    }

    fn layer(&self, m: Member<'_>, step: Step<'_>, n: usize, watch: &mut Watch<'_>) -> Result<(), Broken> {
        let rows = step.batch.num_tokens(n);
        let (s, layer) = (&self.scratch, &self.weights.layers[n]);
        self.add_and_norm(m, rows, n > 0, &layer.attn_norm);
        m.wait()?;
        self.linear(m, &layer.qkv, self.of_normed(s.qkv, rows), watch);
        m.wait()?;
        self.rotate_and_store(m, step, n, watch);
        m.wait()?;
        self.attend(m, step, n, watch);
        m.wait()?;
        if !self.quantises_groups() {
            self.quantise(m, s.attended, self.config.num_heads * self.config.head_dim, rows)?;
        }
        let attended = Product { x: s.attended, quantised: s.quantised, out: s.projected, rows };
        self.linear(m, &layer.attn_output, attended, watch);
        m.wait()?;
        self.add_and_norm(m, rows, true, &layer.ffn_norm);
        m.wait()?;
        self.gate_and_up(m, layer, rows, watch);
        m.wait()?;
        let inner = Product { x: s.gate, quantised: s.inner, out: s.projected, rows };
        self.linear(m, &layer.down, inner, watch);
        Ok(())
    }

    /// `residual += projected` if `add`; `normed = norm(residual)`.
    fn add_and_norm(&self, m: Member<'_>, rows: usize, add: bool, weight: &[f32]) {
        for t in m.share(rows) {
            if add {
                self.add_projected(t);
            }
            self.norm_row(t, t, weight);
        }
    }

    fn add_projected(&self, t: usize) {
        let hidden = self.config.hidden;
        // SAFETY: see the top of the file; rows are that long and of different matrices.
        let (x, add) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.scratch.residual.row(t), hidden),
                std::slice::from_raw_parts(self.scratch.projected.row(t), hidden),
            )
        };
        for (x, add) in x.iter_mut().zip(add) {
            *x += add;
        }
    }

    /// Normalises row `from` of the residual into row `to` of `normed`.
    fn norm_row(&self, from: usize, to: usize, weight: &[f32]) {
        let (x, out) = (self.scratch.residual.row(from).cast_const(), self.scratch.normed.row(to));
        let norm =
            Norm { x, weight: weight.as_ptr(), out, len: self.config.hidden, eps: self.config.rms_eps };
        // SAFETY: see the top of the file; rows and weight are padded with zeros to whole vectors.
        unsafe { (self.kernels.norm)(&norm) }
        self.quantise_part(self.scratch.quantised, to, out, (0, self.config.hidden), self.config.hidden);
    }

    /// Quantises the rows of `x`, which the next matrix product takes; ends with a barrier.
    fn quantise(&self, m: Member<'_>, x: Matrix, cols: usize, rows: usize) -> Result<(), Broken> {
        if !self.int8 {
            return Ok(());
        }
        m.share(rows).for_each(|t| self.quantise_part(self.scratch.quantised, t, x.row(t), (0, cols), cols));
        m.wait()
    }

    /// `x`, which is row `t` from one column to another, whole blocks. A length that is no multiple of 32 has no quantised weights to meet.
    fn quantise_part(&self, to: Matrix, t: usize, x: *const f32, (from, end): (usize, usize), cols: usize) {
        if self.int8 && cols.is_multiple_of(QUANT_BLOCK) {
            let out = to.row(0).cast::<u8>().wrapping_add(record((t, from), cols));
            // SAFETY: see the top of the file; there is room for the records of a step's rows of this length.
            unsafe { (self.kernels.quantise)(&Quantise { x, len: end - from, out }) }
        }
    }

    /// Whether what attention gives is quantised by who computed it: the heads of one KV head are whole blocks.
    fn quantises_groups(&self) -> bool {
        let c = &self.config;
        self.int8 && (c.num_heads / c.num_kv_heads * c.head_dim).is_multiple_of(QUANT_BLOCK)
    }

    /// A member's column tiles of `out = x * weights`.
    fn linear(&self, m: Member<'_>, linear: &Linear, product: Product, watch: &mut Watch<'_>) {
        let total = linear.parts.iter().map(|(weights, _)| weights.num_tiles()).sum();
        let share = m.share(total);
        let mut before = 0;
        for (weights, column) in &linear.parts {
            let num = weights.num_tiles();
            let start = share.start.clamp(before, before + num) - before;
            let end = share.end.clamp(before, before + num) - before;
            let out = product.out;
            let out = Matrix::new(out.row(0).wrapping_add(*column), out.stride());
            self.pieces(m, weights, start..end, Product { out, ..product }, watch);
            before += num;
        }
    }

    /// Some tiles at a time, between which the step may be left.
    fn pieces(
        &self,
        m: Member<'_>,
        weights: &Packed,
        tiles: Range<usize>,
        product: Product,
        watch: &mut Watch<'_>,
    ) {
        let piece = tiles_of_a_piece(product.rows * weights.cols);
        let mut start = tiles.start;
        while start < tiles.end && !watch.leaves() {
            let end = tiles.end.min(start + piece);
            self.matmul(m, weights, start..end, product);
            start = end;
        }
    }

    fn matmul(&self, m: Member<'_>, weights: &Packed, tiles: Range<usize>, product: Product) {
        let Product { x, quantised, out, rows } = product;
        let scratch = self.scratch.members[m.index()].matmul.row(0);
        if self.int8 && weights.shape().is_quantised() {
            let matmul = Int8Matmul {
                weights,
                tiles,
                x: quantised.row(0).cast_const().cast(),
                num_rows: rows,
                out: out.row(0),
                out_stride: out.stride(),
                scratch,
                ahead: ahead(rows),
            };
            // SAFETY: see the top of the file; `x` was quantised before the last barrier.
            return unsafe { (self.kernels.matmul_int8)(&matmul) };
        }
        let matmul = Matmul {
            weights,
            tiles,
            x: x.row(0),
            x_stride: x.stride(),
            num_rows: rows,
            out: out.row(0),
            out_stride: out.stride(),
            scratch,
        };
        // SAFETY: see the top of the file; matrices have room for whole tiles.
        unsafe { (self.kernels.matmul)(&matmul) }
    }

    /// `gate = silu(normed * gate) * (normed * up)`, quantised, each member in its own columns, which are whole blocks.
    fn gate_and_up(&self, m: Member<'_>, layer: &LayerWeights, rows: usize, watch: &mut Watch<'_>) {
        const TILES: usize = QUANT_BLOCK / LANES;
        let (s, num_tiles, ffn) = (&self.scratch, layer.gate.num_tiles(), self.config.ffn);
        let blocks = m.share(num_tiles.div_ceil(TILES));
        let tiles = blocks.start * TILES..num_tiles.min(blocks.end * TILES);
        let (column, len) = (tiles.start * LANES, tiles.len() * LANES);
        for (weights, out) in [(&layer.gate, s.gate), (&layer.up, s.up)] {
            self.pieces(m, weights, tiles.clone(), self.of_normed(out, rows), watch);
        }
        for t in 0..rows {
            let gate = s.gate.row(t).wrapping_add(column);
            let silu = SiluMul { gate, up: s.up.row(t).wrapping_add(column), out: gate, len };
            // SAFETY: see the top of the file; these columns were computed by this member just now.
            unsafe { (self.kernels.silu_mul)(&silu) }
            self.quantise_part(s.inner, t, gate, (column, column + len), ffn);
        }
    }

    /// A product of what was normalised.
    const fn of_normed(&self, out: Matrix, rows: usize) -> Product {
        Product { x: self.scratch.normed, quantised: self.scratch.quantised, out, rows }
    }

    /// Logits of the wanted tokens, some rows at a time, and what is to become of them.
    fn logits(&self, m: Member<'_>, step: Step<'_>) -> Result<(), Broken> {
        let wanted = &step.batch.wanted;
        let output = self.weights.output();
        for (nth, group) in wanted.chunks(LOGIT_ROWS).enumerate() {
            for i in m.share(group.len()) {
                self.add_projected(group[i].token);
                self.norm_row(group[i].token, i, &self.weights.output_norm);
            }
            m.wait()?;
            let product = self.of_normed(self.scratch.logits, group.len());
            self.matmul(m, output, m.share(output.num_tiles()), product);
            m.wait()?;
            for i in m.share(group.len()) {
                self.use_logits(m, step, nth * LOGIT_ROWS + i, i);
            }
            m.wait()?;
        }
        Ok(())
    }

    /// Draws from, or copies, row `row` of the logits for the `nth` wanted token. All tokens of a row are drawn from the same logits.
    fn use_logits(&self, m: Member<'_>, step: Step<'_>, nth: usize, row: usize) {
        let vocab = self.config.vocab;
        // SAFETY: see the top of the file; a row is that long.
        let logits = unsafe { std::slice::from_raw_parts(self.scratch.logits.row(row), vocab) };
        match &step.batch.wanted[nth].purpose {
            Purpose::Sample { samplings, .. } => {
                // SAFETY: this member's own; the reference ends with this call.
                let sampler = unsafe { &mut *self.scratch.members[m.index()].sampler.get() };
                for (nth, sampling) in samplings.clone().zip(&step.plan.samplings[samplings.clone()]) {
                    // SAFETY: rows of logits are padded to whole vectors.
                    match unsafe { sampler::draw(self.kernels, logits, sampling, sampler) } {
                        Ok(drawn) => self.outcome.set_drawn(nth, drawn),
                        Err(sampler::NotFinite) => self.outcome.not_finite.store(true, Ordering::Relaxed),
                    }
                }
            }
            Purpose::Copy { nth } => {
                // SAFETY: the caller gave `num_copied` rows of the vocabulary's size; this one is this member's.
                let out = unsafe { std::slice::from_raw_parts_mut(step.copied.row(*nth), vocab) };
                out.copy_from_slice(logits);
                if logits.iter().any(|l| !l.is_finite()) {
                    self.outcome.not_finite.store(true, Ordering::Relaxed);
                }
            }
        }
    }
}
