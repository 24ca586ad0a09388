//! Clusters of real worker processes with CUDA engines, on a driver for machines without a card: prompts handed from CUDA to CUDA, from
//! CPU to CUDA and back give the same greedy tokens.
//!
//! The rule: within one numerics id tokens are equal, whatever the way. Between devices they are equal as long as the best two logits are farther apart
//! than the engines' logits may differ (0.15 on `builtin:tiny` in f16, asserted in `cuda_engine`); so where two devices part, the f32 engine must find such a
//! near tie at that very token.

use std::time::Duration;

use baton_engine::{CpuEngine, CpuEngineConfig, CudaFound, Precision};
use baton_kv::KvDtype;
use baton_model::Model;
use baton_scheduler::{Engine, Flow, SequenceId, StepOutput, StepPlan};
use baton_tests::cluster::{greedy, strings};
use baton_tests::fake_cuda::FakeCuda;
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Turn};

const NUM_TOKENS: usize = 16;
/// Two logits that are nearer may change places.
const TIE: f32 = 2.0 * 0.15;

const CPU: [&str; 2] = ["--device", "cpu"];
const CUDA: [&str; 2] = ["--device", "cuda:0"];

fn config(fake: &FakeCuda, prefill: [&str; 2], decode: [&str; 2]) -> ClusterConfig {
    ClusterConfig {
        kv_memory: "8M".into(),
        worker_args: strings(&["--context", "2048"]),
        prefill_args: strings(&prefill),
        decode_args: strings(&decode),
        max_step_tokens: Some(64),
        env: vec![fake.env()],
        prefix_cache: true,
        ..ClusterConfig::default()
    }
}

async fn answers(cluster: &Cluster, prompts: &[Vec<u32>], mode: &str) -> Vec<Vec<u32>> {
    let mut answers = Vec::new();
    for prompt in prompts {
        let completion = cluster.completion(&greedy(prompt, NUM_TOKENS)).await;
        assert_eq!(completion.mode, mode);
        answers.push(completion.token_ids);
    }
    cluster.wait_baseline(Duration::from_secs(5)).await;
    answers
}

/// How far apart the best two logits after these tokens are, in f32 on the CPU.
fn margin(tokens: &[u32]) -> f32 {
    let config = CpuEngineConfig {
        num_blocks: 32,
        kv_dtype: KvDtype::F32,
        precision: Precision::F32,
        ..CpuEngineConfig::default()
    };
    let (mut engine, _arena) = CpuEngine::new(&Model::tiny(), config).expect("an engine");
    let blocks: Vec<u32> = (0..tokens.len().div_ceil(16) as u32).collect();
    let mut plan = StepPlan::default();
    plan.push_all_logits(SequenceId(1), 0, tokens, &blocks);
    let mut output = StepOutput::default();
    engine.step(&plan, &mut output, &mut |_| Flow::Continue).expect("a step");
    let mut last = output.logits.split_off(output.logits.len() - engine.vocab_size());
    last.sort_by(f32::total_cmp);
    last[last.len() - 1] - last[last.len() - 2]
}

