//! Workers that are told to end: nobody loses a token, and they are gone in time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use baton_tests::client;
use baton_tests::cluster::{greedy, strings, with};
use baton_tests::seed::Random;
use baton_tests::worker::Worker;
use baton_tests::{Cluster, ClusterConfig, Completion, EventStream, Turn, eventually};
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// How much longer than its drain timeout a worker may live.
const MARGIN: Duration = Duration::from_secs(2);

/// Answers of a streamed request; none of it may be missing or be an error.
async fn answers(at: SocketAddr, body: Value) -> Vec<Completion> {
    let num_choices = body["n"].as_u64().map_or(1, |n| usize::try_from(n).expect("small"));
    let body = with(body, json!({"stream": true}));
    let stream = EventStream::post(at, "/v1/completions", &body).await.expect("a stream");
    assert_eq!(stream.status, 200);
    stream.choices(num_choices).await.expect("a whole stream")
}

/// All requests at once; their answers in order.
async fn all_answers(at: SocketAddr, bodies: &[Value]) -> Vec<Vec<Completion>> {
    let mut tasks = JoinSet::new();
    for (nth, body) in bodies.iter().cloned().enumerate() {
        tasks.spawn(async move { (nth, answers(at, body).await) });
    }
    let mut all = tasks.join_all().await;
    all.sort_by_key(|(nth, _)| *nth);
    all.into_iter().map(|(_, answers)| answers).collect()
}

async fn stage(worker: &Worker, stage: &str) -> Result<f64, String> {
    Ok(worker.metrics().await?.sum("baton_num_requests", &[("stage", stage)]))
}

/// Ends as it was told to: exit code 0, so long after `told` at most.
async fn ends(worker: &mut Worker, told: Instant, bound: Duration) {
    let name = worker.process.name.clone();
    let left = bound.saturating_sub(told.elapsed());
    let status = eventually(&format!("{name} ends"), left, async || {
        worker.process.try_status().ok_or_else(|| "it runs".to_owned())
    })
    .await;
    assert!(status.success(), "{status}:\n{}", worker.process.output());
    eprintln!("{name} ended {:?} after it was told to", told.elapsed());
}

