//! Owns the command `baton`: what there is to type, configuration, the cluster that `up` starts and keeps alive, and
//! what speaks to a running cluster from outside (`chat`, `bench`).
//!
//! Must never know how a prompt is computed, how KV moves or how a request is placed: the roles do, behind `run`.

mod bench;
mod chat;
mod cli;
mod client;
mod config;
mod doctor;
mod exit;
mod lab;
mod plan;
mod roles;
mod sim;
mod trace_export;
mod tracing;
mod up;
mod version;

use std::ffi::OsString;
use std::process::ExitCode;

use cli::{Commands, NotParsed, Parsed};
use exit::Failure;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let parsed = match cli::parse(&arguments) {
        Ok(parsed) => parsed,
        // Ends the process: with 0 after `--help` and `--version`, else with the code of a wrong option.
        Err(NotParsed::Clap(error)) => error.exit(),
        Err(NotParsed::Failure(failure)) => return failure.report(),
    };
    match run(parsed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(parsed: Parsed) -> Result<(), Failure> {
    let Parsed { cli, passed } = parsed;
    match cli.command {
        Commands::Up(options) => {
            let common = cli.global.arguments();
            wait_for(up::run(up::Up { options, passed, common }))
        }
        Commands::Chat(options) => wait_for(chat::run(options)),
        Commands::Bench(options) => wait_for(bench::run(options, cli.global.arguments())),
        Commands::Doctor(options) => doctor::run(&options),
        Commands::Trace(options) => trace_export::run(options),
        Commands::Sim(options) => sim::run(&options),
        Commands::Lab(options) => lab::run(&options),
        Commands::Plan(options) => plan::run(&options),
        role @ (Commands::Router(_) | Commands::PrefillWorker(_) | Commands::DecodeWorker(_)) => {
            roles::run(role, &cli.global)
        }
    }
}

/// Runs to the end on this very thread, which lives as long as the process.
fn wait_for(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let runtime = roles::one_thread()?;
    let outcome = runtime.block_on(work);
    // A download that was interrupted must not keep the process.
    runtime.shutdown_background();
    outcome
}
