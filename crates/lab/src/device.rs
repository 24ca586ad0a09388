//! What the demonstrations pretend to run on: a model and a device with round numbers, priced by the roofline of `baton-timing`.

use std::time::Duration;

use baton_timing::{ModelShape, Roofline, StepWork};

const LAYERS: usize = 32;
const HIDDEN: usize = 4096;
const FFN: usize = 11_008;

/// Multiply-adds of one token in all linear layers: four square matrices of attention and two of the feed-forward part a layer.
pub(crate) const MACS_PER_TOKEN: f64 = (LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN)) as f64;

/// Bytes of all weights.
const WEIGHT_BYTES: f64 = 13.48e9;

/// Bytes of K and V of one token over all layers: two 16-bit numbers a hidden element and layer.
pub(crate) const KV_TOKEN_BYTES: usize = 2 * 2 * LAYERS * HIDDEN;

/// A model of about seven billion weights, without grouped heads: 512 KiB of KV a token.
pub(crate) const MODEL: ModelShape = ModelShape {
    num_params: MACS_PER_TOKEN,
    weight_bytes: WEIGHT_BYTES / MACS_PER_TOKEN,
    num_layers: LAYERS,
    hidden: HIDDEN,
    kv_token_bytes: KV_TOKEN_BYTES,
};

/// Shaped like an A100: 156e12 multiply-adds (two operations each) and 2.0e12 bytes a second, and no cost of a step beside these.
pub(crate) const DEVICE: Roofline =
    Roofline { flops_per_s: 2.0 * 156e12, bytes_per_s: 2.0e12, overhead: Duration::ZERO };

/// Seconds of a pass.
pub(crate) fn seconds(work: &StepWork) -> f64 {
    DEVICE.step_time(&MODEL, work).as_secs_f64()
}

/// Multiply-adds of a pass, by the same counts as [`Roofline::step_time`].
pub(crate) fn macs(work: &StepWork) -> f64 {
    let attention = 2.0 * (LAYERS * HIDDEN) as f64 * work.num_attended as f64;
    MACS_PER_TOKEN * work.num_tokens as f64 + attention
}

/// Bytes that a pass reads, by the same counts.
pub(crate) fn bytes(work: &StepWork) -> f64 {
    WEIGHT_BYTES + KV_TOKEN_BYTES as f64 * work.num_context as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_of_kv_is_half_a_mebibyte() {
        assert_eq!(KV_TOKEN_BYTES, 512 * 1024);
        assert_eq!(MACS_PER_TOKEN, 5_033_164_800.0);
    }

    #[test]
    fn multiply_adds_and_bytes_are_what_the_roofline_prices() {
        for (num_tokens, num_attended, num_context) in
            [(1, 1, 1), (2_048, 2_048 * 2_048, 2_048), (32, 16_384, 16_384)]
        {
            let work = StepWork { num_tokens, num_attended, num_context };
            let here = (macs(&work) / 156e12).max(bytes(&work) / 2.0e12);
            assert!((here - seconds(&work)).abs() < 1e-8, "{here}");
        }
    }
}
