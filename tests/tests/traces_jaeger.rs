//! What a person finds in Jaeger, by its own HTTP API where the machine has Go, and always by the same search among what a collector got.

use std::sync::Arc;
use std::time::Duration;

use baton_tests::cluster::{greedy, strings, with};
use baton_tests::jaeger::Backends;
use baton_tests::netns::{Cable, Side};
use baton_tests::seed::Random;
use baton_tests::spans::{Kind, Search, Trace, critical_path};
use baton_tests::{Answer, Cluster, ClusterConfig, LogDir, Turn};
use serde_json::json;

const ROUTER: &str = "baton-router";
const DECODE: &str = "baton-decode-worker";

/// Slow enough that a prompt of 2,048 tokens takes a second.
fn paced() -> Vec<String> {
    strings(&["--pace-tokens-per-s", "2048", "--max-step-tokens", "256"])
}

async fn complete(cluster: &Cluster, random: &mut Random, num_prompt: usize, num_tokens: usize) -> Answer {
    cluster.post("/v1/completions", &greedy(&random.tiny_prompt(num_prompt), num_tokens)).await.expect(200)
}

/// The id that the router gave the request.
fn request_id(trace: &Trace) -> String {
    trace.root().text("baton.request_id").to_owned()
}

fn has(trace: &Trace, name: &str) -> bool {
    trace.named(name).next().is_some()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_found_by_its_id() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_request_is_found_by_its_id");
    let dir = LogDir::new();
    let backends = Backends::start(dir.path()).await;
    let config = ClusterConfig { env: backends.collector.over_grpc(), ..ClusterConfig::default() };
    let cluster = Cluster::start(config).await;
    for _ in 0..3 {
        complete(&cluster, &mut random, 200, 8).await;
    }
    let of_router = Search { service: ROUTER, ..Search::default() };
    let three = |found: &[Trace]| {
        found.iter().filter(|trace| has(trace, "kv.recv") && has(trace, "decode.run")).count() == 3
    };
    for all in backends.find(of_router, three).await {
        let id = request_id(all.iter().find(|trace| has(trace, "kv.recv")).expect("three were found"));
        let tags = [("baton.request_id", id.as_str())];
        for found in backends.find(Search { tags: &tags, ..of_router }, |found| !found.is_empty()).await {
            assert_eq!(found.len(), 1, "{}", found[0]);
            assert_eq!(request_id(&found[0]), id);
            let services: std::collections::BTreeSet<_> =
                found[0].spans.iter().map(|span| span.service()).collect();
            assert_eq!(services.len(), 3, "{}", found[0]);
        }
    }
}

#[test]
fn requests_that_waited_for_their_kv_are_found_by_how_long() {
    let _turn = Turn::take();
    let Some(cable) = Cable::new().map(Arc::new) else { return };
    let mut random = Random::from_env("requests_that_waited_for_their_kv");
    cable.run(async || {
        let dir = LogDir::new();
        let backends = Backends::start_at(cable.address(Side::Near), dir.path()).await;
        let cluster = Cluster::start(ClusterConfig {
            cable: Some(Arc::clone(&cable)),
            env: backends.collector.over_grpc(),
            prefill_args: paced(),
            ..ClusterConfig::default()
        })
        .await;
        complete(&cluster, &mut random, 2048, 4).await;
        // 1 MiB takes 2.1 s, of which the prefill hides one.
        cable.set_rate(4);
        complete(&cluster, &mut random, 2048, 4).await;
        cable.set_rate(10_000);
        complete(&cluster, &mut random, 2048, 4).await;

        let three = |found: &[Trace]| found.iter().filter(|trace| has(trace, "decode.run")).count() == 3;
        backends.find(Search { service: ROUTER, ..Search::default() }, three).await;
        let waited = Search {
            service: DECODE,
            operation: "kv.wait",
            min_duration: Duration::from_millis(500),
            ..Search::default()
        };
        for found in backends.find(waited, |found| !found.is_empty()).await {
            let [slow] = &found[..] else {
                panic!("{} traces were found, not the slow one alone", found.len())
            };
            let wait = slow.one("kv.wait", Kind::Internal);
            assert!((700.0..1_700.0).contains(&wait.ms()), "{slow}");
            let on_path = critical_path(slow).iter().any(|section| section.span.name == "kv.wait");
            assert!(
                on_path && !critical_path(slow).iter().any(|section| section.span.name == "kv.recv"),
                "{slow}"
            );
        }
    });
}

/// A stream on a worker that also computes prompts: each chunk of another prompt stands between two of its tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_requests_are_found_and_name_who_blocked_them() {
    let _turn = Turn::take();
    let mut random = Random::from_env("stalled_requests_are_found");
    let dir = LogDir::new();
    let backends = Backends::start(dir.path()).await;
    let cluster = Cluster::start(ClusterConfig {
        env: backends.collector.over_grpc(),
        decode_args: [paced(), strings(&["--local-prefill-tokens", "256"])].concat(),
        ..ClusterConfig::default().colocated()
    })
    .await;
    complete(&cluster, &mut random, 20, 100).await;
    let stream = with(greedy(&random.tiny_prompt(20), 1_000), json!({"stream": true}));
    let mut victim = cluster.stream("/v1/completions", &stream).await;
    for _ in 0..20 {
        victim.next().await.expect("no break");
    }
    complete(&cluster, &mut random, 2048, 2).await;
    victim.completion().await.expect("a whole stream");

    let three = |found: &[Trace]| found.iter().filter(|trace| has(trace, "decode.run")).count() == 3;
    let all = backends.find(Search { service: ROUTER, ..Search::default() }, three).await;
    let stalls = Search {
        service: DECODE,
        operation: "decode.stall",
        tags: &[("baton.stall.cause", "local_prefill")],
        min_duration: Duration::from_millis(60),
    };
    let stalled = Search { service: ROUTER, tags: &[("baton.stalled", "true")], ..Search::default() };
    let by_stalls = backends.find(stalls, |found| !found.is_empty()).await;
    let by_root = backends.find(stalled, |found| !found.is_empty()).await;
    for (nth, found) in by_stalls.iter().chain(&by_root).enumerate() {
        let [victim] = &found[..] else {
            panic!("{} traces were found, not the victim's alone", found.len())
        };
        let root = victim.root();
        assert_eq!(root.text("baton.stall.cause"), "local_prefill", "{victim}");
        assert_eq!(root.number("gen_ai.usage.output_tokens"), 1_000.0, "{victim}");
        let all = &all[nth % all.len()];
        let blocker = all.iter().find(|trace| trace.root().attribute("gen_ai.usage.input_tokens") == 2048);
        let blocker = blocker.expect("the blocker's trace");
        let stalls: Vec<_> = victim.named("decode.stall").collect();
        // Eight chunks of 125 ms each.
        assert!((4..=16).contains(&stalls.len()), "{victim}");
        for stall in stalls {
            assert_eq!(victim.parent(stall).map(|parent| &*parent.name), Some("decode.run"), "{victim}");
            if stall.ms() < 60.0 {
                continue; // Not a chunk: the machine was busy.
            }
            assert_eq!(stall.text("baton.stall.blocker_request_id"), request_id(blocker), "{victim}");
            assert_eq!(stall.links.len(), 1, "{victim}");
            assert_eq!(stall.links[0].trace_id, blocker.root().trace_id, "{victim}");
            let blocked = stall.number("baton.stall.blocked_ms");
            assert!(blocked > 60.0 && blocked <= stall.ms(), "{victim}");
        }
        assert!(blocker.root().attribute("baton.stalled") != true, "{blocker}");
    }
}
