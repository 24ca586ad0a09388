//! A second fault while a first one is being mended: in a redirect, in a hold, in a resume.

use std::time::Duration;

use baton_tests::cluster::{greedy, strings, with};
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Completion, EventStream, Turn, eventually};
use serde_json::{Value, json};

const BOUND: Duration = Duration::from_secs(20);
/// Blocks return within a second; the rest is for a busy machine.
const BASELINE: Duration = Duration::from_secs(5);
const PROMPT: usize = 4000;

/// `num_decode` decode workers, each behind a link that can stand still.
async fn cluster(num_decode: usize) -> Cluster {
    let router_args = strings(&["--heartbeat-timeout", "1"]);
    Cluster::start(ClusterConfig { num_decode, proxied: true, router_args, ..ClusterConfig::default() }).await
}

/// The decode worker other than `not` that has sequences in this stage.
async fn in_stage(cluster: &Cluster, stage: &str, not: Option<usize>) -> usize {
    eventually(&format!("a decode worker has one {stage}"), BOUND, async || {
        for (nth, worker) in cluster.decode.iter().enumerate().filter(|(nth, _)| Some(*nth) != not) {
            if worker.metrics().await?.sum("baton_num_requests", &[("stage", stage)]) > 0.0 {
                return Ok(nth);
            }
        }
        Err("none has".to_owned())
    })
    .await
}

async fn redirects(cluster: &Cluster) -> f64 {
    cluster.router_metrics().await.sum("baton_redirects_total", &[])
}

async fn computed(cluster: &Cluster) -> f64 {
    cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await
}

/// A stream whose prompt is computed, and whose KV no link lets pass: what it has told, and the decode worker that waits for the KV.
async fn held_up(cluster: &Cluster, body: &Value) -> (EventStream, Completion, usize) {
    cluster.proxies.iter().for_each(|proxy| proxy.stall(true));
    let mut stream = cluster.stream("/v1/completions", body).await;
    let mut told = Completion::default();
    let event = stream.next().await.expect("no break").expect("no end");
    told.add(&serde_json::from_str(&event.data).expect("JSON"));
    let at = in_stage(cluster, "receiving", None).await;
    (stream, told, at)
}

fn let_pass(cluster: &Cluster) {
    cluster.proxies.iter().for_each(|proxy| proxy.stall(false));
}

/// A stream of 24 tokens after a prompt of its own, and what it is answered when nothing happens.
async fn ask(cluster: &Cluster, random: &mut Random, num_tokens: usize) -> (Value, Vec<u32>) {
    let prompt = random.tiny_prompt(PROMPT);
    let body = with(greedy(&prompt, num_tokens), json!({"stream": true, "temperature": 1.0, "seed": 5}));
    let whole = cluster.stream("/v1/completions", &body).await.completion().await.expect("a whole stream");
    cluster.wait_baseline(BASELINE).await;
    (body, whole.token_ids)
}

async fn redirected(cluster: &Cluster, since: f64) {
    eventually("a redirect", BOUND, async || {
        let num = redirects(cluster).await - since;
        if num >= 1.0 { Ok(()) } else { Err(format!("{num} redirects")) }
    })
    .await;
}

async fn remaining_at_baseline(cluster: &Cluster, without: &[usize]) {
    eventually("the workers that are left have everything back", BASELINE, async || {
        for (nth, worker) in cluster.decode.iter().enumerate() {
            if !without.contains(&nth) {
                worker.at_baseline().await?;
            }
        }
        for worker in &cluster.prefill {
            worker.at_baseline().await?;
        }
        Ok(())
    })
    .await;
}

