//! `baton lab`: the ideas that Baton is made of, shown on the code that serves.

use std::io::{self, Write};
use std::path::PathBuf;

use baton_lab::{Demonstration, Report};

use crate::exit::Failure;

/// Options of `baton lab`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = list())]
pub(crate) struct LabOptions {
    /// Demonstration to run, or all; without one they are listed
    #[arg(value_name = "NAME")]
    name: Option<Choice>,

    /// Print JSON in place of tables: one object, with all a list of them
    #[arg(long)]
    json: bool,

    /// Write a page with plots to this file too, which needs nothing else; an existing file is replaced [default: no page]
    #[arg(long, value_name = "FILE", requires = "name")]
    html: Option<PathBuf>,
}

/// What is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    One(Demonstration),
    All,
}

impl std::str::FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            _ => text.parse().map(Self::One).map_err(|error| format!("{error}, all")),
        }
    }
}

/// All demonstrations, one a line.
fn list() -> String {
    let line = |one: &Demonstration| format!("  {:11} {}\n", one.name(), one.summary());
    let lines: String = Demonstration::ALL.iter().map(line).collect();
    format!("Demonstrations, in the order in which they build on one another:\n{lines}")
}

/// Shows what was asked for.
///
/// # Errors
/// [`Failure::Usage`] when the page can't be written, [`Failure::Unexpected`] when something does not hold that must.
pub(crate) fn run(options: &LabOptions) -> Result<(), Failure> {
    let chosen: Vec<Demonstration> = match options.name {
        None if options.json => return print(&names_as_json()?),
        None => return print(&format!("{}\nRun one with `baton lab NAME`, or `baton lab all`.\n", list())),
        Some(Choice::One(one)) => vec![one],
        Some(Choice::All) => Demonstration::ALL.to_vec(),
    };
    let mut reports = Vec::with_capacity(chosen.len());
    for (nth, one) in chosen.into_iter().enumerate() {
        let report =
            one.run().map_err(|error| Failure::Unexpected(format!("lab {}: {error}", one.name())))?;
        if !options.json {
            // Each is shown when it is there; all of them take seconds.
            let rule = if nth > 0 { format!("\n{}\n\n", "=".repeat(110)) } else { String::new() };
            print(&format!("{rule}{}", baton_lab::text(&report)))?;
        }
        reports.push(report);
    }
    if let Some(path) = &options.html {
        std::fs::write(path, baton_lab::html(&reports)).map_err(|error| {
            Failure::Usage(format!("--html: {} can't be written: {error}", path.display()))
        })?;
        eprintln!("wrote {}", path.display());
    }
    if options.json { print(&as_json(options, &reports)?) } else { Ok(()) }
}

fn names_as_json() -> Result<String, Failure> {
    let names =
        Demonstration::ALL.map(|one| serde_json::json!({"name": one.name(), "summary": one.summary()}));
    to_json(&names)
}

fn as_json(options: &LabOptions, reports: &[Report]) -> Result<String, Failure> {
    match (options.name, reports) {
        (Some(Choice::One(_)), [report]) => to_json(report),
        _ => to_json(&reports),
    }
}

fn to_json(value: &impl serde::Serialize) -> Result<String, Failure> {
    let json = serde_json::to_string_pretty(value).map_err(|error| Failure::Unexpected(error.to_string()))?;
    Ok(json + "\n")
}

/// To standard output; whoever reads only the beginning (`| head`) may leave.
fn print(text: &str) -> Result<(), Failure> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Unexpected(format!("standard output: {error}")))
        }
        _ => Ok(()),
    }
}
