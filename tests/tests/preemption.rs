//! A pool that is too small for what runs in it: who gives way, what the others notice, and what never fits.

use std::time::{Duration, Instant};

use baton_tests::cluster::{greedy, strings, with};
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Completion, Turn};
use serde_json::json;
use tokio::task::JoinSet;

/// Blocks for 2,048 tokens of `builtin:tiny` on each worker, and decoding slow enough that requests run side by side.
fn small() -> ClusterConfig {
    ClusterConfig {
        kv_memory: "1M".into(),
        worker_args: strings(&["--context", "2048"]),
        decode_args: strings(&["--pace-tokens-per-s", "4000"]),
        ..ClusterConfig::default()
    }
}

/// A stream's tokens, and its longest gap between two of them.
async fn streamed(cluster_http: std::net::SocketAddr, body: serde_json::Value) -> (Vec<u32>, Duration) {
    let body = with(body, json!({"stream": true}));
    let stream =
        baton_tests::EventStream::post(cluster_http, "/v1/completions", &body).await.expect("a stream");
    assert_eq!(stream.status, 200);
    let events = stream.collect().await.expect("a whole stream");
    let mut whole = Completion::default();
    let (mut last, mut worst): (Option<Instant>, _) = (None, Duration::ZERO);
    for (at, event) in &events {
        let before = whole.token_ids.len();
        whole.add(event);
        if whole.token_ids.len() > before {
            worst = last.map_or(worst, |last| worst.max(at.duration_since(last)));
            last = Some(*at);
        }
    }
    (whole.token_ids, worst)
}

/// Four sequences of 900 tokens in room for 2,048: the younger ones give way and come back through the prefill worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_that_gave_way_come_back_with_the_same_tokens() {
    let _turn = Turn::take();
    let mut random = Random::from_env("sequences_that_gave_way");
    // What a worker has seen answers grow to, it foresees: the small one must not have seen these before.
    let (roomy, cluster) = (Cluster::start(ClusterConfig::default()).await, Cluster::start(small()).await);
    let bodies: Vec<_> = (0..4)
        .map(|nth| {
            let sampling = json!({"temperature": if nth % 2 == 0 { 0.0 } else { 1.0 }, "seed": nth});
            with(greedy(&random.tiny_prompt(100), 800), sampling)
        })
        .collect();
    let mut wanted = Vec::new();
    for body in &bodies {
        wanted.push(streamed(roomy.http, body.clone()).await);
    }

    let mut tasks = JoinSet::new();
    for (nth, body) in bodies.into_iter().enumerate() {
        let http = cluster.http;
        tasks.spawn(async move { (nth, streamed(http, body).await) });
        // So that they have an order.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    while let Some(done) = tasks.join_next().await {
        let (nth, (tokens, worst)) = done.expect("no stream failed");
        eprintln!("stream {nth}: worst gap {worst:?}, alone {:?}", wanted[nth].1);
        assert_eq!(tokens, wanted[nth].0, "stream {nth}");
    }
    let preemptions = cluster.decode_sum("baton_preemptions_total", &[]).await;
    eprintln!("{preemptions} preemptions");
    assert!(preemptions >= 1.0, "nothing was preempted: the test shows nothing");
    // They came back through the prefill worker, so nobody's gap held a prompt's computation.
    assert_eq!(cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await, 0.0);
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

/// The same where there is no prefill worker: recomputed in place, in chunks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn colocated_sequences_that_gave_way_are_computed_again() {
    let _turn = Turn::take();
    let mut random = Random::from_env("colocated_sequences_that_gave_way");
    let roomy = Cluster::start(ClusterConfig::default()).await;
    let cluster = Cluster::start(small().colocated()).await;
    let bodies: Vec<_> = (0..4).map(|_| greedy(&random.tiny_prompt(100), 800)).collect();
    let mut wanted = Vec::new();
    for body in &bodies {
        wanted.push(streamed(roomy.http, body.clone()).await.0);
    }
    let mut tasks = JoinSet::new();
    for (nth, body) in bodies.into_iter().enumerate() {
        let http = cluster.http;
        tasks.spawn(async move { (nth, streamed(http, body).await.0) });
    }
    while let Some(done) = tasks.join_next().await {
        let (nth, tokens) = done.expect("no stream failed");
        assert_eq!(tokens, wanted[nth], "stream {nth}");
    }
    assert!(cluster.decode_sum("baton_preemptions_total", &[]).await >= 1.0);
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

/// Four answers of one prompt in a pool that can't hold them all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_answers_in_a_full_pool_all_end_with_their_own_tokens() {
    let _turn = Turn::take();
    let mut random = Random::from_env("four_answers_in_a_full_pool");
    let roomy = Cluster::start(ClusterConfig::default()).await;
    let cluster = Cluster::start(small()).await;
    let body = with(
        greedy(&random.tiny_prompt(200), 440),
        json!({"n": 4, "temperature": 1.0, "seed": random.next_u64() >> 1}),
    );
    let all = async |cluster: &Cluster| -> Vec<Vec<u32>> {
        let answer = cluster.post("/v1/completions", &body).await.expect(200);
        Completion::choices(&answer).into_iter().map(|choice| choice.token_ids).collect()
    };
    let wanted = all(&roomy).await;
    // Beside another one of the same size: 2 x (200 + 4 x 440) tokens in room for 2,048.
    let (first, second) = tokio::join!(all(&cluster), all(&cluster));
    assert_eq!((&first, &second), (&wanted, &wanted));
    assert!(cluster.decode_sum("baton_preemptions_total", &[]).await >= 1.0);
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_never_fit_is_refused_with_the_number_that_fits() {
    let _turn = Turn::take();
    let mut random = Random::from_env("what_can_never_fit");
    let cluster = Cluster::start(small()).await;
    let prompt = random.tiny_prompt(1000);
    let refused = async |body: &serde_json::Value| -> String {
        let answer = cluster.post("/v1/completions", body).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned()
    };
    let message = refused(&greedy(&prompt, 2000)).await;
    assert!(message.contains("2000") && message.contains("2048"), "{message}");
    // Each of the four would fit alone.
    let message = refused(&with(greedy(&prompt, 400), json!({"n": 4}))).await;
    assert!(message.contains("2600") && message.contains("2048") && message.contains("248"), "{message}");
    // What fits is served, to the last token.
    assert_eq!(cluster.greedy(&prompt, 1048).await.len(), 1048);
    let four =
        cluster.post("/v1/completions", &with(greedy(&prompt, 248), json!({"n": 4}))).await.expect(200);
    assert!(Completion::choices(&four).iter().all(|choice| choice.token_ids.len() == 248));
    cluster.wait_baseline(Duration::from_secs(5)).await;
}
