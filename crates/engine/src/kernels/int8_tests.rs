//! Quantisation and the integer product of each instruction set, against scalar arithmetic written by the book.

use std::borrow::Cow;

use baton_model::{Tensor, WeightType};
use half::f16;

use super::tests::{Random, tables};
use super::*;
use crate::weights::{Packed, QUANT_BLOCK};

const KINDS: [WeightType; 3] = [WeightType::Q8_0, WeightType::Q4_0, WeightType::Q4_1];

/// A quantised row in plain form.
struct Block {
    quants: [i32; QUANT_BLOCK],
    scale: f32,
    scaled_sum: f32,
}

fn plain(x: &[f32]) -> Vec<Block> {
    let (blocks, _) = x.as_chunks::<QUANT_BLOCK>();
    let block = |x: &[f32; QUANT_BLOCK]| {
        let largest = x.iter().fold(0f32, |a, b| a.max(b.abs()));
        let (inverse, scale) = if largest < 1e-30 { (0.0, 0.0) } else { (127.0 / largest, largest / 127.0) };
        let quants = x.map(|x| (x * inverse).round_ties_even() as i32);
        Block { quants, scale, scaled_sum: scale * quants.iter().sum::<i32>() as f32 }
    };
    blocks.iter().map(block).collect()
}

/// Weights by GGML's layout: integers, scales and minimums of one row.
fn parts(kind: WeightType, row: &[u8]) -> Vec<([i32; QUANT_BLOCK], f32, f32)> {
    let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
    let block = |block: &[u8]| {
        let nibble = |q: &[u8], k: usize| i32::from(if k < 16 { q[k] & 15 } else { q[k - 16] >> 4 });
        let quants = std::array::from_fn(|k| match kind {
            WeightType::Q8_0 => i32::from(block[2 + k].cast_signed()),
            WeightType::Q4_0 => nibble(&block[2..], k) - 8,
            _ => nibble(&block[4..], k),
        });
        (quants, half(block), if kind == WeightType::Q4_1 { half(&block[2..]) } else { 0.0 })
    };
    row.chunks_exact(kind.block_bytes()).map(block).collect()
}

fn reference(fused: bool, kind: WeightType, weights: &[([i32; QUANT_BLOCK], f32, f32)], x: &[Block]) -> f32 {
    let fma = |a: f32, b: f32, c: f32| if fused { a.mul_add(b, c) } else { a * b + c };
    weights.iter().zip(x).fold(0.0, |acc, ((w, scale, min), x)| {
        let dot: i32 = w.iter().zip(x.quants).map(|(w, x)| w * x).sum();
        let acc = fma(dot as f32, scale * x.scale, acc);
        if kind == WeightType::Q4_1 { fma(*min, x.scaled_sum, acc) } else { acc }
    })
}

/// `rows * cols` weights in GGML's layout; `quant` gives the bytes, `scale` each scale and minimum.
fn stored(
    kind: WeightType,
    blocks: usize,
    mut quant: impl FnMut() -> u8,
    mut scale: impl FnMut() -> f32,
) -> Vec<u8> {
    let mut data = Vec::new();
    for _ in 0..blocks {
        data.extend(f16::from_f32(scale()).to_le_bytes());
        if kind == WeightType::Q4_1 {
            data.extend(f16::from_f32(scale()).to_le_bytes());
        }
        let num = if kind == WeightType::Q8_0 { 32 } else { 16 };
        data.extend((0..num).map(|_| quant()));
    }
    data
}

fn quantised(table: &Kernels, x: &[f32], cols: usize) -> Vec<u8> {
    let num_rows = x.len() / cols;
    let mut out = vec![0xa5; num_rows.div_ceil(ROW_GROUP) * group_bytes(cols)];
    for (row, x) in x.chunks_exact(cols).enumerate() {
        let out = out[record((row, 0), cols)..].as_mut_ptr();
        // SAFETY: the table is available; the row's records lie within `out`.
        unsafe { (table.quantise)(&Quantise { x: x.as_ptr(), len: cols, out }) };
    }
    out
}

fn multiply(
    table: &Kernels,
    weights: &Packed,
    tiles: std::ops::Range<usize>,
    (x, num_rows): (&[u8], usize),
    out: &mut [f32],
) {
    let mut scratch = vec![f32::NAN; INT8_SCRATCH_FLOATS];
    let out_stride = weights.num_tiles() * LANES;
    assert!(out.len() >= num_rows * out_stride);
    let matmul = Int8Matmul {
        weights,
        tiles,
        x: x.as_ptr(),
        num_rows,
        out: out.as_mut_ptr(),
        out_stride,
        scratch: scratch.as_mut_ptr(),
        ahead: 4096,
    };
    // SAFETY: the table is available, and the slices cover what the fields say.
    unsafe { (table.matmul_int8)(&matmul) };
}

