//! What a run on one cluster came to.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use serde::Serialize;

use super::cluster::Counts;
use super::layout::{Layout, Split};
use super::measured::MeasuredWorker;
use crate::bench::drive::Run;
use crate::bench::request::Record;
use crate::bench::stats::{Samples, Summary};

/// A gap that is longer than the undisturbed median by this is a stall, in milliseconds: the workers' own default.
const STALL_MS: f64 = 20.0;

/// Shares of the gaps that are told, so that whoever compares two runs sees on which side of a step a percentile lies.
const SHARES: [f64; 12] = [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.985, 0.99, 0.995, 0.999];

/// What requests are asked to keep to; no bound where there is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Slo {
    /// The first token comes within, in milliseconds.
    pub(super) ttft_ms: Option<f64>,
    /// No gap between two tokens is longer, in milliseconds.
    pub(super) itl_ms: Option<f64>,
}

impl Slo {
    fn is_met(&self, record: &Record) -> bool {
        let within = |value: Option<Duration>, bound: Option<f64>| {
            bound.is_none_or(|bound| value.is_none_or(|value| ms(value) <= bound))
        };
        let longest = record.gaps().map(|(_, gap)| gap).max();
        record.ttft().is_some() && within(record.ttft(), self.ttft_ms) && within(longest, self.itl_ms)
    }
}

/// Figures of one run. Milliseconds unless a name says otherwise; a summary is null when there was nothing to measure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Outcome {
    /// From the first arrival to the last answer.
    pub(super) duration_s: f64,
    /// Gaps of the background streams while requests arrived; without streams, of all requests.
    pub(super) itl_ms: Option<Summary>,
    /// The same finer: shares of the gaps, ascending, and how long these are at most.
    pub(super) itl_shares_ms: Vec<(f64, f64)>,
    /// The longest of these gaps that ended; null when there was none.
    pub(super) worst_gap: Option<WorstGap>,
    /// Those of them before an answer's second token: after a handoff the rest of a step that runs, and a step.
    pub(super) first_gap_ms: Option<Summary>,
    /// The others.
    pub(super) later_itl_ms: Option<Summary>,
    /// Gaps of the arriving requests.
    pub(super) arrival_itl_ms: Option<Summary>,
    /// Gaps of the streams before the first request arrived.
    pub(super) quiet_itl_ms: Option<Summary>,
    /// Of the arriving requests.
    pub(super) ttft_ms: Option<Summary>,
    /// Of each of them that was answered, in the order of arrival.
    pub(super) ttft_each_ms: Vec<f64>,
    /// Mean time of an output token after the first, of all whole requests.
    pub(super) tpot_ms: Option<Summary>,
    /// Tokens that came a second, of streams and arrivals.
    pub(super) output_tokens_per_s: f64,
    /// Arrivals that were answered in full.
    pub(super) arrivals: u64,
    /// Requests, streams among them, that ended in full.
    pub(super) requests: u64,
    /// Those of them that met the SLOs.
    pub(super) requests_in_slo: u64,
    /// The same a second.
    pub(super) goodput_per_s: f64,
    /// Requests that failed, by kind; `stream` for background streams.
    pub(super) errors: BTreeMap<String, u64>,
    /// Tokens that came in one event with another: their gaps are not seen from here.
    pub(super) merged_tokens: u64,
    /// Transfers of the arrivals' KV.
    pub(super) kv: Kv,
    /// For how long decoding sequences stood still.
    pub(super) blocked: Blocked,
    /// What the router says its streams were spared by computing prompts elsewhere; null where it says nothing.
    pub(super) avoided_ms: Option<f64>,
    /// The workers, and what their steps cost by the end.
    pub(super) workers: Vec<MeasuredWorker>,
    /// For the picture: gaps by when they ended, in seconds from the first arrival on.
    #[serde(skip)]
    pub(super) gaps: Vec<(f64, f64)>,
    /// For the picture: the arrivals' time from being sent to their first token, in seconds from the first arrival on.
    #[serde(skip)]
    pub(super) prefills: Vec<(f64, f64)>,
}

/// Where a gap was, so that its cause can be told: the second token is the first one that a decode worker sends.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct WorstGap {
    /// Its length.
    pub(super) ms: f64,
    /// When it ended, from the first arrival on.
    pub(super) ended_s: f64,
    /// Which event with tokens of its answer ended it, the first being 1.
    pub(super) token: usize,
    /// What its answer says of exposed transfer; null if it did not end.
    pub(super) exposed_ms: Option<f64>,
}

