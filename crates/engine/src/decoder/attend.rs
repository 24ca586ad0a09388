//! From a row of q, k and v to a row of attention's output.

use std::cell::RefCell;

use baton_kv::BlockMemory;

use super::leave::Watch;
use super::{Decoder, Step};
use crate::kernels::{Attend, MAX_HEAD_DIM, Norm, StoreRow};
use crate::team::Member;

fn add(x: &mut [f32], bias: &[f32]) {
    x.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
}

/// Writes elements of 1, 2 or 4 bytes, `stride` bytes apart.
///
/// # Safety
/// Every place from `to` on, `stride` bytes apart, takes an element.
unsafe fn scatter(elements: &[u8], size: usize, to: *mut u8, stride: usize) {
    // SAFETY: by contract.
    unsafe {
        match size {
            1 => scatter_of::<1>(elements, to, stride),
            2 => scatter_of::<2>(elements, to, stride),
            _ => scatter_of::<4>(elements, to, stride),
        }
    }
}

/// # Safety
/// As [`scatter`].
unsafe fn scatter_of<const SIZE: usize>(elements: &[u8], to: *mut u8, stride: usize) {
    for (nth, &element) in elements.as_chunks::<SIZE>().0.iter().enumerate() {
        // SAFETY: by contract.
        unsafe { to.add(nth * stride).cast::<[u8; SIZE]>().write(element) }
    }
}

impl Decoder {
    /// Adds biases to queries, keys and values, normalises heads of queries and keys, turns them by their positions, and
    /// writes K and V to their blocks.
    pub(super) fn rotate_and_store(
        &self,
        m: Member<'_>,
        step: Step<'_>,
        layer: usize,
        watch: &mut Watch<'_>,
    ) {
        if watch.leaves() {
            return;
        }
        let (c, base) = (&self.config, self.arena.layer(layer));
        let block_bytes = self.arena.layout().block_layer_bytes();
        let weights = &self.weights.layers[layer];
        let [_, (_, k_column), (_, v_column)] = &weights.qkv.parts[..] else { return };
        for t in m.share(step.batch.num_tokens(layer)) {
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

    /// Rounds one token's K (`[head][element][token]`) and V (`[head][token][element]`) into a block, each followed by its
    /// scales (`[head][token]`) if the element type has them.
    ///
    /// # Safety
    /// `block` is a block of one layer that nobody else reads or writes at this slot.
    unsafe fn store_kv(&self, block: *mut u8, slot: usize, k: &[f32], v: &[f32]) {
        let layout = self.arena.layout();
        let (size, dtype, head_dim) = (layout.block_size, layout.dtype, self.config.head_dim);
        let (store, element) = (self.kernels.store(dtype), dtype.size());
        let scales = k.len() * size * element;
        let mut rounded = [0u8; MAX_HEAD_DIM * size_of::<f32>()];
        // SAFETY: a block is K and V, half of it each: `len * size` elements, then a scale for each head and slot. `slot` is below `size`,
        // a head is at most 256 elements of at most 4 bytes.
        unsafe {
            let v_half = block.add(layout.block_layer_bytes() / 2);
            let put_scale = |half: *mut u8, head: usize, scale: u8| {
                if dtype.scale_bytes() > 0 {
                    half.add(scales + head * size + slot).write(scale);
                }
            };
            for (head, k) in k.chunks_exact(head_dim).enumerate() {
                let scale = store(&StoreRow { x: k.as_ptr(), out: rounded.as_mut_ptr(), len: head_dim });
                let to = block.add((head * head_dim * size + slot) * element);
                scatter(&rounded[..head_dim * element], element, to, size * element);
                put_scale(block, head, scale);
            }
            for (head, v) in v.chunks_exact(head_dim).enumerate() {
                let out = v_half.add((head * size + slot) * head_dim * element);
                let scale = store(&StoreRow { x: v.as_ptr(), out, len: head_dim });
                put_scale(v_half, head, scale);
            }
        }
    }

    pub(super) fn attend(&self, m: Member<'_>, step: Step<'_>, layer: usize, watch: &mut Watch<'_>) {
        let (c, layout) = (&self.config, self.arena.layout());
        let group = c.num_heads / c.num_kv_heads;
        let (q, out) = (self.scratch.qkv, self.scratch.attended);
        let watch = RefCell::new(watch);
        let leaves = || watch.borrow_mut().leaves();
        let attending = step.batch.attending(layer);
        let mut share = attending.share(m.index(), m.count(), c.num_kv_heads);
        while !share.is_empty() && !leaves() {
            let (kv_head, unit) = attending.pair(share.start, c.num_kv_heads);
            let num_heads = attending.together(share.clone(), c.num_kv_heads, group);
            share.start += num_heads;
            let next = (!share.is_empty()).then(|| attending.pair(share.start, c.num_kv_heads));
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
                num_heads,
                num_kv_heads: c.num_kv_heads,
                block_size: layout.block_size,
                blocks: &step.plan.blocks[unit.blocks.clone()],
                next: next.map(|(kv_head, unit)| (kv_head, &step.plan.blocks[unit.blocks.clone()])),
                layer: self.arena.layer(layer),
                block_bytes: layout.block_layer_bytes(),
                scale: 1.0 / (c.head_dim as f32).sqrt(),
                scratch: self.scratch.members[m.index()].attend.row(0),
                leaves: &leaves,
            };
            // SAFETY: see the top of `decoder`; the plan was checked, so the table covers the unit's positions and its
            // blocks lie in the arena; this step's K and V were written before the last barrier.
            unsafe { self.kernels.attend(layout.dtype)(&attend) }
            if self.quantises_groups() {
                let (width, cols) = (num_heads * group * c.head_dim, c.num_heads * c.head_dim);
                for t in unit.first_token..unit.first_token + unit.num_tokens {
                    let x = out.row(t).wrapping_add(column);
                    self.quantise_part(self.scratch.quantised, t, x, (column, column + width), cols);
                }
            }
        }
    }
}
