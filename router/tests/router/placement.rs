//! Where requests run: prefix caches, queues, policies, and what is said about it.

use std::time::Duration;

use baton_kv::{BlockHash, KvDtype, KvLayout};
use baton_proto::v1;
use serde_json::{Value, json};

use crate::fake::{FakeWorker, Script};
use crate::harness::{Cluster, ONE_PAIR, Shape, eventually};

const PLAIN: &str = "/v1/completions";

/// A prompt of so many tokens that begins with `first`.
fn prompt(first: u32, num: usize) -> Value {
    let mut ids = vec![98; num];
    ids[0] = first;
    json!(ids)
}

/// Hashes of that prompt's full blocks, as workers make them.
fn hashes(first: u32, num: usize) -> Vec<[u8; 16]> {
    let wire = crate::fake::layout();
    let layout = KvLayout {
        model_digest: wire.model_digest.as_ref().try_into().expect("32 bytes"),
        num_layers: 4,
        num_kv_heads: 2,
        head_dim: 16,
        block_size: 16,
        dtype: KvDtype::F16,
        arrangement: wire.arrangement,
        numerics_id: wire.numerics_id,
    };
    let mut ids = vec![98; num];
    ids[0] = first;
    let mut hash = BlockHash::root(&layout.cache_salt());
    let blocks = ids.chunks_exact(16).map(|block| {
        hash = hash.next(block);
        hash.0
    });
    blocks.collect()
}

