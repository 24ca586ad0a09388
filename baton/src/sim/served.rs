//! `baton sim --workload`: one cluster under a load, in virtual time.

use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use baton_plan::{Cluster, PlanInput, Slo};
use baton_sim::workload::{Arrival, Gaps, Lengths, Pace, Streams, UniqueShape, Workload, unique_arrivals};
use baton_sim::{Policy, ServeConfig, Served, Shape, WorkerShape, serve};
use serde::Serialize;

use super::report::{self, Quantiles};
use crate::bench::mooncake::{Part, TraceFile};
use crate::bench::{positive, print};
use crate::exit::Failure;

/// Requests, unless their number is given.
const REQUESTS: u32 = 2_000;
/// Nothing of a trace is left out for its time or its length but for this.
const WHOLE: Part = Part { duration: Duration::from_secs(10 * 365 * 86_400), context: 1_000_000 };

/// The cluster and its load.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "With --workload")]
pub(super) struct ServedOptions {
    /// Requests to send; of a trace the first so many [default: 2000, or the whole trace, or with --scale 100 for each worker]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) requests: Option<u32>,

    /// Requests a second in the mean; of no use with a trace, which has its own times
    #[arg(long, value_name = "PER_SECOND", default_value_t = 20.0, value_parser = positive)]
    arrival_rate: f64,

    /// Requests of a burst, with --workload bursts
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    burst: u32,

    /// Tokens of each prompt: a number, or LOW-HIGH drawn uniformly
    #[arg(long, value_name = "TOKENS", default_value = "2048")]
    input_len: Lengths,

    /// Tokens of each answer: a number, or LOW-HIGH drawn uniformly
    #[arg(long, value_name = "TOKENS", default_value = "128")]
    output_len: Lengths,

    /// Workers: 2p1d for prefill and decode workers, or a number of colocated ones
    #[arg(long, value_name = "NUMBERS", default_value = "2p1d")]
    workers: Workers,

    /// Prompt tokens of a step beside decoding sequences, on colocated workers
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(16..=2_048))]
    chunk: u32,

    /// Routers, which share the requests
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    routers: u32,

    /// How routers choose workers: kv-aware, least-loaded, round-robin or random-of-two
    #[arg(long, value_name = "NAME", default_value = "kv-aware")]
    placement: Policy,

    /// Model whose time is taken; an unknown name is told with all that there are
    #[arg(long, value_name = "NAME", default_value = "llama-3-8b")]
    model: String,

    /// Device of each worker; likewise
    #[arg(long, value_name = "NAME", default_value = "h200")]
    gpu: String,

    /// Line rate of each worker's link, in gigabits a second
    #[arg(long, value_name = "GBPS", default_value_t = 400.0, value_parser = positive)]
    link_gbps: f64,
}

/// Numbers of workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Workers {
    /// `None`: colocated.
    prefill: Option<u32>,
    decode: u32,
}

/// Workers of a kind at most: as many as a router knows.
const MAX_WORKERS: u32 = 1_024;

impl FromStr for Workers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|number| (1..=MAX_WORKERS).contains(number));
        let apart = text.strip_suffix('d').and_then(|text| text.split_once('p'));
        let workers = match apart {
            Some((prefill, decode)) => number(prefill)
                .zip(number(decode))
                .map(|(prefill, decode)| Self { prefill: Some(prefill), decode }),
            None => number(text).map(|decode| Self { prefill: None, decode }),
        };
        workers.ok_or_else(|| format!("XpYd or a number of colocated workers, each from 1 to {MAX_WORKERS}"))
    }
}

/// What came of it.
#[derive(Debug, Serialize)]
struct Outcome {
    seed: u64,
    cluster: String,
    requests: usize,
    answered: u64,
    /// From the first arrival to the last answer, in virtual time.
    duration_s: f64,
    output_tokens_per_s: f64,
    prompt_tokens: u64,
    cached_tokens: u64,
    ttft_ms: Quantiles,
    itl_ms: Quantiles,
    /// Between the first token and the second.
    first_gap_ms: Quantiles,
    preemptions: u64,
    events: u64,
}

/// Runs it and prints what its clients saw.
///
/// # Errors
/// [`Failure::Usage`] for a wrong option or file, [`Failure::Unexpected`] with the first rule that broke.
pub(super) fn run(load: &str, seed: u64, options: &ServedOptions, json: bool) -> Result<(), Failure> {
    let arrivals = options.arrivals(load, seed)?;
    let config = options.config(arrivals, seed)?;
    let served = serve(&config).map_err(|violation| Failure::Unexpected(violation.to_string()))?;
    let outcome = Outcome::of(&served, &config);
    print(&outcome, &outcome.table(), json)
}

