//! A decode worker is killed while it receives: its prompt is not computed again.

use std::time::Duration;

use baton_tests::cluster::{greedy, strings, with};
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Turn, eventually};
use serde_json::{Value, json};

const PROMPT: usize = 4000;

/// Two decode workers, each behind a link that can stand still.
fn config() -> ClusterConfig {
    let router_args = strings(&["--heartbeat-timeout", "1"]);
    ClusterConfig { num_decode: 2, proxied: true, router_args, ..ClusterConfig::default() }
}

/// Which decode worker holds blocks for KV that has not arrived.
async fn receiving(cluster: &Cluster) -> Option<usize> {
    for (nth, worker) in cluster.decode.iter().enumerate() {
        let metrics = worker.metrics().await.ok()?;
        if metrics.sum("baton_num_requests", &[("stage", "receiving")]) > 0.0 {
            return Some(nth);
        }
    }
    None
}

async fn computed(cluster: &Cluster) -> f64 {
    let metrics = cluster.prefill[0].metrics().await.expect("metrics");
    metrics.sum("baton_prompt_tokens_computed_total", &[])
}

async fn redirects(cluster: &Cluster) -> f64 {
    cluster.router_metrics().await.sum("baton_redirects_total", &[])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_killed_while_it_receives_costs_no_second_prefill() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_decode_worker_killed_while_it_receives");
    let mut cluster = Cluster::start(config()).await;
    for sampling in [json!({}), json!({"temperature": 1.0, "seed": 11, "n": 2})] {
        let prompt = random.tiny_prompt(PROMPT);
        let body = with(with(greedy(&prompt, 24), sampling), json!({"stream": true}));
        let undisturbed = answers(&cluster, &body).await;
        cluster.wait_baseline(Duration::from_secs(5)).await;
        let (before, redirected) = (computed(&cluster).await, redirects(&cluster).await);

        cluster.proxies.iter().for_each(|proxy| proxy.stall(true));
        let mut stream = cluster.stream("/v1/completions", &body).await;
        let mut all = Answers::default();
        // Not before the prompt is computed.
        all.add(&stream.next().await.expect("no break").expect("no end").data);
        assert_eq!(computed(&cluster).await - before, PROMPT as f64);
        let victim = eventually("one of them receives", Duration::from_secs(10), async || {
            receiving(&cluster).await.ok_or_else(|| "none".to_owned())
        })
        .await;
        cluster.decode[victim].process.kill();
        cluster.proxies.iter().for_each(|proxy| proxy.stall(false));
        while let Some(event) = stream.next().await.expect("no break") {
            all.add(&event.data);
        }
        assert_eq!(all.tokens, undisturbed.tokens);
        assert_eq!(computed(&cluster).await - before, PROMPT as f64, "each prompt token once");
        assert_eq!(redirects(&cluster).await - redirected, 1.0);

        let dir = cluster.dir();
        cluster.decode[victim].restart(&dir);
        cluster.wait_ready().await;
        cluster.wait_baseline(Duration::from_secs(5)).await;
    }
}

/// Tokens by choice.
#[derive(Default)]
struct Answers {
    tokens: std::collections::BTreeMap<u64, Vec<u64>>,
}

impl Answers {
    fn add(&mut self, data: &str) {
        let Ok(event) = serde_json::from_str::<Value>(data) else { return };
        for choice in event["choices"].as_array().into_iter().flatten() {
            let ids = choice["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64);
            self.tokens.entry(choice["index"].as_u64().expect("an index")).or_default().extend(ids);
        }
    }
}

async fn answers(cluster: &Cluster, body: &Value) -> Answers {
    let mut stream = cluster.stream("/v1/completions", body).await;
    let mut all = Answers::default();
    while let Some(event) = stream.next().await.expect("no break") {
        all.add(&event.data);
    }
    assert!(all.tokens.values().all(|tokens| tokens.len() >= 2), "{:?}", all.tokens);
    all
}
