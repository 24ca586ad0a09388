//! The built command from outside: exit codes, precedence of options, help, and the two commands that speak to a
//! cluster, against a router of canned answers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output};

fn baton(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(arguments);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BATON_")) {
        command.env_remove(name);
    }
    command
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn taken() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    (listener, port)
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

#[test]
fn flags_win_over_the_environment_over_the_file_over_the_default() {
    let ((_a, in_file), (_b, in_section), (_c, in_environment), (_d, as_flag)) =
        (taken(), taken(), taken(), taken());
    // Which value counted shows in the port that is complained about.
    let top = file(&format!("http-port = {in_file}\n"));
    let section = file(&format!("http-port = {in_file}\n[up]\nhttp-port = {in_section}\n"));
    let complaint = |command: &mut Command| {
        let output = command.output().unwrap();
        assert_eq!(code(&output), 3, "{}", stderr(&output));
        stderr(&output)
    };
    let [top, section] = [&top, &section].map(|file| file.path().to_str().unwrap().to_owned());
    let said = complaint(&mut baton(&["up", "--config", &top]));
    assert!(said.contains(&in_file) && said.contains("--http-port"), "{said}");
    let said = complaint(&mut baton(&["--config", &section, "up"]));
    assert!(said.contains(&in_section), "{said}");
    let said =
        complaint(baton(&["up"]).env("BATON_CONFIG", &section).env("BATON_HTTP_PORT", &in_environment));
    assert!(said.contains(&in_environment), "{said}");
    let flags = ["up", "--config", &section, "--http-port", &as_flag];
    let said = complaint(baton(&flags).env("BATON_HTTP_PORT", &in_environment));
    assert!(said.contains(&as_flag), "{said}");
}

#[test]
fn what_is_wrong_in_a_file_is_one_line_with_its_key() {
    for (text, parts) in [
        ("kv_memory = \"1G\"", ["'kv_memory'", "'kv-memory'"]),
        ("[decode-worker]\nhttp-port = 1", ["'http-port' in [decode-worker]", "unknown"]),
        ("[up]\nmax-num-seqs = \"many\"", ["[up] max-num-seqs", "many"]),
        ("[chat]\nurl = \"x\"", ["[chat]", "[router]"]),
        ("[up]\nlisten = \"127.0.0.1:1\"", ["--listen", "up"]),
        ("not toml", [":1:", "baton"]),
    ] {
        let file = file(text);
        let output = baton(&["up", "--config", file.path().to_str().unwrap()]).output().unwrap();
        assert_eq!(code(&output), 2, "{text}: {}", stderr(&output));
        let said = stderr(&output);
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(parts.iter().all(|part| said.contains(part)), "{text}: {said}");
    }
    let output = baton(&["up", "--config", "/no/such/file.toml"]).output().unwrap();
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("/no/such/file.toml"));
}

#[test]
fn failures_end_with_their_documented_codes() {
    let [(a, http), (b, grpc)] = [taken(), taken()];
    drop((a, b));
    let folder = tempfile::tempdir().unwrap();
    let up = ["up", "--http-port", http.as_str(), "--grpc-port", grpc.as_str()];
    let run = |more: &[&str], environment: &[(&str, &str)]| {
        let mut command = baton(&[&up, more].concat());
        command.env("BATON_CACHE", folder.path()).envs(environment.iter().copied());
        let output = command.output().unwrap();
        (code(&output), stderr(&output))
    };
    for (more, environment, expected, part) in [
        (vec!["--model", "/no/such.gguf"], vec![], 4, "/no/such.gguf"),
        (vec!["--model", "default"], vec![("PATH", "/nowhere")], 5, "python3"),
        (vec!["--model", "default"], vec![("HF_HUB_OFFLINE", "1")], 5, "fetching is off"),
        (vec!["--model", "builtin:tiny", "--kv-memory", "1M"], vec![], 6, "2048"),
        (vec!["--model", "builtin:tiny", "--context", "200000"], vec![], 2, "131072"),
        (vec!["--model", "builtin:tiny", "--cpus", "1022"], vec![], 2, "--cpus"),
        (vec!["--listen", "127.0.0.1:1"], vec![], 2, "--listen"),
        (vec!["--grpc-port", http.as_str()], vec![], 2, "--grpc-port"),
        (vec!["--http-port", "0"], vec![], 2, "--http-port"),
    ] {
        let (code, said) = run(&more, &environment);
        assert_eq!(code, expected, "{more:?}: {said}");
        assert!(said.contains(part), "{more:?}: {said}");
    }
}

