//! `baton sim --scale`: what a simulated request costs in clusters of growing size.

use std::time::Instant;

use baton_sim::{REQUESTS_PER_S, scaled, serve};
use serde::Serialize;

use super::report::Quantiles;
use crate::bench::print;
use crate::exit::Failure;

/// Requests for each worker, unless their number is given.
const REQUESTS_PER_WORKER: u32 = 100;

/// One cluster.
#[derive(Debug, Serialize)]
struct Row {
    workers: u32,
    requests: u32,
    seconds: f64,
    us_per_request: f64,
    events_per_request: f64,
    ttft_ms: Quantiles,
    itl_ms: Quantiles,
}

/// Runs them one after the other, on one thread.
///
/// # Errors
/// [`Failure::Unexpected`] with the first rule that broke.
pub(super) fn run(seed: u64, sizes: &[u32], requests: Option<u32>, json: bool) -> Result<(), Failure> {
    let mut rows = Vec::new();
    for &workers in sizes {
        let row = one(seed, workers, requests.unwrap_or(workers * REQUESTS_PER_WORKER))?;
        eprintln!("{workers} workers: {:.1} s", row.seconds);
        rows.push(row);
    }
    let mut text = format!(
        "Llama 3 8B on H200s, half of the workers of each kind, {REQUESTS_PER_S} requests/s for each prefill worker, prompts of 2,048 and answers of 128 \
         tokens; seed {seed}\n{:>8}{:>10}{:>10}{:>14}{:>16}{:>12}{:>12}{:>12}\n",
        "workers", "requests", "s", "us a request", "events a request", "TTFT p50", "TTFT p99", "ITL p99"
    );
    for row in &rows {
        let Row { workers, requests, seconds, us_per_request, events_per_request, ttft_ms, itl_ms } = row;
        text.push_str(&format!(
            "{workers:>8}{requests:>10}{seconds:>10.1}{us_per_request:>14.0}{events_per_request:>16.0}{:>12.1}{:>12.1}{:>12.1}\n",
            ttft_ms.p50, ttft_ms.p99, itl_ms.p99
        ));
    }
    print(&rows, &text, json)
}

fn one(seed: u64, workers: u32, requests: u32) -> Result<Row, Failure> {
    let config =
        scaled(seed, workers as usize, requests).map_err(|error| Failure::Usage(error.to_string()))?;
    let began = Instant::now();
    let served = serve(&config).map_err(|violation| Failure::Unexpected(violation.to_string()))?;
    let seconds = began.elapsed().as_secs_f64();
    Ok(Row {
        workers,
        requests,
        seconds,
        us_per_request: seconds / f64::from(requests) * 1e6,
        events_per_request: served.report.num_events as f64 / f64::from(requests),
        ttft_ms: Quantiles::of(&served.ttft),
        itl_ms: Quantiles::of(&served.itl),
    })
}
