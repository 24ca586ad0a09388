//! The stall test: streams that decode in the background, and prompts that arrive beside them.
//!
//! Only the background streams' gaps count as ITL: what a newcomer's prefill does to those who are already reading.

use std::time::Duration;

use super::drive::{Run, Unobserved, drive};
use super::options::BenchOptions;
use super::report::Stall;
use super::workload::{Gaps, Pace, Shape, Streams, Workload, unique_arrivals};
use crate::client::Client;
use crate::exit::Failure;

/// Tokens of a background stream, prompts that arrive, tokens that each of them asks for, and seconds between two, unless asked
/// otherwise.
const STREAM_TOKENS: u32 = 2000;
const ARRIVALS: u32 = 5;
const OUTPUT_TOKENS: u32 = 2;
const EVERY: Duration = Duration::from_secs(2);
const QUIET: Duration = Duration::from_secs(3);

/// Runs the test; ends when every arriving prompt was answered.
///
/// # Errors
/// [`Failure::Unexpected`] when a background stream can't be had, [`Failure::Usage`] for too many arrivals.
pub(super) async fn run(client: &Client, options: &BenchOptions, num_streams: u32) -> Result<Stall, Failure> {
    let background = &options.background;
    let gaps = match background.arrival_rate {
        Some(rate) => Gaps::Poisson(rate),
        None => Gaps::Every(background.arrival_every.unwrap_or(EVERY)),
    };
    let pace = Pace {
        gaps,
        duration: options.duration.unwrap_or_default(),
        at_least: background.arrivals.unwrap_or(ARRIVALS),
    };
    let shape = Shape {
        prompt_tokens: background.arrival_prompt_tokens,
        output_tokens: background.arrival_output_tokens.unwrap_or(OUTPUT_TOKENS),
    };
    let workload = Workload {
        seed: options.seed,
        vocab: options.vocab,
        streams: Streams {
            num: num_streams,
            output_tokens: background.stream_tokens.unwrap_or(STREAM_TOKENS),
        },
        quiet: background.quiet.unwrap_or(QUIET),
        arrivals: unique_arrivals(options.seed, pace, shape)?,
    };
    let run: Run = drive(client, workload, options.request_timeout, &mut Unobserved).await?;
    Ok(Stall::of(&run))
}
