//! `baton sim`: whole clusters in virtual time.

use std::time::{Duration, Instant};

use baton_sim::{Faults, Report};

use crate::exit::Failure;

/// Options of `baton sim`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SimOptions {
    /// Clusters to run, one seed each
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    runs: u64,

    /// Seed of the first run; the next ones count up from it
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Faults to inject: none, or all (delays, partitions, lost connections, damaged and repeated messages, cancels; kills, pauses
    /// and drains of processes)
    #[arg(long, value_name = "NAME", default_value = "all")]
    faults: Faults,
}

/// Between two lines about how far it is.
const PROGRESS: Duration = Duration::from_secs(5);

/// Runs them and prints what happened, in counts.
///
/// # Errors
/// [`Failure::Unexpected`] with the first rule that broke and the command that repeats it.
pub(crate) fn run(options: &SimOptions) -> Result<(), Failure> {
    let began = Instant::now();
    let mut said = began;
    let progress = |report: &Report| {
        if said.elapsed() >= PROGRESS {
            said = Instant::now();
            let (done, runs) = (report.num_runs, options.runs);
            eprintln!("{done} of {runs} schedules, {:.0} s", began.elapsed().as_secs_f64());
        }
    };
    let report = baton_sim::run_many(options.seed, options.runs, options.faults, progress)
        .map_err(|violation| Failure::Unexpected(violation.to_string()))?;
    println!("{report}");
    Ok(())
}
