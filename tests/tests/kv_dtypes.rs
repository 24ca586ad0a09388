//! Every element type of KV, and weights quantised at load, through real clusters: the same tokens handed off or not, over both
//! transports, and exactly the bytes that the type promises.

use std::time::Duration;

use baton_tests::cluster::{greedy, strings};
use baton_tests::seed::Random;
use baton_tests::{Cluster, ClusterConfig, Turn};
use serde_json::Value;

/// Bytes of KV of one token of `builtin:tiny`: 2 x 4 layers x 2 heads, rows of 16 elements and, in fp8, a scale.
const TOKEN_BYTES: [(&str, f64); 4] = [("f32", 1024.0), ("f16", 512.0), ("bf16", 512.0), ("fp8", 272.0)];

fn config(kv_dtype: &str) -> ClusterConfig {
    ClusterConfig { kv_dtype: Some(kv_dtype.to_owned()), ..ClusterConfig::default() }
}

/// Greedy tokens of each prompt, and how many were computed where they were decoded.
async fn answers(config: ClusterConfig, prompts: &[Vec<u32>], token_bytes: Option<f64>) -> Vec<Vec<u32>> {
    let cluster = Cluster::start(config).await;
    let (mut answers, mut num_tokens) = (Vec::new(), 0);
    for prompt in prompts {
        let body: Value = greedy(prompt, 24);
        let completion = cluster.completion(&body).await;
        num_tokens += prompt.len();
        if let Some(token_bytes) = token_bytes {
            assert_eq!(completion.mode, "disaggregated");
            let received = cluster.decode_sum("baton_kv_received_bytes_total", &[]).await;
            assert_eq!(received, num_tokens as f64 * token_bytes, "after a prompt of {}", prompt.len());
        }
        answers.push(completion.token_ids);
    }
    if token_bytes.is_some() {
        assert_eq!(cluster.decode_sum("baton_prompt_tokens_computed_total", &[]).await, 0.0);
    }
    cluster.wait_baseline(Duration::from_secs(5)).await;
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kv_dtype_gives_the_same_tokens_handed_off_and_not_and_moves_its_own_bytes() {
    let _turn = Turn::take();
    let mut random = Random::from_env("kv_dtypes");
    let prompts: Vec<_> =
        [1, 15, 16, 17, 33, 200, 777].into_iter().map(|length| random.tiny_prompt(length)).collect();
    let mut of_dtypes = Vec::new();
    for (dtype, token_bytes) in TOKEN_BYTES {
        let together = answers(config(dtype).colocated(), &prompts, None).await;
        for transport in ["shm", "grpc"] {
            let apart = ClusterConfig {
                kv_transport: Some(transport.to_owned()),
                max_step_tokens: Some(64),
                ..config(dtype)
            };
            assert_eq!(
                answers(apart, &prompts, Some(token_bytes)).await,
                together,
                "{dtype} over {transport}"
            );
        }
        of_dtypes.push(together);
    }
    assert_ne!(of_dtypes[3], of_dtypes[0], "fp8 rounds enough to show in random weights");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quantised_weights_give_the_same_tokens_handed_off_and_not() {
    let _turn = Turn::take();
    let mut random = Random::from_env("quantised_weights");
    let prompts: Vec<_> = [5, 64, 300].into_iter().map(|length| random.tiny_prompt(length)).collect();
    let int8 = ClusterConfig { worker_args: strings(&["--quantize", "int8"]), ..ClusterConfig::default() };
    let together = answers(int8.clone().colocated(), &prompts, None).await;
    assert_eq!(answers(int8, &prompts, Some(512.0)).await, together);
}

/// A prefill worker of one type and a decode worker of another never exchange a byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_other_kv_dtypes_or_weights_refuse_each_other_by_name() {
    let _turn = Turn::take();
    for (decode_args, theirs) in [(["--kv-dtype", "fp8"], "fp8"), (["--quantize", "int8"], "q8_0")] {
        let config = ClusterConfig { decode_args: strings(&decode_args), ..ClusterConfig::default() };
        let cluster = Cluster::start_unready(&config).await;
        cluster.wait_decode_ready().await;
        let completion = cluster.try_completion(&greedy(&[65, 66, 67], 4)).await;
        assert!(
            completion.is_err() || completion.as_ref().is_ok_and(|done| done.mode == "local"),
            "{completion:?}"
        );
        assert_eq!(cluster.decode_sum("baton_kv_received_bytes_total", &[]).await, 0.0);
        let logs = [
            cluster.router.output(),
            cluster.prefill[0].process.output(),
            cluster.decode[0].process.output(),
        ];
        assert!(logs.iter().any(|log| log.contains(theirs)), "no log line names {theirs}");
    }
}
