//! Whoever hangs up gives everything back: clients at random moments, whole crowds, and the router itself.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use baton_tests::cluster::{greedy, with};
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, EventStream, Process, Turn, eventually};
use serde_json::{Value, json};
use tokio::task::JoinSet;

const BASELINE: Duration = Duration::from_secs(3);

fn streamed(random: &mut Random, prompt_tokens: usize, num_tokens: usize) -> Value {
    with(greedy(&random.tiny_prompt(prompt_tokens), num_tokens), json!({"stream": true}))
}

/// Runs a stream to its end, or hangs up after `hang_up`. Returns the number of tokens, `None` when it hung up.
async fn run(http: SocketAddr, body: Value, hang_up: Option<Duration>) -> Option<usize> {
    let whole = async {
        let stream = EventStream::post(http, "/v1/completions", &body).await.expect("a stream");
        assert_eq!(stream.status, 200);
        stream.completion().await.expect("a whole stream")
    };
    match hang_up {
        None => Some(whole.await.token_ids.len()),
        Some(after) => tokio::time::timeout(after, whole).await.ok().map(|whole| whole.token_ids.len()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_of_32_mixed_streams_hang_up_and_both_pools_are_whole_again() {
    let _turn = Turn::take();
    let mut random = Random::from_env("half_of_32_mixed_streams_hang_up");
    let cluster = Cluster::start(ClusterConfig::default()).await;
    for round in 0..3 {
        let mut tasks = JoinSet::new();
        for nth in 0..32 {
            let (length, num_tokens) = (random.within(1..3000), random.within(1..200));
            let body = streamed(&mut random, length, num_tokens);
            let hang_up = (nth % 2 == 0).then(|| Duration::from_millis(random.within(0..1500) as u64));
            let http = cluster.http;
            tasks.spawn(async move { (num_tokens, run(http, body, hang_up).await) });
        }
        while let Some(done) = tasks.join_next().await {
            let (wanted, got) = done.expect("no stream failed");
            assert!(got.is_none_or(|got| got == wanted), "{got:?} of {wanted} tokens");
        }
        eprintln!("round {round} done");
        cluster.wait_baseline(BASELINE).await;
    }
    assert_eq!(cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_hundred_at_once_hang_up_four_times_and_a_probe_still_works() {
    let _turn = Turn::take();
    let mut random = Random::from_env("three_hundred_at_once_hang_up");
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let probe = greedy(&random.tiny_prompt(50), 16);
    let before = cluster.completion(&probe).await;
    for _ in 0..4 {
        let mut tasks = JoinSet::new();
        for _ in 0..300 {
            let (length, num_tokens) = (random.within(1..600), random.within(50..400));
            let body = streamed(&mut random, length, num_tokens);
            let http = cluster.http;
            tasks.spawn(async move { run(http, body, None).await });
        }
        // Some are decoding, some in prefill, most at the door.
        tokio::time::sleep(Duration::from_millis(random.within(200..1200) as u64)).await;
        tasks.shutdown().await;
    }
    let start = Instant::now();
    assert_eq!(cluster.completion(&probe).await, before);
    assert!(start.elapsed() < Duration::from_secs(10), "the probe took {:?}", start.elapsed());
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_prefill_that_nobody_waits_for_gives_way_to_a_short_prompt() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_long_prefill_that_nobody_waits_for");
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let short = greedy(&random.tiny_prompt(20), 1);
    let timed = async || {
        let start = Instant::now();
        cluster.completion(&short).await;
        start.elapsed()
    };
    timed().await;
    let (mut idle, mut after) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        idle.push(timed().await);
        let long = streamed(&mut random, 100_000, 4);
        let before = cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await;
        let stream = tokio::spawn(run(cluster.http, long, None));
        // Behind so many tokens a layer of one chunk takes tens of milliseconds.
        eventually("the long prompt is being computed", Duration::from_secs(120), async || {
            let computed = cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await - before;
            if computed > 6_000.0 { Ok(()) } else { Err(format!("{computed} tokens computed")) }
        })
        .await;
        stream.abort();
        after.push(timed().await);
        cluster.wait_baseline(BASELINE).await;
        let computed = cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await - before;
        assert!(computed < 100_000.0, "the long prompt was computed to its end");
    }
    let [idle, after] = [idle, after].map(median);
    eprintln!("a short prompt takes {idle:?} when idle, {after:?} after a long one was cancelled");
    assert!(after < idle * 2 + Duration::from_millis(15), "{after:?} after the cancel, {idle:?} when idle");
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_router_leaves_no_blocks_behind() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_killed_router_leaves_no_blocks_behind");
    let mut cluster = Cluster::start(ClusterConfig::default()).await;
    let mut tasks = JoinSet::new();
    for _ in 0..16 {
        let length = random.within(100..3000);
        let body = streamed(&mut random, length, 20_000);
        let http = cluster.http;
        tasks.spawn(async move {
            let stream = EventStream::post(http, "/v1/completions", &body).await?;
            stream.completion().await
        });
    }
    eventually("several sequences decode", Duration::from_secs(30), async || {
        let running = cluster.decode_sum("baton_num_requests", &[("stage", "running")]).await;
        if running >= 4.0 { Ok(()) } else { Err(format!("{running} running")) }
    })
    .await;
    cluster.router.kill();
    while let Some(ended) = tasks.join_next().await {
        assert!(ended.expect("no panic").is_err(), "a stream ended well although its router was killed");
    }
    eventually("both workers freed everything", BASELINE, async || {
        for worker in cluster.prefill.iter().chain(&cluster.decode) {
            worker.at_baseline().await?;
        }
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_rounds_of_cancels_leave_memory_flat() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_hundred_rounds_of_cancels");
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let mut after_warm_up = Vec::new();
    for round in 0..120 {
        let mut tasks = JoinSet::new();
        for _ in 0..8 {
            let length = random.within(1..300);
            let body = streamed(&mut random, length, 1000);
            let hang_up = Some(Duration::from_millis(random.within(0..40) as u64));
            let http = cluster.http;
            tasks.spawn(async move { run(http, body, hang_up).await });
        }
        while tasks.join_next().await.is_some() {}
        if round == 20 {
            cluster.wait_baseline(BASELINE).await;
            after_warm_up = cluster.processes().map(Process::resident_bytes).collect();
        }
    }
    cluster.wait_baseline(BASELINE).await;
    for (process, before) in cluster.processes().zip(after_warm_up) {
        let now = process.resident_bytes();
        eprintln!("{}: {} KiB, then {} KiB", process.name, before >> 10, now >> 10);
        // Allocators keep some slack; 800 requests that each left their blocks' bookkeeping would show.
        assert!(now < before + (16 << 20), "{}: {before} bytes, 100 rounds later {now}", process.name);
    }
}
