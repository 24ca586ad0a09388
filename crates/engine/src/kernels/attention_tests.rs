//! Attention of each instruction set and element type against its definition in f64, over shuffled blocks of poisoned memory.

use std::cell::Cell;

use baton_kv::{KvDtype, KvLayout};
use half::{bf16, f16};

use super::element::tests::e4m3_value;
use super::tests::{Random, tables};
use super::*;

/// Blocks of one layer, the first of which belong to the sequence in shuffled order.
struct Cache {
    layout: KvLayout,
    bytes: Vec<u8>,
    blocks: Vec<u32>,
}

impl Cache {
    fn new(
        dtype: KvDtype,
        (num_kv_heads, head_dim, block_size): (usize, usize, usize),
        context: usize,
    ) -> Cache {
        let layout = KvLayout {
            model_digest: [0; 32],
            num_layers: 1,
            num_kv_heads,
            head_dim,
            block_size,
            dtype,
            arrangement: String::new(),
            numerics_id: String::new(),
        };
        let num_blocks = layout.blocks_for(context) + 3;
        let mut blocks: Vec<u32> = (0..num_blocks as u32).collect();
        let mut random = Random(context as u64);
        for i in (1..num_blocks).rev() {
            blocks.swap(i, random.next() as usize % (i + 1));
        }
        blocks.truncate(layout.blocks_for(context));
        // All ones are NaN in every type, in fp8 by the scale.
        Cache { bytes: vec![0xff; num_blocks * layout.block_bytes()], blocks, layout }
    }

    /// Byte of an element of K or V, and of its scale.
    fn place(&self, is_v: bool, head: usize, token: usize, dim: usize) -> (usize, usize) {
        let l = &self.layout;
        let (size, block_size) = (l.dtype.size(), l.block_size);
        let block = self.blocks[token / block_size] as usize * l.block_bytes();
        let half = block + if is_v { l.block_bytes() / 2 } else { 0 };
        let slot = token % block_size;
        let element = match is_v {
            false => (head * l.head_dim + dim) * block_size + slot,
            true => (head * block_size + slot) * l.head_dim + dim,
        };
        let scales = half + l.num_kv_heads * l.head_dim * block_size * size;
        (half + element * size, scales + head * block_size + slot)
    }

    /// Rounds a row into its place.
    fn put(&mut self, kernels: &Kernels, is_v: bool, head: usize, token: usize, row: &[f32]) {
        let size = self.layout.dtype.size();
        let mut rounded = vec![0; row.len() * size];
        let store = StoreRow { x: row.as_ptr(), out: rounded.as_mut_ptr(), len: row.len() };
        // SAFETY: the table is available; both cover a row.
        let scale = unsafe { (kernels.store(self.layout.dtype))(&store) };
        for (dim, element) in rounded.chunks_exact(size).enumerate() {
            let (at, scale_at) = self.place(is_v, head, token, dim);
            self.bytes[at..at + size].copy_from_slice(element);
            if self.layout.dtype.scale_bytes() > 0 {
                self.bytes[scale_at] = scale;
            }
        }
    }