impl ServedOptions {
    fn arrivals(&self, load: &str, seed: u64) -> Result<Vec<Arrival>, Failure> {
        let gaps = match load {
            "poisson" => Gaps::Poisson(self.arrival_rate),
            "bursts" => Gaps::Bursts { rate: self.arrival_rate, size: self.burst },
            path => {
                let mut arrivals = TraceFile::read(Path::new(path))?.take(WHOLE)?.arrivals;
                arrivals.truncate(self.requests.map_or(usize::MAX, |requests| requests as usize));
                return Ok(arrivals);
            }
        };
        let pace = Pace { gaps, duration: Duration::ZERO, at_least: self.requests.unwrap_or(REQUESTS) };
        let shape = UniqueShape { prompt_tokens: self.input_len, output_tokens: self.output_len };
        unique_arrivals(seed, pace, shape).map_err(|error| Failure::Usage(format!("--requests: {error}")))
    }

    fn config(&self, arrivals: Vec<Arrival>, seed: u64) -> Result<ServeConfig, Failure> {
        let usage = |error: baton_plan::PlanError| Failure::Usage(error.to_string());
        let longest = |of: fn(&Arrival) -> u32| arrivals.iter().map(of).max().unwrap_or(1);
        let input = PlanInput {
            model: baton_plan::model(&self.model).map_err(usage)?,
            device: baton_plan::device(&self.gpu).map_err(usage)?,
            rate: self.arrival_rate,
            input_tokens: longest(|arrival| arrival.prompt.num_tokens()),
            output_tokens: longest(|arrival| arrival.output_tokens).max(2),
            slo: Slo { ttft_ms: 1e6, itl_ms: 1e6 },
            link_gbps: self.link_gbps,
        };
        input.check().map_err(usage)?;
        let cluster = match self.workers {
            Workers { prefill: Some(prefill), decode } => Cluster::Disaggregated { prefill, decode },
            Workers { prefill: None, decode } => Cluster::Colocated { workers: decode, chunk: self.chunk },
        };
        let shape = baton_plan::shape(&input, cluster, arrivals.len());
        Ok(ServeConfig {
            seed,
            shape: Shape {
                num_routers: self.routers as usize,
                policy: self.placement,
                worker: WorkerShape { cache: true, ..shape.worker },
                ..shape
            },
            workload: Workload { streams: Streams::default(), quiet: Duration::ZERO, arrivals },
            num_warm_up: 0,
            contents: false,
            measured: None,
        })
    }
}

impl Outcome {
    fn of(served: &Served, config: &ServeConfig) -> Self {
        let shape = &config.shape;
        let cluster = match shape.num_prefill_workers {
            0 => format!("{} colocated", shape.num_decode_workers),
            prefill => format!("{prefill}p{}d", shape.num_decode_workers),
        };
        let duration_s = served.duration.as_secs_f64();
        Self {
            seed: config.seed,
            cluster,
            requests: config.workload.arrivals.len(),
            answered: served.num_answered,
            duration_s,
            output_tokens_per_s: served.report.num_tokens as f64 / duration_s.max(1e-9),
            prompt_tokens: served.report.num_prompt_tokens,
            cached_tokens: served.report.num_cached_tokens,
            ttft_ms: Quantiles::of(&served.ttft),
            itl_ms: Quantiles::of(&served.itl),
            first_gap_ms: Quantiles::of(&served.first_gap),
            preemptions: served.report.num_preemptions,
            events: served.report.num_events,
        }
    }

    fn table(&self) -> String {
        let Self { seed, cluster, requests, answered, duration_s, output_tokens_per_s, .. } = self;
        let mut text = format!(
            "{cluster}: {answered} of {requests} requests answered within {duration_s:.1} s of virtual time, {output_tokens_per_s:.0} output tokens/s; seed \
             {seed}\n{} prompt tokens computed; {} found in prefix caches of either side, not computed or not sent; {} preemptions; {} events\n",
            self.prompt_tokens, self.cached_tokens, self.preemptions, self.events
        );
        text.push_str(&report::head());
        text.push_str(&self.ttft_ms.row("TTFT"));
        text.push_str(&self.itl_ms.row("gaps"));
        text.push_str(&self.first_gap_ms.row("first gap"));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_two_numbers_or_one() {
        assert_eq!("3p2d".parse(), Ok(Workers { prefill: Some(3), decode: 2 }));
        assert_eq!("4".parse(), Ok(Workers { prefill: None, decode: 4 }));
        for text in ["", "0", "0p1d", "3p", "3p2", "p2d", "2000", "1p2000d", "x"] {
            assert!(text.parse::<Workers>().is_err_and(|why| why.contains("1024")), "{text}");
        }
    }
}
