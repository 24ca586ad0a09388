//! A bad link under the KV: flipped bits, cut connections, a link that stands still. The tokens stay the same.

use std::time::Duration;

use baton_tests::cluster::greedy;
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Completion, Turn, client, eventually};
use serde_json::Value;
use tokio::task::JoinHandle;

const BASELINE: Duration = Duration::from_secs(5);

/// A cluster behind a proxy, a request, and its tokens over a sound link.
async fn sound(random: &mut Random) -> (Cluster, Value, Vec<u32>) {
    let cluster = Cluster::start(ClusterConfig { proxied: true, ..ClusterConfig::default() }).await;
    let body = greedy(&random.tiny_prompt(3000), 16);
    let wanted = cluster.completion(&body).await;
    assert_eq!(wanted.mode, "disaggregated");
    let num_bulk_bytes = cluster.proxies[0].num_bulk_bytes();
    assert!(num_bulk_bytes > 500_000, "{num_bulk_bytes} bytes of KV passed the proxy");
    (cluster, body, wanted.token_ids)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_is_found_and_its_frame_sent_again() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_flipped_bit_is_found");
    let (cluster, body, wanted) = sound(&mut random).await;
    for num in [1, 2, 5] {
        let before = cluster.decode_sum("baton_kv_frames_corrupt_total", &[]).await;
        cluster.proxies[0].flip(num);
        let completion = cluster.completion(&body).await;
        assert_eq!(completion.token_ids, wanted, "{num} flipped bits");
        assert_eq!(cluster.proxies[0].num_pending(), 0, "too little bulk passed to flip all");
        let corrupt = cluster.decode_sum("baton_kv_frames_corrupt_total", &[]).await - before;
        // Two may fall into one frame.
        assert!(corrupt >= 1.0 && corrupt <= num as f64, "{corrupt} frames for {num} flipped bits");
        // Each is sent again, unless it was damaged for the second time: then the attempt failed.
        let failed = cluster.decode_sum("baton_handoffs_total", &[("outcome", "corrupt")]).await;
        let resent = cluster.prefill_sum("baton_kv_frames_resent_total", &[]).await;
        assert!(resent + failed >= corrupt, "{corrupt} damaged, {resent} sent again, {failed} failed");
        assert!(num > 1 || resent >= 1.0, "{resent} sent again");
        cluster.wait_baseline(BASELINE).await;
    }
}

/// Bit after bit: no attempt gets through, and what comes is an answer all the same, or an error; never other tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_always_flips_never_gives_other_tokens() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_link_that_always_flips");
    let (cluster, body, wanted) = sound(&mut random).await;
    cluster.proxies[0].flip(usize::MAX);
    if let Ok(completion) = cluster.try_completion(&body).await {
        assert_eq!(completion.token_ids, wanted);
    }
    cluster.proxies[0].flip(0);
    assert_eq!(cluster.completion(&body).await.token_ids, wanted);
    cluster.wait_baseline(BASELINE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_connection_costs_the_request_nothing() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_cut_connection");
    let (cluster, body, wanted) = sound(&mut random).await;
    for num in [1, 1, 3] {
        cluster.proxies[0].cut(num);
        let completion = cluster.completion(&body).await;
        assert_eq!(completion.token_ids, wanted, "{num} cuts");
        assert_eq!(cluster.proxies[0].num_pending(), 0, "too little bulk passed to cut so often");
        cluster.wait_baseline(BASELINE).await;
    }
}

/// While the link stands still nothing is decoded, other requests' control goes on, and a cancel frees everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_stands_still_holds_up_one_request_and_can_be_cancelled() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_link_that_stands_still");
    let (cluster, body, wanted) = sound(&mut random).await;
    cluster.proxies[0].stall(true);
    let held_up = start(&cluster, &body);
    eventually("the prompt waits on D", Duration::from_secs(20), async || {
        let receiving = cluster.decode_sum("baton_num_requests", &[("stage", "receiving")]).await;
        if receiving > 0.0 { Ok(()) } else { Err("nothing is received".to_owned()) }
    })
    .await;
    // Its KV is a few blocks, too little to be bulk; only the connection it shares could hold it up.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!held_up.is_finished(), "it was answered although its KV could not arrive");
    held_up.abort();
    cluster.wait_baseline(BASELINE).await;
    cluster.proxies[0].stall(false);
    assert_eq!(cluster.completion(&body).await.token_ids, wanted);

    // And one that waits long enough goes on where it was.
    cluster.proxies[0].stall(true);
    let resumed = start(&cluster, &body);
    tokio::time::sleep(Duration::from_secs(2)).await;
    cluster.proxies[0].stall(false);
    assert_eq!(resumed.await.expect("no panic").expect("an answer").token_ids, wanted);
    cluster.wait_baseline(BASELINE).await;
}

fn start(cluster: &Cluster, body: &Value) -> JoinHandle<Result<Completion, String>> {
    let (http, body) = (cluster.http, body.clone());
    tokio::spawn(async move {
        let answer = client::request(http, "POST", "/v1/completions", Some(&body)).await?;
        if answer.status == 200 { Ok(Completion::from_answer(&answer)) } else { Err(answer.text()) }
    })
}