async fn draining(cluster: &Cluster, role: &str) {
    eventually("the router sees that a worker drains", Duration::from_secs(1), async || {
        let labels = [("role", role), ("state", "draining")];
        let num = cluster.router_metrics().await.sum("baton_workers", &labels);
        if num == 1.0 { Ok(()) } else { Err(format!("{num} drain")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_that_drains_hands_over_what_it_can_not_finish() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_decode_worker_that_drains");
    let config = ClusterConfig {
        num_decode: 2,
        decode_args: strings(&["--drain-timeout", "3", "--pace-tokens-per-s", "500"]),
        ..ClusterConfig::default()
    };
    let mut cluster = Cluster::start(config).await;
    let mut ask = |num_tokens, more| with(greedy(&random.tiny_prompt(200), num_tokens), more);
    let bodies = [
        ask(1200, json!({})),
        ask(1200, json!({"temperature": 1.0, "seed": 7})),
        ask(600, json!({"temperature": 1.0, "seed": 8, "n": 2})),
        ask(600, json!({"temperature": 1.0, "seed": 9, "n": 2})),
    ];
    let undisturbed = all_answers(cluster.http, &bodies).await;
    cluster.wait_baseline(Duration::from_secs(5)).await;
    let resumes = cluster.router_metrics().await.sum("baton_resumes_total", &[]);

    let (http, again) = (cluster.http, bodies.clone());
    let disturbed = tokio::spawn(async move { all_answers(http, &again).await });
    let busy = eventually("all of them decode", Duration::from_secs(20), async || {
        let running =
            [stage(&cluster.decode[0], "running").await?, stage(&cluster.decode[1], "running").await?];
        if running.iter().sum::<f64>() == 6.0 {
            Ok(usize::from(running[1] > running[0]))
        } else {
            Err(format!("{running:?}"))
        }
    })
    .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let told = Instant::now();
    cluster.decode[busy].process.signal(libc::SIGTERM);
    draining(&cluster, "decode").await;
    assert!(cluster.decode[busy].process.try_status().is_none(), "it ended before its sequences could");
    assert_eq!(cluster.greedy(&[65, 66, 67], 4).await.len(), 4, "new requests go to the other one");
    ends(&mut cluster.decode[busy], told, Duration::from_secs(3) + MARGIN).await;
    assert!(!disturbed.is_finished(), "nothing was left to hand over");
    for (got, wanted) in disturbed.await.expect("no error").iter().zip(&undisturbed) {
        for (got, wanted) in got.iter().zip(wanted) {
            let differs = got.token_ids.iter().zip(&wanted.token_ids).position(|(a, b)| a != b);
            assert_eq!((differs, got.token_ids.len()), (None, wanted.token_ids.len()));
            assert_eq!((&got.text, &got.finish_reason), (&wanted.text, &wanted.finish_reason));
        }
    }
    assert!(cluster.router_metrics().await.sum("baton_resumes_total", &[]) > resumes);
    cluster.decode.remove(busy);
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_ends_soon_ends_where_it_runs() {
    let _turn = Turn::take();
    let mut random = Random::from_env("what_ends_soon");
    let config = ClusterConfig {
        decode_args: strings(&["--drain-timeout", "20", "--pace-tokens-per-s", "300"]),
        ..ClusterConfig::default()
    };
    // There is nobody to hand over to.
    let mut cluster = Cluster::start(config).await;
    let body = greedy(&random.tiny_prompt(100), 300);
    let undisturbed = answers(cluster.http, body.clone()).await;
    let stream = tokio::spawn(answers(cluster.http, body));
    eventually("it decodes", Duration::from_secs(20), async || {
        let running = stage(&cluster.decode[0], "running").await?;
        if running > 0.0 { Ok(()) } else { Err("it does not".to_owned()) }
    })
    .await;
    let told = Instant::now();
    cluster.decode[0].process.signal(libc::SIGTERM);
    draining(&cluster, "decode").await;
    let health = client::request(cluster.http, "GET", "/health", None).await.expect("an answer");
    assert_eq!(health.status, 503, "{}", health.text());
    // As soon as nothing runs, not when the time is over.
    ends(&mut cluster.decode[0], told, Duration::from_secs(8)).await;
    assert_eq!(stream.await.expect("no error"), undisturbed);
    assert_eq!(cluster.router_metrics().await.sum("baton_resumes_total", &[]), 0.0);
}

/// Posts a request whose prompt takes a while, and waits until one prefill worker is in the midst of its transfer.
async fn amid_transfer(cluster: &Cluster, body: &Value) -> (tokio::task::JoinHandle<Completion>, usize) {
    let received = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;
    let (http, body) = (cluster.http, body.clone());
    let task = tokio::spawn(async move {
        let answer = client::request(http, "POST", "/v1/completions", Some(&body)).await;
        Completion::from_answer(&answer.expect("an answer").expect(200))
    });
    let busy = eventually("some KV has arrived", Duration::from_secs(60), async || {
        let now = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;
        for (nth, worker) in cluster.prefill.iter().enumerate() {
            if stage(worker, "prefilling").await? > 0.0 && now > received {
                return Ok(nth);
            }
        }
        if task.is_finished() { Ok(usize::MAX) } else { Err(format!("{} bytes", now - received)) }
    })
    .await;
    assert_ne!(busy, usize::MAX, "the request was over before its worker could be told to end");
    (task, busy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_worker_that_drains_stays_until_its_receiver_has_committed() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_prefill_worker_that_drains");
    let config = ClusterConfig {
        max_step_tokens: Some(64),
        worker_args: strings(&["--max-num-seqs", "64"]),
        prefill_args: strings(&["--drain-timeout", "20", "--pace-tokens-per-s", "4000"]),
        ..ClusterConfig::default()
    };
    let mut cluster = Cluster::start(config).await;
    let body = greedy(&random.tiny_prompt(4000), 16);
    let undisturbed = cluster.completion(&body).await;
    let (task, busy) = amid_transfer(&cluster, &body).await;
    let told = Instant::now();
    cluster.prefill[busy].process.signal(libc::SIGTERM);
    draining(&cluster, "prefill").await;
    let completion = task.await.expect("no error");
    assert_eq!((completion.token_ids, completion.mode), (undisturbed.token_ids, "disaggregated".to_owned()));
    ends(&mut cluster.prefill[busy], told, Duration::from_secs(10)).await;
    let metrics = cluster.router_metrics().await;
    assert_eq!(
        (metrics.sum("baton_retries_total", &[]), metrics.sum("baton_resumes_total", &[])),
        (0.0, 0.0)
    );
    cluster.prefill.clear();
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_worker_that_can_not_finish_in_time_ends_and_another_one_computes() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_prefill_worker_that_can_not_finish");
    let config = ClusterConfig {
        num_prefill: 2,
        max_step_tokens: Some(64),
        worker_args: strings(&["--max-num-seqs", "64"]),
        prefill_args: strings(&["--drain-timeout", "0.5", "--pace-tokens-per-s", "3000"]),
        ..ClusterConfig::default()
    };
    let mut cluster = Cluster::start(config).await;
    let body = greedy(&random.tiny_prompt(12_000), 16);
    let undisturbed = cluster.completion(&body).await;
    let (task, busy) = amid_transfer(&cluster, &body).await;
    let told = Instant::now();
    cluster.prefill[busy].process.signal(libc::SIGTERM);
    ends(&mut cluster.prefill[busy], told, Duration::from_millis(500) + MARGIN).await;
    assert_eq!(task.await.expect("no error").token_ids, undisturbed.token_ids);
    // It was placed again, which is charged to nobody.
    let metrics = cluster.router_metrics().await;
    let again = metrics.sum("baton_placements_total", &[]) - 2.0;
    assert_eq!((again >= 1.0, metrics.sum("baton_retries_total", &[])), (true, 0.0), "{again}");
    cluster.prefill.remove(busy);
    cluster.wait_baseline(Duration::from_secs(5)).await;
}