    /// An element as it is stored, by the book.
    fn value(&self, is_v: bool, head: usize, token: usize, dim: usize) -> f64 {
        let (at, scale_at) = self.place(is_v, head, token, dim);
        let two = || [self.bytes[at], self.bytes[at + 1]];
        match self.layout.dtype {
            KvDtype::F32 => f64::from(f32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())),
            KvDtype::F16 => f16::from_le_bytes(two()).to_f64(),
            KvDtype::BF16 => bf16::from_le_bytes(two()).to_f64(),
            KvDtype::Fp8 => e4m3_value(self.bytes[at]) * 2f64.powi(i32::from(self.bytes[scale_at]) - 135),
        }
    }

    /// Rows of one KV head's group from `position` on, over the kernel.
    fn attend(
        &self,
        kernels: &Kernels,
        q: &[f32],
        group: usize,
        kv_head: usize,
        position: usize,
    ) -> Vec<f32> {
        self.attend_until(kernels, q, (group, kv_head, position), &|| false)
    }

    /// As [`Cache::attend`], of (group, KV head, position), unless it `leaves`.
    fn attend_until(
        &self,
        kernels: &Kernels,
        q: &[f32],
        (group, kv_head, position): (usize, usize, usize),
        leaves: &dyn Fn() -> bool,
    ) -> Vec<f32> {
        let l = &self.layout;
        let width = group * l.head_dim;
        let mut out = vec![f32::NAN; q.len()];
        let mut scratch = vec![f32::NAN; ATTEND_SCRATCH_FLOATS];
        let attend = Attend {
            q: q.as_ptr(),
            q_stride: width,
            out: out.as_mut_ptr(),
            out_stride: width,
            num_rows: q.len() / width,
            position,
            group,
            head_dim: l.head_dim,
            kv_head,
            num_heads: 1,
            num_kv_heads: l.num_kv_heads,
            block_size: l.block_size,
            blocks: &self.blocks,
            // Beyond all blocks: asking early for what is not there changes nothing.
            next: Some((kv_head + 1, &[0, 1, u32::MAX])),
            layer: self.bytes.as_ptr(),
            block_bytes: l.block_bytes(),
            scale: 1.0 / (l.head_dim as f32).sqrt(),
            scratch: scratch.as_mut_ptr(),
            leaves,
        };
        // SAFETY: the table is available; queries, outputs, blocks and scratch are as large as the fields say.
        unsafe { (kernels.attend(l.dtype))(&attend) }
        out
    }

    /// One query's answer, by definition.
    fn exact(&self, q: &[f32], kv_head: usize, num_tokens: usize) -> Vec<f64> {
        let dim = self.layout.head_dim;
        let scores: Vec<f64> = (0..num_tokens)
            .map(|t| {
                let products = (0..dim).map(|d| f64::from(q[d]) * self.value(false, kv_head, t, d));
                products.sum::<f64>() / (dim as f64).sqrt()
            })
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let value = |t, d| self.value(true, kv_head, t, d);
        (0..dim)
            .map(|d| weights.iter().enumerate().map(|(t, w)| w * value(t, d)).sum::<f64>() / sum)
            .collect()
    }
}

/// (KV heads, element of a head, block size, query heads a KV head, first position, rows).
const SHAPES: [(usize, usize, usize, usize, usize, usize); 8] = [
    (1, 16, 16, 1, 0, 1),
    (3, 64, 16, 3, 0, 17),
    (2, 64, 16, 3, 254, 5),
    (1, 80, 32, 5, 255, 1),
    (2, 48, 64, 7, 300, 2),
    (1, 256, 256, 2, 511, 3),
    (2, 16, 128, 12, 600, 13),
    (3, 64, 16, 3, 700, 1),
];

