//! `baton bench --compare` and `baton trace export`, as a person at a terminal uses them.

use std::collections::BTreeSet;
use std::time::Duration;

use baton_tests::cluster::strings;
use baton_tests::process::is_alive;
use baton_tests::{LogDir, Process, Turn, eventually};
use serde_json::{Value, json};

/// Ends within this although a test machine is busy: three clusters for some seconds each, and four short ones.
const BOUND: Duration = Duration::from_secs(300);

const SMALL: [&str; 18] = [
    "bench",
    "--compare",
    "--model",
    "builtin:tiny",
    "--json",
    "--streams",
    "4",
    "--duration",
    "3",
    "--quiet",
    "1",
    "--arrivals",
    "4",
    "--arrival-prompt-tokens",
    "1024",
    "--chunks",
    "64,128",
    "--seed=3",
];

fn start(logs: &LogDir, more: &[&str]) -> Process {
    Process::start("compare", logs.path(), &strings(&[&SMALL[..], more].concat()), &[])
}

async fn wait_gone(pids: &BTreeSet<u32>) {
    eventually("every process below is gone", Duration::from_secs(15), async || {
        let left: Vec<&u32> = pids.iter().filter(|&&pid| is_alive(pid)).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?} run")) }
    })
    .await;
}

/// Its end, and every process that was ever seen below it.
async fn run_to_the_end(process: &mut Process) -> BTreeSet<u32> {
    let mut below = BTreeSet::new();
    eventually("the comparison ends", BOUND, async || {
        below.extend(process.descendants());
        if process.try_status().is_some() { Ok(()) } else { Err(process.output()) }
    })
    .await;
    below
}

fn report(said: &str) -> Value {
    let json = said.find("\n{").map(|at| &said[at..]).unwrap_or_default();
    serde_json::Deserializer::from_str(json).into_iter().next().expect("JSON").expect("JSON")
}

#[tokio::test]
async fn a_comparison_reports_every_layout_and_leaves_no_process() {
    let _turn = Turn::take();
    let logs = LogDir::new();
    let picture = logs.path().join("gaps.svg");
    let mut process = start(&logs, &["--svg", &picture.display().to_string(), "--slo-itl-ms", "1000"]);
    let below = run_to_the_end(&mut process).await;
    let said = process.output();
    assert_eq!(process.exit_code(Duration::from_secs(1)), 0, "{said}");
    // Nine clusters: one apart; and for each of two colocated layouts one in one piece, two tries, one with the best chunk.
    assert!(below.len() >= 9 * 3, "{} processes", below.len());
    wait_gone(&below).await;

    let report = report(&said);
    let layouts: Vec<&Value> =
        report["colocated"].as_array().expect("a list").iter().map(|one| &one["layout"]).collect();
    assert_eq!(layouts, ["2x1", "2x1", "1x2", "1x2"]);
    let columns = std::iter::once(&report["disaggregated"]).chain(report["colocated"].as_array().unwrap());
    for (nth, column) in columns.enumerate() {
        for figure in ["itl_ms", "quiet_itl_ms", "ttft_ms", "tpot_ms"] {
            let of = |name: &str| {
                column[figure][name].as_f64().unwrap_or_else(|| panic!("{nth} {figure}.{name}: {column}"))
            };
            assert!(of("p50") > 0.0 && of("p50") <= of("p99") && of("p99") <= of("max"), "{column}");
        }
        assert!(column["arrivals"].as_u64() >= Some(4), "{column}");
        assert_eq!(column["errors"], json!({}), "{column}");
        assert!(column["output_tokens_per_s"].as_f64() > Some(0.0), "{column}");
        assert!(column["requests_in_slo"].as_u64() > Some(0), "{column}");
        // Only apart does KV move, once for each arrival.
        let transfers = column["kv"]["transfers"].as_u64();
        let wanted = if nth == 0 { column["arrivals"].as_u64() } else { Some(0) };
        assert_eq!(transfers, wanted, "{column}");
    }
    for one in report["colocated"].as_array().unwrap() {
        let chunk = one["chunk"].as_u64();
        assert!([None, Some(64), Some(128)].contains(&chunk), "{chunk:?}");
        assert_eq!(one["tried"].as_array().map_or(0, Vec::len), if chunk.is_some() { 2 } else { 0 });
    }
    let avoided = &report["avoided_stall"];
    for (name, at_least) in [("modelled_ms", 1.0), ("measured_ms", 1.0)] {
        assert!(avoided[name].as_f64() >= Some(at_least), "{name}: {avoided}");
    }
    assert!(report["verdict"].as_array().is_some_and(|verdict| verdict.len() == 6), "{report}");
    let picture = std::fs::read_to_string(picture).expect("a picture");
    assert!(picture.starts_with("<svg") && picture.matches("<text x=").count() == 5, "{picture}");
}

