//! The `baton` binary under test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The workspace's target directory, from where this test binary lies (`target/PROFILE/deps/NAME`).
///
/// # Panics
/// When the test was not built by cargo.
pub fn target_dir() -> PathBuf {
    profile_dir().parent().expect("a profile's folder has a parent").to_owned()
}

fn profile_dir() -> PathBuf {
    let exe = std::env::current_exe().expect("a running test knows its file");
    let deps = exe.parent().expect("a file has a folder");
    assert!(deps.ends_with("deps"), "not built by cargo: {}", exe.display());
    deps.parent().expect("deps lies in a profile's folder").to_owned()
}

/// Path of the `baton` binary: `BATON_TEST_BINARY` when set, else built here, once, in the profile of the test itself. Cargo
/// gives a test the path of its own package's binaries only, and waits for another cargo in the same target folder.
///
/// # Panics
/// When it can't be built.
pub fn baton() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| match std::env::var_os("BATON_TEST_BINARY") {
        Some(path) => std::path::absolute(path).expect("BATON_TEST_BINARY is a path"),
        None => build(),
    })
}

/// How the variables begin that cargo sets for a test it runs.
const TOLD_TO_TESTS: [&str; 7] = [
    "CARGO_PKG_",
    "CARGO_MANIFEST_",
    "CARGO_BIN_",
    "CARGO_CRATE_NAME",
    "CARGO_PRIMARY_PACKAGE",
    "CARGO_TARGET_TMPDIR",
    "OUT_DIR",
];

fn build() -> PathBuf {
    let profile_dir = profile_dir();
    let profile = match profile_dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["build", "--locked", "--package", "baton-cli", "--bin", "baton", "--profile", profile])
        .arg("--target-dir")
        .arg(target_dir())
        .current_dir(crate::repository());
    // What cargo tells a test about its package is a changed environment to build scripts, which would build all over again.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if TOLD_TO_TESTS.iter().any(|told| text.starts_with(told)) {
            command.env_remove(name);
        }
    }
    let output = command.output().expect("cargo runs");
    assert!(output.status.success(), "the binary under test: {}", String::from_utf8_lossy(&output.stderr));
    profile_dir.join("baton")
}
