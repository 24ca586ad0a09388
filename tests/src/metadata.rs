//! What `cargo metadata` says, as far as the house rules ask. Read here rather than by a crate for it: that one would switch
//! on a feature of `serde_json`, and the binary under test would be built of other dependencies than the tests.

use std::path::PathBuf;
use std::process::Command;

use serde::Deserialize;

/// The whole graph.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    /// Every package, the registry's too.
    pub packages: Vec<Package>,
    /// Ids of our own.
    pub workspace_members: Vec<String>,
    /// What each package was resolved to.
    pub resolve: Resolve,
}

/// One package.
#[derive(Debug, Deserialize)]
pub struct Package {
    /// Unique.
    pub id: String,
    /// Name.
    pub name: String,
    /// Version.
    pub version: String,
    /// Edition.
    pub edition: String,
    /// Licence expression.
    pub license: Option<String>,
    /// Least compiler.
    pub rust_version: Option<String>,
    /// Registries it may be published to; `None` is any.
    pub publish: Option<Vec<String>>,
    /// Its Cargo.toml.
    pub manifest_path: PathBuf,
    /// As declared, features and platforms not resolved.
    pub dependencies: Vec<Dependency>,
    /// Libraries, binaries, tests.
    pub targets: Vec<Target>,
}

/// A declared dependency.
#[derive(Debug, Deserialize)]
pub struct Dependency {
    /// Package.
    pub name: String,
    /// `None`, "dev" or "build".
    pub kind: Option<String>,
}

/// Something that is compiled.
#[derive(Debug, Deserialize)]
pub struct Target {
    /// "lib", "bin", "test", ...
    pub kind: Vec<String>,
    /// Its root.
    pub src_path: PathBuf,
}

/// The resolved graph.
#[derive(Debug, Deserialize)]
pub struct Resolve {
    /// One per package.
    pub nodes: Vec<Node>,
}

/// A package and what it was resolved to depend on.
#[derive(Debug, Deserialize)]
pub struct Node {
    /// The package.
    pub id: String,
    /// Its dependencies.
    pub deps: Vec<NodeDep>,
}

/// One edge.
#[derive(Debug, Deserialize)]
pub struct NodeDep {
    /// The package depended on.
    pub pkg: String,
    /// Every way in which it is.
    pub dep_kinds: Vec<DepKind>,
}

/// One way to depend on a package.
#[derive(Debug, Deserialize)]
pub struct DepKind {
    /// `None`, "dev" or "build".
    pub kind: Option<String>,
    /// The platform it is for; `None` is every one.
    pub target: Option<String>,
}

impl Metadata {
    /// Asks cargo.
    ///
    /// # Panics
    /// When cargo fails, as it does when Cargo.lock is not up to date.
    pub fn read() -> Self {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["metadata", "--locked", "--format-version", "1"])
            .current_dir(crate::repository())
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("cargo's format version 1")
    }

    /// Our own packages.
    pub fn members(&self) -> Vec<&Package> {
        self.packages.iter().filter(|package| self.workspace_members.contains(&package.id)).collect()
    }
}
