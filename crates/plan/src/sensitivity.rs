//! What another input would change.

use crate::PlanInput;
use crate::search::{Cluster, fewest_disaggregated, fewest_with};
use crate::steps::Steps;

/// An input that differs, and what is then needed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// Name of the input.
    pub input: &'static str,
    /// By what it is multiplied.
    pub factor: f64,
    /// Fewest prefill and decode workers; `None`: no number keeps the objective.
    pub disaggregated: Option<Cluster>,
    /// Fewest colocated workers, with the chunk that is best for the input as it was.
    pub colocated: Option<Cluster>,
}

const FACTORS: [f64; 2] = [0.8, 1.25];

fn scaled(tokens: u32, factor: f64) -> u32 {
    (f64::from(tokens) * factor).round() as u32
}

type Scale = fn(&mut PlanInput, f64);

const INPUTS: [(&str, Scale); 8] = [
    ("rate", |input, factor| input.rate *= factor),
    ("input-len", |input, factor| input.input_tokens = scaled(input.input_tokens, factor).max(1)),
    ("output-len", |input, factor| input.output_tokens = scaled(input.output_tokens, factor).max(2)),
    ("slo-ttft-ms", |input, factor| input.slo.ttft_ms *= factor),
    ("slo-itl-ms", |input, factor| input.slo.itl_ms *= factor),
    ("link-gbps", |input, factor| input.link_gbps *= factor),
    ("reached share of peak operations", |input, factor| input.device.reached_flops *= factor),
    ("reached share of peak bandwidth", |input, factor| input.device.reached_bytes *= factor),
];

/// Every input four fifths and five quarters of what it is, one at a time.
pub fn sensitivity(input: &PlanInput, chunk: u32) -> Vec<Change> {
    let change = |(name, scale): (&'static str, Scale), factor| {
        let mut input = *input;
        scale(&mut input, factor);
        let steps = Steps::new(&input);
        let fits = input.check().is_ok();
        let apart = fits.then(|| fewest_disaggregated(&input, &steps)).flatten();
        let colocated = fits.then(|| fewest_with(&input, &steps, chunk)).flatten();
        Change { input: name, factor, disaggregated: apart, colocated }
    };
    INPUTS.into_iter().flat_map(|one| FACTORS.map(|factor| change(one, factor))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::tests::input;

    #[test]
    fn more_load_and_stricter_bounds_never_take_fewer_workers() {
        let changes = sensitivity(&PlanInput { rate: 30.0, ..input() }, 512);
        assert_eq!(changes.len(), 16);
        let workers = |name: &str, factor: f64| {
            let found = changes.iter().find(|change| change.input == name && change.factor == factor);
            found.unwrap().disaggregated.map_or(u32::MAX, |cluster| cluster.num_workers())
        };
        for more in ["rate", "input-len", "output-len"] {
            assert!(workers(more, 0.8) <= workers(more, 1.25), "{more}");
        }
        for less in ["slo-ttft-ms", "slo-itl-ms", "link-gbps", "reached share of peak operations"] {
            assert!(workers(less, 0.8) >= workers(less, 1.25), "{less}");
        }
        assert!(workers("rate", 0.8) < workers("rate", 1.25));
    }
}
