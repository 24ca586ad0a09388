//! From a row of q, k and v to a row of attention's output.

use baton_kv::{BlockMemory, KvDtype};

use super::{Decoder, Step};
use crate::kernels::{Attend, Norm, StoreHalf};
use crate::team::Member;

fn add(x: &mut [f32], bias: &[f32]) {
    x.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
}

impl Decoder {
    /// Adds biases to queries, keys and values, normalises heads of queries and keys, turns them by their positions, and
    /// writes K and V to their blocks.
    pub(super) fn rotate_and_store(&self, m: Member<'_>, step: Step<'_>, layer: usize) {
        let (c, base) = (&self.config, self.arena.layer(layer));
        let block_bytes = self.arena.layout().block_layer_bytes();
        let weights = &self.weights.layers[layer];
        let [_, (_, k_column), (_, v_column)] = &weights.qkv.parts[..] else { return };
        for t in m.share(step.batch.places.len()) {
            let place = step.batch.places[t];
            let qkv = self.scratch.qkv.row(t);
            // SAFETY: see the top of `decoder`; a row holds q, k and v at these columns. The plan was checked: the block
            // lies in the arena and belongs to this row alone.
            unsafe {
                let turns = std::slice::from_raw_parts(self.scratch.turns.row(t), c.head_dim);
                let heads = |column: usize, num: usize| {
                    std::slice::from_raw_parts_mut(qkv.add(column), num * c.head_dim)
                };
                let (q, k) = (heads(0, c.num_heads), heads(*k_column, c.num_kv_heads));
                let v = heads(*v_column, c.num_kv_heads);
                if let Some(biases) = &weights.qkv_bias {
                    add(q, &biases.q);
                    add(k, &biases.k);
                    add(v, &biases.v);
                }
                for (heads, norm) in [(q, &weights.q_norm), (&mut *k, &weights.k_norm)] {
                    for head in heads.chunks_exact_mut(c.head_dim) {
                        self.norm_head(head, norm.as_deref());
                        self.rope.apply(head, turns);
                    }
                }
                let block = base.add(place.block as usize * block_bytes);
                self.store_kv(block, place.slot as usize, k, v);
            }
        }
    }

    /// Normalises one head in place, if the model has a norm there.
    fn norm_head(&self, head: &mut [f32], weight: Option<&[f32]>) {
        if let Some(weight) = weight {
            let (x, out) = (head.as_ptr(), head.as_mut_ptr());
            let norm = Norm { x, weight: weight.as_ptr(), out, len: head.len(), eps: self.config.rms_eps };
            // SAFETY: head and weight have the same length, a multiple of 16; the kernel reads each vector before it writes it.
            unsafe { (self.kernels.norm)(&norm) }
        }
    }

    /// Writes one token's K (`[head][element][token]`) and V (`[head][token][element]`) to a block.
    ///
    /// # Safety
    /// `block` is a block of one layer that nobody else reads or writes at this slot.
    unsafe fn store_kv(&self, block: *mut u8, slot: usize, k: &[f32], v: &[f32]) {
        let (size, head_dim) = (self.arena.layout().block_size, self.config.head_dim);
        match self.arena.layout().dtype {
            // SAFETY: K and V are `len * size` elements each, and `slot` is below `size`.
            KvDtype::F32 => unsafe {
                let block = block.cast::<f32>();
                for (i, &x) in k.iter().enumerate() {
                    block.add(i * size + slot).write(x);
                }
                for (head, v) in v.chunks_exact(head_dim).enumerate() {
                    let to = block.add(k.len() * size + (head * size + slot) * head_dim);
                    std::ptr::copy_nonoverlapping(v.as_ptr(), to, head_dim);
                }
            },
            // SAFETY: as above; a head is a multiple of 16 and at most 256.
            KvDtype::F16 => unsafe {
                let block = block.cast::<u16>();
                for (head, k) in k.chunks_exact(head_dim).enumerate() {
                    let mut rounded = [0u16; crate::kernels::MAX_HEAD_DIM];
                    let half = StoreHalf { x: k.as_ptr(), out: rounded.as_mut_ptr(), len: head_dim };
                    (self.kernels.store_half)(&half);
                    for (d, &x) in rounded[..head_dim].iter().enumerate() {
                        block.add((head * head_dim + d) * size + slot).write(x);
                    }
                }
                for (head, v) in v.chunks_exact(head_dim).enumerate() {
                    let out = block.add(k.len() * size + (head * size + slot) * head_dim);
                    (self.kernels.store_half)(&StoreHalf { x: v.as_ptr(), out, len: head_dim });
                }
            },
        }
    }

    pub(super) fn attend(&self, m: Member<'_>, step: Step<'_>, layer: usize) {
        let (c, layout) = (&self.config, self.arena.layout());
        let group = c.num_heads / c.num_kv_heads;
        let units = &step.batch.units;
        let (q, out) = (self.scratch.qkv, self.scratch.attended);
        for pair in step.batch.attention_share(m.index(), m.count(), c.num_kv_heads) {
            let (kv_head, unit) = (pair / units.len(), &units[pair % units.len()]);
            let column = kv_head * group * c.head_dim;
            let attend = Attend {
                q: q.row(unit.first_token).wrapping_add(column),
                q_stride: q.stride(),
                out: out.row(unit.first_token).wrapping_add(column),
                out_stride: out.stride(),
                num_rows: unit.num_tokens,
                position: unit.position,
                group,
                head_dim: c.head_dim,
                kv_head,
                num_kv_heads: c.num_kv_heads,
                block_size: layout.block_size,
                blocks: &step.plan.blocks[unit.blocks.clone()],
                layer: self.arena.layer(layer),
                block_bytes: layout.block_layer_bytes(),
                scale: 1.0 / (c.head_dim as f32).sqrt(),
                scratch: self.scratch.members[m.index()].attend.row(0),
            };
            // SAFETY: see the top of `decoder`; the plan was checked, so the table covers the unit's positions and its
            // blocks lie in the arena; this step's K and V were written before the last barrier.
            unsafe {
                match layout.dtype {
                    KvDtype::F32 => (self.kernels.attend_f32)(&attend),
                    KvDtype::F16 => (self.kernels.attend_f16)(&attend),
                }
            }
        }
    }
}
