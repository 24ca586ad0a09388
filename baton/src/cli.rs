//! The command line: what there is to type.

use std::ffi::OsString;
use std::path::PathBuf;

use baton_decode_worker::DecodeWorkerConfig;
use baton_prefill_worker::PrefillWorkerConfig;
use baton_router::RouterConfig;
use baton_telemetry::log::LogFormat;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::bench::BenchOptions;
use crate::chat::ChatOptions;
use crate::config::{self, ConfigFile};
use crate::doctor::{self, DoctorOptions};
use crate::exit::{self, Failure};
use crate::lab::LabOptions;
use crate::plan::PlanOptions;
use crate::sim::SimOptions;
use crate::trace_export::TraceOptions;
use crate::tracing::Traced;
use crate::up::{self, PassedOn, UpOptions};
use crate::version;

/// Serves large language models with prefill and decode on separate workers.
///
/// Options come from flags, then BATON_* environment variables, then the TOML file of --config, then defaults.
#[derive(Debug, Parser)]
#[command(name = "baton", version = version::line(), after_help = exit::TABLE, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: GlobalOptions,
    #[command(subcommand)]
    pub(crate) command: Commands,
}

/// Options of every command.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct GlobalOptions {
    /// TOML file with options: keys are the long names without dashes, for all commands or in [up], [router],
    /// [prefill-worker], [decode-worker], [doctor]
    #[arg(long, env = "BATON_CONFIG", value_name = "FILE", global = true, help_heading = "Everywhere")]
    pub(crate) config: Option<PathBuf>,

    /// How log lines look: text or json
    #[arg(
        long,
        env = "BATON_LOG_FORMAT",
        value_name = "NAME",
        default_value = "text",
        global = true,
        help_heading = "Everywhere"
    )]
    pub(crate) log_format: LogFormat,

    /// Least level of log lines: error, warn, info, debug, trace or off, or TARGET=LEVEL pairs with commas between;
    /// under `up` the default is warn
    #[arg(
        long,
        env = "BATON_LOG_LEVEL",
        value_name = "LEVEL",
        default_value = "info",
        global = true,
        help_heading = "Everywhere"
    )]
    pub(crate) log_level: String,

    /// Allow text of prompts and answers in logs
    #[arg(long, env = "BATON_LOG_CONTENT", global = true, help_heading = "Everywhere")]
    pub(crate) log_content: bool,
}

impl GlobalOptions {
    /// The same options as arguments for a child.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec![
            format!("--log-format={}", self.log_format).into(),
            format!("--log-level={}", self.log_level).into(),
        ];
        if self.log_content {
            arguments.push("--log-content".into());
        }
        if let Some(path) = &self.config {
            arguments.push("--config".into());
            arguments.push(path.into());
        }
        arguments
    }
}

/// The level of the processes that `up` starts, unless another was asked for.
const LEVEL_UNDER_UP: &str = "warn";

/// What can be done.
#[derive(Debug, Subcommand)]
pub(crate) enum Commands {
    /// Start a whole cluster on this machine: router, prefill and decode workers
    Up(UpOptions),
    /// Run a router for workers that run already
    Router(Traced<RouterConfig>),
    /// Run a prefill worker: computes prompts and streams their KV
    PrefillWorker(Traced<PrefillWorkerConfig>),
    /// Run a decode worker: receives KV and generates
    DecodeWorker(Traced<DecodeWorkerConfig>),
    /// Ask a running cluster one question
    Chat(ChatOptions),
    /// Load a running cluster and report latencies
    Bench(BenchOptions),
    /// Tell what a worker would load, choose and take, and why it could not run
    Doctor(DoctorOptions),
    /// Work with the traces that processes wrote to files
    Trace(TraceOptions),
    /// Run whole clusters in virtual time: with faults, to check that nothing breaks, or under a load, to see how they serve it
    Sim(SimOptions),
    /// Show the ideas that Baton is made of, each on the code that serves
    Lab(LabOptions),
    /// Tell how many workers of each kind a load and an objective need
    Plan(PlanOptions),
}

/// A command line that was understood.
#[derive(Debug)]
pub(crate) struct Parsed {
    /// What was typed, with everything else filled in.
    pub(crate) cli: Cli,
    /// For `up`: what its children are given.
    pub(crate) passed: PassedOn,
}

/// The command line's definition, with the file's values as defaults.
///
/// # Errors
/// [`Failure::Usage`] for what is wrong with the file.
pub(crate) fn definition(file: Option<&ConfigFile>) -> Result<clap::Command, Failure> {
    let command = Cli::command().mut_subcommand("up", up::adjust).mut_subcommand("doctor", doctor::adjust);
    config::apply(command, file)
}

/// Why a command line was not understood.
#[derive(Debug)]
pub(crate) enum NotParsed {
    /// Clap's own, which also stands for `--help` and `--version`.
    Clap(clap::Error),
    /// Ours.
    Failure(Failure),
}

impl From<Failure> for NotParsed {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

/// Understands a command line.
///
/// # Errors
/// [`NotParsed`].
pub(crate) fn parse(arguments: &[OsString]) -> Result<Parsed, NotParsed> {
    let file = config::path_from(arguments).map(|path| ConfigFile::read(&path)).transpose()?;
    let command = definition(file.as_ref())?;
    let matches = command.clone().try_get_matches_from(arguments).map_err(NotParsed::Clap)?;
    let mut cli = Cli::from_arg_matches(&matches).map_err(NotParsed::Clap)?;
    if matches!(cli.command, Commands::Up(_) | Commands::Bench(_)) && !sets_log_level(&matches, file.as_ref())
    {
        // Three processes on one terminal, which `bench --compare` starts too: what they do well would bury what the user should see.
        LEVEL_UNDER_UP.clone_into(&mut cli.global.log_level);
    }
    if let (Commands::Up(options), Some(("up", matches))) = (&mut cli.command, matches.subcommand()) {
        up::settle_devices(options, matches, file.as_ref())?;
    }
    let passed = passed_on(&command, &matches, file.as_ref())?;
    Ok(Parsed { cli, passed })
}

fn sets_log_level(matches: &ArgMatches, file: Option<&ConfigFile>) -> bool {
    let by_default = matches.value_source("log_level") == Some(ValueSource::DefaultValue);
    !by_default || file.is_some_and(|file| file.top.contains_key("log-level"))
}

fn passed_on(
    command: &clap::Command,
    matches: &ArgMatches,
    file: Option<&ConfigFile>,
) -> Result<PassedOn, Failure> {
    match matches.subcommand() {
        Some(("up", matches)) => PassedOn::collect(command, matches, file),
        _ => Ok(PassedOn::default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        definition(None).unwrap().debug_assert();
    }

    #[test]
    fn every_option_with_a_value_says_what_it_is() {
        let mut command = definition(None).unwrap();
        command.build();
        for sub in command.get_subcommands() {
            let own = sub.get_arguments().filter(|arg| !arg.is_hide_set() && arg.get_id() != "help");
            for arg in own {
                let name = format!("{} {}", sub.get_name(), arg.get_id());
                let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.len() > 10, "{name}: no help");
                let takes = arg.get_action().takes_values() && arg.get_long().is_some();
                let says = !arg.get_default_values().is_empty()
                    || help.contains("[default")
                    || help.contains("repeat");
                // These choose a mode by being there.
                let mode = ["config", "rate"].contains(&arg.get_id().as_str());
                assert!(!takes || mode || says, "{name}: no default: {help}");
            }
        }
    }
}
