//! Rotary settings of a `config.json`.

use std::f64::consts::TAU;
use std::path::Path;

use serde::Deserialize;

use crate::{ModelError, RopeScaling};

/// `rope_scaling` or `rope_parameters`; older files say `type` for `rope_type`.
#[derive(Debug, Deserialize, Default)]
pub(crate) struct RopeParameters {
    rope_type: Option<String>,
    r#type: Option<String>,
    pub(crate) rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    partial_rotary_factor: Option<f64>,
}

impl RopeParameters {
    /// The correction of the `head_dim / 2` frequencies `theta ^ (-2i / head_dim)`.
    pub(crate) fn scaling(
        &self,
        path: &Path,
        theta: f64,
        head_dim: usize,
    ) -> Result<RopeScaling, ModelError> {
        if let Some(factor) = self.partial_rotary_factor.filter(|factor| *factor != 1.0) {
            let what = format!("partial_rotary_factor = {factor} is not supported");
            return Err(ModelError::unsupported(path, what));
        }
        match self.rope_type.as_deref().or(self.r#type.as_deref()).unwrap_or("default") {
            "default" | "none" => Ok(RopeScaling::None),
            "linear" => Ok(match self.positive(path, "factor", self.factor)? {
                1.0 => RopeScaling::None,
                factor => RopeScaling::Linear(factor as f32),
            }),
            "llama3" => self.llama3(path, theta, head_dim),
            other => Err(ModelError::unsupported(
                path,
                format!("rope scaling '{other}' is not supported; supported: default, linear, llama3"),
            )),
        }
    }

    fn positive(&self, path: &Path, field: &str, value: Option<f64>) -> Result<f64, ModelError> {
        match value {
            Some(value) if value.is_finite() && value > 0.0 => Ok(value),
            Some(value) => {
                Err(ModelError::corrupt(path, format!("rope scaling {field} = {value} is not positive")))
            }
            None => Err(ModelError::corrupt(path, format!("rope scaling has no {field}"))),
        }
    }

    /// Llama 3.1's extension (the formula of its reference code, `apply_scaling`): waves shorter than
    /// `original / high` stay, those longer than `original / low` are stretched by `factor`, those between are blended.
    fn llama3(&self, path: &Path, theta: f64, head_dim: usize) -> Result<RopeScaling, ModelError> {
        let factor = self.positive(path, "factor", self.factor)?;
        let low = self.positive(path, "low_freq_factor", self.low_freq_factor)?;
        let high = self.positive(path, "high_freq_factor", self.high_freq_factor)?;
        let original = self.original_max_position_embeddings;
        let original = self.positive(path, "original_max_position_embeddings", original)?;
        if high <= low {
            let reason = format!("rope scaling high_freq_factor {high} is not above low_freq_factor {low}");
            return Err(ModelError::corrupt(path, reason));
        }
        let divisor = |i: usize| {
            let wave = TAU * theta.powf(2.0 * i as f64 / head_dim as f64);
            let kept = ((original / wave - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 / (kept + (1.0 - kept) / factor)) as f32
        };
        Ok(RopeScaling::Factors((0..head_dim / 2).map(divisor).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<RopeScaling, ModelError> {
        let parameters: RopeParameters = serde_json::from_str(json).unwrap();
        parameters.scaling(Path::new("config.json"), 500_000.0, 128)
    }

    #[test]
    fn llama_3_1_keeps_short_waves_and_stretches_long_ones() {
        let json = r#"{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,
            "original_max_position_embeddings":8192}"#;
        let RopeScaling::Factors(factors) = parse(json).unwrap() else { panic!("no factors") };
        assert_eq!(factors.len(), 64);
        // The wave of i = 28 is 1,956 positions, below 8192 / 4; that of i = 36 is 10,085, above 8192.
        assert_eq!((factors[0], factors[28], factors[36], factors[63]), (1.0, 1.0, 8.0, 8.0));
        assert!(factors.is_sorted() && factors[32] > 1.0 && factors[32] < 8.0, "{factors:?}");
        // By hand for i = 32: wave = 2 pi sqrt(500000) = 4442.88, kept = (8192 / wave - 1) / 3 = 0.28128.
        assert!((factors[32] - 1.0 / (0.281_28 + 0.718_72 / 8.0)).abs() < 1e-3, "{}", factors[32]);
    }

    #[test]
    fn the_other_kinds() {
        assert_eq!(parse(r#"{"rope_type":"default","rope_theta":1e6}"#).unwrap(), RopeScaling::None);
        assert_eq!(parse(r#"{"type":"linear","factor":2}"#).unwrap(), RopeScaling::Linear(2.0));
        for (json, part) in [
            (r#"{"rope_type":"yarn","factor":4}"#, "'yarn' is not supported"),
            (r#"{"type":"linear"}"#, "has no factor"),
            (r#"{"type":"linear","factor":-1}"#, "factor = -1"),
            (r#"{"rope_type":"llama3","factor":8}"#, "has no low_freq_factor"),
            (r#"{"rope_type":"default","partial_rotary_factor":0.5}"#, "partial_rotary_factor = 0.5"),
            (
                r#"{"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":4,
                "original_max_position_embeddings":64}"#,
                "not above",
            ),
        ] {
            let error = parse(json).unwrap_err().to_string();
            assert!(error.contains(part), "'{error}' does not say '{part}'");
        }
    }
}
