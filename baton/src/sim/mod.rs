//! `baton sim`: whole clusters in virtual time. Drawn ones under faults; or one cluster under a load, clusters of growing size, and the clusters of a
//! comparison that ran, to see how well the simulation knows them.

mod calibrate;
mod made_trace;
mod report;
mod scale;
mod served;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use baton_sim::{Faults, Report};

use self::made_trace::TraceOptions;
use self::served::ServedOptions;
use crate::exit::Failure;

/// Options of `baton sim`.
#[derive(Debug, Clone, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct SimOptions {
    /// Do something else
    #[command(subcommand)]
    other: Option<OtherSim>,

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

    /// Serve a load instead, without faults: poisson, bursts, or a trace file of JSON lines as `bench --compare` takes them [default: none]
    #[arg(long, value_name = "LOAD", conflicts_with_all = ["runs", "faults", "scale", "calibrate"])]
    workload: Option<String>,

    /// Serve the same load per worker on clusters of so many workers instead, and tell what a simulated request costs [default: none]
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with_all = ["runs", "faults", "calibrate"],
          value_parser = clap::value_parser!(u32).range(2..=2_000))]
    scale: Vec<u32>,

    /// Simulate the clusters of a comparison instead, with the costs that their workers measured, and tell how far off that is: a file that
    /// `bench --compare --json` wrote [default: none]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["runs", "faults"])]
    calibrate: Option<PathBuf>,

    /// Print one JSON object instead of tables; not with drawn clusters
    #[arg(long, conflicts_with_all = ["runs", "faults"])]
    json: bool,

    #[command(flatten)]
    served: ServedOptions,
}

/// What needs no cluster.
#[derive(Debug, Clone, clap::Subcommand)]
enum OtherSim {
    /// Make a trace file: conversations over shared beginnings
    Trace(TraceOptions),
}

/// Between two lines about how far it is.
const PROGRESS: Duration = Duration::from_secs(5);

/// Runs what was asked for and prints what happened.
///
/// # Errors
/// [`Failure::Unexpected`] with the first rule that broke and the command that repeats it; [`Failure::Usage`] for a wrong option or file.
pub(crate) fn run(options: &SimOptions) -> Result<(), Failure> {
    match (&options.other, &options.workload, &options.calibrate) {
        (Some(OtherSim::Trace(options)), ..) => made_trace::run(options),
        (None, Some(load), _) => served::run(load, options.seed, &options.served, options.json),
        (None, None, Some(path)) => calibrate::run(path, options.json),
        _ if !options.scale.is_empty() => {
            scale::run(options.seed, &options.scale, options.served.requests, options.json)
        }
        _ => drawn(options),
    }
}

fn drawn(options: &SimOptions) -> Result<(), Failure> {
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
