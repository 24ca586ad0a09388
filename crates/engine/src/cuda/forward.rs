//! The forward pass: what is queued for each part of a step.

use std::sync::Arc;

use super::arena::CudaArena;
use super::driver::{DeviceError, Span, Stream};
use super::kernels::{Attend, Kernels, Norm, RopeKv, Sample};
use super::products::{Factors, Products};
use super::scratch::{DECODE_CAPACITY, Scratch};
use super::tables::{LogitGroup, Tables, Upload};
use super::weights::DeviceWeights;

/// The model with everything that a step needs. Every method queues on the stream that it is given, and the engine finishes that
/// stream before it begins another step: that is why the products below are sound.
pub(super) struct Forward {
    pub(super) kernels: Kernels,
    pub(super) products: Products,
    pub(super) weights: DeviceWeights,
    pub(super) scratch: Scratch,
    pub(super) arena: Arc<CudaArena>,
}

type Outcome = Result<(), DeviceError>;

impl Forward {
    pub(super) fn embed(&self, stream: &Stream, upload: &Upload, tables: &Tables) -> Outcome {
        let tokens = upload.span(tables.tokens.clone());
        self.kernels.embed(stream, self.scratch.residual, self.weights.embedding, tokens)
    }

    /// Up to where the layer's K and V are in their blocks.
    pub(super) fn keys_and_values(
        &mut self,
        stream: &Stream,
        upload: &Upload,
        tables: &Tables,
        n: usize,
    ) -> Outcome {
        let (s, layer) = (&self.scratch, &self.weights.layers[n]);
        let num_rows = tables.tokens.len();
        let norm = Norm {
            residual: s.residual,
            projected: (n > 0).then_some(s.projected),
            weight: layer.attn_norm,
            select: None,
            normed: s.normed,
        };
        self.kernels.add_norm(stream, norm, num_rows as u32)?;
        // SAFETY: see the top of the file; scratch has room for rows in whole units.
        unsafe { self.products.multiply(stream, &layer.qkv, Factors { x: s.normed, out: s.qkv, num_rows }) }?;
        let rope = RopeKv {
            qkv: s.qkv,
            bias: layer.qkv_bias,
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            turns: self.weights.turns,
            positions: upload.span(tables.positions.clone()),
            slots: upload.span(tables.slots.clone()),
            q: s.q,
            layer: self.arena.layer(n),
        };
        self.kernels.rope_kv(stream, rope)
    }

    pub(super) fn rest_of_layer(
        &mut self,
        stream: &Stream,
        upload: &Upload,
        tables: &Tables,
        n: usize,
    ) -> Outcome {
        self.attend(stream, upload, tables, n)?;
        let (s, layer) = (&self.scratch, &self.weights.layers[n]);
        let num_rows = tables.tokens.len();
        let factors = Factors { x: s.attended, out: s.projected, num_rows };
        // SAFETY: see the top of the file; scratch has room for rows in whole units.
        unsafe { self.products.multiply(stream, &layer.attn_output, factors) }?;
        let norm = Norm {
            residual: s.residual,
            projected: Some(s.projected),
            weight: layer.ffn_norm,
            select: None,
            normed: s.normed,
        };
        self.kernels.add_norm(stream, norm, num_rows as u32)?;
        let factors = Factors { x: s.normed, out: s.gate_up, num_rows };
        // SAFETY: as above.
        unsafe { self.products.multiply(stream, &layer.gate_up, factors) }?;
        self.kernels.silu_mul(stream, s.gate_up, s.hidden, num_rows as u32)?;
        let factors = Factors { x: s.hidden, out: s.projected, num_rows };
        // SAFETY: as above.
        unsafe { self.products.multiply(stream, &layer.down, factors) }
    }

    fn attend(&self, stream: &Stream, upload: &Upload, tables: &Tables, n: usize) -> Outcome {
        let s = &self.scratch;
        let attend = |rows, items| Attend {
            q: s.q,
            layer: self.arena.layer(n),
            rows: upload.span(rows),
            items: upload.span(items),
            blocks: upload.span(tables.blocks.clone()),
            out: s.attended,
        };
        for launch in &tables.decode {
            let attend = attend(launch.rows.clone(), launch.items.clone());
            self.kernels.decode(stream, attend, s.partials, DECODE_CAPACITY as u32)?;
        }
        let prefill = attend(tables.prefill_rows.clone(), tables.prefill_items.clone());
        self.kernels.prefill(stream, prefill)
    }

    /// Logits of a group's tokens, after the last layer.
    pub(super) fn logits(
        &mut self,
        stream: &Stream,
        upload: &Upload,
        tables: &Tables,
        group: &LogitGroup,
    ) -> Outcome {
        let s = &self.scratch;
        let start = tables.select.start;
        let select = upload.span(start + group.wanted.start..start + group.wanted.end);
        let norm = Norm {
            residual: s.residual,
            projected: Some(s.projected),
            weight: self.weights.output_norm,
            select: Some(select),
            normed: s.normed,
        };
        let num_rows = group.wanted.len();
        self.kernels.add_norm(stream, norm, num_rows as u32)?;
        let factors = Factors { x: s.normed, out: s.logits, num_rows };
        // SAFETY: see the top of the file; scratch has room for a whole group.
        unsafe { self.products.multiply(stream, &self.weights.output, factors) }
    }

    /// Draws from the logits of the group before.
    pub(super) fn sample(&self, stream: &Stream, samplings: Span, tokens: Span, logprobs: Span) -> Outcome {
        let sample = Sample {
            logits: self.scratch.logits,
            samplings,
            probabilities: self.scratch.probabilities,
            tokens,
            logprobs,
            num: (tokens.len / 4) as u32,
        };
        self.kernels.sample(stream, sample)
    }
}
