//! From measured requests to a table and a JSON object.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::drive::Run;
use super::request::Record;
use super::stats::{Samples, Summary};

/// Everything measured of a set of requests.
#[derive(Debug, Clone, Default)]
pub(super) struct Measured {
    ttft: Samples,
    itl: Samples,
    tpot: Samples,
    e2e: Samples,
    num_tokens: u64,
    num_merged: u64,
    errors: BTreeMap<String, u64>,
    /// From the first request to the end of the last one.
    pub(super) duration: Duration,
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

impl Measured {
    /// Takes in a request that was answered in full.
    pub(super) fn add(&mut self, record: &Record) {
        self.ttft.extend(record.ttft().map(ms));
        self.itl.extend(record.gaps().map(|(_, gap)| ms(gap)));
        self.tpot.extend(record.tpot().map(ms));
        self.e2e.push(ms(record.end.saturating_duration_since(record.start)));
        self.num_tokens += record.num_tokens;
        self.num_merged += record.num_merged;
    }

    /// Counts a request that was not.
    pub(super) fn error(&mut self, kind: &str) {
        *self.errors.entry(kind.to_owned()).or_default() += 1;
    }

    /// Whether nothing at all was answered.
    pub(super) fn is_empty(&self) -> bool {
        self.e2e.len() == 0
    }

    /// What is reported.
    pub(super) fn report(&self) -> Report {
        let seconds = self.duration.as_secs_f64();
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        Report {
            requests: self.e2e.len() as u64,
            num_errors: self.errors.values().sum(),
            errors: self.errors.clone(),
            duration_s: seconds,
            requests_per_s: per_second(self.e2e.len() as f64),
            output_tokens: self.num_tokens,
            output_tokens_per_s: per_second(self.num_tokens as f64),
            merged_tokens: self.num_merged,
            ttft_ms: self.ttft.summary(),
            itl_ms: self.itl.summary(),
            tpot_ms: self.tpot.summary(),
            e2e_ms: self.e2e.summary(),
        }
    }
}

/// The JSON object of a load test. A summary is null when nothing was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Report {
    /// Requests answered in full; only they are in the figures below.
    requests: u64,
    num_errors: u64,
    /// Requests that were not, by kind.
    errors: BTreeMap<String, u64>,
    duration_s: f64,
    requests_per_s: f64,
    output_tokens: u64,
    output_tokens_per_s: f64,
    /// Tokens that came in one event with another: their gaps are not in `itl_ms`.
    merged_tokens: u64,
    ttft_ms: Option<Summary>,
    itl_ms: Option<Summary>,
    tpot_ms: Option<Summary>,
    e2e_ms: Option<Summary>,
}

impl Report {
    /// The same for a person.
    pub(super) fn table(&self) -> String {
        let mut text = format!(
            "{} requests in {:.1} s: {:.2} requests/s, {:.1} output tokens/s\n",
            self.requests, self.duration_s, self.requests_per_s, self.output_tokens_per_s
        );
        let rows = [
            ("TTFT", self.ttft_ms),
            ("ITL", self.itl_ms),
            ("TPOT", self.tpot_ms),
            ("end-to-end", self.e2e_ms),
        ];
        text.push_str(&rows_table(&rows));
        if self.merged_tokens > 0 {
            // Writing to a String can't fail.
            let _ = writeln!(text, "{} tokens came together with another one", self.merged_tokens);
        }
        let errors: Vec<String> = self.errors.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        let errors = if errors.is_empty() { "none".to_owned() } else { errors.join(", ") };
        let _ = writeln!(text, "errors: {errors}");
        text
    }
}

fn rows_table(rows: &[(&str, Option<Summary>)]) -> String {
    let mut text =
        format!("{:<22}{:>10}{:>10}{:>10}{:>10}{:>10}\n", "ms", "p50", "p90", "p99", "max", "samples");
    for (name, summary) in rows {
        let _ = match summary {
            Some(s) => writeln!(
                text,
                "{name:<22}{:>10.2}{:>10.2}{:>10.2}{:>10.2}{:>10}",
                s.p50, s.p90, s.p99, s.max, s.count
            ),
            None => writeln!(text, "{name:<22}{:>10}{:>10}{:>10}{:>10}{:>10}", "-", "-", "-", "-", 0),
        };
    }
    text
}

/// Everything measured in a stall test.
#[derive(Debug, Clone, Default)]
pub(super) struct Stall {
    /// The prompts that arrived.
    arrivals: Measured,
    /// From the first arrival to the last answer.
    duration: Duration,
    /// Background streams that broke off.
    num_stream_errors: u64,
    quiet: Samples,
    itl: Samples,
    num_merged: u64,
}

