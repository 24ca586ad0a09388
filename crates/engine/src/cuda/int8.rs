//! Matrices of 8 bits on the device: an integer an element, a scale a row, as `cuda/ABI.md` lays them out; and the kernels that read them.

use super::config::Half;
use super::driver::{Arg, DeviceError, Kernel, Module, Span, Stream};
use super::kernels::{launch, reaches};
use super::products::Factors;

/// Integers go from minus this to this.
const LEVELS: f32 = 127.0;
/// Rows lie at multiples of so many bytes, and elements are in another order within so many.
const PIECE: usize = 16;

/// A matrix of `rows` outputs by `cols` inputs.
#[derive(Clone, Copy)]
pub(super) struct Int8Matrix {
    /// `rows` of [`stride`] bytes.
    pub(super) quants: Span,
    /// f32, one a row.
    pub(super) scales: Span,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// Bytes from one row of integers to the next.
pub(super) const fn stride(cols: usize) -> usize {
    cols.next_multiple_of(PIECE)
}

/// Rounds a row to the integers nearest under its own scale, which it gives: its largest magnitude over 127. `out` is a stride long.
/// `None` if an element is not finite.
pub(super) fn round_row(row: &[f32], out: &mut [u8]) -> Option<f32> {
    if row.iter().any(|x| !x.is_finite()) {
        return None;
    }
    let scale = row.iter().fold(0f32, |largest, x| largest.max(x.abs())) / LEVELS;
    out.fill(0);
    for (pieces, out) in row.chunks(PIECE).zip(out.chunks_exact_mut(PIECE)) {
        for (k, x) in pieces.iter().enumerate() {
            let nearest =
                if scale > 0.0 { (x / scale).round_ties_even().clamp(-LEVELS, LEVELS) } else { 0.0 };
            out[place(k)] = (nearest as i8).cast_unsigned();
        }
    }
    Some(scale)
}

/// Where element `k` of 16 lies: a lane of a matrix product takes two pairs that are 8 apart, and finds its four in one word.
const fn place(k: usize) -> usize {
    k % 8 / 2 * 4 + k % 2 + k / 8 * 2
}

/// What a kernel is launched with for so many rows of activations.
#[derive(Clone, Copy)]
struct Share {
    rows: u32,
    outputs: u32,
    shared_bytes: u32,
}

/// By rows that a block of threads takes. Which one runs decides no bit.
const SHARES: [Share; 3] = [
    Share { rows: 16, outputs: 32, shared_bytes: 35_840 },
    Share { rows: 32, outputs: 32, shared_bytes: 39_936 },
    Share { rows: 64, outputs: 64, shared_bytes: 79_872 },
];
const THREADS: u32 = 128;
const EMBED_THREADS: u32 = 256;

/// The kernels of one type of activations.
pub(super) struct Int8Kernels {
    multiply: [Kernel; SHARES.len()],
    embed: Kernel,
}

impl Int8Kernels {
    pub(super) fn find(module: &Module, half: Half) -> Result<Int8Kernels, DeviceError> {
        let find = |share: Share| {
            module.kernel(&format!("multiply_int8_{}_m{}", half.name(), share.rows), share.shared_bytes)
        };
        let [few, more, many] = SHARES;
        Ok(Int8Kernels {
            multiply: [find(few)?, find(more)?, find(many)?],
            embed: module.kernel("embed_int8", 0)?,
        })
    }

    /// Queues `out = x * weight^T` for `num_rows` rows of `x`; no others are read or written.
    pub(super) fn multiply(
        &self,
        stream: &Stream,
        weight: &Int8Matrix,
        factors: Factors,
    ) -> Result<(), DeviceError> {
        let Factors { x, out, num_rows } = factors;
        reaches(x, num_rows * weight.cols * size_of::<u16>());
        reaches(out, num_rows * weight.rows * size_of::<f32>());
        weight.check();
        let nth = SHARES.iter().position(|share| num_rows <= share.rows as usize).unwrap_or(SHARES.len() - 1);
        let share = SHARES[nth];
        let [rows, outputs, inputs] = [num_rows, weight.rows, weight.cols].map(|n| n as u32);
        let args: &[Arg] = &[
            out.into(),
            x.into(),
            weight.quants.into(),
            weight.scales.into(),
            rows.into(),
            outputs.into(),
            inputs.into(),
            (stride(weight.cols) as u32).into(),
        ];
        let grid = [outputs.div_ceil(share.outputs), rows.div_ceil(share.rows), 1];
        launch(stream, self.multiply[nth], grid, THREADS, share.shared_bytes, args)
    }

    /// Queues `residual[t] = matrix[tokens[t]]`, widened to f32.
    pub(super) fn embed(
        &self,
        stream: &Stream,
        residual: Span,
        matrix: &Int8Matrix,
        tokens: Span,
    ) -> Result<(), DeviceError> {
        let num = tokens.len / 4;
        reaches(residual, num * matrix.cols * size_of::<f32>());
        matrix.check();
        let args: &[Arg] = &[
            residual.into(),
            matrix.quants.into(),
            matrix.scales.into(),
            tokens.into(),
            (matrix.cols as u32).into(),
            (stride(matrix.cols) as u32).into(),
        ];
        launch(stream, self.embed, [num as u32, 1, 1], EMBED_THREADS, 0, args)
    }
}

impl Int8Matrix {
    fn check(&self) {
        reaches(self.quants, self.rows * stride(self.cols));
        reaches(self.scales, self.rows * size_of::<f32>());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_comes_back_within_half_a_step_and_every_element_has_a_place_of_its_own() {
        let row: Vec<f32> = (0..40).map(|k| ((k * 37 % 101) as f32 - 50.0) * 0.03).collect();
        let mut out = vec![9; stride(40)];
        let scale = round_row(&row, &mut out).unwrap();
        assert_eq!((out.len(), scale), (48, 50.0 * 0.03 / 127.0));
        let element = |k: usize| f32::from(out[k / 16 * 16 + place(k % 16)].cast_signed()) * scale;
        for (k, x) in row.iter().enumerate() {
            assert!((x - element(k)).abs() <= 0.5001 * scale, "{k}: {x} became {}", element(k));
        }
        assert!((40..48).all(|k| element(k) == 0.0));
        let mut places: Vec<usize> = (0..16).map(place).collect();
        // As the table in ABI.md has them.
        assert_eq!(places, [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]);
        places.sort_unstable();
        assert_eq!(places, (0..16).collect::<Vec<_>>());
    }

    #[test]
    fn rows_of_zeros_stay_so_and_what_is_not_finite_is_refused() {
        let mut out = [7; 16];
        assert_eq!(round_row(&[0.0; 8], &mut out), Some(0.0));
        assert_eq!(out, [0; 16]);
        for bad in [f32::NAN, f32::INFINITY] {
            assert_eq!(round_row(&[1.0, bad], &mut out), None);
        }
        // Extremes of f32 are no extremes of its integers.
        assert_eq!(round_row(&[f32::MAX, -f32::MAX], &mut out), Some(f32::MAX / 127.0));
        assert_eq!([out[0], out[1]].map(u8::cast_signed), [127, -127]);
    }
}