async fn ask(cluster: &Cluster, prompt: &Value) {
    let body = json!({"prompt": prompt, "max_tokens": 2});
    let answer = cluster.client.post(PLAIN, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

fn num_prefills(cluster: &Cluster) -> Vec<usize> {
    cluster.prefill.iter().map(|worker| worker.prefills().len()).collect()
}

const TWO_PREFILL: Shape = Shape { num_prefill: 2, num_decode: 1 };

/// Two prefill workers with caches and measured rates; both are watched when it returns.
async fn caching(options: &[&str]) -> Cluster {
    let script = Script { has_cache: true, ..Script::says("hello") };
    let cluster = Cluster::start(TWO_PREFILL, script, options).await;
    for worker in &cluster.prefill {
        worker.set_status(|status| status.prefill_tokens_per_s = 1000.0);
    }
    for worker in &cluster.decode {
        worker.set_status(|status| {
            status.prefill_tokens_per_s = 500.0;
            status.decode_step_ms = 10.0;
        });
    }
    cluster.until_all_ready().await;
    cluster
}

async fn until_watched(cluster: &Cluster, num_streams: usize) {
    eventually("every cache is watched", async || {
        cluster.prefill.iter().chain(&cluster.decode).all(|worker| worker.num_cache_streams() >= num_streams)
    })
    .await;
    // What was sent is taken in.
    tokio::time::sleep(Duration::from_millis(100)).await;
}

#[tokio::test]
async fn the_worker_with_the_cached_prefix_is_chosen() {
    let cluster = caching(&[]).await;
    until_watched(&cluster, 1).await;
    // The second one alone has the prompt: least-loaded ties would go to the first.
    cluster.prefill[1].store(&hashes(1, 1024));
    cluster.prefill[0].store(&hashes(2, 1024));
    tokio::time::sleep(Duration::from_millis(100)).await;
    for nth in 1..=3 {
        ask(&cluster, &prompt(1, 1024)).await;
        assert_eq!(num_prefills(&cluster), [0, nth]);
    }
    ask(&cluster, &prompt(2, 1024)).await;
    assert_eq!(num_prefills(&cluster), [1, 3]);
    // Whoever opts out is placed as if nobody had it.
    let body = json!({"prompt": prompt(1, 1024), "max_tokens": 2, "no_prefix_cache": true});
    assert_eq!(cluster.client.post(PLAIN, &body).await.status, 200);
    assert_eq!(cluster.prefill.iter().map(|worker| worker.prefills().len()).sum::<usize>(), 5);
    let last = cluster
        .prefill
        .iter()
        .flat_map(FakeWorker::prefills)
        .filter(|request| request.terms.expect("terms").no_prefix_cache);
    assert_eq!(last.count(), 1);
}

#[tokio::test]
async fn a_gap_in_cache_updates_opens_the_stream_again_for_a_snapshot() {
    let cluster = caching(&[]).await;
    until_watched(&cluster, 1).await;
    cluster.prefill[1].store_unheard(&hashes(1, 1024));
    ask(&cluster, &prompt(1, 1024)).await;
    assert_eq!(num_prefills(&cluster), [1, 0], "nobody heard of it");
    // The next message shows that one is missing.
    cluster.prefill[1].store(&hashes(9, 16));
    eventually("a snapshot is asked for", async || cluster.prefill[1].num_cache_streams() == 2).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    ask(&cluster, &prompt(1, 1024)).await;
    assert_eq!(num_prefills(&cluster), [1, 1]);
    assert_eq!(cluster.prefill[0].num_cache_streams(), 1, "the others are left alone");
}

#[tokio::test]
async fn a_process_that_is_replaced_has_nothing_cached() {
    let mut cluster = caching(&[]).await;
    until_watched(&cluster, 1).await;
    cluster.prefill[1].store(&hashes(1, 1024));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let at = cluster.prefill[1].socket();
    cluster.prefill[1].kill();
    let script = std::sync::Arc::clone(&cluster.script);
    let again = FakeWorker::start_at(at, crate::fake::Kind::Prefill, script, v1::worker_status::State::Ready);
    again.set_status(|status| status.prefill_tokens_per_s = 1000.0);
    eventually("its cache is watched", async || again.num_cache_streams() == 1).await;
    cluster.until_all_ready().await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    ask(&cluster, &prompt(1, 1024)).await;
    assert_eq!((num_prefills(&cluster)[0], again.prefills().len()), (1, 0));
}

#[tokio::test]
async fn workers_without_a_cache_are_asked_once() {
    let cluster = Cluster::start(TWO_PREFILL, Script::says("hello"), &[]).await;
    cluster.until_all_ready().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    ask(&cluster, &prompt(1, 64)).await;
    assert!(cluster.prefill.iter().chain(&cluster.decode).all(|worker| worker.num_cache_streams() == 0));
}

#[tokio::test]
async fn a_burst_between_two_statuses_spreads() {
    let script = Script { prefill_hangs: true, ..Script::says("hello") };
    let cluster = Cluster::start(TWO_PREFILL, script, &["--keep-alive", "0.05"]).await;
    for worker in cluster.prefill.iter().chain(&cluster.decode) {
        worker.set_status(|status| status.prefill_tokens_per_s = 1000.0);
    }
    // One has less to do: it gets more, but not everything.
    cluster.prefill[0].set_status(|status| status.queued_tokens = 1100);
    cluster.until_all_ready().await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let body = json!({"prompt": prompt(1, 500), "stream": true, "max_tokens": 2});
    let mut streams = Vec::new();
    for _ in 0..8 {
        streams.push(cluster.client.stream(PLAIN, &[], &body).await);
    }
    assert_eq!(num_prefills(&cluster), [3, 5]);
    drop(streams);
    cluster.until_no_leg_is_open().await;
}

#[tokio::test]
async fn the_reason_is_said_and_counted() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &["--placement", "round-robin"]).await;
    let answer = cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
    assert_eq!(
        (answer.header("x-baton-mode"), answer.header("x-baton-reason")),
        (Some("disaggregated"), Some("policy"))
    );
    assert_eq!(cluster.router.metrics().num_placed("disaggregated", "policy"), 1);
    let shape = Shape { num_prefill: 0, num_decode: 1 };
    let cluster = Cluster::start(shape, Script::says("hello"), &[]).await;
    let answer = cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
    assert_eq!(answer.header("x-baton-reason"), Some("no_prefill_worker"));
    assert_eq!(cluster.router.metrics().num_placed("local", "no_prefill_worker"), 1);
}

