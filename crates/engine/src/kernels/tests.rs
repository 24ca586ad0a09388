//! Each kernel of each instruction set by itself, against its definition.

use std::borrow::Cow;

use baton_model::{Tensor, WeightType};
use half::{bf16, f16};

use super::*;
use crate::weights::Packed;

pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.0 >> 33
    }

    pub(super) fn signed(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }

    pub(super) fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.signed()).collect()
    }
}

pub(super) fn tables() -> impl Iterator<Item = &'static Kernels> {
    Isa::available().into_iter().filter_map(Kernels::of)
}

fn packed(kind: WeightType, rows: usize, cols: usize, random: &mut Random) -> Packed {
    let mut data = Vec::new();
    for _ in 0..rows * cols / kind.block_elements() {
        let scale = f16::from_f32(0.1 * random.signed()).to_le_bytes();
        match kind {
            WeightType::F32 => data.extend(random.signed().to_le_bytes()),
            WeightType::F16 => data.extend(scale),
            WeightType::BF16 => data.extend(bf16::from_f32(random.signed()).to_le_bytes()),
            _ => {
                data.extend(scale);
                if kind == WeightType::Q4_1 {
                    data.extend(f16::from_f32(random.signed()).to_le_bytes());
                }
                let quants = if kind == WeightType::Q8_0 { 32 } else { 16 };
                data.extend((0..quants).map(|_| random.next() as u8));
            }
        }
    }
    Packed::of(&Tensor { name: "test".into(), rows, cols, kind, data: Cow::Owned(data) })
}

fn multiply(table: &Kernels, weights: &Packed, tiles: std::ops::Range<usize>, x: &[f32], out: &mut [f32]) {
    let mut scratch = vec![0.0; MATMUL_SCRATCH_FLOATS];
    let num_rows = x.len() / weights.cols;
    let out_stride = weights.num_tiles() * LANES;
    assert!(out.len() >= num_rows * out_stride);
    let matmul = Matmul {
        weights,
        tiles,
        x: x.as_ptr(),
        x_stride: weights.cols,
        num_rows,
        out: out.as_mut_ptr(),
        out_stride,
        scratch: scratch.as_mut_ptr(),
    };
    // SAFETY: the table is available, and the slices cover what the fields say.
    unsafe { (table.matmul)(&matmul) }
}

/// The order that the kernels promise: one chain of multiply-adds over k.
fn chain(table: &Kernels, row: &[f32], x: &[f32]) -> f32 {
    row.iter().zip(x).fold(0.0, |sum, (w, x)| if table.fused { x.mul_add(*w, sum) } else { x * w + sum })
}

