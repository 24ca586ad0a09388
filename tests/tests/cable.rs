//! A real cable between P and D, in network namespaces: slow, pulled, and plugged in again. Nobody says goodbye on a pulled cable.

use std::sync::Arc;
use std::time::Duration;

use baton_tests::cluster::{greedy, strings, with};
use baton_tests::netns::Cable;
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Turn, client, eventually};
use serde_json::json;

fn over(cable: &Arc<Cable>) -> ClusterConfig {
    ClusterConfig { cable: Some(Arc::clone(cable)), ..ClusterConfig::default() }
}

#[test]
fn over_a_slow_cable_the_tokens_are_the_same_and_its_cost_is_said() {
    let _turn = Turn::take();
    let Some(cable) = Cable::new().map(Arc::new) else { return };
    let mut random = Random::from_env("over_a_slow_cable");
    cable.run(async || {
        let cluster = Cluster::start(over(&cable)).await;
        let body = greedy(&random.tiny_prompt(3000), 16);
        let fast = cluster.completion(&body).await;
        assert_eq!(fast.mode, "disaggregated");
        // 1.5 MB of KV take 3 s at 4 Mb/s.
        cable.set_rate(4);
        let answer = cluster.post("/v1/completions", &body).await.expect(200).json();
        let tokens: Vec<u64> = answer["choices"][0]["token_ids"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|id| id.as_u64())
            .collect();
        assert!(tokens.iter().copied().eq(fast.token_ids.iter().map(|&id| u64::from(id))));
        let kv = &answer["baton"]["kv"];
        eprintln!("{kv}");
        let (total, exposed) =
            (kv["total_ms"].as_f64().unwrap_or(0.0), kv["exposed_ms"].as_f64().unwrap_or(0.0));
        assert!(total >= 2_500.0 && exposed <= total && exposed >= 1_500.0, "{kv}");
        cable.set_rate(10_000);
        cluster.wait_baseline(Duration::from_secs(5)).await;
    });
}

#[test]
fn a_cable_pulled_for_a_moment_costs_a_pause() {
    let _turn = Turn::take();
    let Some(cable) = Cable::new().map(Arc::new) else { return };
    let mut random = Random::from_env("a_cable_pulled_for_a_moment");
    cable.run(async || {
        let cluster = Cluster::start(over(&cable)).await;
        let decoding = with(greedy(&random.tiny_prompt(100), 3000), json!({"stream": true}));
        let moving = greedy(&random.tiny_prompt(4000), 16);
        let wanted = cluster.stream("/v1/completions", &decoding).await.completion().await.expect("whole");
        let moved = cluster.completion(&moving).await;

        cable.set_rate(4);
        let mut stream = cluster.stream("/v1/completions", &decoding).await;
        stream.next().await.expect("no break");
        let received = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;
        let (http, body) = (cluster.http, moving.clone());
        let task =
            tokio::task::spawn(
                async move { client::request(http, "POST", "/v1/completions", Some(&body)).await },
            );
        eventually("KV is on its way", Duration::from_secs(20), async || {
            let now = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;
            if now > received { Ok(()) } else { Err(format!("{now} bytes")) }
        })
        .await;
        cable.plug(false);
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        cable.plug(true);
        let answer = task.await.expect("no panic").expect("an answer").expect(200);
        assert_eq!(baton_tests::Completion::from_answer(&answer).token_ids, moved.token_ids);
        let rest = stream.completion().await.expect("the stream goes on");
        assert!(
            wanted.token_ids.ends_with(&rest.token_ids) && rest.token_ids.len() + 8 > wanted.token_ids.len()
        );
        cluster.wait_baseline(Duration::from_secs(10)).await;
    });
}

/// Long enough for both sides to give each other up: neither hangs, and both are as if nothing had been.
#[test]
fn a_cable_pulled_for_long_ends_what_ran_and_leaves_nothing_behind() {
    let _turn = Turn::take();
    let Some(cable) = Cable::new().map(Arc::new) else { return };
    let mut random = Random::from_env("a_cable_pulled_for_long");
    cable.run(async || {
        let config = ClusterConfig { router_args: strings(&["--heartbeat-timeout", "2"]), ..over(&cable) };
        let cluster = Cluster::start(config).await;
        let body = with(greedy(&random.tiny_prompt(100), 100_000), json!({"stream": true}));
        let mut streams = Vec::new();
        for _ in 0..4 {
            let mut stream = cluster.stream("/v1/completions", &body).await;
            stream.next().await.expect("no break");
            streams.push(stream);
        }
        cable.plug(false);
        for stream in streams {
            let ended = stream.completion().await;
            assert!(ended.is_err(), "a stream without its only decode worker ended well");
        }
        // D has not heard of any of this: its streams are gone without a word.
        tokio::time::sleep(Duration::from_secs(12)).await;
        cable.plug(true);
        cluster.wait_ready().await;
        cluster.wait_baseline(Duration::from_secs(20)).await;
        assert_eq!(cluster.greedy(&random.tiny_prompt(2000), 8).await.len(), 8);
        cluster.wait_baseline(Duration::from_secs(5)).await;
    });
}