#[tokio::test]
async fn a_short_prompt_may_stay_local_and_that_is_no_fallback() {
    let cluster = caching(&["--max-local-tokens", "256"]).await;
    // The prefill workers have long queues.
    for worker in &cluster.prefill {
        worker.set_status(|status| status.queued_tokens = 100_000);
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let answer = cluster.client.post(PLAIN, &json!({"prompt": prompt(1, 100), "max_tokens": 2})).await;
    assert_eq!(
        (answer.header("x-baton-mode"), answer.header("x-baton-reason")),
        (Some("local"), Some("short_prompt"))
    );
    assert_eq!(cluster.router.metrics().local_fallbacks.get(), 0);
    let answer = cluster.client.post(PLAIN, &json!({"prompt": prompt(1, 300), "max_tokens": 2})).await;
    assert_eq!(answer.header("x-baton-mode"), Some("disaggregated"), "longer than --max-local-tokens");
}

#[tokio::test]
async fn round_robin_takes_turns() {
    let cluster = Cluster::start(TWO_PREFILL, Script::says("hello"), &["--placement", "round-robin"]).await;
    cluster.until_all_ready().await;
    for _ in 0..6 {
        ask(&cluster, &prompt(1, 64)).await;
    }
    assert_eq!(num_prefills(&cluster), [3, 3]);
}

#[tokio::test]
async fn what_can_never_fit_is_refused_with_the_largest_that_can() {
    let script = Script { refuses: Some(v1::Cause::TooLarge), ..Script::says("hello") };
    let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
    // 8192 blocks of 16 tokens are 131,072 tokens.
    for (n, needed, sum) in [(1, "41000", "prompt 1000, answer 40000"), (4, "161000", "32504 for each of 4")]
    {
        let body = json!({"prompt": prompt(1, 1000), "n": n, "max_tokens": 40_000});
        let answer = cluster.client.post(PLAIN, &body).await;
        assert_eq!((answer.status, &answer.error()["code"]), (400, &json!("context_length_exceeded")));
        let message = answer.error()["message"].to_string();
        assert!([needed, "131072", sum].iter().all(|part| message.contains(part)), "{message}");
    }
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &[]).await;
    for (max_tokens, status) in [(32_504, 200), (32_505, 400)] {
        let body = json!({"prompt": prompt(1, 1000), "n": 4, "max_tokens": max_tokens});
        assert_eq!(cluster.client.post(PLAIN, &body).await.status, status, "{max_tokens}");
    }
    assert_eq!(cluster.num_legs(), 2, "no worker heard of what can't fit");
    // A default is clipped, and never the cause of a refusal.
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "n": 8});
    assert_eq!(cluster.client.post("/v1/chat/completions", &chat).await.status, 200);
    let asked = cluster.decode[0].decodes()[1].stopping.clone().expect("stopping").max_new_tokens;
    assert!((131_072 / 8 - 100..131_072 / 8).contains(&asked), "{asked}");
}

#[tokio::test]
async fn priority_reaches_both_workers_and_has_limits() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("hello"), &[]).await;
    for priority in [json!(-100), json!(100), json!(0), json!(null)] {
        let body = json!({"prompt": "x", "priority": priority});
        assert_eq!(cluster.client.post(PLAIN, &body).await.status, 200);
        let (prefills, decodes) = (cluster.prefill[0].prefills(), cluster.decode[0].decodes());
        let last = |terms: Option<v1::Terms>| terms.expect("terms");
        let (prefill, decode) =
            (last(prefills.last().expect("a leg").terms), last(decodes.last().expect("a leg").terms));
        assert_eq!(i64::from(prefill.priority), priority.as_i64().unwrap_or(0));
        assert_eq!(prefill.priority, decode.priority);
        assert!(!prefill.no_prefix_cache && prefill.age_ms < 10_000);
    }
    for (field, value, says) in [
        ("priority", json!(101), "from -100 to 100, not 101"),
        ("priority", json!(-101), "from -100 to 100, not -101"),
        ("priority", json!(u64::MAX), "from -100 to 100"),
        ("priority", json!(0.5), "an integer"),
        ("priority", json!("high"), "an integer"),
        ("no_prefix_cache", json!(1), "a boolean"),
        ("cache_salt", json!("mine"), "not supported"),
    ] {
        let answer = cluster.client.post(PLAIN, &json!({"prompt": "x", field: value})).await;
        let error = answer.error();
        assert_eq!((answer.status, &error["param"]), (400, &json!(field)));
        assert!(error["message"].as_str().is_some_and(|message| message.contains(says)), "{error}");
    }
}
