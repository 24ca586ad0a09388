//! Workers that die, come back, stand still, or are not there yet.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use baton_tests::client::{self, ANSWER_BOUND};
use baton_tests::cluster::{greedy, strings, with};
use baton_tests::seed::Random;
use baton_tests::worker::{Role, Worker};
use baton_tests::{Cluster, ClusterConfig, Completion, EventStream, Turn, eventually};
use serde_json::json;

/// How long routers and workers may take to see that another is gone.
const NOTICED: Duration = Duration::from_secs(15);

/// A router that notices silence within a second.
fn quick() -> ClusterConfig {
    ClusterConfig { router_args: strings(&["--heartbeat-timeout", "1"]), ..ClusterConfig::default() }
}

async fn wait_mode(cluster: &Cluster, mode: &str) -> Completion {
    let body = greedy(&[65, 66, 67], 4);
    eventually(&format!("an answer in mode {mode}"), NOTICED, async || {
        let completion = cluster.try_completion(&body).await?;
        assert_eq!(completion.token_ids.len(), 4, "a 200 without its content");
        if completion.mode == mode { Ok(completion) } else { Err(completion.mode) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_its_prefill_worker_a_cluster_answers_locally_and_says_so() {
    let _turn = Turn::take();
    let mut cluster = Cluster::start(quick()).await;
    let apart = wait_mode(&cluster, "disaggregated").await;
    cluster.prefill[0].process.kill();

    let local = wait_mode(&cluster, "local").await;
    assert_eq!(local.token_ids, apart.token_ids);
    assert!(cluster.router_metrics().await.sum("baton_local_fallbacks_total", &[]) >= 1.0);
    assert!(cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await > 0.0);
    let health = client::request(cluster.http, "GET", "/health", None).await.expect("an answer");
    assert_eq!(health.status, 200, "a chat succeeds, so it is ready");
    let log = cluster.router.output();
    let loud = |line: &&str| line.contains("WARN") && line.to_lowercase().contains("prefill");
    assert!(log.lines().any(|line| loud(&line)), "no warning that no prefill worker lives:\n{log}");

    let dir = cluster.dir();
    cluster.prefill[0].restart(&dir);
    cluster.wait_ready().await;
    let again = wait_mode(&cluster, "disaggregated").await;
    assert_eq!(again.token_ids, apart.token_ids);
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_worker_killed_in_mid_transfer_costs_its_request_nothing() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_prefill_worker_killed_in_mid_transfer");
    for num_prefill in [2, 1] {
        let config = ClusterConfig {
            num_prefill,
            max_step_tokens: Some(64),
            worker_args: strings(&["--max-num-seqs", "64"]),
            ..quick()
        };
        let mut cluster = Cluster::start(config).await;
        let body = greedy(&random.tiny_prompt(4000), 16);
        let undisturbed = cluster.completion(&body).await;
        cluster.wait_baseline(Duration::from_secs(5)).await;
        let received = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;

        let (http, request) = (cluster.http, body.clone());
        let task =
            tokio::spawn(
                async move { client::request(http, "POST", "/v1/completions", Some(&request)).await },
            );
        let victim = eventually("some KV has arrived", Duration::from_secs(60), async || {
            let now = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;
            for (nth, worker) in cluster.prefill.iter().enumerate() {
                let metrics = worker.metrics().await?;
                let busy = metrics.sum("baton_num_requests", &[("stage", "prefilling")]);
                if busy > 0.0 && now > received {
                    return Ok(nth);
                }
            }
            if task.is_finished() { Ok(usize::MAX) } else { Err(format!("{} bytes", now - received)) }
        })
        .await;
        assert_ne!(victim, usize::MAX, "the request was over before a worker could be killed");
        cluster.prefill[victim].process.kill();

        let answer = task.await.expect("no panic").expect("an answer").expect(200);
        let completion = Completion::from_answer(&answer);
        assert_eq!(completion.token_ids, undisturbed.token_ids, "with {num_prefill} prefill workers");
        assert!(cluster.decode[0].process.try_status().is_none(), "D died of P's death");
        cluster.prefill.remove(victim);
        cluster.wait_baseline(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_killed_while_decoding_is_resumed_elsewhere_without_gap_or_repetition() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_decode_worker_killed_while_decoding");
    let mut cluster = Cluster::start(ClusterConfig { num_decode: 2, ..quick() }).await;
    let prompt = random.tiny_prompt(300);
    for sampling in [json!({}), json!({"temperature": 1.0, "seed": 7})] {
        let body = with(with(greedy(&prompt, 3000), sampling), json!({"stream": true}));
        let undisturbed =
            cluster.stream("/v1/completions", &body).await.completion().await.expect("a whole stream");
        cluster.wait_baseline(Duration::from_secs(5)).await;

        let mut stream = cluster.stream("/v1/completions", &body).await;
        let mut first = Completion::default();
        for _ in 0..50 {
            let event = stream.next().await.expect("no break").expect("no end");
            let event: serde_json::Value = serde_json::from_str(&event.data).expect("JSON");
            first.add(&event);
        }
        let victim = running(&cluster).await.expect("one of them decodes");
        cluster.decode[victim].process.kill();
        let rest = stream.completion().await.expect("the stream goes on");
        let tokens = [first.token_ids, rest.token_ids].concat();
        let part = tokens.iter().zip(&undisturbed.token_ids).position(|(a, b)| a != b);
        assert_eq!((part, tokens.len()), (None, undisturbed.token_ids.len()));
        assert_eq!(rest.finish_reason, "length");

        let dir = cluster.dir();
        cluster.decode[victim].restart(&dir);
        cluster.wait_ready().await;
        cluster.wait_baseline(Duration::from_secs(5)).await;
    }
}

/// The decode worker that has a running sequence.
async fn running(cluster: &Cluster) -> Option<usize> {
    for (nth, worker) in cluster.decode.iter().enumerate() {
        let metrics = worker.metrics().await.ok()?;
        if metrics.sum("baton_num_requests", &[("stage", "running")]) > 0.0 {
            return Some(nth);
        }
    }
    None
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_back_on_its_port_is_another_one_and_no_answer_is_empty() {
    let _turn = Turn::take();
    let mut cluster = Cluster::start(quick()).await;
    let body = greedy(&[72, 73, 74], 8);
    let wanted = cluster.completion(&body).await.token_ids;
    let dir = cluster.dir();
    for _ in 0..3 {
        cluster.decode[0].restart(&dir);
        // Errors are right while it is away; a 200 must be whole.
        eventually("an answer from the new instance", NOTICED, async || {
            let completion = cluster.try_completion(&body).await?;
            assert_eq!(completion.token_ids, wanted, "a 200 without its content");
            Ok(())
        })
        .await;
        cluster.wait_ready().await;
    }
    assert_eq!(cluster.completion(&body).await.mode, "disaggregated");
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_a_killed_lone_decode_worker_end_with_an_error_in_bounded_time() {
    let _turn = Turn::take();
    let mut cluster = Cluster::start(quick()).await;
    let body = with(greedy(&[72, 73, 74], 50_000), json!({"stream": true}));
    let mut stream = cluster.stream("/v1/completions", &body).await;
    for _ in 0..5 {
        assert!(stream.next().await.expect("no break").is_some());
    }
    cluster.decode[0].process.kill();
    let start = Instant::now();
    let ended = stream.completion().await;
    assert!(ended.is_err(), "a stream that lost its worker ended well: {ended:?}");
    assert!(
        start.elapsed() < Duration::from_secs(60) && start.elapsed() < ANSWER_BOUND,
        "{:?}",
        start.elapsed()
    );
    cluster.decode.clear();
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_that_stands_still_costs_its_requests_a_bounded_wait() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_decode_worker_that_stands_still");
    let mut cluster = Cluster::start(ClusterConfig { num_decode: 2, ..quick() }).await;
    cluster.decode[0].process.signal(libc::SIGSTOP);
    let start = Instant::now();
    for _ in 0..6 {
        let length = random.within(1..200);
        let prompt = random.tiny_prompt(length);
        assert_eq!(cluster.greedy(&prompt, 8).await.len(), 8);
    }
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    cluster.decode[0].process.signal(libc::SIGCONT);
    cluster.wait_ready().await;
    cluster.wait_baseline(NOTICED).await;
}

/// Its late frames must not reach blocks that were given to another sequence meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_worker_that_stands_still_in_mid_transfer_is_replaced_and_its_late_frames_harm_nobody() {
    let _turn = Turn::take();
    let mut random = Random::from_env("a_prefill_worker_that_stands_still");
    // A pool that the sequences afterwards fill, so that the given-up blocks are used again.
    let config = ClusterConfig {
        kv_memory: "4M".into(),
        max_step_tokens: Some(64),
        worker_args: strings(&["--max-num-seqs", "64", "--context", "8192"]),
        ..quick()
    };
    let mut cluster = Cluster::start(config).await;
    let body = greedy(&random.tiny_prompt(4000), 16);
    let others: Vec<_> = (0..8).map(|_| greedy(&random.tiny_prompt(900), 16)).collect();
    let undisturbed = cluster.completion(&body).await.token_ids;
    let mut wanted = Vec::new();
    for other in &others {
        wanted.push(cluster.completion(other).await.token_ids);
    }
    let received = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;
    let (http, request) = (cluster.http, body.clone());
    let task =
        tokio::spawn(async move { client::request(http, "POST", "/v1/completions", Some(&request)).await });
    eventually("some KV has arrived", Duration::from_secs(60), async || {
        let now = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;
        if now > received || task.is_finished() { Ok(()) } else { Err("none".to_owned()) }
    })
    .await;
    assert!(!task.is_finished(), "the request was over before its worker could be stopped");
    cluster.prefill[0].process.signal(libc::SIGSTOP);
    let answer = task.await.expect("no panic").expect("an answer").expect(200);
    assert_eq!(Completion::from_answer(&answer).token_ids, undisturbed);
    cluster.prefill[0].process.signal(libc::SIGCONT);
    for (other, wanted) in others.iter().zip(wanted) {
        assert_eq!(cluster.completion(other).await.token_ids, wanted);
    }
    cluster.wait_ready().await;
    cluster.wait_baseline(NOTICED).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ready_means_that_a_chat_succeeds_and_that_a_pair_can_serve() {
    let _turn = Turn::take();
    let config = ClusterConfig::default();
    // A prefill worker's port that is taken and says nothing: it may still be loading.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = silent.local_addr().expect("an address");
    let router_args = vec!["--prefill-worker".to_owned(), port.to_string()];
    let mut cluster =
        Cluster::start_unready(&ClusterConfig { num_prefill: 0, router_args, ..config.clone() }).await;
    cluster.wait_decode_ready().await;
    let health = client::request(cluster.http, "GET", "/health", None).await.expect("an answer");
    assert_ne!(
        health.status,
        200,
        "ready although its prefill worker has not answered yet: {}",
        health.text()
    );
    drop(silent);

    let args = strings(&["--model", "builtin:tiny", "--threads", "1", "--kv-memory", "64M"]);
    let worker = Worker::start_at(Role::Prefill, "prefill-0", &cluster.dir(), args, port).await;
    cluster.prefill.push(worker);
    let chat =
        json!({"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4});
    eventually("ready", Duration::from_secs(60), async || {
        let health = client::request(cluster.http, "GET", "/health", None).await?;
        if health.status == 200 { Ok(()) } else { Err(health.text()) }
    })
    .await;
    let answer = cluster.post("/v1/chat/completions", &chat).await.expect(200);
    assert_eq!(answer.header("x-baton-mode"), "disaggregated");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_ready_is_true() {
    let _turn = Turn::take();
    for _ in 0..3 {
        let cluster = Cluster::start_unready(&ClusterConfig::default()).await;
        eventually("ready", Duration::from_secs(60), async || {
            let health = client::request(cluster.http, "GET", "/health", None).await?;
            if health.status == 200 { Ok(()) } else { Err(health.text()) }
        })
        .await;
        let chat =
            json!({"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4});
        let answer = cluster.post("/v1/chat/completions", &chat).await.expect(200);
        assert_eq!(answer.header("x-baton-mode"), "disaggregated");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_whose_layouts_differ_refuse_each_other_by_name() {
    let _turn = Turn::take();
    let config = ClusterConfig { decode_args: strings(&["--block-size", "32"]), ..ClusterConfig::default() };
    let cluster = Cluster::start_unready(&config).await;
    cluster.wait_decode_ready().await;
    let start = Instant::now();
    // Local serving stays possible; a wrong answer does not.
    let completion = cluster.try_completion(&greedy(&[65, 66, 67], 4)).await;
    assert!(
        completion.is_err() || completion.as_ref().is_ok_and(|done| done.mode == "local"),
        "{completion:?}"
    );
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let logs =
        [cluster.router.output(), cluster.prefill[0].process.output(), cluster.decode[0].process.output()];
    let named = |log: &String| log.contains("block_size") && log.contains("16") && log.contains("32");
    assert!(logs.iter().any(named), "no log line names both layouts");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_lets_running_requests_end_and_exits_with_0() {
    let _turn = Turn::take();
    let mut cluster = Cluster::start(ClusterConfig::default()).await;
    let body = with(greedy(&[65, 66, 67], 400), json!({"stream": true}));
    let mut stream = EventStream::post(cluster.http, "/v1/completions", &body).await.expect("a stream");
    assert!(stream.next().await.expect("no break").is_some());
    cluster.router.signal(libc::SIGTERM);
    let completion = stream.completion().await.expect("the stream ends well");
    assert!(completion.token_ids.len() >= 398, "{}", completion.token_ids.len());
    assert_eq!(cluster.router.exit_code(Duration::from_secs(10)), 0);
    for process in [&mut cluster.prefill[0].process, &mut cluster.decode[0].process] {
        process.signal(libc::SIGTERM);
        assert_eq!(process.exit_code(Duration::from_secs(10)), 0, "{}", process.name);
    }
}
