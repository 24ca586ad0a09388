//! `baton sim trace`: a made trace file.

use std::fmt::Write;
use std::path::PathBuf;

use baton_sim::workload::{TraceLine, TraceShape, made_trace, reused_tokens};

use crate::bench::positive;
use crate::exit::Failure;

/// What the trace is to be like.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct TraceOptions {
    /// File to write; without one the lines go to standard output [default: none]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Requests
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,

    /// Requests a second, a Poisson process
    #[arg(long, value_name = "PER_SECOND", default_value_t = 10.0, value_parser = positive)]
    rate: f64,

    /// Mean tokens of a request that it shares with none before; log-normal
    #[arg(long, value_name = "TOKENS", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    new_tokens: u32,

    /// Mean tokens of an answer; log-normal
    #[arg(long, value_name = "TOKENS", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    output_tokens: u32,

    /// Beginnings (system prompts) that conversations share; the n-th is 1/n times as frequent as the first
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    prefixes: u32,

    /// Tokens of each of them, in whole blocks of 512
    #[arg(long, value_name = "TOKENS", default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    prefix_tokens: u32,

    /// Requests in a hundred that go on with a conversation
    #[arg(long, value_name = "PERCENT", default_value_t = 40, value_parser = clap::value_parser!(u32).range(0..=100))]
    turns: u32,

    /// Tokens of a prompt at most
    #[arg(long, value_name = "TOKENS", default_value_t = 6_144, value_parser = clap::value_parser!(u32).range(1..=130_000))]
    max_tokens: u32,

    /// Seed of everything
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Makes it, writes it, and says on standard error what it is.
///
/// # Errors
/// [`Failure::Usage`] when the file can't be written.
pub(super) fn run(options: &TraceOptions) -> Result<(), Failure> {
    let lines = made_trace(
        options.seed,
        TraceShape {
            num_requests: options.requests,
            rate: options.rate,
            new_tokens: options.new_tokens,
            output_tokens: options.output_tokens,
            num_prefixes: options.prefixes,
            prefix_tokens: options.prefix_tokens,
            turns_percent: options.turns,
            max_tokens: options.max_tokens,
        },
    );
    let mut text = String::new();
    for line in &lines {
        write_line(&mut text, line);
    }
    match &options.out {
        Some(path) => std::fs::write(path, &text)
            .map_err(|error| Failure::Usage(format!("--out {}: {error}", path.display())))?,
        None => print!("{text}"),
    }
    let (tokens, reused) = reused_tokens(&lines);
    eprintln!(
        "seed {}: {} requests, {tokens} prompt tokens, of which a prefix cache without bound would find {:.0} %",
        options.seed,
        lines.len(),
        100.0 * reused as f64 / tokens.max(1) as f64
    );
    Ok(())
}

fn write_line(text: &mut String, line: &TraceLine) {
    let TraceLine { timestamp, input_length, output_length, hash_ids } = line;
    let _ = writeln!(
        text,
        "{{\"timestamp\": {timestamp:.3}, \"input_length\": {input_length}, \"output_length\": {output_length}, \"hash_ids\": {hash_ids:?}}}"
    );
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::mooncake::{Part, TraceFile};

    #[test]
    fn what_is_made_is_what_the_reader_of_traces_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made.jsonl");
        let out = Some(path.clone());
        run(&TraceOptions {
            out,
            requests: 300,
            rate: 10.0,
            new_tokens: 700,
            output_tokens: 50,
            prefixes: 3,
            prefix_tokens: 1_024,
            turns: 50,
            max_tokens: 4_000,
            seed: 7,
        })
        .unwrap();
        let part = Part { duration: Duration::from_secs(1_000), context: 8_192 };
        let trace = TraceFile::read(&path).unwrap().take(part).unwrap();
        assert_eq!((trace.arrivals.len(), trace.num_too_long), (300, 0));
        assert!(trace.arrivals.iter().all(|arrival| arrival.prompt.num_tokens() <= 4_000));
        let nowhere = TraceOptions { out: Some("/nowhere/at/all".into()), ..options() };
        assert!(run(&nowhere).is_err_and(|failure| failure.code() == 2));
    }

    fn options() -> TraceOptions {
        TraceOptions {
            out: None,
            requests: 1,
            rate: 1.0,
            new_tokens: 1,
            output_tokens: 1,
            prefixes: 0,
            prefix_tokens: 0,
            turns: 0,
            max_tokens: 1,
            seed: 1,
        }
    }
}
