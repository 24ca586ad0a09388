//! The house rules that a machine can check. Each names what broke it, file and line.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use baton_tests::metadata::{Metadata, Package};
use baton_tests::source::{self, Line};

const MAX_LINES: usize = 500;

/// Crates whose `now` is an argument.
const PURE: [&str; 5] = ["kv", "handoff", "scheduler", "dispatch", "timing"];

/// Who may use whom; everything not listed here is not allowed.
const EDGES: [(&str, &[&str]); 18] = [
    ("kv", &[]),
    ("handoff", &["kv"]),
    ("scheduler", &["kv"]),
    ("dispatch", &["kv", "handoff"]),
    ("timing", &["kv", "scheduler"]),
    ("sim", &["kv", "handoff", "scheduler", "dispatch", "timing"]),
    // Demonstrations look at every pure crate; nothing that serves looks at them.
    ("lab", &["kv", "scheduler", "timing", "sim"]),
    ("plan", &["dispatch", "timing", "sim"]),
    ("proto", &[]),
    ("telemetry", &[]),
    ("model", &[]),
    ("text", &["model"]),
    ("engine", &["kv", "scheduler", "model"]),
    ("transfer", &["kv", "handoff", "proto", "telemetry"]),
    // What both workers share includes the memory plan, which asks the engine and the model what they take.
    ("worker", &["kv", "handoff", "scheduler", "model", "engine", "proto", "telemetry"]),
    ("prefill-worker", WORKER),
    ("decode-worker", WORKER),
    ("router", &["kv", "handoff", "dispatch", "model", "text", "proto", "telemetry"]),
];
const WORKER: &[&str] =
    &["kv", "handoff", "scheduler", "engine", "model", "transfer", "worker", "proto", "telemetry"];

/// Rooms that may use everything and that nothing uses.
const TOPS: [&str; 2] = ["cli", "tests"];

fn metadata() -> &'static Metadata {
    static METADATA: OnceLock<Metadata> = OnceLock::new();
    METADATA.get_or_init(Metadata::read)
}

fn room(name: &str) -> Option<&str> {
    name.strip_prefix("baton-")
}

fn members() -> Vec<&'static Package> {
    metadata().members()
}

/// Every Rust file with its lines, comments taken out.
fn rust() -> &'static [(PathBuf, Vec<Line>)] {
    static RUST: OnceLock<Vec<(PathBuf, Vec<Line>)>> = OnceLock::new();
    RUST.get_or_init(|| {
        let files = source::files("rs");
        assert!(files.len() > 30, "the source tree was not found: {files:?}");
        files.into_iter().map(|path| (path.clone(), source::lines(&source::text(&path)))).collect()
    })
}

fn in_pure_crate(path: &Path) -> bool {
    PURE.iter().any(|name| path.starts_with(Path::new("crates").join(name)))
}

/// Whether one of the folders above the file has this name.
fn is_in(path: &Path, folder: &str) -> bool {
    path.components().any(|part| part.as_os_str() == folder)
}

/// Fails with every line for which `broken` says why.
fn no_line(rule: &str, mut broken: impl FnMut(&Path, &Line) -> Option<String>) {
    let mut found = Vec::new();
    for (path, lines) in rust() {
        for (nth, line) in lines.iter().enumerate() {
            if let Some(why) = broken(path, line) {
                found.push(format!("{}:{}: {why}", path.display(), nth + 1));
            }
        }
    }
    assert!(found.is_empty(), "{rule}\n{}", found.join("\n"));
}

fn contains_any(line: &Line, patterns: &[&str]) -> Option<String> {
    let hit = patterns.iter().find(|pattern| has_word(&line.code, pattern))?;
    Some((*hit).to_owned())
}

/// Whether `pattern` stands in `code` and does not continue a longer word.
fn has_word(code: &str, pattern: &str) -> bool {
    code.match_indices(pattern).any(|(at, _)| {
        !code[..at].chars().next_back().is_some_and(|before| before.is_alphanumeric() || before == '_')
    })
}

#[test]
fn dependencies_point_one_way() {
    let allowed: BTreeMap<&str, &[&str]> = EDGES.into_iter().collect();
    for package in members() {
        let name = room(&package.name).expect("packages are named baton-*");
        for dependency in &package.dependencies {
            let Some(on) = room(&dependency.name) else { continue };
            assert!(!TOPS.contains(&on), "nothing uses baton-{on}, but baton-{name} does");
            if TOPS.contains(&name) {
                continue;
            }
            let may = allowed.get(name).unwrap_or_else(|| panic!("baton-{name} has no line in EDGES"));
            // A test may build on more, but a pure crate's tests stay pure.
            let test_only = dependency.kind.as_deref() == Some("dev") && !PURE.contains(&name);
            assert!(may.contains(&on) || test_only, "baton-{name} must not depend on baton-{on}");
        }
    }
}