#[tokio::test]
async fn ctrl_c_ends_a_comparison_with_everything_it_started() {
    let _turn = Turn::take();
    let logs = LogDir::new();
    let mut process = start(&logs, &[]);
    let mut below = BTreeSet::new();
    eventually("a cluster is driven", BOUND, async || {
        below.extend(process.descendants());
        assert!(process.try_status().is_none(), "it ended:\n{}", process.output());
        if process.output().contains("arrivals within") { Ok(()) } else { Err(process.output()) }
    })
    .await;
    assert!(below.len() >= 4, "up, a router and two workers: {below:?}");
    process.signal(libc::SIGINT);
    assert_eq!(process.exit_code(Duration::from_secs(20)), 130);
    wait_gone(&below).await;
}

#[tokio::test]
async fn a_killed_comparison_takes_everything_along() {
    let _turn = Turn::take();
    let logs = LogDir::new();
    let mut process = start(&logs, &[]);
    let mut below = BTreeSet::new();
    eventually("a cluster runs", BOUND, async || {
        below.extend(process.descendants());
        if below.len() >= 4 { Ok(()) } else { Err(process.output()) }
    })
    .await;
    process.kill();
    wait_gone(&below).await;
}

#[tokio::test]
async fn a_trace_file_is_the_workload() {
    let _turn = Turn::take();
    let logs = LogDir::new();
    let file = logs.path().join("trace.jsonl");
    let line = |at: u32, input: u32, ids: &[u64]| {
        json!({"timestamp": at, "input_length": input, "output_length": 6, "hash_ids": ids}).to_string()
    };
    let lines = [line(0, 600, &[1, 2]), line(300, 700, &[1, 3]), line(400, 200_000, &[0; 391])].join("\n");
    std::fs::write(&file, lines).expect("a file");
    let args = ["bench", "--compare", "--model", "builtin:tiny", "--json", "--chunks", "128", "--workload"];
    let args = [&strings(&args)[..], &[file.display().to_string()]].concat();
    let mut process = Process::start("compare", logs.path(), &args, &[]);
    let below = run_to_the_end(&mut process).await;
    let said = process.output();
    assert_eq!(process.exit_code(Duration::from_secs(1)), 0, "{said}");
    wait_gone(&below).await;
    let report = report(&said);
    assert_eq!(report["load"]["left_out"], 1);
    assert_eq!(report["disaggregated"]["arrivals"], 2);
    // No streams: the requests' own gaps are the figures.
    assert_eq!(report["disaggregated"]["itl_ms"]["count"], 10);
    // The second prompt begins like the first, so that the first block of 512 is not moved again.
    let bytes = report["disaggregated"]["kv"]["bytes"].as_u64().expect("bytes");
    assert!(bytes > 0 && bytes.is_multiple_of(600 + 700 - 512), "{bytes} bytes");

    std::fs::write(&file, "{\"timestamp\": 1}\n").expect("a file");
    let mut process = Process::start("compare", logs.path(), &args, &[]);
    let below = run_to_the_end(&mut process).await;
    assert_eq!(process.exit_code(Duration::from_secs(1)), 2);
    assert!(process.output().contains("line 1"), "{}", process.output());
    wait_gone(&below).await;
}
