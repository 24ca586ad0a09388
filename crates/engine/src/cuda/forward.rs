//! The forward pass: what is queued for each part of a step.

use std::sync::Arc;

use super::arena::CudaArena;
use super::drawn::Drawn;
use super::driver::{DeviceError, Stream};
use super::kernels::{Attend, Kernels, Norm, RopeKv, Sample};
use super::linear::Linear;
use super::products::{Factors, Products};
use super::scratch::{LOGIT_ROWS, Scratch};
use super::tables::{LogitGroup, Tables, Upload};
use super::weights::DeviceWeights;

/// The model with everything that a step needs. Every method queues on the stream that it is given, and the engine finishes that
/// stream before it begins another step: that is why the products below are sound.
///
/// What is queued for tables of equal lengths differs in nothing, addresses included: a decode step is captured once and launched again
/// ([`super::graphs`]). So nothing here may look at what the words say.
pub(super) struct Forward {
    pub(super) kernels: Kernels,
    pub(super) products: Products,
    pub(super) weights: DeviceWeights,
    pub(super) scratch: Scratch,
    pub(super) arena: Arc<CudaArena>,
}

/// Where a step is queued, and its tables, which are on their way to the device.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) stream: &'a Stream,
    pub(super) upload: &'a Upload,
    pub(super) tables: &'a Tables,
}

type Outcome = Result<(), DeviceError>;

impl Forward {
    /// A step of which nobody wants to hear before it is over: embedding, all layers, logits and drawing.
    pub(super) fn decode(&mut self, step: Step<'_>, drawn: &Drawn) -> Outcome {
        self.embed(step)?;
        for n in 0..self.weights.layers.len() {
            self.keys_and_values(step, n)?;
            self.rest_of_layer(step, n)?;
        }
        for group in &step.tables.groups {
            self.logits(step, group)?;
            self.draw(step, group, drawn)?;
        }
        Ok(())
    }

    pub(super) fn copy_blocks(&self, step: Step<'_>, num_blocks: u32) -> Outcome {
        for pairs in &step.tables.copies {
            let pairs = step.upload.span(pairs.clone());
            self.kernels.copy_blocks(step.stream, self.arena.all(), pairs, num_blocks)?;
        }
        Ok(())
    }

    pub(super) fn embed(&self, step: Step<'_>) -> Outcome {
        let tokens = step.upload.span(step.tables.tokens.clone());
        self.weights.embedding.gather(step.stream, &self.kernels, self.scratch.residual, tokens)
    }

    /// Up to where the layer's K and V are in their blocks.
    pub(super) fn keys_and_values(&mut self, step: Step<'_>, n: usize) -> Outcome {
        let Step { stream, upload, tables } = step;
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
        let factors = Factors { x: s.normed, out: s.qkv, num_rows };
        multiply(stream, &layer.qkv, (&self.kernels, &mut self.products), factors)?;
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

    pub(super) fn rest_of_layer(&mut self, step: Step<'_>, n: usize) -> Outcome {
        self.attend(step, n)?;
        let stream = step.stream;
        let (s, layer) = (&self.scratch, &self.weights.layers[n]);
        let num_rows = step.tables.tokens.len();
        let factors = Factors { x: s.attended, out: s.projected, num_rows };
        multiply(stream, &layer.attn_output, (&self.kernels, &mut self.products), factors)?;
        let norm = Norm {
            residual: s.residual,
            projected: Some(s.projected),
            weight: layer.ffn_norm,
            select: None,
            normed: s.normed,
        };
        self.kernels.add_norm(stream, norm, num_rows as u32)?;
        let factors = Factors { x: s.normed, out: s.gate_up, num_rows };
        multiply(stream, &layer.gate_up, (&self.kernels, &mut self.products), factors)?;
        self.kernels.silu_mul(stream, s.gate_up, s.hidden, num_rows as u32)?;
        let factors = Factors { x: s.hidden, out: s.projected, num_rows };
        multiply(stream, &layer.down, (&self.kernels, &mut self.products), factors)
    }

    fn attend(&self, step: Step<'_>, n: usize) -> Outcome {
        let Step { stream, upload, tables } = step;
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
            self.kernels.decode(stream, attend, s.partials, launch.capacity as u32)?;
        }
        let prefill = attend(tables.prefill_rows.clone(), tables.prefill_items.clone());
        self.kernels.prefill(stream, prefill)
    }

    /// Logits of a group's tokens, after the last layer.
    pub(super) fn logits(&mut self, step: Step<'_>, group: &LogitGroup) -> Outcome {
        let s = &self.scratch;
        let start = step.tables.select.start;
        let select = step.upload.span(start + group.wanted.start..start + group.wanted.end);
        let norm = Norm {
            residual: s.residual,
            projected: Some(s.projected),
            weight: self.weights.output_norm,
            select: Some(select),
            normed: s.normed,
        };
        let num_rows = group.wanted.len();
        self.kernels.add_norm(step.stream, norm, num_rows as u32)?;
        let factors = Factors { x: s.normed, out: s.logits, num_rows };
        multiply(step.stream, &self.weights.output, (&self.kernels, &mut self.products), factors)
    }

    /// Draws from the logits of the group before.
    pub(super) fn draw(&self, step: Step<'_>, group: &LogitGroup, drawn: &Drawn) -> Outcome {
        let num = step.tables.num_samplings();
        for first in group.samplings.clone().step_by(LOGIT_ROWS) {
            let some = first..group.samplings.end.min(first + LOGIT_ROWS);
            let (tokens, logprobs) = drawn.places(some.clone(), num);
            let sample = Sample {
                logits: self.scratch.logits,
                samplings: step.upload.samplings(step.tables, some.clone()),
                probabilities: self.scratch.probabilities,
                tokens,
                logprobs,
                num: some.len() as u32,
            };
            self.kernels.sample(step.stream, sample)?;
        }
        Ok(())
    }
}

/// Queues a product over scratch, which has room for rows in whole units, and for a whole group of logits.
fn multiply(
    stream: &Stream,
    weight: &Linear,
    (kernels, products): (&Kernels, &mut Products),
    factors: Factors,
) -> Outcome {
    // SAFETY: all memory is the engine's own, which finishes the stream before anybody else touches it.
    unsafe { weight.multiply(stream, kernels, products, factors) }
}