#[test]
fn pure_crates_are_built_of_nothing_that_touches_the_world() {
    const WORLD: [&str; 12] = [
        "tokio",
        "tonic",
        "tracing",
        "rand",
        "getrandom",
        "prost",
        "hyper",
        "axum",
        "opentelemetry",
        "candle-core",
        "cudarc",
        "libc",
    ];
    let graph = &metadata().resolve;
    let names: BTreeMap<_, _> = metadata().packages.iter().map(|p| (&p.id, p.name.as_str())).collect();
    let nodes: BTreeMap<_, _> = graph.nodes.iter().map(|node| (&node.id, node)).collect();
    for package in members() {
        let name = room(&package.name).unwrap_or_default();
        if !PURE.contains(&name) && !["sim", "lab", "plan"].contains(&name) {
            continue;
        }
        let mut open = vec![&package.id];
        let mut seen = BTreeSet::new();
        while let Some(id) = open.pop() {
            assert!(!WORLD.contains(&names[id]), "baton-{name} is built of {}", names[id]);
            let normal = nodes[id]
                .deps
                .iter()
                .filter(|dep| dep.dep_kinds.iter().any(|kind| kind.kind.is_none() && kind.target.is_none()));
            open.extend(normal.map(|dep| &dep.pkg).filter(|id| seen.insert((*id).clone())));
        }
    }
}

#[test]
fn pure_crates_name_no_runtime_clock_or_randomness() {
    const WORLD: [&str; 10] = [
        "tokio::",
        "tonic::",
        "tracing::",
        "rand::",
        "getrandom",
        "Instant::now",
        "SystemTime::now",
        "thread::sleep",
        "thread::spawn",
        "std::net",
    ];
    no_line("A pure crate touches the world:", |path, line| {
        // A benchmark measures time; that is what it is for.
        (in_pure_crate(path) && !is_in(path, "benches")).then(|| contains_any(line, &WORLD)).flatten()
    });
}

#[test]
fn one_version_of_each_crate_that_matters() {
    const ONE: [&str; 24] = [
        "tokio",
        "tonic",
        "tonic-prost",
        "prost",
        "prost-types",
        "axum",
        "axum-core",
        "hyper",
        "hyper-util",
        "h2",
        "http",
        "http-body",
        "bytes",
        "tower",
        "tower-service",
        "candle-core",
        "half",
        "tokenizers",
        "tracing",
        "tracing-subscriber",
        "opentelemetry",
        "rustls",
        "serde",
        "clap",
    ];
    for name in ONE {
        let mut versions: Vec<_> =
            metadata().packages.iter().filter(|p| p.name == name).map(|p| &p.version).collect();
        versions.dedup();
        assert!(versions.len() <= 1, "{name}: versions in the tree: {versions:?}");
    }
}

#[test]
fn packages_share_the_house_settings() {
    for package in members() {
        assert!(package.name.starts_with("baton-"), "{} is not named baton-*", package.name);
        assert_eq!(package.publish.as_deref(), Some(&[][..]), "{} could be published", package.name);
        assert_eq!(package.edition.as_str(), "2024", "{}", package.name);
        assert!(package.license.is_some() && package.rust_version.is_some(), "{}", package.name);
        let manifest = std::fs::read_to_string(&package.manifest_path).expect("a manifest");
        assert!(manifest.contains("[lints]\nworkspace = true"), "{} has lints of its own", package.name);
        for line in manifest.lines().filter(|line| line.contains("version = \"") || line.contains(" = \"")) {
            let own = ["name", "description", "path", "harness", "default-run", "build", "required-features"];
            let key = line.split(['=', '.']).next().unwrap_or_default().trim();
            assert!(
                own.contains(&key) || line.contains('[') || line.contains("path = "),
                "{}: '{line}': versions stand in the root Cargo.toml once",
                package.name
            );
        }
    }
}

