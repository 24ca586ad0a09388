//! KV from device to device between real worker processes, on a driver for machines without a card whose memory other processes really open: the same
//! tokens as over every other transport, and nothing kept whoever hangs up or dies.

use std::time::Duration;

use baton_tests::client;
use baton_tests::cluster::{greedy, strings, with};
use baton_tests::fake_cuda::{FakeCuda, opened_by};
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, EventStream, Turn, eventually};
use serde_json::json;

const NUM_TOKENS: usize = 8;
/// Bytes of KV of a token of `builtin:tiny`.
const TOKEN_BYTES: usize = 512;

const CPU: [&str; 2] = ["--device", "cpu"];
const FIRST: [&str; 2] = ["--device", "cuda:0"];
const SECOND: [&str; 2] = ["--device", "cuda:1"];

fn config(fake: &FakeCuda, prefill: [&str; 2], decode: [&str; 2]) -> ClusterConfig {
    ClusterConfig {
        kv_memory: "8M".into(),
        worker_args: strings(&["--context", "2048"]),
        prefill_args: strings(&prefill),
        decode_args: strings(&decode),
        max_step_tokens: Some(64),
        env: vec![fake.env()],
        ..ClusterConfig::default()
    }
}

/// Prompts take long enough to be caught in mid-transfer.
fn slow(config: ClusterConfig) -> ClusterConfig {
    let mut prefill_args = config.prefill_args.clone();
    prefill_args.extend(strings(&["--pace-tokens-per-s", "500"]));
    ClusterConfig { prefill_args, ..config }
}

fn over(transport: &str, config: ClusterConfig) -> ClusterConfig {
    ClusterConfig { kv_transport: Some(transport.to_owned()), ..config }
}

/// Lines of a prefill worker's log that say this.
fn said(cluster: &Cluster, nth: usize, what: &str) -> usize {
    cluster.prefill[nth].process.output().matches(what).count()
}

async fn received(cluster: &Cluster) -> f64 {
    cluster.decode_sum("baton_kv_received_bytes_total", &[]).await
}

