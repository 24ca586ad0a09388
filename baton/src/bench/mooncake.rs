//! Requests from a trace file: JSON lines as Mooncake published its traces.
//!
//! A line is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one for each 512 tokens]}`. Two prompts
//! whose `hash_ids` begin alike begin with the same tokens.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_sim::workload::{Arrival, Prompt, TRACE_BLOCK_TOKENS};
use serde::Deserialize;

use crate::exit::Failure;

/// Tokens that one hash id stands for.
const BLOCK: u32 = TRACE_BLOCK_TOKENS;
/// Longest line that is read, in bytes: a prompt of a million tokens has 2,000 ids of at most 20 digits.
const MAX_LINE_BYTES: usize = 256 << 10;
/// Requests that a file may hold.
const MAX_REQUESTS: usize = 1_000_000;

/// One line.
#[derive(Debug, Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// What was read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Trace {
    /// Requests, by time; the first at once.
    pub(crate) arrivals: Vec<Arrival>,
    /// Requests left out because prompt and answer are longer than the context.
    pub(crate) num_too_long: usize,
}

/// What of a file is taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// Only requests up to here, from the first one on.
    pub(crate) duration: Duration,
    /// Tokens of prompt and answer together, at most.
    pub(crate) context: u32,
}

/// A trace file that was read and understood.
#[derive(Debug)]
pub(crate) struct TraceFile {
    path: PathBuf,
    lines: Vec<Line>,
}

impl TraceFile {
    /// Reads all of it.
    ///
    /// # Errors
    /// [`Failure::Usage`] with file, line and field.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let bad = |why: String| Failure::Usage(format!("--workload {}: {why}", path.display()));
        let file = std::fs::File::open(path).map_err(|error| bad(error.to_string()))?;
        let lines = parse(BufReader::new(file)).map_err(bad)?;
        Ok(Self { path: path.to_owned(), lines })
    }

    /// The requests of a part.
    ///
    /// # Errors
    /// [`Failure::Usage`] when there is none.
    pub(crate) fn take(self, part: Part) -> Result<Trace, Failure> {
        let trace = take(self.lines, part);
        if trace.arrivals.is_empty() {
            return Err(Failure::Usage(format!(
                "--workload {}: no request within {:.0} s fits a context of {} tokens ({} are longer)",
                self.path.display(),
                part.duration.as_secs_f64(),
                part.context,
                trace.num_too_long
            )));
        }
        Ok(trace)
    }
}

fn parse(mut text: impl BufRead) -> Result<Vec<Line>, String> {
    let mut lines: Vec<Line> = Vec::new();
    let mut bytes = Vec::new();
    for number in 1.. {
        bytes.clear();
        let mut limited = std::io::Read::take(&mut text, MAX_LINE_BYTES as u64 + 1);
        limited.read_until(b'\n', &mut bytes).map_err(|error| error.to_string())?;
        if bytes.is_empty() {
            break;
        }
        if bytes.len() > MAX_LINE_BYTES {
            return Err(format!("line {number} is longer than {MAX_LINE_BYTES} bytes"));
        }
        if bytes.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let line: Line = serde_json::from_slice(&bytes).map_err(|error| format!("line {number}: {error}"))?;
        check(&line, lines.last()).map_err(|why| format!("line {number}: {why}"))?;
        if lines.len() == MAX_REQUESTS {
            return Err(format!("line {number}: more than {MAX_REQUESTS} requests"));
        }
        lines.push(line);
    }
    Ok(lines)
}

fn check(line: &Line, before: Option<&Line>) -> Result<(), String> {
    let Line { timestamp, input_length, output_length, hash_ids } = line;
    // A century in milliseconds: what is beyond can't be a time, and would not fit a duration.
    if !(0.0..=3.2e12).contains(timestamp) {
        return Err(format!("timestamp {timestamp} is no number of milliseconds from 0 to 3.2e12"));
    }
    if let Some(before) = before.filter(|before| before.timestamp > *timestamp) {
        return Err(format!("timestamp {timestamp} is before the line above's {}", before.timestamp));
    }
    for (field, value) in [("input_length", *input_length), ("output_length", *output_length)] {
        if !(1..=16_000_000).contains(&value) {
            return Err(format!("{field} {value} is not from 1 to 16000000"));
        }
    }
    let wanted = input_length.div_ceil(BLOCK) as usize;
    if hash_ids.len() != wanted {
        return Err(format!(
            "{} hash_ids for an input_length of {input_length}: expected {wanted}, one for each {BLOCK} tokens",
            hash_ids.len()
        ));
    }
    Ok(())
}

