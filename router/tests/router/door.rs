//! Load: the door, the queue, and clients that read slowly or come twice.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::fake::Script;
use crate::harness::{Cluster, ONE_PAIR, eventually};

const PLAIN: &str = "/v1/completions";

#[tokio::test]
async fn too_much_is_shed_with_a_time_to_come_back() {
    let script = Script { prefill_hangs: true, ..Script::says("x") };
    let options = ["--max-concurrent", "2", "--max-queue", "1", "--keep-alive", "0.05"];
    let cluster = Cluster::start(ONE_PAIR, script, &options).await;
    let body = json!({"prompt": "a", "stream": true});
    let first = cluster.client.stream(PLAIN, &[], &body).await;
    let second = cluster.client.stream(PLAIN, &[], &body).await;
    let (client, queued_body) = (&cluster.client, json!({"prompt": "b", "stream": true}));
    let mut queued = Box::pin(client.stream(PLAIN, &[], &queued_body));
    let waits = tokio::time::timeout(Duration::from_millis(100), queued.as_mut()).await;
    assert!(waits.is_err(), "the third waits");
    let answer = cluster.client.post(PLAIN, &body).await;
    assert_eq!(answer.status, 429);
    let seconds: u64 = answer.header("retry-after").expect("Retry-After").parse().expect("seconds");
    assert!(seconds >= 1);
    assert_eq!(answer.error()["type"], "rate_limit_error");
    assert_eq!(cluster.prefill[0].prefills().len(), 2, "the shed and the queued ones reached no worker");
    // A place that becomes free goes to the one that waits.
    drop(first);
    let third = queued.await;
    assert_eq!(third.status, 200);
    eventually("the third reached a worker", async || cluster.prefill[0].prefills().len() == 3).await;
    drop((second, third));
    cluster.until_no_leg_is_open().await;
    assert_eq!(cluster.num_in_flight(), 0);
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_is_forgotten() {
    let script = Script { prefill_hangs: true, ..Script::says("x") };
    let options = ["--max-concurrent", "1", "--max-queue", "1", "--keep-alive", "0.05"];
    let cluster = Cluster::start(ONE_PAIR, script, &options).await;
    let body = json!({"prompt": "a", "stream": true});
    let first = cluster.client.stream(PLAIN, &[], &body).await;
    {
        let mut queued = Box::pin(cluster.client.stream(PLAIN, &[], &body));
        assert!(tokio::time::timeout(Duration::from_millis(100), queued.as_mut()).await.is_err());
        assert_eq!(cluster.client.post(PLAIN, &body).await.status, 429);
    }
    // Its place in the queue is free again: the next one waits instead of being shed.
    eventually("the queue has room", async || {
        let mut next = Box::pin(cluster.client.stream(PLAIN, &[], &body));
        tokio::time::timeout(Duration::from_millis(100), next.as_mut()).await.is_err()
    })
    .await;
    drop(first);
    cluster.until_no_leg_is_open().await;
}

#[tokio::test]
async fn two_live_requests_never_share_a_label() {
    let script = Script { decode_hangs_after: Some(2), ..Script::says("hello") };
    let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
    let label = [("x-request-id", "run-1")];
    let body = json!({"prompt": "a", "stream": true});
    let mut first = cluster.client.stream(PLAIN, &label, &body).await;
    assert!(first.until("\"l\"").await);
    let answer = cluster.client.post_with(PLAIN, &label, &body).await;
    assert_eq!((answer.status, &answer.error()["code"]), (409, &json!("duplicate_request_id")));
    assert_eq!(answer.header("x-request-id"), Some("run-1"));
    drop(first);
    cluster.until_no_leg_is_open().await;
    let one = json!({"prompt": "a", "max_tokens": 2});
    // Free again as soon as its request has ended, also for a client that comes back at once.
    for _ in 0..20 {
        assert_eq!(cluster.client.post_with(PLAIN, &label, &one).await.status, 200);
    }
    let odd = cluster.client.post_with(PLAIN, &[("x-request-id", "two words")], &one).await;
    assert_eq!((odd.status, &odd.error()["param"]), (400, &json!("X-Request-Id")));
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cancelled() {
    let script = Script { tokens_per_message: 64, ..Script::says("0123456789") };
    let cluster =
        Cluster::start(ONE_PAIR, script, &["--max-output-buffer", "64", "--slow-reader-timeout", "0.3"])
            .await;
    let body = json!({"prompt": "a", "stream": true, "ignore_eos": true, "max_tokens": 130_000}).to_string();
    let mut connection = TcpStream::connect(cluster.router.http).await.expect("connected");
    let head = format!(
        "POST {PLAIN} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    connection.write_all(head.as_bytes()).await.expect("written");
    eventually("the request is cancelled", async || cluster.num_ended("disaggregated", "slow_reader") == 1)
        .await;
    cluster.until_no_leg_is_open().await;
    // What it can still read ends with an error, not as if all had been said.
    let mut rest = Vec::new();
    connection.read_to_end(&mut rest).await.ok();
    let rest = String::from_utf8_lossy(&rest);
    assert!(rest.contains("slow_reader") && !rest.contains("[DONE]"));
}

#[tokio::test]
async fn a_client_that_hangs_up_cancels_both_legs() {
    for (script, during) in [
        (Script { prefill_hangs: true, ..Script::says("hello") }, "prefill"),
        (Script { decode_hangs_after: Some(3), ..Script::says("hello") }, "decode"),
    ] {
        for stream in [false, true] {
            let cluster = Cluster::start(ONE_PAIR, script.clone(), &["--keep-alive", "0.05"]).await;
            let body = json!({"prompt": "a", "stream": stream});
            if stream {
                let mut response = cluster.client.stream(PLAIN, &[], &body).await;
                assert!(response.until(if during == "prefill" { ": keep-alive" } else { "\"l\"" }).await);
                drop(response);
            } else {
                let mut response = Box::pin(cluster.client.post(PLAIN, &body));
                assert!(tokio::time::timeout(Duration::from_millis(200), response.as_mut()).await.is_err());
            }
            cluster.until_no_leg_is_open().await;
            let num_cancelled = cluster.prefill[0].num_cancelled() + cluster.decode[0].num_cancelled();
            assert_eq!(num_cancelled, if during == "prefill" { 2 } else { 1 }, "{during}, stream {stream}");
            let counted =
                async || cluster.num_ended("disaggregated", "cancelled") == 1 && cluster.num_in_flight() == 0;
            eventually("it counts as cancelled", counted).await;
        }
    }
}

#[tokio::test]
async fn a_hundred_at_once_are_all_answered() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &["--max-concurrent", "8"]).await;
    let requests = (0..100).map(|num| {
        let client = &cluster.client;
        async move { client.post(PLAIN, &json!({"prompt": format!("{num}"), "stream": num % 2 == 0})).await }
    });
    for answer in futures::future::join_all(requests).await {
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(answer.text().contains("\"stop\""));
    }
    assert_eq!(cluster.num_open(), 0);
}

#[tokio::test]
async fn many_requests_share_a_connection_without_waiting_for_each_other() {
    let script = Script { decode_hangs_after: Some(1), ..Script::says("hello") };
    let cluster = Cluster::start(ONE_PAIR, script, &["--max-concurrent", "300"]).await;
    let body = json!({"prompt": "x", "stream": true});
    let streams = (0..300).map(|_| cluster.client.stream(PLAIN, &[], &body));
    let streams = futures::future::join_all(streams).await;
    eventually("300 decode", async || cluster.decode[0].num_open() == 300).await;
    drop(streams);
    cluster.until_no_leg_is_open().await;
}
