//! How much of a transfer hides behind the prefill that makes it: on loopback, on a link about as slow as the prefill, and on a long one.

use std::sync::Arc;
use std::time::Duration;

use baton_tests::cluster::{greedy, strings, with};
use baton_tests::netns::Cable;
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Turn};
use serde_json::json;

/// Bytes of KV of one token of `builtin:tiny` in f16.
const TINY_TOKEN_BYTES: f64 = 512.0;

#[derive(Debug, Clone, Copy)]
struct Kv {
    total_ms: f64,
    /// As D says. It can't see how long the notice that prefill is done took to come.
    exposed_ms: f64,
    /// As the client sees it: from the first token, which P sends, to the second, which D sends.
    gap_ms: f64,
}

impl Kv {
    fn hidden_share(self) -> f64 {
        1.0 - self.gap_ms / self.total_ms.max(1e-9)
    }
}

async fn transfer(cluster: &Cluster, random: &mut Random, num_tokens: usize) -> Kv {
    let body = with(greedy(&random.tiny_prompt(num_tokens), 4), json!({"stream": true}));
    let events = cluster.stream("/v1/completions", &body).await.collect().await.expect("a whole stream");
    let kv = &events.last().expect("an event").1["baton"]["kv"];
    assert_eq!(kv["bytes"].as_f64(), Some(num_tokens as f64 * TINY_TOKEN_BYTES), "{kv}");
    let ms = |name: &str| kv[name].as_f64().unwrap_or_else(|| panic!("no {name} in {kv}"));
    let gap = events[1].0 - events[0].0;
    Kv { total_ms: ms("total_ms"), exposed_ms: ms("exposed_ms"), gap_ms: gap.as_secs_f64() * 1e3 }
}

/// The median by the gap, after a warm-up.
async fn median(cluster: &Cluster, random: &mut Random, num_tokens: usize) -> Kv {
    let mut runs = Vec::new();
    for _ in 0..6 {
        runs.push(transfer(cluster, random, num_tokens).await);
    }
    runs.remove(0);
    runs.sort_by(|a, b| a.gap_ms.total_cmp(&b.gap_ms));
    eprintln!("{num_tokens} tokens: {runs:?}");
    runs[runs.len() / 2]
}

/// A prefill that takes as long as a large model's, at 2,048 tokens a second.
fn paced() -> ClusterConfig {
    ClusterConfig {
        prefill_args: strings(&["--pace-tokens-per-s", "2048", "--max-step-tokens", "256"]),
        kv_transport: Some("grpc".into()),
        ..ClusterConfig::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_loopback_nearly_all_of_a_transfer_is_hidden() {
    let _turn = Turn::take();
    let mut random = Random::from_env("on_loopback_nearly_all");
    for transport in ["grpc", "shm"] {
        let config = ClusterConfig { kv_transport: Some(transport.into()), ..paced() };
        let cluster = Cluster::start(config).await;
        let kv = median(&cluster, &mut random, 2048).await;
        assert!(kv.hidden_share() >= 0.95, "{transport}: {kv:?}");
    }
}

/// 2,048 tokens are 1 MiB, which takes 0.8 s at 10.5 Mb/s; their prefill takes 1 s.
#[test]
fn a_transfer_of_four_fifths_of_the_prefill_is_nine_tenths_hidden() {
    let _turn = Turn::take();
    let Some(cable) = Cable::new().map(Arc::new) else { return };
    let mut random = Random::from_env("a_transfer_of_four_fifths");
    cable.run(async || {
        let cluster = Cluster::start(ClusterConfig { cable: Some(Arc::clone(&cable)), ..paced() }).await;
        cable.set_rate_kilobits(10_500);
        let kv = median(&cluster, &mut random, 2048).await;
        assert!(kv.total_ms > 700.0, "the link was not slowed: {kv:?}");
        assert!(kv.hidden_share() >= 0.90, "{kv:?}");
    });
}

/// 1 Gb/s and 5 ms each way: what is exposed is the last piece of the last chunk and the questions around it.
#[test]
fn over_a_long_link_a_layer_chunk_and_two_round_trips_are_exposed() {
    const DELAY: Duration = Duration::from_millis(5);
    let _turn = Turn::take();
    let Some(cable) = Cable::new().map(Arc::new) else { return };
    let mut random = Random::from_env("over_a_long_link");
    cable.run(async || {
        let config = ClusterConfig { cable: Some(Arc::clone(&cable)), proxied: true, ..paced() };
        let cluster = Cluster::start(config).await;
        cable.set_rate_kilobits(1_000_000);
        cluster.proxies[0].set_delay(DELAY);
        let kv = median(&cluster, &mut random, 2048).await;
        // 256 tokens of one of four layers at 1 Gb/s.
        let layer_chunk_ms = 256.0 * TINY_TOKEN_BYTES / 4.0 * 8.0 / 1e9 * 1e3;
        let bound = layer_chunk_ms + 2.0 * 2.0 * DELAY.as_secs_f64() * 1e3;
        assert!(kv.exposed_ms <= kv.gap_ms && kv.gap_ms <= bound, "{kv:?}, bound {bound} ms");
    });
}