async fn rest_of(stream: EventStream, told: Completion) -> Vec<u32> {
    let rest = tokio::time::timeout(BOUND, stream.completion()).await.expect("an end in time");
    [told.token_ids, rest.expect("the stream goes on").token_ids].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_hangs_up_in_a_redirect_leaves_nothing_behind() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_client_that_hangs_up_in_a_redirect");
    let mut cluster = cluster(2).await;
    let (body, wanted) = ask(&cluster, &mut random, 24).await;
    let before = redirects(&cluster).await;
    let (stream, _, victim) = held_up(&cluster, &body).await;
    cluster.decode[victim].process.kill();
    redirected(&cluster, before).await;
    // The other one may have reserved, or may be about to.
    tokio::time::sleep(Duration::from_millis(random.within(0..30) as u64)).await;
    drop(stream);
    // Also while the links still stand.
    remaining_at_baseline(&cluster, &[victim]).await;
    let_pass(&cluster);
    let again = cluster.stream("/v1/completions", &body).await.completion().await.expect("the other serves");
    assert_eq!(again.token_ids, wanted);
    remaining_at_baseline(&cluster, &[victim]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_dies_in_a_redirect_leaves_nothing_behind() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_router_that_dies_in_a_redirect");
    let mut cluster = cluster(2).await;
    let (body, _) = ask(&cluster, &mut random, 24).await;
    let before = redirects(&cluster).await;
    let (stream, _, victim) = held_up(&cluster, &body).await;
    cluster.decode[victim].process.kill();
    redirected(&cluster, before).await;
    tokio::time::sleep(Duration::from_millis(random.within(0..30) as u64)).await;
    cluster.router.kill();
    assert!(stream.completion().await.is_err(), "a stream ended well although its router was killed");
    remaining_at_baseline(&cluster, &[victim]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_decode_worker_lost_in_a_redirect_costs_no_second_prefill_either() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_second_decode_worker_lost");
    let mut cluster = cluster(3).await;
    let (body, wanted) = ask(&cluster, &mut random, 24).await;
    let (before, num_computed) = (redirects(&cluster).await, computed(&cluster).await);
    let (stream, told, first) = held_up(&cluster, &body).await;
    // Not killed at the same time, since a request that takes two workers down is given up: one leaves in order.
    cluster.decode[first].process.kill();
    let second = in_stage(&cluster, "receiving", Some(first)).await;
    cluster.decode[second].process.signal(libc::SIGTERM);
    // It stays for KV that is under way, and ends when its time is up.
    cluster.decode[second].process.wait(Duration::from_secs(15));
    let_pass(&cluster);
    assert_eq!(rest_of(stream, told).await, wanted);
    let num_redirects = redirects(&cluster).await - before;
    let num_computed = computed(&cluster).await - num_computed;
    assert_eq!((num_redirects, num_computed), (2.0, PROMPT as f64));
    remaining_at_baseline(&cluster, &[first, second]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_back_on_its_port_while_the_prompt_is_held_is_another_one() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_decode_worker_back_on_its_port_while");
    let mut cluster = cluster(1).await;
    let (body, wanted) = ask(&cluster, &mut random, 24).await;
    let dir = cluster.dir();
    for pause_ms in [0, 300, 1500, 4000] {
        let (stream, told, victim) = held_up(&cluster, &body).await;
        cluster.decode[victim].process.kill();
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        cluster.decode[victim].restart(&dir);
        let_pass(&cluster);
        // The only decode worker was lost: an error is right if it took too long, a short or wrong answer never is.
        match tokio::time::timeout(BOUND, stream.completion()).await.expect("an end in time") {
            Ok(rest) => {
                let tokens = [told.token_ids, rest.token_ids].concat();
                assert_eq!(tokens, wanted, "after {pause_ms} ms");
                eprintln!("back after {pause_ms} ms: the answer is whole");
            }
            Err(error) => eprintln!("back after {pause_ms} ms: {error}"),
        }
        cluster.wait_ready().await;
        cluster.wait_baseline(BASELINE).await;
        let again = cluster.stream("/v1/completions", &body).await.completion().await.expect("it serves");
        assert_eq!(again.token_ids, wanted);
        cluster.wait_baseline(BASELINE).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_worker_that_drains_during_a_resume_changes_no_token() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_prefill_worker_that_drains_during_a_resume");
    let router_args = strings(&["--heartbeat-timeout", "1"]);
    let config = ClusterConfig { num_prefill: 2, num_decode: 2, router_args, ..ClusterConfig::default() };
    let mut cluster = Cluster::start(config).await;
    let (body, wanted) = ask(&cluster, &mut random, 2000).await;
    let mut stream = cluster.stream("/v1/completions", &body).await;
    let mut told = Completion::default();
    for _ in 0..30 {
        let event = stream.next().await.expect("no break").expect("no end");
        told.add(&serde_json::from_str(&event.data).expect("JSON"));
    }
    let before = cluster.prefill_sum("baton_prompt_tokens_computed_total", &[]).await;
    let victim = in_stage(&cluster, "running", None).await;
    cluster.decode[victim].process.kill();
    // Whoever computes the prompt for the resume is told to go.
    let busy = eventually("one computes for the resume", BOUND, async || {
        if computed(&cluster).await == before {
            return Err("nothing is computed".to_owned());
        }
        for (nth, worker) in cluster.prefill.iter().enumerate() {
            if worker.metrics().await?.sum("baton_num_requests", &[]) > 0.0 {
                return Ok(nth);
            }
        }
        // It was quick.
        Ok(0)
    })
    .await;
    cluster.prefill[busy].process.signal(libc::SIGTERM);
    assert_eq!(rest_of(stream, told).await, wanted);
    assert_eq!(cluster.prefill[busy].process.exit_code(Duration::from_secs(10)), 0);
    cluster.prefill.remove(busy);
    remaining_at_baseline(&cluster, &[victim]).await;
}
