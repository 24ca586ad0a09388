//! `baton up` as a newcomer meets it: ready, a chat, Ctrl-C; and what goes wrong, each with its exit code.

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use baton_tests::client;
use baton_tests::cluster::{free_port, strings};
use baton_tests::process::is_alive;
use baton_tests::{LogDir, Process, Turn, eventually};
use serde_json::json;

/// The longest wait for an end that should come at once.
const STOP: Duration = Duration::from_secs(15);

struct Up {
    process: Process,
    http: SocketAddr,
    _logs: LogDir,
}

fn start(args: &[&str]) -> Up {
    let logs = LogDir::new();
    let [http, grpc] = [free_port(), free_port()];
    let mut all = strings(&["up", "--http-port", &http.to_string(), "--grpc-port", &grpc.to_string()]);
    all.extend(strings(args));
    let process = Process::start("up", logs.path(), &all, &[]);
    Up { process, http: SocketAddr::from(([127, 0, 0, 1], http)), _logs: logs }
}

impl Up {
    async fn wait_ready(&mut self) {
        let (http, process) = (self.http, &mut self.process);
        eventually("baton up is ready", Duration::from_secs(120), async || {
            assert!(process.try_status().is_none(), "it ended:\n{}", process.output());
            // Its warm-up chat too has ended by then.
            if !process.output().contains("ready in") {
                return Err(process.output());
            }
            let health = client::request(http, "GET", "/health", None).await?;
            if health.status == 200 { Ok(()) } else { Err(health.text()) }
        })
        .await;
    }

    async fn chat(&self) {
        let body =
            json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "ignore_eos": true});
        let answer =
            client::request(self.http, "POST", "/v1/chat/completions", Some(&body)).await.expect("an answer");
        let answer = answer.expect(200);
        assert_eq!(answer.json()["usage"]["completion_tokens"], 8);
    }
}

async fn wait_gone(pids: &[u32]) {
    eventually("every process below baton up is gone", STOP, async || {
        let left: Vec<&u32> = pids.iter().filter(|&&pid| is_alive(pid)).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?} run")) }
    })
    .await;
}

#[tokio::test]
async fn it_gets_ready_chats_and_ends_by_ctrl_c() {
    let _turn = Turn::take();
    let mut up = start(&["--model", "builtin:tiny"]);
    up.wait_ready().await;
    up.chat().await;
    let below = up.process.descendants();
    assert_eq!(below.len(), 3, "a router and two workers");
    // What it prints to be pasted works as pasted.
    let said = eventually("a curl line", Duration::from_secs(10), async || {
        let said = up.process.output().replace("\\\n", " ");
        said.lines()
            .map(str::trim)
            .find(|line| line.starts_with("curl "))
            .map(str::to_owned)
            .ok_or_else(|| said.clone())
    })
    .await;
    let pasted = std::process::Command::new("bash").args(["-c", &said]).output().expect("bash runs");
    assert!(pasted.status.success(), "{said}: {}", String::from_utf8_lossy(&pasted.stderr));
    let answer = String::from_utf8_lossy(&pasted.stdout).into_owned();
    assert!(answer.contains("choices"), "{said} -> {answer}");
    up.process.signal(libc::SIGINT);
    assert_eq!(up.process.exit_code(STOP), 0);
    wait_gone(&below).await;
}

#[tokio::test]
async fn with_the_default_model_it_needs_no_argument() {
    let Some(_model) = baton_tests::model_or_skip() else { return };
    let _turn = Turn::take();
    let mut up = start(&[]);
    up.wait_ready().await;
    up.chat().await;
    let below = up.process.descendants();
    up.process.signal(libc::SIGTERM);
    assert_eq!(up.process.exit_code(STOP), 0);
    wait_gone(&below).await;
}

#[tokio::test]
async fn numbers_of_workers_and_colocated_are_taken() {
    let _turn = Turn::take();
    for (args, num_below) in
        [(vec!["--prefill-workers", "2", "--decode-workers", "2"], 5), (vec!["--colocated"], 3)]
    {
        let all = [vec!["--model", "builtin:tiny"], args].concat();
        let mut up = start(&all);
        up.wait_ready().await;
        up.chat().await;
        assert_eq!(up.process.descendants().len(), num_below, "{all:?}");
    }
}

/// Cores that a process's compute threads may run on.
fn compute_cores(pid: u32) -> Vec<String> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a running process").flatten();
    let of_thread = threads.filter_map(|thread| {
        let name = std::fs::read_to_string(thread.path().join("comm")).ok()?;
        let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
        let cores =
            status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().to_owned();
        name.contains("step").then_some(cores)
    });
    of_thread.collect()
}

#[tokio::test]
async fn prefill_and_decode_never_compute_on_one_core() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return baton_tests::skip("one core only");
    }
    let _turn = Turn::take();
    let mut up = start(&["--model", "builtin:tiny"]);
    up.wait_ready().await;
    let of_role = |role: &str| {
        let below = up.process.descendants().into_iter();
        let mut found = below.filter(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|command| command.contains(role))
        });
        compute_cores(found.next().unwrap_or_else(|| panic!("no {role} runs")))
    };
    let (prefill, decode) = (of_role("prefill-worker"), of_role("decode-worker"));
    assert!(!prefill.is_empty() && !decode.is_empty());
    // One core a thread, or else "in common" could not be read off a list of names.
    let pinned = |cores: &[String]| cores.iter().all(|core| core.parse::<u32>().is_ok());
    assert!(pinned(&prefill) && pinned(&decode), "{prefill:?} {decode:?}");
    assert!(prefill.iter().all(|core| !decode.contains(core)), "{prefill:?} {decode:?}");
}

