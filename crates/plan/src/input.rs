//! What a plan is for, and its bounds.

use baton_timing::catalog::{CatalogDevice, CatalogModel, DEVICES, MODELS};

/// Share of a device's memory that weights and KV may take.
const MEMORY_SHARE: f64 = 0.9;
/// Share of a link's line rate that payload reaches.
const LINE_SHARE: f64 = 0.9;

/// What requests are to keep to. Each bound is to hold for 99 in 100.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slo {
    /// From a request to its first token, in milliseconds.
    pub ttft_ms: f64,
    /// Between two tokens, in milliseconds.
    pub itl_ms: f64,
}

/// What is to be served, on what, and how well.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlanInput {
    /// The model.
    pub model: CatalogModel,
    /// One worker's device.
    pub device: CatalogDevice,
    /// Requests a second.
    pub rate: f64,
    /// Tokens of a prompt.
    pub input_tokens: u32,
    /// Tokens of an answer.
    pub output_tokens: u32,
    /// The objective.
    pub slo: Slo,
    /// Line rate of each worker's link, in gigabits a second.
    pub link_gbps: f64,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Choose one of those named.
    #[error("unknown {kind} '{name}': {known}")]
    Unknown {
        /// model or gpu.
        kind: &'static str,
        /// As it was typed.
        name: String,
        /// Those that there are, with commas between.
        known: String,
    },
    /// An input out of its bounds.
    #[error("{field} is {value}: from {least} to {most}")]
    OutOfBounds {
        /// Name of the option without its dashes.
        field: &'static str,
        /// As it was given.
        value: f64,
        /// Smallest value.
        least: f64,
        /// Largest value.
        most: f64,
    },
    /// The model and one request are larger than the device.
    #[error(
        "{model} does not fit {device}: weights and the KV of one request take {needed_gb:.1} GB, {usable_gb:.1} GB of its memory are usable"
    )]
    DoesNotFit {
        /// Name of the model.
        model: &'static str,
        /// Name of the device.
        device: &'static str,
        /// What is needed.
        needed_gb: f64,
        /// What there is.
        usable_gb: f64,
    },
    /// No number of workers keeps the objective.
    #[error(
        "no number of workers keeps {bound} within {limit_ms} ms: alone a request takes {alone_ms:.1} ms"
    )]
    TooSlow {
        /// Name of the option without its dashes.
        bound: &'static str,
        /// What was asked for.
        limit_ms: f64,
        /// What an idle device takes.
        alone_ms: f64,
    },
    /// More workers than a router knows, or hardly used ones.
    #[error(
        "more than {most} workers, or workers that are idle for seven eighths of the time, would be needed: loosen the objective or split the load"
    )]
    TooMany {
        /// Workers of both kinds at most.
        most: u32,
    },
    /// A simulation of the plan broke a rule.
    #[error("the simulation of the plan broke a rule: {0}")]
    Simulation(String),
}

fn find<T: Copy>(
    kind: &'static str,
    name: &str,
    all: &[T],
    name_of: impl Fn(&T) -> &'static str,
) -> Result<T, PlanError> {
    let unknown = || PlanError::Unknown {
        kind,
        name: name.to_owned(),
        known: all.iter().map(&name_of).collect::<Vec<_>>().join(", "),
    };
    all.iter().find(|one| name_of(one) == name).copied().ok_or_else(unknown)
}

/// A model by its name.
///
/// # Errors
/// [`PlanError::Unknown`] with all names.
pub fn model(name: &str) -> Result<CatalogModel, PlanError> {
    find("model", name, &MODELS, |model| model.name)
}

/// A device by its name.
///
/// # Errors
/// [`PlanError::Unknown`] with all names.
pub fn device(name: &str) -> Result<CatalogDevice, PlanError> {
    find("gpu", name, &DEVICES, |device| device.name)
}

impl PlanInput {
    /// Whether every input is within its bounds and a worker can hold the model and a request.
    ///
    /// # Errors
    /// [`PlanError::OutOfBounds`] and [`PlanError::DoesNotFit`].
    pub fn check(&self) -> Result<(), PlanError> {
        let bounds = [
            ("rate", self.rate, 1e-3, 1e5),
            ("input-len", f64::from(self.input_tokens), 1.0, 1_000_000.0),
            ("output-len", f64::from(self.output_tokens), 2.0, 100_000.0),
            ("slo-ttft-ms", self.slo.ttft_ms, 0.1, 1e7),
            ("slo-itl-ms", self.slo.itl_ms, 0.1, 1e6),
            ("link-gbps", self.link_gbps, 0.01, 1e5),
        ];
        for (field, value, least, most) in bounds {
            if !(least..=most).contains(&value) {
                return Err(PlanError::OutOfBounds { field, value, least, most });
            }
        }
        let needed = self.weight_bytes() + self.request_bytes();
        let usable = self.device.memory_bytes * MEMORY_SHARE;
        if needed > usable {
            return Err(PlanError::DoesNotFit {
                model: self.model.name,
                device: self.device.name,
                needed_gb: needed / 1e9,
                usable_gb: usable / 1e9,
            });
        }
        Ok(())
    }

