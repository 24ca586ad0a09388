//! `baton bench`: loads a running cluster over HTTP and reports latency as its clients see it; `baton bench transfer` and `engine` need no cluster,
//! `baton bench --compare` starts its own.
//!
//! ITL is the gap between two events that carry tokens, one sample a gap; TPOT is a request's mean. Times of an open
//! loop start at the planned moment of arrival, so that a late start can't hide a queue.

pub(crate) mod compare;
mod drive;
mod engine;
mod load;
pub(crate) mod mooncake;
mod options;
pub(crate) mod process;
mod report;
mod request;
mod stall;
mod stats;
mod transfer;
mod workload;

use std::ffi::OsString;

use baton_worker::Turns;
use options::OtherBench;
pub(crate) use options::{BenchOptions, positive};

use crate::client::Client;
use crate::exit::Failure;

/// Runs the test and prints its report on standard output. `global` are the arguments that every child is given first.
///
/// # Errors
/// [`Failure::Usage`] for a bad URL, [`Failure::Unexpected`] when no cluster answers or no request succeeded.
pub(crate) async fn run(options: BenchOptions, global: Vec<OsString>) -> Result<(), Failure> {
    if let Some(OtherBench::Engine(options)) = options.other {
        let json = options.json;
        let measured = tokio::task::spawn_blocking(move || engine::run(&options)).await;
        let report = measured.map_err(|error| Failure::Unexpected(error.to_string()))??;
        return print(&report, &report.table(), json);
    }
    if let Some(OtherBench::Transfer(options)) = options.other {
        let json = options.json;
        let measured = tokio::task::spawn_blocking(move || transfer::run(&options)).await;
        let report = measured.map_err(|error| Failure::Unexpected(error.to_string()))??;
        return print(&report, &report.table(), json);
    }
    if options.compare.compare {
        let comparison = Box::pin(compare::run(&options, global)).await?;
        return print(&comparison, &comparison.table(), options.json);
    }
    // A clock that waits for its turn on a core measures that too.
    let _ = Turns::LastShort.take();
    let client = Client::new(&options.url)?;
    // Asked first, so that a missing cluster is one clear line and not a table of errors.
    client.get("/v1/models").await?;
    if let Some(num_streams) = options.background.streams {
        let report = stall::run(&client, &options, num_streams).await?.report();
        return print(&report, &report.table(), options.json);
    }
    let measured = load::run(&client, &options).await;
    let report = measured.report();
    print(&report, &report.table(), options.json)?;
    if measured.is_empty() {
        return Err(Failure::Unexpected("no request was answered".to_owned()));
    }
    Ok(())
}

/// Prints one JSON object, or the table.
///
/// # Errors
/// [`Failure::Unexpected`] when it can't be written as JSON.
pub(crate) fn print(report: &impl serde::Serialize, table: &str, json: bool) -> Result<(), Failure> {
    if json {
        let text =
            serde_json::to_string_pretty(report).map_err(|error| Failure::Unexpected(error.to_string()))?;
        println!("{text}");
    } else {
        print!("{table}");
    }
    Ok(())
}
