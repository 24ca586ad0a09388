//! `baton sim --scale`: what a simulated request costs in clusters of growing size.

use std::time::Instant;

use baton_sim::{REQUESTS_PER_S, scaled, serve};
use serde::Serialize;

use super::report::Quantiles;
use crate::bench::print;
use crate::bench::process::{forget_peak, own_memory, thread_cpu_s};
use crate::exit::Failure;

/// Requests for each worker, unless their number is given.
const REQUESTS_PER_WORKER: u32 = 100;

/// One cluster.
#[derive(Debug, Serialize)]
struct Row {
    workers: u32,
    requests: u32,
    seconds: f64,
    /// Time on a core, not on a clock, so that what else runs on the machine counts for little.
    cpu_us_per_request: f64,
    events_per_request: f64,
    /// The largest the process was, in MiB; null where the system does not say.
    peak_mib: Option<f64>,
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
         tokens; seed {seed}\n{:>8}{:>10}{:>10}{:>18}{:>18}{:>13}{:>12}{:>12}{:>12}\n",
        "workers",
        "requests",
        "s",
        "CPU us a request",
        "events a request",
        "MiB at most",
        "TTFT p50",
        "TTFT p99",
        "ITL p99"
    );
    for row in &rows {
        let Row {
            workers,
            requests,
            seconds,
            cpu_us_per_request,
            events_per_request,
            peak_mib,
            ttft_ms,
            itl_ms,
        } = row;
        let mib = peak_mib.map_or("-".to_owned(), |mib| format!("{mib:.0}"));
        text.push_str(&format!(
            "{workers:>8}{requests:>10}{seconds:>10.1}{cpu_us_per_request:>18.0}{events_per_request:>18.0}{mib:>13}{:>12.1}{:>12.1}{:>12.1}\n",
            ttft_ms.p50, ttft_ms.p99, itl_ms.p99
        ));
    }
    print(&rows, &text, json)
}

fn one(seed: u64, workers: u32, requests: u32) -> Result<Row, Failure> {
    let config =
        scaled(seed, workers as usize, requests).map_err(|error| Failure::Usage(error.to_string()))?;
    forget_peak();
    let (began, cpu_before) = (Instant::now(), thread_cpu_s());
    let served = serve(&config).map_err(|violation| Failure::Unexpected(violation.to_string()))?;
    let seconds = began.elapsed().as_secs_f64();
    let cpu_s = thread_cpu_s() - cpu_before;
    Ok(Row {
        workers,
        requests,
        seconds,
        cpu_us_per_request: cpu_s / f64::from(requests) * 1e6,
        events_per_request: served.report.num_events as f64 / f64::from(requests),
        peak_mib: own_memory("VmHWM:").map(|bytes| bytes as f64 / 1_048_576.0),
        ttft_ms: Quantiles::of(&served.ttft),
        itl_ms: Quantiles::of(&served.itl),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_what_a_request_took_and_how_large_the_process_was() {
        let row = one(1, 4, 50).unwrap();
        assert!(row.events_per_request > 100.0 && row.seconds > 0.0);
        if cfg!(target_os = "linux") {
            let cpu_us = row.cpu_us_per_request;
            assert!(cpu_us > 1.0 && cpu_us <= row.seconds / 50.0 * 1.1e6, "{cpu_us}");
            assert!((1.0..4_096.0).contains(&row.peak_mib.unwrap()), "{row:?}");
        }
    }
}
