//! `baton plan`: how many workers of each kind a load and an objective need.

mod report;

use baton_plan::{Cluster, PlanError, PlanInput, Slo};

use self::report::Report;
use crate::bench::{positive, print};
use crate::exit::Failure;

/// What is to be served, on what, and how well.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct PlanOptions {
    /// Model; an unknown name is told with all that there are
    #[arg(long, value_name = "NAME", default_value = "llama-3-8b")]
    model: String,

    /// Device of each worker; likewise
    #[arg(long, value_name = "NAME", default_value = "h200")]
    gpu: String,

    /// Requests a second
    #[arg(long, value_name = "PER_SECOND", default_value_t = 20.0, value_parser = positive)]
    rate: f64,

    /// Tokens of a prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 2_048)]
    input_len: u32,

    /// Tokens of an answer
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    output_len: u32,

    /// 99 in 100 first tokens come within, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 300.0, value_parser = positive)]
    slo_ttft_ms: f64,

    /// 99 in 100 gaps between tokens are at most so long, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 15.0, value_parser = positive)]
    slo_itl_ms: f64,

    /// Line rate of each worker's link, in gigabits a second
    #[arg(long, value_name = "GBPS", default_value_t = 400.0, value_parser = positive)]
    link_gbps: f64,

    /// Also simulate the plan with so many requests, and tell how far the model is off; 0: don't
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    simulate: u32,

    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// Plans and prints.
///
/// # Errors
/// [`Failure::Usage`] for an unknown name, an input out of its bounds, and an objective that no number of workers keeps.
pub(crate) fn run(options: &PlanOptions) -> Result<(), Failure> {
    let report = options.report().map_err(|error| match error {
        PlanError::Simulation(_) => Failure::Unexpected(error.to_string()),
        _ => Failure::Usage(error.to_string()),
    })?;
    print(&report, &report.table(), options.json)
}

impl PlanOptions {
    fn input(&self) -> Result<PlanInput, PlanError> {
        Ok(PlanInput {
            model: baton_plan::model(&self.model)?,
            device: baton_plan::device(&self.gpu)?,
            rate: self.rate,
            input_tokens: self.input_len,
            output_tokens: self.output_len,
            slo: Slo { ttft_ms: self.slo_ttft_ms, itl_ms: self.slo_itl_ms },
            link_gbps: self.link_gbps,
        })
    }

    fn report(&self) -> Result<Report, PlanError> {
        let input = self.input()?;
        let plan = baton_plan::plan(&input)?;
        let chunk = match plan.colocated {
            Some((Cluster::Colocated { chunk, .. }, ..)) => chunk,
            _ => baton_plan::CHUNKS[0],
        };
        let changes = baton_plan::sensitivity(&input, chunk);
        let mut report = Report::new(&input, &plan, &changes);
        if self.simulate > 0 {
            for (cluster, figures, _) in [plan.disaggregated, plan.colocated].into_iter().flatten() {
                let judged = baton_plan::judge(&input, cluster, self.simulate)?;
                report.judged(cluster, &figures, &judged);
            }
        }
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> PlanOptions {
        PlanOptions {
            model: "llama-3-8b".to_owned(),
            gpu: "h200".to_owned(),
            rate: 20.0,
            input_len: 2_048,
            output_len: 128,
            slo_ttft_ms: 300.0,
            slo_itl_ms: 15.0,
            link_gbps: 400.0,
            simulate: 0,
            json: false,
        }
    }

    #[test]
    fn a_plan_says_what_it_takes_what_it_gives_and_what_would_change_it() {
        let report = PlanOptions { simulate: 300, ..options() }.report().unwrap();
        let json = serde_json::to_value(&report).unwrap();
        let workers = |kind: &str| json[kind]["workers"].as_u64().unwrap();
        let least = workers("disaggregated").min(workers("colocated"));
        assert_eq!(json["cheapest"]["workers"].as_u64(), Some(least), "{json}");
        let apart = &json["disaggregated"];
        assert_eq!(
            apart["prefill"].as_u64().unwrap() + apart["decode"].as_u64().unwrap(),
            workers("disaggregated")
        );
        let goodput = apart["goodput_per_gpu"].as_f64().unwrap();
        assert!(goodput * workers("disaggregated") as f64 >= 20.0, "{goodput}");
        assert!(apart["ttft_p99_ms"].as_f64().unwrap() <= 300.0);
        assert!(
            json["links"]["least_gbps"].as_f64().unwrap() < json["links"]["hiding_gbps"].as_f64().unwrap()
        );
        assert_eq!(json["sensitivity"].as_array().unwrap().len(), 16);
        assert_eq!(json["simulated"].as_array().unwrap().len(), 2);
        let table = report.table();
        for part in ["disaggregated", "colocated", "goodput", "Gb/s", "rate x 1.25", "simulated"] {
            assert!(table.contains(part), "{part}:\n{table}");
        }
        let loses = table.contains("Disaggregation loses");
        assert_eq!(loses, workers("colocated") < workers("disaggregated"), "{table}");
    }

    #[test]
    fn what_is_wrong_ends_with_the_code_of_a_wrong_option() {
        for wrong in [
            PlanOptions { model: "llama-9".to_owned(), ..options() },
            PlanOptions { gpu: "abacus".to_owned(), ..options() },
            PlanOptions { output_len: 1, ..options() },
            PlanOptions { input_len: 0, ..options() },
            PlanOptions { slo_ttft_ms: 1.0, ..options() },
        ] {
            assert_eq!(run(&wrong).unwrap_err().code(), 2, "{wrong:?}");
        }
    }
}
