//! `baton trace export`: the files that `--trace-file` and `--traces` write, as one document that Jaeger's page uploads.

mod gather;
mod lines;
mod select;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use self::gather::Gathered;
use self::select::{Requests, Wanted};
use crate::exit::Failure;

/// Options of `baton trace`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TraceOptions {
    #[command(subcommand)]
    command: TraceCommands,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum TraceCommands {
    /// Gather what processes wrote with --trace-file or --traces into one OTLP JSON document, as Jaeger's page uploads it
    Export(ExportOptions),
}

/// Options of `baton trace export`.
#[derive(Debug, Clone, clap::Args)]
struct ExportOptions {
    /// Files, or folders of which every .json, .jsonl and .ndjson file is read
    #[arg(value_name = "FILE|DIR", required = true)]
    paths: Vec<PathBuf>,

    /// Only the trace of this request: the id that the client sent or got as x-request-id, or Baton's own [default: all]
    #[arg(long, value_name = "ID")]
    request_id: Option<String>,

    /// Only this trace, 32 hexadecimal digits [default: all]
    #[arg(long, value_name = "ID", value_parser = trace_id, conflicts_with = "request_id")]
    trace_id: Option<String>,

    /// Only the traces of the N requests that took longest [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..),
          conflicts_with_all = ["request_id", "trace_id"])]
    slowest: Option<u32>,

    /// File to write [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Reads a trace id as users have it: from Jaeger, a log line or a `traceparent`, in either case of letters.
fn trace_id(text: &str) -> Result<String, String> {
    let id = text.to_ascii_lowercase();
    let good = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    if good { Ok(id) } else { Err("32 hexadecimal digits".to_owned()) }
}

/// Runs what was asked for.
///
/// # Errors
/// [`Failure::Usage`] for what can't be read or written, with file and line; [`Failure::Unexpected`] when nothing is left.
pub(crate) fn run(options: TraceOptions) -> Result<(), Failure> {
    let TraceCommands::Export(options) = options.command;
    let files = files(&options.paths)?;
    let wanted = wanted(&options, &files)?;
    let mut gathered = Gathered::new(wanted);
    for file in &files {
        lines::read(file, |batch| gathered.add(batch))?;
    }
    if gathered.num_spans() == 0 {
        let files = counted((files.len(), "file"));
        return Err(Failure::Unexpected(format!("no span of that kind in {files}")));
    }
    let (num_spans, num_traces) = (gathered.num_spans(), gathered.num_traces());
    write(&options, &gathered.document())?;
    let [spans, traces, files] =
        [(num_spans, "span"), (num_traces, "trace"), (files.len(), "file")].map(counted);
    eprintln!("{spans} of {traces} from {files}");
    Ok(())
}

/// So many of a thing whose plural ends in s.
fn counted((num, what): (usize, &str)) -> String {
    format!("{num} {what}{}", if num == 1 { "" } else { "s" })
}

/// Which traces are asked for; reads the files once where that takes knowing the requests.
fn wanted(options: &ExportOptions, files: &[PathBuf]) -> Result<Wanted, Failure> {
    if let Some(id) = &options.trace_id {
        return Ok(Wanted::These(BTreeSet::from([id.clone()])));
    }
    if options.request_id.is_none() && options.slowest.is_none() {
        return Ok(Wanted::All);
    }
    let mut requests = Requests::default();
    for file in files {
        lines::read(file, |batch| requests.add(&batch))?;
    }
    match (&options.request_id, options.slowest) {
        (Some(id), _) => {
            let traces = requests.with_id(id);
            if traces.is_empty() {
                let known = requests.len();
                return Err(Failure::Unexpected(format!("no request {id} among the {known} in these files")));
            }
            Ok(Wanted::These(traces))
        }
        (None, Some(num)) => Ok(Wanted::These(requests.slowest(num as usize))),
        (None, None) => Ok(Wanted::All),
    }
}

/// The files themselves and those of folders, each once, in order.
fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let bad = |path: &Path, why: String| Failure::Usage(format!("{}: {why}", path.display()));
    let mut files = BTreeSet::new();
    for path in paths {
        if !path.is_dir() {
            files.insert(path.clone());
            continue;
        }
        let before = files.len();
        for entry in std::fs::read_dir(path).map_err(|error| bad(path, error.to_string()))? {
            let entry = entry.map_err(|error| bad(path, error.to_string()))?.path();
            let extension = entry.extension().and_then(|extension| extension.to_str());
            if matches!(extension, Some("json" | "jsonl" | "ndjson")) && entry.is_file() {
                files.insert(entry);
            }
        }
        if files.len() == before {
            return Err(bad(path, "no .json, .jsonl or .ndjson file in this folder".to_owned()));
        }
    }
    Ok(files.into_iter().collect())
}

fn write(options: &ExportOptions, document: &serde_json::Value) -> Result<(), Failure> {
    let (result, place) = match &options.output {
        Some(path) => (std::fs::write(path, document.to_string()), path.display().to_string()),
        None => (writeln!(std::io::stdout().lock(), "{document}"), "standard output".to_owned()),
    };
    result.map_err(|error| Failure::Usage(format!("{place}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_ids_are_taken_in_either_case_and_nothing_else_is() {
        let id = "4BF92F3577B34DA6A3CE929D0E0E4736";
        assert_eq!(trace_id(id).unwrap(), id.to_lowercase());
        for bad in ["", "4bf9", "4bf92f3577b34da6a3ce929d0e0e473g", "4bf92f3577b34da6a3ce929d0e0e47361"] {
            assert!(trace_id(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn one_is_not_many() {
        assert_eq!([0, 1, 2].map(|num| counted((num, "trace"))), ["0 traces", "1 trace", "2 traces"]);
    }

    #[test]
    fn folders_give_their_files_once_and_an_empty_one_is_said() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b.jsonl", "a.json", "notes.txt"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let paths = [folder.path().to_owned(), folder.path().join("a.json")];
        let found = files(&paths).unwrap();
        assert_eq!(found, [folder.path().join("a.json"), folder.path().join("b.jsonl")]);
        let empty = tempfile::tempdir().unwrap();
        assert!(files(&[empty.path().to_owned()]).is_err_and(|failure| failure.code() == 2));
    }
}
