//! Rotary position embedding (Su et al., 2021).

use baton_model::{ModelConfig, RopeScaling, RopeStyle};

/// Turns pairs of a head's elements by an angle that grows with the position.
pub(crate) struct Rope {
    style: RopeStyle,
    /// Radians per position of each pair.
    frequencies: Vec<f64>,
}

impl Rope {
    pub(crate) fn new(model: &ModelConfig) -> Rope {
        let half = model.head_dim / 2;
        let plain = |i: usize| f64::from(model.rope_base).powf(-(i as f64) / half as f64);
        let divisor = |i: usize| match &model.rope_scaling {
            RopeScaling::None => 1.0,
            RopeScaling::Linear(factor) => f64::from(*factor),
            RopeScaling::Factors(factors) => factors.get(i).map_or(1.0, |&f| f64::from(f)),
        };
        Rope { style: model.rope_style, frequencies: (0..half).map(|i| plain(i) / divisor(i)).collect() }
    }

    /// Cosines of all pairs at `position`, then sines; `out` has a head's length. Angles are f64, since at
    /// position 100,000 an f32 is off by a hundredth of a radian.
    pub(crate) fn fill(&self, position: u32, out: &mut [f32]) {
        let (cos, sin) = out.split_at_mut(self.frequencies.len());
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
            let (s, c) = (f64::from(position) * frequency).sin_cos();
            (*cos, *sin) = (c as f32, s as f32);
        }
    }

    /// Turns one head; `turns` is what [`Self::fill`] gave.
    pub(crate) fn apply(&self, head: &mut [f32], turns: &[f32]) {
        let (cos, sin) = turns.split_at(self.frequencies.len());
        match self.style {
            RopeStyle::Interleaved => {
                let (pairs, _) = head.as_chunks_mut::<2>();
                for ((pair, c), s) in pairs.iter_mut().zip(cos).zip(sin) {
                    *pair = turn(*pair, *c, *s);
                }
            }
            RopeStyle::HalfSplit => {
                let (low, high) = head.split_at_mut(cos.len());
                for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                    [*a, *b] = turn([*a, *b], *c, *s);
                }
            }
        }
    }
}

fn turn([a, b]: [f32; 2], cos: f32, sin: f32) -> [f32; 2] {
    [a * cos - b * sin, a * sin + b * cos]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(style: RopeStyle, scaling: RopeScaling) -> ModelConfig {
        let model = baton_model::Model::tiny();
        ModelConfig {
            head_dim: 16,
            rope_base: 10_000.0,
            rope_style: style,
            rope_scaling: scaling,
            ..model.config
        }
    }

    fn turned(config: &ModelConfig, position: u32, head: &[f32]) -> Vec<f32> {
        let rope = Rope::new(config);
        let mut turns = vec![0.0; head.len()];
        rope.fill(position, &mut turns);
        let mut head = head.to_vec();
        rope.apply(&mut head, &turns);
        head
    }

    #[test]
    fn pairs_turn_by_position_times_frequency() {
        let mut head = vec![0.0; 16];
        head[2] = 1.0;
        let out = turned(&config(RopeStyle::Interleaved, RopeScaling::None), 131_071, &head);
        let angle = 131_071.0 * 10_000f64.powf(-1.0 / 8.0);
        assert!(
            (f64::from(out[2]) - angle.cos()).abs() < 1e-6 && (f64::from(out[3]) - angle.sin()).abs() < 1e-6
        );
        assert!(out.iter().enumerate().all(|(i, &v)| i == 2 || i == 3 || v == 0.0));
    }

    #[test]
    fn both_styles_are_one_rotation_of_differently_ordered_elements() {
        let head: Vec<f32> = (0..16).map(|i| i as f32 - 7.5).collect();
        let halves: Vec<f32> = (0..16).map(|i| head[i % 8 * 2 + i / 8]).collect();
        let a = turned(&config(RopeStyle::Interleaved, RopeScaling::None), 1234, &head);
        let b = turned(&config(RopeStyle::HalfSplit, RopeScaling::None), 1234, &halves);
        for i in 0..16 {
            assert_eq!(b[i], a[i % 8 * 2 + i / 8]);
        }
    }

    #[test]
    fn scaling_divides_frequencies() {
        let head: Vec<f32> = (0..16).map(|i| (i * i) as f32).collect();
        let plain = turned(&config(RopeStyle::HalfSplit, RopeScaling::None), 100, &head);
        let linear = turned(&config(RopeStyle::HalfSplit, RopeScaling::Linear(4.0)), 400, &head);
        let factors = vec![1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0];
        let mixed = turned(&config(RopeStyle::HalfSplit, RopeScaling::Factors(factors)), 400, &head);
        for i in 0..16 {
            assert!((linear[i] - plain[i]).abs() < 1e-3, "element {i}");
            let unscaled = i % 8 < 4;
            let want = if unscaled {
                turned(&config(RopeStyle::HalfSplit, RopeScaling::None), 400, &head)[i]
            } else {
                plain[i]
            };
            assert!((mixed[i] - want).abs() < 1e-3, "element {i}");
        }
    }
}
