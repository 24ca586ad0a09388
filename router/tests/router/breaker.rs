//! Workers that keep failing requests, and requests that keep taking workers down.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::fake::Script;
use crate::harness::{Cluster, Shape, eventually};
use crate::log::Log;

const PLAIN: &str = "/v1/completions";

/// Of `baton_dispatch`: this many failures open a breaker, for this long at first.
const MAX_FAILURES: usize = 3;
const FIRST_BACKOFF: Duration = Duration::from_secs(1);

async fn is_answered(cluster: &Cluster) {
    let answer = cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["choices"][0]["text"], "hello");
}

async fn num_open(cluster: &Cluster) -> u64 {
    let metrics = cluster.client.get("/metrics").await.text();
    let line = metrics.lines().find_map(|line| line.strip_prefix("baton_open_breakers{role=\"decode\"} "));
    line.expect("the gauge").parse().expect("a number")
}

#[tokio::test]
async fn a_worker_that_fails_every_leg_is_left_out_tried_and_taken_back() {
    let shape = Shape { num_prefill: 1, num_decode: 2 };
    let cluster = Cluster::start(shape, Script::says("hello"), &["--placement", "round-robin"]).await;
    cluster.until_all_ready().await;
    let (broken, other) = (&cluster.decode[0], &cluster.decode[1]);
    broken.set_broken(true);
    assert_eq!(num_open(&cluster).await, 0);
    while broken.decodes().len() < MAX_FAILURES {
        is_answered(&cluster).await;
    }
    let opened = Instant::now();
    assert_eq!(num_open(&cluster).await, 1);
    let before = other.decodes().len();
    for _ in 0..4 {
        is_answered(&cluster).await;
    }
    if opened.elapsed() < FIRST_BACKOFF / 2 {
        assert_eq!(broken.decodes().len(), MAX_FAILURES, "nothing goes there while it is open");
        assert_eq!(other.decodes().len(), before + 4);
    }
    // One request tries it, and it is left out again for longer.
    eventually("it is tried", async || {
        is_answered(&cluster).await;
        broken.decodes().len() > MAX_FAILURES
    })
    .await;
    assert!(opened.elapsed() > FIRST_BACKOFF / 2, "{:?}", opened.elapsed());
    assert_eq!((broken.decodes().len(), num_open(&cluster).await), (MAX_FAILURES + 1, 1));
    broken.set_broken(false);
    eventually("it is taken back", async || {
        is_answered(&cluster).await;
        broken.decodes().len() > MAX_FAILURES + 3
    })
    .await;
    assert_eq!(num_open(&cluster).await, 0);
}

#[tokio::test]
async fn a_request_that_took_two_workers_down_is_given_up_and_named() {
    let log = Log::record();
    let shape = Shape { num_prefill: 1, num_decode: 3 };
    let cluster = Cluster::start(shape, Script::says("hello"), &[]).await;
    cluster.until_all_ready().await;
    cluster.decode.iter().for_each(|worker| worker.set_broken(true));
    let answer = cluster.client.post(PLAIN, &json!({"prompt": "x", "max_tokens": 5})).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    let (had, spared): (Vec<_>, Vec<_>) = cluster.decode.iter().partition(|worker| worker.num_legs() > 0);
    assert_eq!((had.len(), spared.len()), (2, 1), "the third is not tried");
    let id = answer.header("x-baton-request-id").expect("an id");
    let (first, second) = (had[0].address(), had[1].address());
    let named = log.lines(&["WARN", "took workers down", id, &first, &second, "peer_lost"]);
    assert_eq!(named.len(), 1, "{:?}", log.lines(&["WARN"]));
    assert!(!named[0].contains(&spared[0].address()));
    cluster.until_no_leg_is_open().await;

    // One that lost one worker only is no suspect.
    had[0].set_broken(false);
    spared[0].set_broken(false);
    assert_eq!(cluster.client.post(PLAIN, &json!({"prompt": "y"})).await.status, 200);
    assert_eq!(log.lines(&["took workers down"]).len(), 1);
}

#[tokio::test]
async fn what_is_said_twice_is_delivered_once_and_counted() {
    let script = Script { repeats: true, ..Script::says("hello") };
    let cluster = Cluster::start(crate::harness::ONE_PAIR, script, &[]).await;
    is_answered(&cluster).await;
    // Four letters and the end of sequence; what follows the last word is not waited for.
    let num = cluster.router.metrics().late_messages.num("router");
    assert!((4..=5).contains(&num), "{num}");
    let metrics = cluster.client.get("/metrics").await.text();
    assert!(metrics.contains("baton_late_messages_total{where=\"router\"}"), "{metrics}");
}

/// Leaving out the only decode worker would turn a few failures into an outage of its own.
#[tokio::test]
async fn the_only_decode_worker_is_asked_however_often_it_failed() {
    let shape = Shape { num_prefill: 1, num_decode: 1 };
    let cluster = Cluster::start(shape, Script::says("hello"), &[]).await;
    cluster.until_all_ready().await;
    let lone = &cluster.decode[0];
    lone.set_broken(true);
    while num_open(&cluster).await == 0 {
        let answer = cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
        assert_ne!(answer.status, 200, "{}", answer.text());
    }
    lone.set_broken(false);
    is_answered(&cluster).await;
}