/// Equal, or parted at a near tie.
fn assert_near(prompt: &[u32], ours: &[u32], theirs: &[u32], what: &str) {
    let Some(parted) = (0..NUM_TOKENS).find(|&nth| ours[nth] != theirs[nth]) else { return };
    let margin = margin(&[prompt, &ours[..parted]].concat());
    assert!(margin < TIE, "{what}: prompt of {} parts at token {parted}, margin {margin}", prompt.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cuda_and_cpu_workers_hand_prompts_to_each_other() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let mut random = Random::from_env("cuda_handoffs");
    let prompts: Vec<_> = [1, 16, 33, 150].into_iter().map(|length| random.tiny_prompt(length)).collect();
    let num_bytes: usize = prompts.iter().map(|prompt| prompt.len() * 512).sum();

    let colocated = Cluster::start(config(&fake, CUDA, CUDA).colocated()).await;
    let together = answers(&colocated, &prompts, "colocated").await;
    drop(colocated);
    for (prefill, decode, transport) in [(CUDA, CUDA, "shm"), (CPU, CUDA, "grpc"), (CUDA, CPU, "shm")] {
        let what = format!("{} to {}", prefill[1], decode[1]);
        let kv_transport = Some(transport.to_owned());
        let cluster = Cluster::start(ClusterConfig { kv_transport, ..config(&fake, prefill, decode) }).await;
        let apart = answers(&cluster, &prompts, "disaggregated").await;
        assert_eq!(
            cluster.decode_sum("baton_kv_received_bytes_total", &[]).await,
            num_bytes as f64,
            "{what}"
        );
        assert_eq!(cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await, 0.0, "{what}");
        if prefill == decode {
            assert_eq!(apart, together, "{what}: one numerics id, the same bits");
        }
        // Once more: what came from another device is not in the prefix cache, and is moved again.
        cluster.completion(&greedy(&prompts[3], 2)).await;
        let again = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await - num_bytes as f64;
        let tokens = if prefill == decode { prompts[3].len() % 16 } else { prompts[3].len() };
        assert_eq!(again, (tokens * 512) as f64, "{what}");
        for ((prompt, ours), theirs) in prompts.iter().zip(&apart).zip(&together) {
            assert_near(prompt, ours, theirs, &what);
        }
    }
}

/// The planted fault: streams that wait for no event, as if the engine had not asked for it. KV that arrived is then not there when it is read, and
/// what was never written are NaNs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_wait_for_kv_that_arrives_shows() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let prompt = Random::from_env("cuda_planted").tiny_prompt(40);
    let mut tokens = Vec::new();
    for fault in ["FAKE_CUDA_NONE=1", "FAKE_CUDA_DROP_WAITS=1"] {
        let mut config = config(&fake, CPU, CUDA);
        config.env.push(fault.to_owned());
        let cluster = Cluster::start(config).await;
        tokens.push(cluster.try_completion(&greedy(&prompt, NUM_TOKENS)).await.map(|done| done.token_ids));
    }
    assert!(tokens[0].is_ok(), "{tokens:?}");
    assert_ne!(tokens[0], tokens[1], "the driver drops waits, and nobody notices");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_end_cleanly_and_what_the_device_does_not_have_is_refused_in_one_line() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let mut started = config(&fake, CUDA, CUDA);
    let dir = tempfile::tempdir().expect("a folder");
    let report = dir.path().join("report");
    started.env.push(format!("FAKE_CUDA_REPORT={}", report.display()));
    let mut cluster = Cluster::start(started).await;
    let prompt = Random::from_env("cuda_leaks").tiny_prompt(40);
    assert_eq!(cluster.completion(&greedy(&prompt, 4)).await.mode, "disaggregated");
    for worker in cluster.prefill.iter_mut().chain(&mut cluster.decode) {
        worker.process.signal(libc::SIGTERM);
        assert_eq!(worker.process.exit_code(Duration::from_secs(10)), 0, "{}", worker.process.output());
    }
    // The driver was there to the end, and both computed on it. What an engine gives back is counted in `cuda_engine`; a process may end before its
    // threads have, and the system takes the rest.
    let text = std::fs::read_to_string(&report).expect("a report");
    let launches = text.lines().map(|line| {
        let report: serde_json::Value = serde_json::from_str(line).expect("JSON");
        report["launches"].as_u64().expect("a number")
    });
    assert_eq!(launches.filter(|launches| *launches > 0).count(), 2, "{text}");

    for (args, said) in [
        (["--device", "cuda:5"], "--device: there is no cuda:5"),
        (["--kv-dtype", "fp8"], "--kv-dtype: fp8 is not possible on a CUDA device"),
        (["--precision", "f32"], "--precision: f32 is not possible on a CUDA device"),
    ] {
        let (code, output) = refused(&fake, &args);
        assert_eq!(code, Some(2), "{args:?}: {output}");
        assert!(output.contains(said), "{args:?}: {output}");
    }
}

/// Exit code and output of a worker on the fake device with these options.
fn refused(fake: &FakeCuda, args: &[&str]) -> (Option<i32>, String) {
    let (name, folder) = fake
        .env()
        .split_once('=')
        .map(|(name, folder)| (name.to_owned(), folder.to_owned()))
        .expect("an assignment");
    let device = ["--device", "cuda:0"].into_iter().filter(|_| args[0] != "--device");
    let output = std::process::Command::new(baton_tests::binary::baton())
        .args(["decode-worker", "--model", "builtin:tiny", "--context", "2048"])
        .args(device)
        .args(args)
        .env(name, folder)
        .output()
        .expect("it runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

/// The script with which a card is met first: here it goes as far as what it finds.
#[test]
fn the_script_for_a_card_says_what_is_missing_without_one() {
    if CudaFound::look().is_usable() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let output = std::process::Command::new("python3")
        .arg(baton_tests::repository().join("tests/gpu/run"))
        .arg(baton_tests::binary::baton())
        .arg("--out")
        .arg(dir.path())
        .output()
        .expect("python3 runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(3), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("no CUDA device can be used; missing: the driver"), "{text}");
    let report = std::fs::read_to_string(dir.path().join("gpu.json")).expect("a report");
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["parts"][0]["outcome"], "no card", "{report}");
}