#[test]
fn a_file_is_one_idea() {
    const NAMES: [&str; 6] = ["common", "utils", "util", "types", "helpers", "misc"];
    let mut found = Vec::new();
    for (path, _) in rust() {
        let num_lines = source::text(path).lines().count();
        if num_lines > MAX_LINES {
            found.push(format!("{}: {num_lines} lines, at most {MAX_LINES}", path.display()));
        }
        let folder = path.parent().and_then(Path::file_name);
        if [path.file_stem(), folder].into_iter().flatten().any(|name| NAMES.iter().any(|bad| name == *bad)) {
            found.push(format!("{}: the name says nothing", path.display()));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn a_crate_opens_with_what_it_owns_and_must_never_know() {
    for package in members() {
        for target in package.targets.iter().filter(|target| target.kind.iter().any(|kind| kind == "lib")) {
            let text = std::fs::read_to_string(&target.src_path).expect("a source file");
            let docs: String = text.lines().take_while(|line| line.starts_with("//!")).collect();
            let lower = docs.to_lowercase();
            assert!(
                lower.contains("own") && lower.contains("never"),
                "{}: opens with '{docs}'",
                target.src_path.display()
            );
        }
    }
}

#[test]
fn nothing_is_left_undone() {
    const LEFT: [&str; 5] = ["todo!(", "unimplemented!(", "dbg!(", "#[ignore", "assert!(true"];
    no_line("Left undone:", |_, line| {
        LEFT.iter().find(|pattern| line.code.contains(**pattern)).map(|pattern| (*pattern).to_owned())
    });
}

#[test]
fn every_queue_has_a_bound() {
    const UNBOUNDED: [&str; 4] = ["unbounded_channel", "mpsc::channel()", "unbounded()", "UnboundedSender"];
    no_line("A queue without a bound:", |_, line| contains_any(line, &UNBOUNDED));
}

#[test]
fn metric_and_span_names_stand_in_telemetry_alone() {
    // A name of one word, such as `decode`, is a word of many other things too.
    let spans: Vec<String> = span_names().into_iter().filter(|name| name.contains('.')).collect();
    assert!(spans.len() >= 10, "{spans:?}");
    const MACROS: [&str; 7] = [
        "span!(",
        "trace_span!(",
        "debug_span!(",
        "info_span!(",
        "warn_span!(",
        "error_span!(",
        "#[instrument",
    ];
    let crates: BTreeSet<String> = members().iter().map(|package| package.name.replace('-', "_")).collect();
    no_line("Belongs into crates/telemetry:", |path, line| {
        // Tests read metrics from outside, by the names that users read.
        if path.starts_with("crates/telemetry") || is_in(path, "tests") {
            return None;
        }
        if let Some(hit) = contains_any(line, &MACROS) {
            return Some(hit);
        }
        line.strings.iter().find_map(|text| {
            let metric = words(text).find(|word| word.starts_with("baton_") && !crates.contains(*word));
            let span = spans.iter().map(String::as_str).find(|span| text == span);
            metric.or(span).map(|name| format!("\"{name}\""))
        })
    });
}

/// What `names::span` lists.
fn span_names() -> Vec<String> {
    let lines = source::lines(&source::text(Path::new("crates/telemetry/src/names.rs")));
    let within = lines.iter().skip_while(|line| !line.code.contains("pub mod span"));
    let within = within.take_while(|line| line.code.trim() != "}");
    within.flat_map(|line| line.strings.clone()).collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

#[test]
fn documented_cargo_commands_are_locked() {
    const SUBCOMMANDS: [&str; 8] = ["run", "build", "test", "install", "clippy", "check", "bench", "doc"];
    let mut found = Vec::new();
    for path in source::files("md").into_iter().chain([PathBuf::from("justfile"), PathBuf::from(".ci/run")]) {
        for (nth, line) in source::text(&path).lines().enumerate() {
            let commands = line.match_indices("cargo ").map(|(at, _)| &line[at..]);
            // A command ends at a backtick or a shell operator.
            let commands = commands.map(|rest| rest.split(['`', ';', '&', '|']).next().unwrap_or_default());
            for command in commands {
                let subcommand = command.split_whitespace().nth(1).unwrap_or_default();
                if SUBCOMMANDS.contains(&subcommand)
                    && !command.contains("--locked")
                    && !command.contains("--version")
                {
                    found.push(format!("{}:{}: {command}", path.display(), nth + 1));
                }
            }
        }
    }
    assert!(found.is_empty(), "without --locked:\n{}", found.join("\n"));
}

#[test]
fn links_between_documents_resolve() {
    let mut found = Vec::new();
    for path in source::files("md") {
        let text = source::text(&path);
        let folder = baton_tests::repository().join(&path).parent().expect("a file has a folder").to_owned();
        for (at, _) in text.match_indices("](") {
            let link = text[at + 2..].split([')', ' ', '\n']).next().unwrap_or_default();
            let file = link.split('#').next().unwrap_or_default();
            if !file.is_empty()
                && !link.contains("://")
                && !link.starts_with("mailto:")
                && !folder.join(file).exists()
            {
                found.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(found.is_empty(), "links to nothing:\n{}", found.join("\n"));
}

#[test]
fn the_surroundings_are_there() {
    for file in [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "LICENSE-MIT",
        "LICENSE-APACHE",
        "justfile",
        "rust-toolchain.toml",
        "clippy.toml",
        "deny.toml",
        "rustfmt.toml",
        ".ci/run",
    ] {
        assert!(baton_tests::repository().join(file).is_file(), "{file} is missing");
    }
}
