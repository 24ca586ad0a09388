//! `baton chat`, `baton bench` and the roles' options, as a person at a terminal uses them.

use std::time::Duration;

use baton_tests::cluster::strings;
use baton_tests::{Cluster, ClusterConfig, LogDir, Process, Turn};
use serde_json::Value;

fn run(args: &[&str], env: &[(&str, &str)]) -> (i32, String) {
    let logs = LogDir::new();
    let mut process = Process::start("baton", logs.path(), &strings(args), env);
    let code = process.exit_code(Duration::from_secs(60));
    (code, process.output())
}

#[tokio::test]
async fn chat_answers_and_accounts_for_the_handoff() {
    let _turn = Turn::take();
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let url = format!("http://{}", cluster.http);
    let (code, said) = run(&["chat", "--url", &url, "--max-tokens", "20", "--seed", "1", "Hello"], &[]);
    assert_eq!(code, 0, "{said}");
    let account = said.lines().last().unwrap_or_default();
    for word in ["TTFT", "tok/s", "KV", "transfer", "exposed"] {
        assert!(account.contains(word), "no {word} in: {account}");
    }
    let (code, said) = run(&["chat", "--url", "http://127.0.0.1:1", "Hello"], &[]);
    assert_ne!(code, 0);
    assert!(said.contains("127.0.0.1:1"), "{said}");
}

#[tokio::test]
async fn bench_reports_percentiles_as_json() {
    let _turn = Turn::take();
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let url = format!("http://{}", cluster.http);
    let load =
        ["--requests", "24", "--concurrency", "6", "--prompt-tokens", "10-200", "--output-tokens", "12"];
    let args = [&["bench", "--url", &url, "--json", "--seed", "3", "--vocab", "128"][..], &load].concat();
    let (code, said) = run(&args, &[]);
    assert_eq!(code, 0, "{said}");
    let json = said.find('{').map(|at| &said[at..]).unwrap_or_default();
    let report: Value =
        serde_json::Deserializer::from_str(json).into_iter().next().expect("JSON").expect("JSON");
    for metric in ["ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"] {
        let of =
            |name: &str| report[metric][name].as_f64().unwrap_or_else(|| panic!("{metric}.{name}: {report}"));
        assert!(of("p50") > 0.0 && of("p50") <= of("p99") && of("p99") <= of("max"), "{metric}: {report}");
    }
    // What it counted is what the cluster did.
    assert_eq!(cluster.router_metrics().await.sum("baton_requests_total", &[]), 24.0);
    let generated = cluster.prefill_sum("baton_generated_tokens_total", &[]).await
        + cluster.decode_sum("baton_generated_tokens_total", &[]).await;
    assert_eq!(generated, 24.0 * 12.0);
}

#[test]
fn flags_win_over_environment_and_environment_over_file() {
    let logs = LogDir::new();
    let file = logs.path().join("baton.toml");
    // Each source gives a value of its own, and none can be used, so the message tells which one counted.
    std::fs::write(&file, "[decode-worker]\nmax-num-seqs = 601\n").expect("a file");
    let file = file.display().to_string();
    let base = ["decode-worker", "--model", "builtin:tiny", "--config", &file];
    let env = [("BATON_MAX_NUM_SEQS", "602")];
    let flag = [&base[..], &["--max-num-seqs", "603"]].concat();
    for (args, env, wanted) in
        [(&base[..], &[][..], "601"), (&base[..], &env[..], "602"), (&flag[..], &env[..], "603")]
    {
        let (code, said) = run(args, env);
        assert!(code == 2 && said.contains(wanted), "{code}: {said}");
    }

    std::fs::write(logs.path().join("baton.toml"), "[decode-worker]\nblock-sise = 16\n").expect("a file");
    let (code, said) = run(&base, &[]);
    assert!(code == 2 && said.contains("block-sise"), "{code}: {said}");
}

#[test]
fn version_tells_revision_and_protocol() {
    let (code, said) = run(&["--version"], &[]);
    assert_eq!(code, 0);
    assert!(said.starts_with("baton ") && said.contains("git ") && said.contains("protocol "), "{said}");
}

#[tokio::test]
async fn logs_carry_role_and_request_and_no_text() {
    let _turn = Turn::take();
    let config = ClusterConfig {
        worker_args: strings(&["--log-format", "json", "--log-level", "trace"]),
        router_args: strings(&["--log-format", "json", "--log-level", "trace"]),
        ..ClusterConfig::default()
    };
    let cluster = Cluster::start(config).await;
    let secret = "xyzzy-plugh-secret";
    let chat = serde_json::json!({"messages": [{"role": "user", "content": secret}], "max_tokens": 8});
    cluster.post("/v1/chat/completions", &chat).await.expect(200);
    cluster.wait_baseline(Duration::from_secs(5)).await;
    for (role, process) in [
        ("router", &cluster.router),
        ("prefill", &cluster.prefill[0].process),
        ("decode", &cluster.decode[0].process),
    ] {
        let log = process.output();
        assert!(!log.contains(secret), "{role} logs a prompt's text");
        let mut with_request = 0;
        for line in log.lines() {
            let value: Value =
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{role}: {error}: {line}"));
            assert!(value["role"].as_str().is_some_and(|name| name.contains(role)), "{role}: {line}");
            with_request += usize::from(!value["request_id"].is_null());
        }
        assert!(with_request > 0, "{role}: no line carries a request id");
    }
}