#[test]
fn help_and_version_say_what_they_must() {
    let version = stdout(&baton(&["--version"]).output().unwrap());
    assert!(version.contains("git ") && version.contains("protocol 3"), "{version}");
    let help = stdout(&baton(&["--help"]).output().unwrap());
    for word in [
        "up",
        "router",
        "prefill-worker",
        "decode-worker",
        "chat",
        "bench",
        "doctor",
        "sim",
        "Exit codes",
        "130",
    ] {
        assert!(help.contains(word), "{word}: {help}");
    }
    let up = stdout(&baton(&["up", "--help"]).output().unwrap());
    // Long texts go on in the next line, wherever that falls.
    let up = up.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "--http-port <PORT>",
        "[default: 8080]",
        "[default: 8081]",
        "--kv-memory <BYTES>",
        "BATON_CONTEXT",
        "<TOKENS>",
    ] {
        assert!(up.contains(words), "{words}: {up}");
    }
    assert!(!up.contains("--address-file"), "{up}");
    let output = baton(&["up", "--no-such-option"]).output().unwrap();
    assert_eq!(code(&output), 2);
}

#[test]
fn without_a_cluster_chat_says_how_to_start_one() {
    let (listener, port) = taken();
    drop(listener);
    let url = format!("http://127.0.0.1:{port}");
    for arguments in [["chat", "hello", "--url", &url], ["bench", "--json", "--url", &url]] {
        let output = baton(&arguments).output().unwrap();
        assert_eq!(code(&output), 1);
        assert!(stderr(&output).contains("baton up"), "{}", stderr(&output));
    }
}

/// Answers `count` connections: each gets the events, or the list of models for a GET.
fn canned(count: usize, events: &'static [&'static str]) -> (String, std::thread::JoinHandle<Vec<String>>) {
    let (listener, port) = taken();
    let server = std::thread::spawn(move || {
        (0..count).map(|_| answer(listener.accept().unwrap().0, events)).collect::<Vec<String>>()
    });
    (format!("http://127.0.0.1:{port}"), server)
}