/// KV that moved between workers, summed over the arrivals, as the router tells it to its clients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Kv {
    /// How many.
    pub(super) transfers: u64,
    /// Payload.
    pub(super) bytes: u64,
    /// From the first byte to the last one verified.
    pub(super) total_ms: f64,
    /// The part that nobody waited for.
    pub(super) hidden_ms: f64,
    /// The part that decoding waited for.
    pub(super) exposed_ms: f64,
    /// The largest exposed part of one.
    pub(super) exposed_max_ms: f64,
    /// Between the first token, which the prefill worker sends, and the second: the exposed part and one decode step, as a
    /// client sees it; the mean.
    pub(super) token_gap_1_2_ms: f64,
}

/// Time that sequences were ready to go on and did not, summed over them.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Blocked {
    /// Seen from here: what gaps of the streams that are 20 ms or more above the undisturbed median have above it.
    pub(super) client_ms: f64,
    /// How many such gaps.
    pub(super) client_stalls: u64,
    /// As the workers count it, by cause; empty where they do not.
    pub(super) workers_ms: BTreeMap<String, f64>,
}

impl Blocked {
    /// What others' prompts did, as the workers count it; `None` where they count nothing.
    pub(super) fn by_prefills_ms(&self) -> Option<f64> {
        let of = |cause: &str| self.workers_ms.get(cause).copied();
        of("local_prefill").map(|ms| ms + of("resume").unwrap_or(0.0))
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

impl Outcome {
    /// From what was seen here, and what the cluster counted meanwhile.
    pub(super) fn of(run: &Run, counts: Counts, slo: Slo) -> Self {
        let quiet: Samples = run.victims_gaps(run.quiet, run.start).map(|(_, gap)| ms(gap)).collect();
        let gaps: Vec<(f64, f64)> = run
            .victims_gaps(run.start, run.end)
            .map(|(at, gap)| (at.saturating_duration_since(run.start).as_secs_f64(), ms(gap)))
            .collect();
        let itl: Samples = gaps.iter().map(|(_, gap)| *gap).collect();
        let whole = || run.arrivals.iter().chain(run.ended_streams());
        let duration_s = (run.end - run.start).as_secs_f64();
        let per_second = |count: f64| if duration_s > 0.0 { count / duration_s } else { 0.0 };
        let in_slo = whole().filter(|record| slo.is_met(record)).count() as u64;
        let mut errors = run.errors.clone();
        if run.num_stream_errors > 0 {
            errors.insert("stream".to_owned(), run.num_stream_errors);
        }
        let usual = quiet.summary().or(itl.summary()).map_or(0.0, |summary| summary.p50);
        Self {
            duration_s,
            itl_ms: itl.summary(),
            itl_shares_ms: itl.shares(&SHARES),
            worst_gap: worst_gap(run),
            first_gap_ms: gaps_of(run, 0..1),
            later_itl_ms: gaps_of(run, 1..usize::MAX),
            arrival_itl_ms: run
                .arrivals
                .iter()
                .flat_map(Record::gaps)
                .map(|(_, gap)| ms(gap))
                .collect::<Samples>()
                .summary(),
            quiet_itl_ms: quiet.summary(),
            ttft_each_ms: run.arrivals.iter().filter_map(Record::ttft).map(ms).collect(),
            ttft_ms: run.arrivals.iter().filter_map(Record::ttft).map(ms).collect::<Samples>().summary(),
            tpot_ms: whole().filter_map(Record::tpot).map(ms).collect::<Samples>().summary(),
            output_tokens_per_s: per_second(run.num_tokens_in_window() as f64),
            arrivals: run.arrivals.len() as u64,
            requests: whole().count() as u64,
            requests_in_slo: in_slo,
            goodput_per_s: per_second(in_slo as f64),
            errors,
            merged_tokens: run.arrivals.iter().chain(&run.streams).map(|record| record.num_merged).sum(),
            kv: kv(&run.arrivals),
            blocked: blocked(&gaps, usual, &counts),
            avoided_ms: counts.avoided_ms,
            workers: counts.workers,
            prefills: run.arrivals.iter().filter_map(|record| prefill(run, record)).collect(),
            gaps,
        }
    }
}

/// Gaps of the streams that ended while requests arrived, those with these numbers within their answers.
fn gaps_of(run: &Run, numbers: Range<usize>) -> Option<Summary> {
    let of = |record: &Record| {
        let gaps = record.gaps().enumerate().filter(|(nth, _)| numbers.contains(nth));
        let within = gaps.filter(|(_, (at, _))| (run.start..=run.end).contains(at));
        within.map(|(_, (_, gap))| ms(gap)).collect::<Vec<_>>()
    };
    run.victims().iter().flat_map(of).collect::<Samples>().summary()
}

fn worst_gap(run: &Run) -> Option<WorstGap> {
    let of = |record: &Record| {
        let exposed_ms = record.kv.map(|kv| kv.exposed_ms);
        let gaps = record.gaps().enumerate().filter(|(_, (at, _))| (run.start..=run.end).contains(at));
        gaps.map(|(nth, (at, gap))| WorstGap {
            ms: ms(gap),
            ended_s: (at - run.start).as_secs_f64(),
            token: nth + 2,
            exposed_ms,
        })
        .max_by(|a, b| a.ms.total_cmp(&b.ms))
    };
    run.victims().iter().filter_map(of).max_by(|a, b| a.ms.total_cmp(&b.ms))
}

fn prefill(run: &Run, record: &Record) -> Option<(f64, f64)> {
    let from = record.start.saturating_duration_since(run.start).as_secs_f64();
    Some((from, from + record.ttft()?.as_secs_f64()))
}

fn kv(arrivals: &[Record]) -> Kv {
    let mut sum = Kv::default();
    let mut gaps = Samples::default();
    for record in arrivals {
        let Some(kv) = record.kv.filter(|kv| kv.bytes > 0) else { continue };
        sum.transfers += 1;
        sum.bytes += kv.bytes;
        sum.total_ms += kv.total_ms;
        sum.exposed_ms += kv.exposed_ms;
        sum.hidden_ms += kv.total_ms - kv.exposed_ms;
        sum.exposed_max_ms = sum.exposed_max_ms.max(kv.exposed_ms);
        gaps.extend(record.gaps().next().map(|(_, gap)| ms(gap)));
    }
    sum.token_gap_1_2_ms = gaps.summary().map_or(0.0, |summary| summary.mean);
    sum
}

fn blocked(gaps: &[(f64, f64)], usual: f64, counts: &Counts) -> Blocked {
    let stalls: Vec<f64> =
        gaps.iter().map(|(_, gap)| gap - usual).filter(|excess| *excess >= STALL_MS).collect();
    Blocked {
        // A sum over nothing would be -0.
        client_ms: stalls.iter().fold(0.0, |sum, stall| sum + stall),
        client_stalls: stalls.len() as u64,
        workers_ms: counts.blocked_ms.iter().cloned().collect(),
    }
}

/// One of the colocated clusters.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Colocated {
    /// Workers x threads of each.
    pub(super) layout: Split,
    /// Prompt tokens beside decoding ones in a step; null for prompts in one piece.
    pub(super) chunk: Option<u32>,
    /// The chunks that were tried, where one was chosen.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tried: Vec<Tried>,
    /// What it came to.
    #[serde(flatten)]
    pub(super) outcome: Outcome,
}

impl Colocated {
    pub(super) fn name(&self) -> String {
        Layout::Colocated { split: self.layout, chunk: self.chunk }.name()
    }
}

/// A short run with one chunk.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Tried {
    pub(super) chunk: u32,
    pub(super) itl_ms: Option<Summary>,
    pub(super) ttft_ms: Option<Summary>,
}

