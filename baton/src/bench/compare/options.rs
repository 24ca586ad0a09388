//! Options of `baton bench --compare`, besides those it shares with the stall test.

use std::path::PathBuf;

use baton_worker::CpuList;

use crate::bench::options::positive;

/// What to compare, and how to judge it.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Comparison")]
pub(crate) struct CompareOptions {
    /// Compare instead: one workload on a disaggregated cluster and on colocated ones of as many cores, which are started
    /// and stopped one after another; --duration is 60 s unless given
    #[arg(long, conflicts_with_all = ["concurrency", "rate", "requests"])]
    pub(in crate::bench) compare: bool,

    /// Model that the compared clusters serve
    #[arg(long, env = "BATON_MODEL", value_name = "MODEL", default_value = "default")]
    pub(super) model: String,

    /// The two CPUs to use, such as 0,2 [default: two of different physical cores]
    #[arg(long, value_name = "LIST", requires = "compare")]
    pub(super) cpus: Option<CpuList>,

    /// Requests whose first token comes later count for nothing in goodput, in milliseconds [default: none do]
    #[arg(long, value_name = "MS", value_parser = positive, requires = "compare")]
    pub(super) slo_ttft_ms: Option<f64>,

    /// Requests with a longer gap between two tokens count for nothing in goodput, in milliseconds [default: none do]
    #[arg(long, value_name = "MS", value_parser = positive, requires = "compare")]
    pub(super) slo_itl_ms: Option<f64>,

    /// Chunks, in tokens, of which the best is taken for each colocated layout, beside prompts in one piece
    #[arg(long, value_name = "LIST", default_value = "128,256,512", value_delimiter = ',', requires = "compare",
          value_parser = clap::value_parser!(u32).range(16..=32_768))]
    pub(super) chunks: Vec<u32>,

    /// Trace file instead of streams and unique prompts: JSON lines with timestamp (ms), input_length, output_length and
    /// hash_ids, one for each 512 tokens; requests longer than the context are left out [default: none]
    #[arg(long, value_name = "FILE", requires = "compare",
          conflicts_with_all = ["streams", "stream_tokens", "arrivals", "arrival_output_tokens", "arrival_rate",
                                "arrival_every"])]
    pub(super) workload: Option<PathBuf>,

    /// File to write a picture of all runs to: gaps over time, SVG [default: none]
    #[arg(long, value_name = "FILE", requires = "compare")]
    pub(super) svg: Option<PathBuf>,
}