impl Stall {
    /// What a run came to.
    pub(super) fn of(run: &Run) -> Self {
        let duration = run.end - run.start;
        let mut stall = Self {
            arrivals: Measured { duration, errors: run.errors.clone(), ..Measured::default() },
            duration,
            num_stream_errors: run.num_stream_errors,
            ..Self::default()
        };
        run.arrivals.iter().for_each(|record| stall.arrivals.add(record));
        stall.quiet.extend(run.victims_gaps(run.quiet, run.start).map(|(_, gap)| ms(gap)));
        stall.itl.extend(run.victims_gaps(run.start, run.end).map(|(_, gap)| ms(gap)));
        stall.num_merged = run.streams.iter().map(|record| record.num_merged).sum();
        stall
    }

    /// What is reported.
    pub(super) fn report(&self) -> StallReport {
        StallReport {
            duration_s: self.duration.as_secs_f64(),
            streams: StreamsReport {
                itl_ms: self.itl.summary(),
                quiet_itl_ms: self.quiet.summary(),
                merged_tokens: self.num_merged,
                num_errors: self.num_stream_errors,
            },
            arrivals: self.arrivals.report(),
        }
    }
}

/// The JSON object of a stall test.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct StallReport {
    duration_s: f64,
    streams: StreamsReport,
    arrivals: Report,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct StreamsReport {
    /// Gaps while prompts arrived.
    itl_ms: Option<Summary>,
    /// Gaps before the first one did.
    quiet_itl_ms: Option<Summary>,
    merged_tokens: u64,
    num_errors: u64,
}

impl StallReport {
    /// The same for a person.
    pub(super) fn table(&self) -> String {
        let mut text = format!("background streams, for {:.1} s of arrivals\n", self.duration_s);
        let rows =
            [("ITL without arrivals", self.streams.quiet_itl_ms), ("ITL with arrivals", self.streams.itl_ms)];
        text.push_str(&rows_table(&rows));
        if let (Some(quiet), Some(busy)) = (self.streams.quiet_itl_ms, self.streams.itl_ms) {
            let _ = writeln!(
                text,
                "worst gap: {:.1}x the undisturbed median, p99 {:.1}x",
                busy.max / quiet.p50,
                busy.p99 / quiet.p50
            );
        }
        let _ = writeln!(text, "streams broken off: {}\n\narriving prompts", self.streams.num_errors);
        text.push_str(&self.arrivals.table());
        text
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn record(start: Instant, at_ms: &[u64]) -> Record {
        let at = |ms: &u64| start + Duration::from_millis(*ms);
        let end = at_ms.last().map_or(start, at);
        let arrivals: Vec<Instant> = at_ms.iter().map(at).collect();
        Record { num_tokens: arrivals.len() as u64, arrivals, end, ..Record::new(start) }
    }

    #[test]
    fn the_json_has_the_promised_names() {
        let start = Instant::now();
        let mut measured = Measured { duration: Duration::from_secs(2), ..Measured::default() };
        measured.add(&record(start, &[10, 30, 60]));
        measured.error("http_429");
        let json = serde_json::to_value(measured.report()).unwrap();
        assert_eq!(json["itl_ms"]["p50"], 20.0);
        assert_eq!(json["itl_ms"]["max"], 30.0);
        assert_eq!(json["ttft_ms"]["p99"], 10.0);
        assert_eq!(json["tpot_ms"]["p50"], 25.0);
        assert_eq!(json["e2e_ms"]["p90"], 60.0);
        assert_eq!(json["requests"], 1);
        assert_eq!(json["errors"]["http_429"], 1);
        assert_eq!(json["output_tokens_per_s"], 1.5);
        assert_eq!(json["duration_s"], 2.0);
    }

    fn run(streams: Vec<Record>, [quiet, start, end]: [Instant; 3]) -> Run {
        let (arrivals, errors) = (Vec::new(), BTreeMap::new());
        Run { quiet, start, end, streams, num_stream_errors: 0, arrivals, errors }
    }

    #[test]
    fn a_stalls_gaps_fall_into_their_windows() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        // Gaps end at 20 (before everything), 40 (quiet), 150 (with arrivals) and 500 (after).
        let stream = record(start, &[10, 20, 40, 150, 500]);
        let stall = Stall::of(&run(vec![stream], [at(30), at(100), at(400)]));
        let json = serde_json::to_value(stall.report()).unwrap();
        assert_eq!(json["streams"]["quiet_itl_ms"]["count"], 1);
        assert_eq!(json["streams"]["quiet_itl_ms"]["max"], 20.0);
        assert_eq!(json["streams"]["itl_ms"]["count"], 1);
        assert_eq!(json["streams"]["itl_ms"]["max"], 110.0);
        assert_eq!(json["arrivals"]["ttft_ms"], serde_json::Value::Null);
    }

    #[test]
    fn a_stream_that_never_spoke_again_counts_its_silence() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut silent = record(start, &[10, 50]);
        silent.end = start;
        let stall = Stall::of(&run(vec![silent], [at(0), at(100), at(4000)]));
        assert_eq!(stall.itl.summary().unwrap().max, 3950.0);
    }
}