/// A first token this many times later than with the quickest chunk is too late, however smooth the streams are.
const COLLAPSED: f64 = 1.5;

/// The chunk with the lowest p99 gap among those whose first tokens do not come far later; ties go to the larger one.
pub(super) fn best_chunk(tried: &[Tried]) -> Option<u32> {
    let measured =
        || tried.iter().filter_map(|tried| Some((tried.chunk, tried.itl_ms?.p99, tried.ttft_ms?.p50)));
    let quickest = measured().map(|(.., ttft)| ttft).min_by(f64::total_cmp)?;
    let good = measured().filter(|(.., ttft)| *ttft <= COLLAPSED * quickest);
    let best = good.min_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
    best.map(|(chunk, ..)| chunk)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::client::KvReport;

    fn record(start: Instant, at_ms: &[u64], is_whole: bool) -> Record {
        let at = |ms: &u64| start + Duration::from_millis(*ms);
        let arrivals: Vec<Instant> = at_ms.iter().map(at).collect();
        let end = if is_whole { *arrivals.last().unwrap() } else { start };
        Record { num_tokens: arrivals.len() as u64, arrivals, end, ..Record::new(start) }
    }

    fn run() -> Run {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        // One stream with gaps of 10 ms, then one of 200 ms, which falls into the window, and then cut off.
        let stream = record(begin, &[10, 20, 30, 40, 240, 250], false);
        let mut arrival = record(at(35), &[100, 160], true);
        arrival.kv = Some(KvReport { bytes: 1000, total_ms: 50.0, exposed_ms: 20.0 });
        Run {
            quiet: begin,
            start: at(35),
            end: at(255),
            streams: vec![stream],
            num_stream_errors: 1,
            arrivals: vec![arrival],
            errors: BTreeMap::new(),
        }
    }

    #[test]
    fn gaps_blocked_time_transfers_and_goodput_are_what_the_run_says() {
        let counts = Counts {
            avoided_ms: Some(3.0),
            blocked_ms: vec![("local_prefill".to_owned(), 180.0), ("resume".to_owned(), 2.0)],
            ..Counts::default()
        };
        let slo = Slo { ttft_ms: Some(150.0), itl_ms: None };
        let outcome = Outcome::of(&run(), counts.clone(), slo);
        assert_eq!(outcome.quiet_itl_ms.unwrap().max, 10.0);
        assert_eq!((outcome.itl_ms.unwrap().max, outcome.itl_ms.unwrap().count), (200.0, 3));
        assert_eq!((outcome.ttft_ms.unwrap().p50, outcome.ttft_each_ms.as_slice()), (100.0, &[100.0][..]));
        assert_eq!(outcome.itl_shares_ms.last(), Some(&(0.999, 200.0)));
        let worst = outcome.worst_gap.unwrap();
        assert_eq!((worst.ms, worst.ended_s, worst.token, worst.exposed_ms), (200.0, 0.205, 5, None));
        // The stream's first gap ended before anything arrived.
        assert_eq!((outcome.first_gap_ms, outcome.later_itl_ms.unwrap().count), (None, 3));
        assert_eq!(outcome.arrival_itl_ms.unwrap().max, 60.0);
        let early = Run { start: run().quiet, ..run() };
        let early = Outcome::of(&early, counts.clone(), slo);
        assert_eq!((early.first_gap_ms.unwrap().max, early.later_itl_ms.unwrap().max), (10.0, 200.0));
        assert_eq!((outcome.blocked.client_ms, outcome.blocked.client_stalls), (190.0, 1));
        assert_eq!(outcome.blocked.by_prefills_ms(), Some(182.0));
        assert_eq!(
            (outcome.kv.hidden_ms, outcome.kv.exposed_ms, outcome.kv.token_gap_1_2_ms),
            (30.0, 20.0, 60.0)
        );
        assert_eq!((outcome.requests, outcome.requests_in_slo, outcome.errors["stream"]), (1, 1, 1));
        // Three tokens of the stream and two of the arrival in 220 ms.
        assert!((outcome.output_tokens_per_s - 5.0 / 0.22).abs() < 1e-6);
        let strict = Slo { ttft_ms: Some(99.0), itl_ms: None };
        assert_eq!(Outcome::of(&run(), counts.clone(), strict).requests_in_slo, 0);
        let smooth = Slo { ttft_ms: None, itl_ms: Some(59.0) };
        assert_eq!(Outcome::of(&run(), counts, smooth).requests_in_slo, 0);
        assert_eq!(Outcome::of(&run(), Counts::default(), slo).blocked.by_prefills_ms(), None);
    }

    #[test]
    fn the_smoothest_chunk_wins_unless_first_tokens_collapse() {
        let summary = |value: f64| Some(std::iter::once(value).collect::<Samples>().summary().unwrap());
        let tried = |chunk, itl, ttft| Tried { chunk, itl_ms: summary(itl), ttft_ms: summary(ttft) };
        let all = [tried(128, 100.0, 5000.0), tried(256, 200.0, 3000.0), tried(512, 300.0, 2500.0)];
        assert_eq!(best_chunk(&all), Some(256));
        assert_eq!(best_chunk(&[tried(128, 7.0, 1.0), tried(256, 7.0, 1.0)]), Some(256));
        let silent = Tried { chunk: 64, itl_ms: None, ttft_ms: None };
        assert_eq!(best_chunk(&[silent]), None);
    }
}
