//! Saturation with one request in ten cancelled, for `BATON_SOAK_SECONDS` (15 if not set): memory of every process over time.
//! The figures of docs/benchmarks.md come from ten minutes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_tests::cluster::{greedy, with};
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, EventStream, Process, Turn};
use serde_json::json;
use tokio::task::JoinSet;

const NUM_CLIENTS: usize = 48;

/// Seconds at the end over which memory must not grow; of a shorter run the last half.
const WATCHED_S: f64 = 300.0;

#[derive(Default)]
struct Counts {
    whole: AtomicU64,
    cancelled: AtomicU64,
    refused: AtomicU64,
}

async fn client(http: SocketAddr, until: Instant, mut random: Random, counts: Arc<Counts>) {
    while Instant::now() < until {
        let (length, num_tokens) = (random.within(1..800), random.within(1..120));
        let body = with(greedy(&random.tiny_prompt(length), num_tokens), json!({"stream": true}));
        let patience = match random.within(0..10) {
            0 => Duration::from_millis(random.within(0..400) as u64),
            _ => Duration::from_secs(120),
        };
        let whole = async {
            let stream = EventStream::post(http, "/v1/completions", &body).await?;
            let is_success = stream.status.is_success();
            stream.completion().await.map(|whole| is_success && whole.token_ids.len() == num_tokens)
        };
        let count = match tokio::time::timeout(patience, whole).await {
            Err(_) => &counts.cancelled,
            Ok(Ok(true)) => &counts.whole,
            Ok(_) => &counts.refused,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// The last samples of a run, see [`WATCHED_S`].
fn watched(samples: &[(f64, f64)]) -> &[(f64, f64)] {
    let end = samples.last().map_or(0.0, |sample| sample.0);
    let from = end - WATCHED_S.min(end / 2.0);
    &samples[samples.partition_point(|sample| sample.0 < from)..]
}

/// Least-squares slope of (seconds, bytes), in bytes a minute.
fn slope(samples: &[(f64, f64)]) -> f64 {
    let num = samples.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| samples.iter().map(of).sum::<f64>() / num;
    let (x, y) = (mean(|s| s.0), mean(|s| s.1));
    let above: f64 = samples.iter().map(|s| (s.0 - x) * (s.1 - y)).sum();
    let below: f64 = samples.iter().map(|s| (s.0 - x).powi(2)).sum();
    60.0 * above / below.max(1e-9)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saturation_with_cancels_leaves_memory_flat() {
    let _turn = Turn::take();
    let mut random = Random::from_env("saturation_with_cancels");
    let seconds = std::env::var("BATON_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(15);
    let cluster = Cluster::start(ClusterConfig { prefix_cache: true, ..ClusterConfig::default() }).await;
    let counts = Arc::new(Counts::default());
    let start = Instant::now();
    let until = start + Duration::from_secs(seconds);
    let mut clients = JoinSet::new();
    for _ in 0..NUM_CLIENTS {
        let seed = Random::new(random.next_u64());
        clients.spawn(client(cluster.http, until, seed, Arc::clone(&counts)));
    }
    let mut samples: Vec<Vec<(f64, f64)>> = cluster.processes().map(|_| Vec::new()).collect();
    while Instant::now() < until {
        for (process, samples) in cluster.processes().zip(&mut samples) {
            samples.push((start.elapsed().as_secs_f64(), process.resident_bytes() as f64));
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    while let Some(ended) = clients.join_next().await {
        ended.expect("no client failed");
    }
    let [whole, cancelled, refused] =
        [&counts.whole, &counts.cancelled, &counts.refused].map(|count| count.load(Ordering::Relaxed));
    eprintln!("{whole} whole answers, {cancelled} cancelled, {refused} refused, in {seconds} s");
    let names = cluster.processes().map(|process: &Process| process.name.clone());
    let mut steepest = f64::MIN;
    for (name, samples) in names.zip(&samples) {
        let (first, last) = (samples[0], samples[samples.len() - 1]);
        let watched = watched(samples);
        let (slope, seconds) = (slope(watched), last.0 - watched.first().map_or(0.0, |s| s.0));
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        eprintln!(
            "{name}: {:.1} MiB at first, {:.1} MiB at last, {:.3} MiB a minute over the last {seconds:.0} s",
            mib(first.1),
            mib(last.1),
            mib(slope)
        );
        steepest = steepest.max(mib(slope));
    }
    assert!(whole > 0 && refused == 0, "{whole} whole, {refused} refused or short");
    // A short run is still filling caches and allocators.
    if seconds >= 2 * WATCHED_S as u64 {
        assert!(steepest < 1.0, "{steepest} MiB a minute");
    }
    cluster.wait_baseline(Duration::from_secs(5)).await;
}
