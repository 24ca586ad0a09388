//! The fetch of a packaged model, with a stand-in for pip.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Mutex;

use super::*;
use crate::{HubOptions, NoProgress};

const CONTENT: &[u8] = b"GGUF and then some weights";

/// A folder with a package, a cache, and a `python3` that does what `script` says.
struct Fixture {
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new(script: &str) -> Fixture {
        let fixture = Fixture { folder: tempfile::tempdir().unwrap() };
        let file = File::create(fixture.path("package.whl")).unwrap();
        let mut archive = zip::ZipWriter::new(file);
        let options = zip::write::SimpleFileOptions::default();
        archive.start_file("package/other.py", options).unwrap();
        archive.write_all(b"raise SystemExit('never run')").unwrap();
        archive.start_file("package/small.gguf", options).unwrap();
        archive.write_all(CONTENT).unwrap();
        archive.finish().unwrap();
        let python = fixture.path("python3");
        // The arguments end in: --dest FOLDER REQUIREMENT.
        let preamble = "#!/bin/sh\n[ \"$1\" != -c ] || { echo \"$0\"; exit; }\nwhile [ $# -gt 2 ]; do shift; done\ndest=\"$1\"; requirement=\"$2\"\n";
        fs::write(&python, format!("{preamble}here=\"$(dirname \"$0\")\"\n{script}\n")).unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn model(&self) -> Packaged {
        Packaged {
            file: "small.gguf",
            bytes: CONTENT.len() as u64,
            sha256: digest::hex(&<sha2::Sha256 as sha2::Digest>::digest(CONTENT)),
            requirement: "package==1.0",
            member: "package/small.gguf",
            package_bytes: 1000,
            python: self.path("python3").into(),
        }
    }

    fn resolve(&self, model: &Packaged) -> Result<PathBuf, ModelError> {
        model.resolve(&options(&self.path("cache"), &NoProgress))
    }

    fn cached(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("cache")).unwrap().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        names
    }
}

fn options<'a>(cache: &Path, progress: &'a dyn Progress) -> ResolveOptions<'a> {
    let hub = HubOptions { endpoint: String::new(), token: None };
    ResolveOptions { cache_dir: cache.to_owned(), progress, offline: false, hub }
}

const GOOD: &str =
    r#"echo run >> "$here/runs"; mkdir -p "$dest"; cp "$here/package.whl" "$dest/package-1.0.whl""#;

#[test]
fn the_member_is_fetched_once_and_nothing_else_is_left() {
    let fixture = Fixture::new(GOOD);
    for _ in 0..3 {
        assert_eq!(fs::read(fixture.resolve(&fixture.model()).unwrap()).unwrap(), CONTENT);
    }
    assert_eq!(fs::read_to_string(fixture.path("runs")).unwrap(), "run\n");
    assert_eq!(fixture.cached(), ["small.gguf", "small.gguf.lock", "small.gguf.verified"]);
}

#[test]
fn what_an_interrupted_download_left_is_cleared() {
    let fixture = Fixture::new(&format!("[ ! -e \"$dest/../stale\" ] || exit 9; {GOOD}"));
    let stale = fixture.path("cache/small.gguf.fetch");
    fs::create_dir_all(&stale).unwrap();
    fs::write(stale.join("stale"), "half").unwrap();
    fixture.resolve(&fixture.model()).unwrap();
    assert_eq!(fixture.cached(), ["small.gguf", "small.gguf.lock", "small.gguf.verified"]);
}

#[test]
fn a_damaged_copy_in_the_cache_is_replaced() {
    let fixture = Fixture::new(GOOD);
    let path = fixture.resolve(&fixture.model()).unwrap();
    for damaged in [b"GGUF and then some weightz".as_slice(), b"GG"] {
        // A new file, as damage that also keeps the time of change can't be seen.
        fs::remove_file(&path).unwrap();
        fs::write(&path, damaged).unwrap();
        fs::File::open(&path).unwrap().set_modified(UNIX_EPOCH + Duration::from_secs(1)).unwrap();
        fixture.resolve(&fixture.model()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), CONTENT);
    }
}

#[test]
fn another_file_than_expected_never_becomes_the_model() {
    let fixture = Fixture::new(GOOD);
    let other_hash = Packaged { sha256: "00".repeat(32), ..fixture.model() };
    let shorter = Packaged { bytes: 4, ..fixture.model() };
    let elsewhere = Packaged { member: "package/none.gguf", ..fixture.model() };
    for model in [other_hash, shorter, elsewhere] {
        let error = fixture.resolve(&model).unwrap_err();
        assert!(matches!(error, ModelError::Corrupt { .. }), "{error:?}");
        assert_eq!(fixture.cached(), ["small.gguf.lock"]);
    }
}