#[tokio::test]
async fn killed_it_leaves_no_child() {
    let _turn = Turn::take();
    let mut up = start(&["--model", "builtin:tiny"]);
    up.wait_ready().await;
    let below = up.process.descendants();
    assert_eq!(below.len(), 3);
    up.process.kill();
    wait_gone(&below).await;
    // Also while it still starts.
    let mut up = start(&["--model", "builtin:tiny"]);
    tokio::time::sleep(Duration::from_millis(150)).await;
    let below = up.process.descendants();
    up.process.kill();
    wait_gone(&below).await;
}

#[tokio::test]
async fn a_worker_that_dies_is_started_again() {
    let _turn = Turn::take();
    let mut up = start(&["--model", "builtin:tiny"]);
    up.wait_ready().await;
    let before = up.process.descendants();
    kill_workers(&before);
    eventually("two new workers", Duration::from_secs(30), async || {
        let now = up.process.descendants();
        let new = now.iter().filter(|pid| !before.contains(pid)).count();
        if new >= 2 { Ok(()) } else { Err(format!("{now:?}, before {before:?}")) }
    })
    .await;
    up.wait_ready().await;
    eventually("disaggregated again", Duration::from_secs(30), async || {
        let body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2});
        let answer = client::request(up.http, "POST", "/v1/chat/completions", Some(&body)).await?;
        let mode = answer.header("x-baton-mode");
        if answer.status == 200 && mode == "disaggregated" {
            Ok(())
        } else {
            Err(format!("{} {mode}", answer.status))
        }
    })
    .await;
}

/// The router, whose command line names them, lives on.
fn kill_workers(pids: &[u32]) {
    for &pid in pids {
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if command.split('\0').any(|word| word == "prefill-worker" || word == "decode-worker") {
            baton_tests::process::kill(pid);
        }
    }
}

#[tokio::test]
async fn workers_that_die_while_it_starts_are_no_end_of_it() {
    let _turn = Turn::take();
    let mut up = start(&["--model", "builtin:tiny"]);
    // As early as there are any: before its warm-up chat, or in the middle of it.
    let below = eventually("all its processes", STOP, async || {
        let below = up.process.descendants();
        if below.len() == 3 { Ok(below) } else { Err(format!("{below:?}")) }
    })
    .await;
    kill_workers(&below);
    up.wait_ready().await;
    up.chat().await;
}

/// Runs to the end; returns the exit code and the last line that is no log of a child.
fn end(args: &[&str]) -> (i32, String) {
    let logs = LogDir::new();
    let mut process = Process::start("baton", logs.path(), &strings(args), &[]);
    let start = Instant::now();
    let code = process.exit_code(STOP);
    assert!(start.elapsed() < STOP);
    (code, process.output())
}

#[tokio::test]
async fn a_port_in_use_is_named_at_once() {
    let _turn = Turn::take();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let (free, address) = (free_port().to_string(), format!("127.0.0.1:{port}"));
    let tiny = ["--model", "builtin:tiny"];
    for (args, option) in [
        (vec!["up", "--http-port", &port, "--grpc-port", &free], "--http-port"),
        (vec!["up", "--http-port", &free, "--grpc-port", &port], "--grpc-port"),
        (vec!["prefill-worker", "--listen", &address], "--listen"),
        (vec!["decode-worker", "--listen", &address], "--listen"),
        (vec!["router", "--http-listen", &address, "--decode-worker", "127.0.0.1:1"], "--http-listen"),
    ] {
        let args = [args, tiny.to_vec()].concat();
        let (code, said) = end(&args);
        assert_eq!(code, 3, "{args:?}: {said}");
        assert!(said.lines().any(|line| line.contains(&port) && line.contains(option)), "{args:?}: {said}");
    }
}

#[tokio::test]
async fn what_can_not_work_ends_with_one_line_and_its_code() {
    let _turn = Turn::take();
    let ports = [free_port(), free_port()].map(|port| port.to_string());
    let up = ["up", "--http-port", &ports[0], "--grpc-port", &ports[1]];
    for (args, code, words) in [
        (vec!["--model", "/no/such/model.gguf"], 4, vec!["/no/such/model.gguf"]),
        (vec!["--model", "builtin:huge"], 4, vec!["builtin:huge"]),
        (vec!["--no-such-option"], 2, vec!["--no-such-option"]),
        (vec!["--model", "builtin:tiny", "--block-size", "24"], 2, vec!["--block-size", "24"]),
        (vec!["--model", "builtin:tiny", "--kv-memory", "900G"], 6, vec!["kv-memory"]),
    ] {
        let args = [up.to_vec(), args].concat();
        let (got, said) = end(&args);
        assert_eq!(got, code, "{args:?}: {said}");
        assert!(said.lines().any(|line| words.iter().all(|word| line.contains(word))), "{args:?}: {said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[tokio::test]
async fn kv_memory_too_small_for_the_context_says_what_fits() {
    let _turn = Turn::take();
    // 1 MiB holds 2,048 tokens of builtin:tiny.
    let args = ["decode-worker", "--listen", "127.0.0.1:0", "--model", "builtin:tiny", "--kv-memory", "1M"];
    let (code, said) = end(&[&args[..], &["--context", "4096"]].concat());
    assert_eq!(code, 6, "{said}");
    assert!(said.lines().any(|line| line.contains("2048") && line.contains("4096")), "{said}");
}

#[tokio::test]
async fn another_address_than_loopback_needs_insecure() {
    let _turn = Turn::take();
    let (code, said) = end(&["decode-worker", "--model", "builtin:tiny", "--listen", "0.0.0.0:0"]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("--insecure") && said.contains("0.0.0.0"), "{said}");
}