#[test]
fn a_product_is_one_chain_over_k_whatever_is_computed_with_it() {
    for table in tables() {
        for kind in WeightType::ALL {
            let mut random = Random(kind as u64 + 1);
            // More than one slab, the last one short; 7 tiles, the last one partly padding.
            let cols = if kind.block_elements() == 1 { 147 } else { 288 };
            let weights = packed(kind, 105, cols, &mut random);
            let mut row = vec![0.0; cols];
            for num_rows in [1, 2, 3, 4, 5, 7, 8, 12, 13, 31] {
                let x = random.floats(num_rows * cols);
                let mut out = vec![f32::NAN; num_rows * 112];
                // As two members would share it.
                multiply(table, &weights, 0..3, &x, &mut out);
                multiply(table, &weights, 3..7, &x, &mut out);
                for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact(112)) {
                    for (o, out) in out.iter().enumerate() {
                        row.fill(0.0);
                        if o < 105 {
                            weights.row(o, &mut row);
                        }
                        let want = chain(table, &row, x);
                        let same = if o < 105 { out.to_bits() == want.to_bits() } else { *out == 0.0 };
                        assert!(
                            same,
                            "{:?}, {kind}, {num_rows} rows, output {o}: {out}, want {want}",
                            table.isa
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn more_rows_than_one_pass_takes() {
    let table = tables().next().unwrap();
    let mut random = Random(3);
    // Long rows make passes of few rows.
    let (cols, num_rows) = (8192, 101);
    let weights = packed(WeightType::F32, 16, cols, &mut random);
    let x = random.floats(num_rows * cols);
    let mut out = vec![f32::NAN; num_rows * 16];
    multiply(table, &weights, 0..1, &x, &mut out);
    let mut row = vec![0.0; cols];
    weights.row(9, &mut row);
    for (n, x) in x.chunks_exact(cols).enumerate() {
        assert_eq!(out[n * 16 + 9].to_bits(), chain(table, &row, x).to_bits(), "row {n}");
    }
}

fn exponentials(table: &Kernels, x: &[f32], largest: f32, scale: f32) -> (Vec<f32>, f32) {
    let padded: Vec<f32> = x.iter().copied().chain([f32::NAN; LANES]).collect();
    let mut out = vec![9.0; x.len().next_multiple_of(LANES)];
    let e = Exponentials { x: padded.as_ptr(), out: out.as_mut_ptr(), len: x.len(), largest, scale };
    // SAFETY: the table is available, both slices reach the next multiple of 16.
    let sum = unsafe { (table.exponentials)(&e) };
    assert!(out[x.len()..].iter().all(|&v| v == 0.0));
    out.truncate(x.len());
    (out, sum)
}

#[test]
fn exponentials_are_accurate_and_the_same_in_every_lane() {
    for table in tables() {
        let x: Vec<f32> = (0..20_000).map(|i| 3.0 - i as f32 * 0.004_47).collect();
        let (out, sum) = exponentials(table, &x, 0.0, 1.0);
        let mut exact = 0.0;
        for (&x, &got) in x.iter().zip(&out) {
            let want = f64::from(x).exp();
            exact += want;
            if x > -86.4 {
                let error = (f64::from(got) - want).abs() / want;
                assert!(error < 4e-7, "{:?}: e^{x} = {got}", table.isa);
            }
        }
        assert!((f64::from(sum) - exact).abs() / exact < 1e-5);
        let (alone, _) = exponentials(table, &x[77..78], 0.0, 1.0);
        assert_eq!(alone[0].to_bits(), out[77].to_bits());
        let special = [0.0, -200.0, f32::NEG_INFINITY, f32::NAN, 1.0];
        let (out, _) = exponentials(table, &special, 0.0, 1.0);
        assert_eq!(out[..3], [1.0, 0.0, 0.0]);
        assert!(out[3].is_nan());
        let (out, _) = exponentials(table, &[5.0, 7.0], 7.0, 0.5);
        assert_eq!(out[1], 1.0);
        assert!((out[0] - (-1f32).exp()).abs() < 1e-6);
    }
}

#[test]
fn the_largest_element_is_found_and_what_is_not_finite_is_not_overlooked() {
    for table in tables() {
        for len in [1, 15, 16, 17, 100] {
            for at in 0..len {
                let mut x = vec![-3.0; len];
                x[at] = -1.5;
                // SAFETY: the table is available.
                let largest = |x: &[f32]| unsafe { (table.largest)(x) };
                assert_eq!(largest(&x), -1.5, "{:?}, element {at} of {len}", table.isa);
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    x[at] = bad;
                    assert!(largest(&x).is_nan(), "{:?}, {bad} at {at} of {len}", table.isa);
                }
            }
        }
    }
}

#[test]
fn norm_and_silu_are_their_formulas() {
    let mut random = Random(4);
    for table in tables() {
        let len = 53;
        let pad = |mut v: Vec<f32>| {
            v.resize(64, 0.0);
            v
        };
        let (x, weight) = (pad(random.floats(len)), pad(random.floats(len)));
        let mut out = vec![f32::NAN; 64];
        let norm = Norm { x: x.as_ptr(), weight: weight.as_ptr(), out: out.as_mut_ptr(), len, eps: 1e-5 };
        // SAFETY: the table is available, the slices are padded.
        unsafe { (table.norm)(&norm) };
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / len as f64;
        for i in 0..64 {
            let want = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i]);
            assert!((f64::from(out[i]) - want).abs() < 1e-6, "{:?}", table.isa);
        }
        let gate: Vec<f32> = (0..64).map(|i| (i as f32 - 32.0) * 4.0).collect();
        let up = random.floats(64);
        let silu = SiluMul { gate: gate.as_ptr(), up: up.as_ptr(), out: out.as_mut_ptr(), len: 64 };
        // SAFETY: as above.
        unsafe { (table.silu_mul)(&silu) };
        for i in 0..64 {
            let want = f64::from(gate[i]) / (1.0 + (-f64::from(gate[i])).exp()) * f64::from(up[i]);
            let bound = 1e-6 * want.abs().max(1.0);
            assert!((f64::from(out[i]) - want).abs() < bound, "{:?}: silu({})", table.isa, gate[i]);
        }
    }
}

#[test]
fn an_instruction_set_that_is_not_there_has_no_table() {
    for isa in [Isa::Amx, Isa::Avx512, Isa::Avx2, Isa::Portable] {
        assert_eq!(Kernels::of(isa).is_some(), Isa::available().contains(&isa));
    }
    assert!(Isa::available().contains(&Isa::Portable));
}