#[test]
fn attention_is_its_definition_for_every_element_type_over_shuffled_blocks() {
    for kernels in tables() {
        for dtype in KvDtype::ALL {
            for (nth, (num_kv_heads, head_dim, block_size, group, position, num_rows)) in
                SHAPES.into_iter().enumerate()
            {
                let what = format!("{:?}, {dtype}, shape {nth}", kernels.isa);
                let mut random = Random(nth as u64 + 50);
                let context = position + num_rows;
                let mut cache = Cache::new(dtype, (num_kv_heads, head_dim, block_size), context);
                for token in 0..context {
                    for head in 0..num_kv_heads {
                        for is_v in [false, true] {
                            // Rows of very different sizes, so that a scale that is not its row's shows.
                            let size = 2f32.powi((random.next() % 7) as i32 - 4);
                            let row: Vec<f32> = random.floats(head_dim).iter().map(|x| x * size).collect();
                            cache.put(kernels, is_v, head, token, &row);
                        }
                    }
                }
                let width = group * head_dim;
                let q: Vec<f32> = random.floats(num_rows * width).iter().map(|x| 4.0 * x).collect();
                for kv_head in 0..num_kv_heads {
                    let got = cache.attend(kernels, &q, group, kv_head, position);
                    for row in 0..num_rows {
                        let rows = row * width..(row + 1) * width;
                        let alone = cache.attend(kernels, &q[rows.clone()], group, kv_head, position + row);
                        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        assert_eq!(bits(&got[rows.clone()]), bits(&alone), "{what}: row {row} alone");
                        let queries = q[rows.clone()].chunks_exact(head_dim);
                        for (q, got) in queries.zip(got[rows].chunks_exact(head_dim)) {
                            let want = cache.exact(q, kv_head, position + row + 1);
                            let off = got
                                .iter()
                                .zip(&want)
                                .map(|(&g, w)| (f64::from(g) - w).abs())
                                .fold(0.0, f64::max);
                            assert!(off < 2e-5, "{what}: row {row} is off by {off}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn attention_over_a_long_context_is_left_between_tiles() {
    const CONTEXT: usize = 5000;
    for kernels in tables() {
        let mut cache = Cache::new(KvDtype::F16, (1, 16, 16), CONTEXT);
        for token in 0..CONTEXT {
            for is_v in [false, true] {
                cache.put(kernels, is_v, 0, token, &[0.5; 16]);
            }
        }
        let looks = Cell::new(0);
        let attend_until = |last: usize| {
            looks.set(0);
            cache.attend_until(kernels, &[1.0; 48], (3, 0, CONTEXT - 1), &|| {
                looks.update(|num| num + 1);
                looks.get() == last
            })
        };
        let whole = attend_until(usize::MAX);
        // 20 tiles, and a look between every four of them.
        assert_eq!((looks.get(), whole.iter().any(|x| x.is_nan())), (4, false), "{:?}", kernels.isa);
        for last in 1..=4 {
            let nothing = attend_until(last);
            assert_eq!((looks.get(), nothing.iter().all(|x| x.is_nan())), (last, true), "{:?}", kernels.isa);
        }
    }
}

#[test]
fn every_fp8_code_and_scale_is_read_as_its_value() {
    for kernels in tables() {
        let mut cache = Cache::new(KvDtype::Fp8, (1, 256, 16), 1);
        cache.put(kernels, false, 0, 0, &[0.0; 256]);
        let codes: Vec<u8> = (0..=255).filter(|code| code & 0x7f != 0x7f).collect();
        for scale in (1..=254u8).step_by(11) {
            for dim in 0..256 {
                let (at, scale_at) = cache.place(true, 0, 0, dim);
                cache.bytes[at] = codes.get(dim).copied().unwrap_or(0);
                cache.bytes[scale_at] = scale;
            }
            // One token: its weight is 1, so the answer is its V.
            let got = cache.attend(kernels, &[0.0; 256], 1, 0, 0);
            for (dim, (&code, got)) in codes.iter().zip(got).enumerate() {
                let want = cache.value(true, 0, 0, dim);
                let least = f64::from(f32::MIN_POSITIVE);
                assert!(
                    f64::from(got) == want || want.abs() < least,
                    "{:?}, {code} at {scale}: {got}, want {want}",
                    kernels.isa
                );
            }
        }
    }
}

#[test]
fn a_value_that_is_not_finite_is_never_hidden() {
    for kernels in tables() {
        for dtype in KvDtype::ALL {
            for (is_v, bad) in [(false, f32::NAN), (true, f32::NAN), (true, f32::INFINITY)] {
                let mut cache = Cache::new(dtype, (1, 32, 16), 20);
                for token in 0..20 {
                    for which in [false, true] {
                        let mut row = [0.5; 32];
                        if token == 7 && which == is_v {
                            row[9] = bad;
                        }
                        cache.put(kernels, which, 0, token, &row);
                    }
                }
                let sees = |position| cache.attend(kernels, &[1.0; 32], 1, 0, position);
                assert!(sees(6).iter().all(|x| x.is_finite()), "{:?}, {dtype}", kernels.isa);
                assert!(sees(7).iter().any(|x| !x.is_finite()), "{:?}, {dtype}, {bad}", kernels.isa);
                assert!(sees(19).iter().any(|x| !x.is_finite()), "{:?}, {dtype}, {bad}", kernels.isa);
            }
        }
    }
}