#[test]
fn missing_tools_are_named() {
    let fixture = Fixture::new("echo \"$0: No module named pip\" >&2; exit 1");
    let without_python = Packaged { python: fixture.path("none").into(), ..fixture.model() };
    for (model, tool) in [(without_python, "python3 with pip"), (fixture.model(), "pip for python3")] {
        let error = fixture.resolve(&model).unwrap_err();
        assert!(matches!(&error, ModelError::MissingTool { tool: found } if found == tool), "{error:?}");
        assert!(error.to_string().contains("--model PATH"), "{error}");
    }
}

#[test]
fn a_version_managers_script_is_passed_by() {
    let real = Fixture::new(GOOD);
    let shim = real.path("shim");
    let python = real.path("python3");
    let python = python.display();
    // Answers where the interpreter is, and would download in a grandchild.
    fs::write(&shim, format!("#!/bin/sh\n[ \"$1\" = -c ] && exec {python} -c\n{python} \"$@\"; exit 9\n"))
        .unwrap();
    fs::set_permissions(&shim, fs::Permissions::from_mode(0o755)).unwrap();
    real.resolve(&Packaged { python: shim.into(), ..real.model() }).unwrap();
}

#[test]
fn pips_own_error_is_passed_on_in_one_line() {
    let fixture = Fixture::new(
        "echo Collecting; echo 'ERROR: Could not find a version'; echo 'ERROR: No matching distribution'; exit 1",
    );
    let text = fixture.resolve(&fixture.model()).unwrap_err().to_string();
    assert!(text.contains("ERROR: No matching distribution") && !text.contains('\n'), "{text}");
    let fixture = Fixture::new("exit 3");
    let text = fixture.resolve(&fixture.model()).unwrap_err().to_string();
    assert!(text.contains("exit status: 3"), "{text}");
    let fixture = Fixture::new("mkdir -p \"$dest\"");
    let text = fixture.resolve(&fixture.model()).unwrap_err().to_string();
    assert!(text.contains("left no package"), "{text}");
}

#[test]
fn progress_follows_what_pip_has_on_disk() {
    #[derive(Default)]
    struct Log(Mutex<Vec<String>>);
    impl Log {
        fn add(&self, line: String) {
            self.0.lock().unwrap().push(line);
        }
    }
    impl Progress for Log {
        fn start(&self, what: &str, total_bytes: Option<u64>) {
            self.add(format!("start {what} {total_bytes:?}"));
        }
        fn advance_to(&self, done_bytes: u64) {
            if done_bytes >= 500 {
                self.add("half".to_owned());
            }
        }
        fn note(&self, _line: &str) {}
        fn finish(&self) {
            self.add("finish".to_owned());
        }
    }
    let script = format!("head -c 500 /dev/zero > \"$TMPDIR/unpacking\"; sleep 1; {GOOD}");
    let fixture = Fixture::new(&script);
    let log = Log::default();
    fixture.model().resolve(&options(&fixture.path("cache"), &log)).unwrap();
    let mut lines = log.0.into_inner().unwrap();
    lines.dedup();
    assert_eq!(lines, ["start small.gguf Some(1000)", "half", "finish"]);
}

#[test]
fn several_at_once_fetch_once() {
    let fixture = Fixture::new(&format!("sleep 0.3; {GOOD}"));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| fixture.resolve(&fixture.model()).unwrap());
        }
    });
    assert_eq!(fs::read_to_string(fixture.path("runs")).unwrap(), "run\n");
}

/// Not a test by itself: the process that `pip_does_not_survive_a_killed_parent` starts and kills.
#[test]
fn resolving_process() {
    if let Some(folder) = std::env::var_os("BATON_TEST_RESOLVE_IN") {
        let model =
            Packaged { python: Path::new(&folder).join("python3").into(), ..Fixture::new("").model() };
        let outcome = model.resolve(&options(&Path::new(&folder).join("cache"), &NoProgress));
        panic!("the download ended before this process was killed: {outcome:?}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn pip_does_not_survive_a_killed_parent() {
    let fixture =
        Fixture::new("echo $$ > \"$here/pid.new\"; mv \"$here/pid.new\" \"$here/pid\"; exec sleep 60");
    let mut parent = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "default_model::tests::resolving_process"])
        .env("BATON_TEST_RESOLVE_IN", fixture.folder.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let soon = |what: &dyn Fn() -> bool| {
        (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            what()
        })
    };
    assert!(soon(&|| fixture.path("pid").exists()), "pip was not started");
    let pid = fs::read_to_string(fixture.path("pid")).unwrap();
    // A process that ended and was not yet collected shows as a zombie.
    let is_gone = || match fs::read_to_string(format!("/proc/{}/stat", pid.trim())) {
        Ok(stat) => stat.contains(") Z "),
        Err(_) => true,
    };
    assert!(!is_gone());
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert!(soon(&is_gone), "pip lives on");
}
