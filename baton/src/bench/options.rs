//! Options of `baton bench`.

use std::time::Duration;

use baton_sim::workload::Lengths;

use super::compare::CompareOptions;
use super::engine::EngineOptions;
use super::transfer::TransferOptions;

/// What to load a cluster with, and for how long.
#[derive(Debug, Clone, clap::Args)]
#[command(args_conflicts_with_subcommands = true,
          group = clap::ArgGroup::new("background").args(["streams", "compare"]).multiple(true))]
pub(crate) struct BenchOptions {
    /// Measure something else
    #[command(subcommand)]
    pub(super) other: Option<OtherBench>,

    /// Where the cluster's HTTP face is
    #[arg(long, env = "BATON_URL", value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub(super) url: String,

    /// Closed loop: so many users, each sends its next request when its last one ended
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) concurrency: u32,

    /// Open loop instead: Poisson arrivals, requests a second
    #[arg(long, value_name = "PER_SECOND", value_parser = positive, conflicts_with = "concurrency")]
    pub(super) rate: Option<f64>,

    /// Requests to send [default: 100, or no limit with --duration]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) requests: Option<u64>,

    /// Seconds to go on sending; requests that run then may end [default: until --requests are sent]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) duration: Option<Duration>,

    /// Tokens of each prompt: a number, or LOW-HIGH drawn uniformly
    #[arg(long, value_name = "TOKENS", default_value = "128")]
    pub(super) prompt_tokens: Lengths,

    /// Tokens of each answer: a number, or LOW-HIGH drawn uniformly; the end of sequence is ignored
    #[arg(long, value_name = "TOKENS", default_value = "64")]
    pub(super) output_tokens: Lengths,

    /// Seed of lengths, prompts and arrival times
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) seed: u64,

    /// Prompts are made of token ids below this
    #[arg(long, value_name = "TOKENS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(32..))]
    pub(super) vocab: u32,

    /// Seconds after which a request that has not ended counts as an error
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    pub(super) request_timeout: Duration,

    /// Print one JSON object instead of tables
    #[arg(long)]
    pub(super) json: bool,

    #[command(flatten)]
    pub(super) background: BackgroundOptions,

    #[command(flatten)]
    pub(super) compare: CompareOptions,
}

/// Options of the loads with streams in the background: the stall test and the comparison.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Stall test")]
pub(super) struct BackgroundOptions {
    /// Stall test instead: so many streams decode in the background, and only their gaps are measured as ITL while
    /// prompts arrive [default: 8 with --compare]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=1024),
          conflicts_with_all = ["concurrency", "rate", "requests"])]
    pub(super) streams: Option<u32>,

    /// Tokens of each background stream; one that ends early is started again [default: 2000, with --compare 500]
    #[arg(long, value_name = "TOKENS", requires = "background",
          value_parser = clap::value_parser!(u32).range(2..))]
    pub(super) stream_tokens: Option<u32>,

    /// Prompts that arrive, or with --duration at least arrive [default: 5, with --compare 8]
    #[arg(long, value_name = "N", requires = "background", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) arrivals: Option<u32>,

    /// Tokens of each arriving prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, requires = "background",
          value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub(super) arrival_prompt_tokens: u32,

    /// Tokens each arriving prompt asks for [default: 2, with --compare 8]
    #[arg(long, value_name = "TOKENS", requires = "background",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) arrival_output_tokens: Option<u32>,

    /// Poisson arrivals, prompts a second [default with --compare: half of what one prefill worker can compute]
    #[arg(long, value_name = "PER_SECOND", value_parser = positive, requires = "background")]
    pub(super) arrival_rate: Option<f64>,

    /// Seconds between arrivals [default: 2, unless --arrival-rate or --compare]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "background",
          conflicts_with = "arrival_rate")]
    pub(super) arrival_every: Option<Duration>,

    /// Seconds that the background streams run alone first; their gaps are reported apart [default: 3, with --compare 10]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "background")]
    pub(super) quiet: Option<Duration>,
}

/// Measurements that need no cluster.
#[derive(Debug, Clone, clap::Subcommand)]
pub(super) enum OtherBench {
    /// How fast KV moves between two workers of this machine, beside raw TCP and memcpy
    Transfer(TransferOptions),
    /// How fast steps of the CPU engine are, beside what this machine's cores and memory can do
    Engine(EngineOptions),
}

impl BenchOptions {
    /// How many requests at most.
    pub(super) fn request_limit(&self) -> u64 {
        match (self.requests, self.duration) {
            (Some(requests), _) => requests,
            (None, Some(_)) => u64::MAX,
            (None, None) => 100,
        }
    }
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e6 => Ok(number),
        _ => Err("a number above 0, up to 1000000".to_owned()),
    }
}

pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 86_400.0 => Ok(Duration::from_secs_f64(number)),
        _ => Err("seconds above 0, up to 86400".to_owned()),
    }
}
