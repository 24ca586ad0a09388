//! Who is ready, and what /health says about who is not.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1::worker_status::State;
use baton_router::{Router, RouterError};
use serde_json::{Value, json};

use crate::client::Client;
use crate::fake::{FakeWorker, Kind, Script};
use crate::harness::{Cluster, ONE_PAIR, config, eventually};

const PLAIN: &str = "/v1/completions";

fn missing(health: &Value) -> String {
    health["missing"].to_string()
}

#[tokio::test]
async fn health_follows_the_workers() {
    let at = "127.0.0.1:0".parse().expect("address");
    let script = Arc::new(Script::says("hello"));
    let prefill = [FakeWorker::start_at(at, Kind::Prefill, Arc::clone(&script), State::Loading)];
    let mut decode = [FakeWorker::start_at(at, Kind::Decode, script, State::Loading)];
    let router = Router::start(config(&prefill, &decode, &[])).await.expect("router starts");
    let client = Client::new(router.http);
    let says = async |status: u16, part: &str| {
        let answer = client.get("/health").await;
        answer.status == status && missing(&answer.json()).contains(part)
    };
    eventually("both load", async || {
        client.get("/health").await.json()["workers"].to_string().matches("loading").count() == 2
    })
    .await;
    assert!(says(503, "a ready decode worker").await);
    eventually("the tokenizer is ready", async || client.get("/v1/models").await.status == 200).await;
    let answer = client.post(PLAIN, &json!({"prompt": "x"})).await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert!(answer.error()["message"].to_string().contains("a ready decode worker"));
    decode[0].set_state(State::Ready);
    // A pair is to serve: the prefill worker is on its way.
    eventually("only prefill is missing", async || says(503, "a ready prefill worker").await).await;
    prefill[0].set_state(State::Ready);
    eventually("all ready", async || says(200, "[]").await).await;
    assert_eq!(
        client.post(PLAIN, &json!({"prompt": "x"})).await.header("x-baton-mode"),
        Some("disaggregated")
    );
    prefill[0].set_state(State::Draining);
    eventually("a draining worker gets nothing new", async || {
        client.post(PLAIN, &json!({"prompt": "x"})).await.header("x-baton-mode") == Some("local")
    })
    .await;
    prefill[0].set_state(State::Ready);
    decode[0].kill();
    eventually("the decode worker is missed", async || says(503, "a ready decode worker").await).await;
    let metrics = client.get("/metrics").await.text();
    assert!(metrics.contains("{role=\"decode\",state=\"unreachable\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_silent_worker_is_not_ready_and_comes_back() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &["--heartbeat-timeout", "0.5"]).await;
    cluster.decode[0].mute();
    eventually("it is missed", async || cluster.client.get("/health").await.status == 503).await;
    let health = cluster.client.get("/health").await.json();
    assert!(health["workers"].to_string().contains("no heartbeat"), "{health}");
}

#[tokio::test]
async fn work_without_progress_is_death_and_a_long_step_is_not() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &["--stall-timeout", "0.4"]).await;
    // Progress goes on: busy for longer than the stall timeout, and fine.
    for progress in 0..12 {
        cluster.decode[0].set_status(|status| {
            status.idle = false;
            status.progress = progress;
        });
        tokio::time::sleep(Duration::from_millis(60)).await;
        assert_eq!(cluster.client.get("/health").await.status, 200);
    }
    eventually("it stands still", async || cluster.client.get("/health").await.status == 503).await;
    cluster.decode[0].set_status(|status| status.progress += 1);
    eventually("it moves again", async || cluster.client.get("/health").await.status == 200).await;
}

#[tokio::test]
async fn another_process_at_the_same_address_is_noticed() {
    let mut cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &[]).await;
    let at = cluster.decode[0].socket();
    cluster.decode[0].kill();
    let again = FakeWorker::start_at(at, Kind::Decode, Arc::clone(&cluster.script), State::Ready);
    eventually("the new process serves", async || {
        let answer = cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
        assert!(
            answer.status != 200 || answer.json()["choices"][0]["text"] != "",
            "never a 200 without content"
        );
        answer.status == 200
    })
    .await;
    let destination = cluster.prefill[0].prefills().last().and_then(|request| request.destination.clone());
    let told = destination.expect("a destination").instance_id;
    assert_eq!(told, again.instance());
}

