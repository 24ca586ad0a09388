//! A crowd in a closed loop for a few seconds: everybody is answered wholly, and the pools are whole afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_tests::cluster::{greedy, with};
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, EventStream, Turn};
use serde_json::json;
use tokio::task::JoinSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_users_in_a_closed_loop_are_all_answered_wholly() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_hundred_users_in_a_closed_loop");
    let cluster = Cluster::start(ClusterConfig { num_decode: 2, ..ClusterConfig::default() }).await;
    let done = Arc::new(AtomicUsize::new(0));
    let until = Instant::now() + Duration::from_secs(5);
    let mut users = JoinSet::new();
    for _ in 0..100 {
        let (http, done) = (cluster.http, Arc::clone(&done));
        let (length, num_tokens) = (random.within(1..300), random.within(1..40));
        let prompt = random.tiny_prompt(length);
        users.spawn(async move {
            let body = with(greedy(&prompt, num_tokens), json!({"stream": true}));
            let mut first = None;
            while Instant::now() < until {
                let stream = EventStream::post(http, "/v1/completions", &body).await.expect("an answer");
                assert_eq!(stream.status, 200);
                let completion = stream.completion().await.expect("a whole stream");
                assert_eq!(completion.token_ids.len(), num_tokens);
                // The same request among ever other company: the same tokens.
                assert_eq!(first.get_or_insert_with(|| completion.token_ids.clone()), &completion.token_ids);
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    while let Some(user) = users.join_next().await {
        user.expect("a user was answered");
    }
    let done = done.load(Ordering::Relaxed);
    eprintln!("{done} requests");
    assert!(done >= 100, "{done} requests");
    cluster.wait_baseline(Duration::from_secs(5)).await;
    assert_eq!(cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await, 0.0);
}