fn take(lines: Vec<Line>, part: Part) -> Trace {
    let first = lines.first().map_or(0.0, |line| line.timestamp);
    let mut trace = Trace { arrivals: Vec::new(), num_too_long: 0 };
    for line in lines {
        let at = Duration::from_secs_f64((line.timestamp - first) / 1e3);
        if at > part.duration {
            break;
        }
        if line.input_length.saturating_add(line.output_length) > part.context {
            trace.num_too_long += 1;
            continue;
        }
        let prompt = Prompt::Blocks { ids: line.hash_ids, block: BLOCK, tokens: line.input_length };
        trace.arrivals.push(Arrival { at, prompt, output_tokens: line.output_length });
    }
    trace
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: Part = Part { duration: Duration::from_secs(60), context: 8192 };

    fn lines(text: &str) -> Result<Trace, String> {
        parse(text.as_bytes()).map(|lines| take(lines, PART))
    }

    #[test]
    fn times_lengths_and_shared_blocks_are_taken_over() {
        let trace = lines(concat!(
            "{\"timestamp\": 27482, \"input_length\": 1030, \"output_length\": 52, \"hash_ids\": [46, 47, 48]}\n\n",
            "{\"timestamp\": 30535, \"input_length\": 512, \"output_length\": 26, \"hash_ids\": [46]}\n",
            "{\"timestamp\": 30536, \"input_length\": 8192, \"output_length\": 1, \"hash_ids\":",
            " [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]}\n",
            "{\"timestamp\": 99999, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1]}",
        ))
        .unwrap();
        assert_eq!(trace.num_too_long, 1);
        assert_eq!(trace.arrivals.len(), 2);
        assert_eq!(trace.arrivals[0].at, Duration::ZERO);
        assert_eq!(trace.arrivals[1].at, Duration::from_millis(3053));
        let prompt = Prompt::Blocks { ids: vec![46, 47, 48], block: 512, tokens: 1030 };
        assert_eq!((&trace.arrivals[0].prompt, trace.arrivals[0].output_tokens), (&prompt, 52));
    }

    #[test]
    fn a_file_without_a_request_that_fits_is_refused_with_both_numbers() {
        let path = PathBuf::from("long.jsonl");
        let line = "{\"timestamp\": 1, \"input_length\": 9000, \"output_length\": 1, \"hash_ids\": [1, 2, 3, 4, 5, 6, 7, 8, 9, \
                    10, 11, 12, 13, 14, 15, 16, 17, 18]}";
        let file = TraceFile { path, lines: parse(line.as_bytes()).unwrap() };
        let failure = file.take(PART).unwrap_err().to_string();
        assert!(
            failure.contains("long.jsonl") && failure.contains("8192") && failure.contains("(1 are"),
            "{failure}"
        );
        assert!(TraceFile::read(Path::new("/nowhere.jsonl")).is_err_and(|failure| failure.code() == 2));
    }

    #[test]
    fn what_is_wrong_is_told_with_line_and_field() {
        let good = "{\"timestamp\": 9, \"input_length\": 5, \"output_length\": 5, \"hash_ids\": [1]}\n";
        for (line, word) in [
            ("{\"timestamp\": 9, \"input_length\": 5, \"output_length\": 5}", "hash_ids"),
            (
                "{\"timestamp\": 9, \"input_length\": 513, \"output_length\": 5, \"hash_ids\": [1]}",
                "expected 2",
            ),
            ("{\"timestamp\": 8, \"input_length\": 5, \"output_length\": 5, \"hash_ids\": [1]}", "timestamp"),
            (
                "{\"timestamp\": -1, \"input_length\": 5, \"output_length\": 5, \"hash_ids\": [1]}",
                "timestamp",
            ),
            (
                "{\"timestamp\": 9, \"input_length\": 0, \"output_length\": 5, \"hash_ids\": []}",
                "input_length",
            ),
            (
                "{\"timestamp\": 9, \"input_length\": 5, \"output_length\": 0, \"hash_ids\": [1]}",
                "output_length",
            ),
            ("{\"timestamp\": 9, \"input_length\": 5e9, \"output_length\": 5, \"hash_ids\": [1]}", "line 2"),
            ("nothing", "line 2"),
        ] {
            let error = lines(&format!("{good}{line}\n")).unwrap_err();
            assert!(error.contains("line 2") && error.contains(word), "{line}: {error}");
        }
        let long = format!("{good}{}", " ".repeat(MAX_LINE_BYTES + 10));
        assert!(lines(&long).unwrap_err().contains("longer than"));
    }
}