#[tokio::test]
async fn workers_that_differ_are_refused_with_both_named() {
    let cluster = Cluster::start_cold(ONE_PAIR, Script::says("hello"), &[]).await;
    let at = "127.0.0.1:0".parse().expect("address");
    for (what, kind) in [("block_size", Kind::Prefill), ("model", Kind::Prefill), ("protocol", Kind::Decode)]
    {
        let script = Arc::new(Script::says("odd"));
        let odd = FakeWorker::start_at(at, kind, script, State::Loading);
        odd.describe(|description| {
            let mut layout = crate::fake::layout();
            match what {
                "block_size" => layout.block_size = 32,
                "model" => layout.model_digest = vec![9; 32].into(),
                _ => description.protocol_version = 99,
            }
            description.layout = Some(layout);
        });
        odd.set_state(State::Ready);
        let (odd_address, good) = (odd.address(), cluster.decode[0].address());
        let workers = [odd];
        let fine = std::slice::from_ref(&cluster.decode[0]);
        let extra = ["--decode-worker", &odd_address];
        let config = match kind {
            Kind::Prefill => config(&workers, fine, &[]),
            Kind::Decode => config(&[], fine, &extra),
        };
        let router = Router::start(config).await.expect("router starts");
        let client = Client::new(router.http);
        eventually("it is refused", async || client.get("/health").await.text().contains("refused")).await;
        let health = client.get("/health").await.json();
        let refused =
            health["workers"].as_array().expect("workers").iter().find(|worker| worker["state"] == "refused");
        let reason = refused.expect("one is refused")["reason"].to_string();
        assert!(reason.contains(&odd_address) && reason.contains(what), "{reason}");
        if what == "block_size" {
            assert!(reason.contains(&good) && reason.contains("16") && reason.contains("32"), "{reason}");
        }
        // The others serve, without it.
        eventually("the rest serves", async || {
            client.post(PLAIN, &json!({"prompt": "x"})).await.header("x-baton-mode") == Some("local")
        })
        .await;
        assert_eq!(workers[0].num_legs(), 0);
    }
}

#[tokio::test]
async fn the_least_loaded_workers_are_chosen() {
    let shape = crate::harness::Shape { num_prefill: 2, num_decode: 2 };
    let script = Script { decode_hangs_after: Some(1), ..Script::says("hello") };
    let cluster = Cluster::start(shape, script, &[]).await;
    cluster.until_all_ready().await;
    let mut streams = Vec::new();
    for _ in 0..6 {
        let mut stream = cluster.client.stream(PLAIN, &[], &json!({"prompt": "x", "stream": true})).await;
        assert!(stream.until("\"e\"").await);
        streams.push(stream);
    }
    assert_eq!(cluster.decode.iter().map(FakeWorker::num_open).collect::<Vec<_>>(), [3, 3]);
}

#[tokio::test]
async fn busy_ports_and_unusable_models_are_one_clear_line() {
    let cluster = Cluster::start_cold(ONE_PAIR, Script::says("x"), &[]).await;
    for (option, taken) in [("--http-listen", cluster.router.http), ("--grpc-listen", cluster.router.grpc)] {
        let taken = taken.to_string();
        let config = config(&cluster.prefill, &cluster.decode, &[option, &taken]);
        let Err(error @ RouterError::Bind { .. }) = Router::start(config).await else {
            panic!("bound twice")
        };
        let line = error.to_string();
        assert!(line.contains(&taken) && line.contains(option) && !line.contains('\n'), "{line}");
    }
    let config = config(&cluster.prefill, &cluster.decode, &["--model", "./no/such/model.gguf"]);
    let error = baton_router::run(config, std::future::pending()).await.expect_err("no such model");
    assert!(
        matches!(error, RouterError::Model(_)) && error.to_string().contains("no/such/model.gguf"),
        "{error}"
    );
}

#[tokio::test]
async fn at_shutdown_running_requests_end_and_new_ones_are_refused() {
    let script = Script { pace: Duration::from_millis(30), ..Script::says("abcdefghij") };
    let Cluster { router, client, prefill, decode, .. } = Cluster::start(ONE_PAIR, script, &[]).await;
    let mut stream = client.stream(PLAIN, &[], &json!({"prompt": "x", "stream": true})).await;
    assert!(stream.until("\"b\"").await);
    let address = router.http;
    let stopped = tokio::spawn(router.shutdown());
    let text = stream.rest().await;
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    tokio::time::timeout(Duration::from_secs(3), stopped).await.expect("in bounded time").expect("no panic");
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "nobody listens any more");
    drop((prefill, decode));
}

#[tokio::test]
async fn the_drain_timeout_bounds_shutdown() {
    let script = Script { decode_hangs_after: Some(2), ..Script::says("abcdefghij") };
    let cluster = Cluster::start(ONE_PAIR, script, &["--drain-timeout", "0.2"]).await;
    let mut stream = cluster.client.stream(PLAIN, &[], &json!({"prompt": "x", "stream": true})).await;
    assert!(stream.until("\"c\"").await);
    let Cluster { router, prefill, decode, .. } = cluster;
    tokio::time::timeout(Duration::from_secs(3), router.shutdown()).await.expect("in bounded time");
    eventually("the leg is cancelled", async || decode[0].num_open() == 0).await;
    drop((stream, prefill));
}