/// Compares every output of every table with the scalar one, bit by bit.
fn compare(kind: WeightType, (rows, cols): (usize, usize), data: &[u8], x: &[f32], what: &str) {
    let tensor = Tensor { name: "test".into(), rows, cols, kind, data: Cow::Borrowed(data) };
    let weights = Packed::of(&tensor);
    let (num_rows, width) = (x.len() / cols, weights.num_tiles() * LANES);
    let row_bytes = cols / QUANT_BLOCK * kind.block_bytes();
    let by_row: Vec<_> = data.chunks_exact(row_bytes).map(|row| parts(kind, row)).collect();
    for table in tables() {
        let quants = quantised(table, x, cols);
        let mut out = vec![f32::NAN; num_rows * width];
        let split = weights.num_tiles() / 2;
        multiply(table, &weights, 0..split, (&quants, num_rows), &mut out);
        multiply(table, &weights, split..weights.num_tiles(), (&quants, num_rows), &mut out);
        for (n, (x, out)) in x.chunks_exact(cols).zip(out.chunks_exact(width)).enumerate() {
            let x = plain(x);
            for (o, &got) in out.iter().enumerate() {
                let want = by_row.get(o).map_or(0.0, |w| reference(table.fused, kind, w, &x));
                let same = got.to_bits() == want.to_bits() || (o >= rows && got == 0.0);
                let isa = table.isa;
                assert!(
                    same,
                    "{isa:?}, {kind}, {what}: row {n} of {num_rows}, output {o}: {got}, want {want}"
                );
            }
        }
    }
}

#[test]
fn products_of_random_shapes_are_the_scalar_ones() {
    let mut random = Random(31);
    for kind in KINDS {
        // The last is longer than a slab of spread weights.
        for (rows, cols) in [(1, 32), (16, 64), (37, 288), (105, 576), (19, 2048 + 96)] {
            for num_rows in [1, 2, 3, 5, 8, 15, 16, 17, 29, 43] {
                let mut numbers = Random(random.next());
                let data = stored(
                    kind,
                    rows * cols / QUANT_BLOCK,
                    || random.next() as u8,
                    || 0.1 * numbers.signed(),
                );
                let x = numbers.floats(num_rows * cols);
                compare(kind, (rows, cols), &data, &x, "random");
            }
        }
    }
}

#[test]
fn products_of_extreme_values_are_the_scalar_ones() {
    let (rows, cols) = (18, 96);
    type Pattern = (&'static str, fn(usize) -> f32);
    let patterns: [Pattern; 7] = [
        ("largest", |_| 1.0),
        ("smallest", |_| -1.0),
        ("alternating", |i| if i % 2 == 0 { 1.0 } else { -1.0 }),
        ("zeros", |_| 0.0),
        ("huge", |i| (i as f32 - 40.0) * 1e33),
        ("tiny", |i| (i as f32 - 40.0) * 1e-31),
        ("every level", |i| (i as f32 * 2.6).rem_euclid(255.0) - 127.0),
    ];
    for kind in KINDS {
        for quant in [0x00, 0x80, 0x7f, 0xff, 0x88, 0xf0, 0x0f] {
            for scale in [1.0, -1.0, 65504.0, 6e-8, 0.0] {
                let data = stored(kind, rows * cols / QUANT_BLOCK, || quant, || scale);
                for (name, value) in patterns {
                    let x: Vec<f32> = (0..17 * cols).map(value).collect();
                    let what = format!("{name}, weights {quant:#x} times {scale}");
                    compare(kind, (rows, cols), &data, &x, &what);
                }
            }
        }
        let mut next = 0u8;
        let every = move || {
            next = next.wrapping_add(1);
            next
        };
        let data = stored(kind, rows * cols / QUANT_BLOCK, every, || 0.5);
        let x: Vec<f32> = (0..17 * cols).map(|i| (i % 255) as f32 - 127.0).collect();
        compare(kind, (rows, cols), &data, &x, "every byte");
    }
}

#[test]
fn what_is_not_finite_spoils_its_row_alone() {
    let mut random = Random(32);
    for kind in KINDS {
        // Blocks are quantised by fours, twos and ones.
        let (rows, cols) = (32, 7 * QUANT_BLOCK);
        let data = stored(kind, rows * cols / QUANT_BLOCK, || 0x95, || 0.25);
        let weights =
            Packed::of(&Tensor { name: "test".into(), rows, cols, kind, data: Cow::Borrowed(&data) });
        for table in tables() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, 17, 31, 63, 127, 128, 191, 192, 223] {
                    let mut x = random.floats(20 * cols);
                    x[9 * cols + at] = bad;
                    let mut out = vec![0.0; 20 * rows];
                    multiply(table, &weights, 0..2, (&quantised(table, &x, cols), 20), &mut out);
                    for (n, out) in out.chunks_exact(rows).enumerate() {
                        let spoiled = out.iter().all(|v| v.is_nan());
                        assert!(spoiled == (n == 9), "{:?}, {kind}, {bad} at {at}: row {n}", table.isa);
                    }
                }
            }
        }
    }
}

#[test]
fn quantising_is_close_and_uses_the_whole_range() {
    let mut random = Random(33);
    for table in tables() {
        let x = random.floats(7 * QUANT_BLOCK);
        let records = quantised(table, &x, x.len());
        let want = plain(&x);
        for (b, block) in want.iter().enumerate() {
            let at = &records[b * group_bytes(32)..];
            let scale = f32::from_le_bytes([at[32], at[33], at[34], at[35]]);
            assert_eq!(scale.to_bits(), block.scale.to_bits());
            for k in 0..QUANT_BLOCK {
                let place = k / 8 * 8 + k % 2 * 4 + k % 8 / 2;
                let got = i32::from(at[place].cast_signed());
                assert_eq!(got, block.quants[k], "{:?}, block {b}, k {k}", table.isa);
                assert!((got as f32 * scale - x[b * QUANT_BLOCK + k]).abs() <= scale * 0.5001);
            }
            assert!(block.quants.iter().any(|q| q.abs() == 127));
        }
    }
}
