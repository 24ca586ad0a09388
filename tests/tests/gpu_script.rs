//! The script with which a card is met, on the driver for tests: every part runs to its end, and nothing that it says can be taken for a figure.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use baton_tests::Turn;
use baton_tests::fake_cuda::FakeCuda;

const PARTS: [&str; 8] =
    ["card", "kernels", "sanitizer", "tokens", "handoff", "decode_rate", "prefill_rate", "shape"];

/// The newest test program of this name beside this one; only `cargo test --workspace` makes all of them.
fn program(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().expect("this program");
    let beside = std::fs::read_dir(own.parent()?).ok()?.flatten().map(|entry| entry.path());
    let named = |path: &PathBuf| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.starts_with(&format!("{name}-")) && !file.contains('.')
    };
    beside.filter(named).max_by_key(|path| path.metadata().and_then(|found| found.modified()).ok())
}

fn run(fake: &FakeCuda, out: &Path, arguments: &[&str]) -> Output {
    let libraries = fake.env();
    let (name, folder) = libraries.split_once('=').expect("an assignment");
    let mut command = Command::new("python3");
    command.arg(baton_tests::repository().join("tests/gpu/run")).arg(baton_tests::binary::baton());
    command.arg("--out").arg(out).args(arguments).env(name, folder);
    for (variable, program) in
        [("CUDA_KERNEL_TESTS", program("cuda_kernels")), ("CUDA_SHAPE", program("cuda_shape"))]
    {
        command.envs(program.map(|path| (variable, path)));
    }
    command.output().expect("python3 runs")
}

#[test]
fn every_part_runs_on_the_driver_for_tests_and_nothing_looks_like_a_figure() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let dir = tempfile::tempdir().expect("a folder");
    let missing: Vec<_> = [("kernels", "cuda_kernels"), ("shape", "cuda_shape")]
        .into_iter()
        .filter(|(_, name)| program(name).is_none())
        .map(|(part, _)| part)
        .collect();
    if !missing.is_empty() {
        eprintln!("left out, since their programs were not built: {missing:?}");
    }
    let parts: Vec<_> = PARTS.into_iter().filter(|part| !missing.contains(part)).collect();
    let output = run(&fake, dir.path(), &["--reduced", "--parts", &parts.join(",")]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let report = std::fs::read_to_string(dir.path().join("gpu.json")).expect("a report");
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    let outcomes: Vec<_> = report["parts"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|part| (part["part"].as_str().unwrap_or_default(), part["outcome"].as_str().unwrap_or_default()))
        .collect();
    let wanted: Vec<_> =
        parts.iter().map(|&part| (part, if part == "sanitizer" { "skipped" } else { "ok" })).collect();
    assert_eq!(outcomes, wanted, "{report}");
    let table = std::fs::read_to_string(dir.path().join("gpu.md")).expect("a table");
    for told in [text.as_str(), table.as_str(), report["no_figures"].as_str().unwrap_or_default()] {
        assert!(told.contains("NO FIGURES") && told.contains("driver for tests"), "{told}");
    }
    let handoff = &report["parts"].as_array().expect("a list")
        [parts.len() - if missing.contains(&"shape") { 3 } else { 4 }];
    assert_eq!(handoff["cuda:0 to cuda:0 over ipc"]["longest_transfer"]["transport"], "ipc", "{handoff}");
}

#[test]
fn without_its_word_for_it_the_script_takes_no_driver_for_tests() {
    let _turn = Turn::take();
    let Some(fake) = FakeCuda::build_or_skip() else { return };
    let dir = tempfile::tempdir().expect("a folder");
    let output = run(&fake, dir.path(), &["--model", "builtin:tiny"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("a driver for tests is loaded, which no figure may come from"), "{text}");
}