/// Waits until some of a prompt's KV has arrived and not all of it.
async fn wait_mid_transfer(cluster: &Cluster, before: f64) {
    eventually("some KV has arrived", Duration::from_secs(60), async || {
        if received(cluster).await > before { Ok(()) } else { Err("none yet".to_owned()) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_devices_hand_prompts_over_with_the_same_tokens_as_through_the_host() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let mut random = Random::from_env("cuda_peer");
    let prompts: Vec<_> = [1, 16, 33, 200].into_iter().map(|length| random.tiny_prompt(length)).collect();
    let num_bytes: usize = prompts.iter().map(|prompt| prompt.len() * TOKEN_BYTES).sum();
    let mut all = Vec::new();
    for (transport, line) in [
        ("auto", "KV goes through device memory"),
        ("ipc", "KV goes through device memory"),
        ("shm", "KV goes through shared memory"),
        ("grpc", "KV goes over gRPC"),
    ] {
        let cluster = Cluster::start(over(transport, config(&fake, FIRST, SECOND))).await;
        let mut answers = Vec::new();
        for prompt in &prompts {
            let done = cluster.completion(&greedy(prompt, NUM_TOKENS)).await;
            assert_eq!(done.mode, "disaggregated");
            answers.push(done.token_ids);
        }
        cluster.wait_baseline(Duration::from_secs(5)).await;
        assert_eq!(received(&cluster).await, num_bytes as f64, "{transport}");
        assert_eq!(cluster.decode_sum("baton_kv_frames_corrupt_total", &[]).await, 0.0, "{transport}");
        assert_eq!(said(&cluster, 0, line), 1, "{transport}: {}", cluster.prefill[0].process.output());
        // One ring after another: one is enough, and only device memory has any.
        let (source, destination) = (&cluster.prefill[0].process, &cluster.decode[0].process);
        let rings = opened_by(destination.pid());
        let wanted = if line.contains("device memory") { vec![source.pid()] } else { Vec::new() };
        assert_eq!(rings, wanted, "{transport}");
        assert!(opened_by(source.pid()).is_empty(), "nobody opens the destination's memory");
        all.push(answers);
    }
    assert!(all.iter().all(|answers| *answers == all[0]), "{all:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_hangs_up_in_mid_transfer_leaves_nothing_on_either_side() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let mut random = Random::from_env("cuda_peer_cancel");
    let cluster = Cluster::start(slow(over("ipc", config(&fake, FIRST, SECOND)))).await;
    let probe = greedy(&random.tiny_prompt(40), NUM_TOKENS);
    let tokens = cluster.completion(&probe).await.token_ids;
    let prompt = random.tiny_prompt(1200);
    for _ in 0..2 {
        let before = received(&cluster).await;
        let body = with(greedy(&prompt, NUM_TOKENS), json!({"stream": true}));
        let stream = EventStream::post(cluster.http, "/v1/completions", &body);
        let mid_transfer = wait_mid_transfer(&cluster, before);
        tokio::select! {
            _ = async { stream.await.expect("a stream").completion().await } => panic!("it ended before it was given up"),
            () = mid_transfer => {}
        }
        cluster.wait_baseline(Duration::from_secs(10)).await;
        let arrived = received(&cluster).await - before;
        assert!(arrived < (prompt.len() * TOKEN_BYTES) as f64, "{arrived} bytes: the whole prompt");
        assert_eq!(cluster.completion(&probe).await.token_ids, tokens);
    }
    cluster.wait_baseline(Duration::from_secs(5)).await;
    // The rings of the streams that were given up are closed; the one that serves is open.
    eventually("rings are closed", Duration::from_secs(5), async || {
        match opened_by(cluster.decode[0].process.pid()).len() {
            0 | 1 => Ok(()),
            more => Err(format!("{more} are open")),
        }
    })
    .await;
    assert_eq!(said(&cluster, 0, "can't be used any more"), 0, "nobody fell back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_killed_in_mid_transfer_is_replaced_and_its_device_memory_let_go() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let body = greedy(&Random::from_env("cuda_peer_killed").tiny_prompt(1200), NUM_TOKENS);
    let config = ClusterConfig {
        num_prefill: 2,
        router_args: strings(&["--heartbeat-timeout", "1"]),
        ..slow(over("ipc", config(&fake, FIRST, SECOND)))
    };
    let mut cluster = Cluster::start(config).await;
    let undisturbed = cluster.completion(&body).await;
    cluster.wait_baseline(Duration::from_secs(5)).await;
    let before = received(&cluster).await;
    let (http, request) = (cluster.http, body.clone());
    let asked = async move { client::request(http, "POST", "/v1/completions", Some(&request)).await };
    let answer = tokio::spawn(asked);
    wait_mid_transfer(&cluster, before).await;
    let mut victim = None;
    for (nth, worker) in cluster.prefill.iter().enumerate() {
        let metrics = worker.metrics().await.expect("metrics");
        if metrics.sum("baton_num_requests", &[]) > 0.0 {
            victim = Some(nth);
        }
    }
    let victim = victim.expect("one that computes");
    let pid = cluster.prefill[victim].process.pid();
    cluster.prefill[victim].process.kill();
    let answer = answer.await.expect("no panic").expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(baton_tests::Completion::from_answer(&answer).token_ids, undisturbed.token_ids);
    eventually("every block is back", Duration::from_secs(10), async || {
        cluster.decode[0].at_baseline().await
    })
    .await;
    let destination = &cluster.decode[0].process;
    // What an earlier handoff had kept open may stay for a while, what was cut short not; a later handoff closes the first too.
    let left = opened_by(destination.pid()).into_iter().filter(|&maker| maker == pid).count();
    assert!(left <= 1, "{left} rings of a worker that is gone are open");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_destination_killed_in_mid_transfer_leaves_the_source_whole() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let body = greedy(&Random::from_env("cuda_peer_decode_killed").tiny_prompt(1200), NUM_TOKENS);
    let config = ClusterConfig {
        num_decode: 2,
        router_args: strings(&["--heartbeat-timeout", "1"]),
        ..slow(over("ipc", config(&fake, FIRST, SECOND)))
    };
    let mut cluster = Cluster::start(config).await;
    let undisturbed = cluster.completion(&body).await;
    cluster.wait_baseline(Duration::from_secs(5)).await;
    let before = received(&cluster).await;
    let (http, request) = (cluster.http, body.clone());
    let asked = async move { client::request(http, "POST", "/v1/completions", Some(&request)).await };
    let answer = tokio::spawn(asked);
    wait_mid_transfer(&cluster, before).await;
    let mut victim = None;
    for (nth, worker) in cluster.decode.iter().enumerate() {
        let metrics = worker.metrics().await.expect("metrics");
        if metrics.sum("baton_num_requests", &[]) > 0.0 {
            victim = Some(nth);
        }
    }
    cluster.decode[victim.expect("one that receives")].process.kill();
    let answer = answer.await.expect("no panic").expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(baton_tests::Completion::from_answer(&answer).token_ids, undisturbed.token_ids);
    eventually("every block is back", Duration::from_secs(10), async || {
        cluster.prefill[0].at_baseline().await
    })
    .await;
}

/// The planted fault: the source's thread does not wait for its copies, so frames are announced before their bytes lie in the ring; or not even for the
/// nonce by which the two meet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_does_not_wait_for_its_copies_is_never_believed() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let prompt = Random::from_env("cuda_peer_planted").tiny_prompt(40);
    let mut found = Vec::new();
    for fault in ["FAKE_CUDA_NONE=1", "FAKE_CUDA_DROP_SYNCS=1", "FAKE_CUDA_DROP_SYNCS=0"] {
        let config = ClusterConfig {
            prefill_env: vec![fault.to_owned()],
            ..over("auto", config(&fake, FIRST, SECOND))
        };
        let cluster = Cluster::start(config).await;
        let answer = cluster.try_completion(&greedy(&prompt, NUM_TOKENS)).await.map(|done| done.token_ids);
        let corrupt = cluster.decode_sum("baton_kv_frames_corrupt_total", &[]).await;
        found.push((answer, corrupt, said(&cluster, 0, "KV goes through device memory")));
    }
    let [(good, none, 1), (believed, some, 1), (fallen_back, no_frame, 0)] = &found[..] else {
        panic!("{found:?}");
    };
    assert!(good.is_ok() && *none == 0.0, "{found:?}");
    assert!(*some > 0.0, "frames that were not there, and nobody noticed: {found:?}");
    assert!(believed.is_err() || believed == good, "wrong tokens: {found:?}");
    assert!(fallen_back == good && *no_frame == 0.0, "{found:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_devices_can_not_reach_each_other_kv_goes_through_the_host_and_that_is_said_once() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let mut random = Random::from_env("cuda_peer_fallback");
    let prompts: Vec<_> = [20, 40].into_iter().map(|length| random.tiny_prompt(length)).collect();
    for (prefill, decode, env, transport, why) in [
        (FIRST, SECOND, Some("FAKE_CUDA_NO_PEER=1"), "auto", "peer access is not possible"),
        (CPU, SECOND, None, "auto", ""),
        (FIRST, CPU, None, "auto", "this worker's KV is on no device"),
    ] {
        let mut config = over(transport, config(&fake, prefill, decode));
        config.env.extend(env.map(str::to_owned));
        let cluster = Cluster::start(config).await;
        for prompt in &prompts {
            assert_eq!(cluster.completion(&greedy(prompt, NUM_TOKENS)).await.mode, "disaggregated");
        }
        let what = format!("{} to {}", prefill[1], decode[1]);
        assert_eq!(said(&cluster, 0, "KV goes through shared memory"), 1, "{what}");
        assert_eq!(said(&cluster, 0, "KV goes through device memory"), 0, "{what}");
        let log = cluster.decode[0].process.output();
        assert!(log.contains(why), "{what}: {log}");
        assert!(opened_by(cluster.decode[0].process.pid()).is_empty(), "{what}");
    }
    // Demanded, it is refused with the reason, and nothing is answered over another way.
    let cluster = Cluster::start_unready(&over("ipc", config(&fake, CPU, SECOND))).await;
    cluster.wait_decode_ready().await;
    eventually("the refusal is told", Duration::from_secs(20), async || {
        let mode = cluster.try_completion(&greedy(&prompts[0], 2)).await.map(|done| done.mode);
        assert_ne!(mode.as_deref(), Ok("disaggregated"));
        let logs: String = cluster.processes().map(baton_tests::Process::output).collect();
        match logs.contains("device memory is demanded and can't be used") {
            true => Ok(()),
            false => Err(format!("{mode:?}: {logs}")),
        }
    })
    .await;
    assert_eq!(received(&cluster).await, 0.0);
}