    fn weight_bytes(&self) -> f64 {
        self.model.shape.num_params * self.model.shape.weight_bytes
    }

    fn request_bytes(&self) -> f64 {
        let tokens = f64::from(self.input_tokens) + f64::from(self.output_tokens);
        tokens * self.model.shape.kv_token_bytes as f64
    }

    /// Tokens of KV that a worker's memory has room for beside the weights.
    pub fn kv_tokens(&self) -> f64 {
        let free = self.device.memory_bytes * MEMORY_SHARE - self.weight_bytes();
        (free / self.model.shape.kv_token_bytes as f64).max(0.0)
    }

    /// Payload bytes a second of a link.
    pub const fn link_bytes_per_s(&self) -> f64 {
        self.link_gbps * 1e9 / 8.0 * LINE_SHARE
    }

    /// Seconds that the KV of a token takes on a link.
    pub(crate) fn wire_token_s(&self) -> f64 {
        self.model.shape.kv_token_bytes as f64 / self.link_bytes_per_s()
    }

    /// Line rate, in gigabits a second, at which the KV of one prompt takes this many seconds.
    pub(crate) fn gbps_for(&self, seconds: f64) -> f64 {
        let bytes = f64::from(self.input_tokens) * self.model.shape.kv_token_bytes as f64;
        bytes / seconds * 8.0 / 1e9 / LINE_SHARE
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Llama 3 8B on H200s, 20 requests a second of 2,048 and 128 tokens.
    pub(crate) fn input() -> PlanInput {
        PlanInput {
            model: model("llama-3-8b").unwrap(),
            device: device("h200").unwrap(),
            rate: 20.0,
            input_tokens: 2_048,
            output_tokens: 128,
            slo: Slo { ttft_ms: 300.0, itl_ms: 15.0 },
            link_gbps: 400.0,
        }
    }

    #[test]
    fn unknown_names_are_told_with_all_that_there_are() {
        let text = model("llama-9").unwrap_err().to_string();
        assert!(text.contains("'llama-9'") && text.contains("llama-3-8b, qwen2.5-32b"), "{text}");
        let text = device("h300").unwrap_err().to_string();
        assert!(text.contains("gpu 'h300'") && text.contains("l40s"), "{text}");
    }

    #[test]
    fn what_is_out_of_bounds_is_told_by_field_and_limits() {
        let bad = |change: fn(&mut PlanInput)| {
            let mut input = input();
            change(&mut input);
            input.check().unwrap_err().to_string()
        };
        assert_eq!(input().check(), Ok(()));
        let texts = [
            (bad(|i| i.rate = 0.0), "rate is 0: from 0.001"),
            (bad(|i| i.rate = f64::NAN), "rate is NaN"),
            (bad(|i| i.input_tokens = 0), "input-len is 0: from 1 to 1000000"),
            (bad(|i| i.output_tokens = 1), "output-len is 1: from 2"),
            (bad(|i| i.slo.ttft_ms = -1.0), "slo-ttft-ms is -1"),
            (bad(|i| i.slo.itl_ms = f64::INFINITY), "slo-itl-ms is inf"),
            (bad(|i| i.link_gbps = 1e9), "link-gbps is 1000000000"),
        ];
        for (text, expected) in texts {
            assert!(text.starts_with(expected), "{text}");
        }
        let text = bad(|i| i.model = model("llama-3-70b").unwrap());
        assert!(text.contains("llama-3-70b does not fit h200") && text.contains("141.9 GB"), "{text}");
    }

    #[test]
    fn links_and_memory_are_what_arithmetic_says() {
        // 256 MiB at 90 % of 25 and 400 Gb/s: 95 and 6 ms.
        for (link_gbps, ms) in [(25.0, 95.4), (400.0, 5.97)] {
            let input = PlanInput { link_gbps, ..input() };
            let took = input.wire_token_s() * 2_048.0 * 1e3;
            assert!((took / ms - 1.0).abs() < 0.01, "{took}");
            assert!((input.gbps_for(took / 1e3) / link_gbps - 1.0).abs() < 1e-9);
        }
        assert!((input().kv_tokens() - 845_642.0).abs() < 10.0, "{}", input().kv_tokens());
    }
}