/// Gives the request's body.
fn answer(stream: TcpStream, events: &[&str]) -> String {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let get = line.starts_with("GET");
    let mut length = 0;
    while line != "\r\n" {
        line.clear();
        reader.read_line(&mut line).unwrap();
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let mut stream = reader.into_inner();
    let kind = if get { "application/json" } else { "text/event-stream" };
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n").unwrap();
    if get {
        write!(stream, "{{\"object\": \"list\", \"data\": []}}").unwrap();
    }
    for event in events.iter().filter(|_| !get) {
        write!(stream, "data: {event}\n\n").unwrap();
        stream.flush().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    String::from_utf8(body).unwrap()
}

#[test]
fn chat_shows_the_answer_and_what_it_took() {
    let (url, server) = canned(
        1,
        &[
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"{"choices":[{"delta":{"content":"Hi "}}]}"#,
            r#"{"choices":[{"delta":{"content":"there"},"finish_reason":"stop"}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2},"baton":{"mode":"disaggregated","ttft_ms":12.4,"kv":{"bytes":2048,"total_ms":1.5,"exposed_ms":0.25}}}"#,
            "[DONE]",
        ],
    );
    let output =
        baton(&["chat", "hello", "--url", &url, "--seed", "3", "--max-tokens", "7"]).output().unwrap();
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert_eq!(stdout(&output), "Hi there\n");
    let said = stderr(&output);
    assert!(
        said.contains("TTFT 12 ms") && said.contains("KV 2.0 KiB, transfer 1.5 ms, exposed 0.2 ms"),
        "{said}"
    );
    let body: serde_json::Value = serde_json::from_str(&server.join().unwrap()[0]).unwrap();
    assert_eq!((&body["seed"], &body["max_tokens"], &body["stream"]), (&3.into(), &7.into(), &true.into()));
}

#[test]
fn an_answer_that_breaks_off_is_a_failure() {
    let (url, server) = canned(1, &[r#"{"choices":[{"delta":{"content":"Hi "}}]}"#]);
    let output = baton(&["chat", "hello", "--url", &url]).output().unwrap();
    assert_eq!(code(&output), 1);
    assert!(stderr(&output).contains("broke off"), "{}", stderr(&output));
    server.join().unwrap();
    let (url, server) = canned(1, &[r#"{"error":{"message":"worker lost"}}"#]);
    let output = baton(&["chat", "hello", "--url", &url]).output().unwrap();
    assert!(stderr(&output).contains("worker lost"), "{}", stderr(&output));
    server.join().unwrap();
}

#[test]
fn bench_measures_every_gap_and_stops_by_itself() {
    let (url, server) = canned(
        5,
        &[
            r#"{"choices":[{"text":"a","token_ids":[1]}]}"#,
            r#"{"choices":[{"text":"bc","token_ids":[2,3]}]}"#,
            r#"{"choices":[{"text":"d","token_ids":[4]}]}"#,
            "[DONE]",
        ],
    );
    let arguments =
        ["bench", "--url", &url, "--json", "--requests", "4", "--concurrency", "2", "--prompt-tokens", "8-9"];
    let output = baton(&[&arguments[..], &["--output-tokens", "4"]].concat()).output().unwrap();
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["requests"], 4);
    assert_eq!(report["itl_ms"]["count"], 8, "two gaps a request");
    assert_eq!(report["merged_tokens"], 4, "one token a request shares its event");
    assert!(report["itl_ms"]["p50"].as_f64().unwrap() >= 4.0);
    let bodies = server.join().unwrap();
    let body: serde_json::Value = serde_json::from_str(&bodies[1]).unwrap();
    assert!(matches!(body["prompt"].as_array().unwrap().len(), 8 | 9));
    assert_eq!((&body["ignore_eos"], &body["return_token_ids"]), (&true.into(), &true.into()));
}

#[test]
fn sim_runs_clusters_without_a_violation() {
    let output = baton(&["sim", "--runs", "20", "--seed", "7", "--faults", "all"]).output().unwrap();
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    assert!(stdout(&output).contains("20"), "{}", stdout(&output));
}

#[test]
fn doctor_tells_what_would_run_and_ends_as_a_worker_would() {
    let doctor = |arguments: &[&str]| {
        let output = baton(&[&["doctor", "--json", "--threads", "1"], arguments].concat()).output().unwrap();
        let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        (code(&output), report, stderr(&output))
    };
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/models/qwen2");
    let (code, report, said) = doctor(&["--model", folder, "--quantize", "int8", "--kv-dtype", "fp8"]);
    assert_eq!((code, &report["ok"]), (0, &true.into()), "{said}{report}");
    assert_eq!((&report["model"]["family"], &report["engine"]["weights"]), (&"qwen2".into(), &"q8_0".into()));
    assert!(report["engine"]["numerics"].as_str().unwrap().contains("kv-fp8"), "{report}");
    assert_eq!(report["context"]["fits"], report["context"]["of_model"]);
    let (code, report, said) = doctor(&["--model", "builtin:tiny", "--kv-memory", "1M"]);
    assert_eq!((code, &report["problems"][0]["exit_code"]), (6, &6.into()));
    assert_eq!((&report["context"]["fits"], said.lines().count()), (&2048.into(), 1), "{report}");
    assert!(said.contains("2048") && said.contains("--kv-memory"), "{said}");
    let (code, report, said) = doctor(&["--model", "/nowhere/model.gguf"]);
    assert_eq!((code, &report["ok"]), (4, &false.into()));
    assert!(said.contains("/nowhere/model.gguf"), "{said}");
}
