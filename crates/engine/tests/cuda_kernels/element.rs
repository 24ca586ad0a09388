//! The two 16-bit types of weights, activations and KV.

use half::{bf16, f16};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Element {
    F16,
    BF16,
}

/// All ones: a NaN in both types, and in f32.
pub(crate) const POISON: u16 = 0xffff;

impl Element {
    pub(crate) const ALL: [Element; 2] = [Element::F16, Element::BF16];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Element::F16 => "f16",
            Element::BF16 => "bf16",
        }
    }

    pub(crate) fn round(self, x: f32) -> u16 {
        match self {
            Element::F16 => f16::from_f32(x).to_bits(),
            Element::BF16 => bf16::from_f32(x).to_bits(),
        }
    }

    pub(crate) fn widen(self, bits: u16) -> f64 {
        match self {
            Element::F16 => f16::from_bits(bits).to_f64(),
            Element::BF16 => bf16::from_bits(bits).to_f64(),
        }
    }

    /// The largest relative error of one rounding.
    pub(crate) fn unit(self) -> f64 {
        match self {
            Element::F16 => 1.0 / 2048.0,
            Element::BF16 => 1.0 / 256.0,
        }
    }
}

/// The largest of `|got - want| / max(1, |want|)`; infinite where `got` is NaN.
pub(crate) fn largest_error(got: impl Iterator<Item = f64>, want: impl Iterator<Item = f64>) -> f64 {
    got.zip(want)
        .map(|(got, want)| (got - want).abs() / want.abs().max(1.0))
        .fold(0.0, |largest, error| if error.is_nan() { f64::INFINITY } else { largest.max(error) })
}
