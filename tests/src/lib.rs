//! Owns how tests see Baton from outside: real processes of the `baton` binary, an HTTP client, `/metrics`, spans as a collector or
//! a Jaeger gets them, the golden tokens, and the source tree for the house rules.
//!
//! Must never know how a worker works inside: what a cluster does is read from its answers, its metrics, its spans, its logs
//! and its process table. Tests that look inside use the crates themselves.

pub mod binary;
pub mod client;
pub mod cluster;
pub mod fake_cuda;
pub mod go;
pub mod golden;
mod grpc_bytes;
pub mod jaeger;
pub mod metadata;
pub mod metrics;
pub mod netns;
pub mod otlp;
pub mod process;
pub mod proxy;
pub mod seed;
pub mod source;
pub mod spans;
pub mod wait;
pub mod worker;

pub use client::{Answer, Completion, EventStream};
pub use cluster::{Cluster, ClusterConfig};
pub use metrics::Metrics;
pub use process::{LogDir, Process};
pub use wait::{Turn, eventually};

use std::path::PathBuf;

/// The top of the repository.
pub fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Whether skipping is a failure.
pub fn is_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true" || value == "1")
}

/// Says why a test can't run here; under `CI=true` that fails it.
///
/// # Panics
/// Under `CI=true`.
pub fn skip(why: &str) {
    assert!(!is_ci(), "skipping is not allowed under CI=true: {why}");
    eprintln!("SKIPPED: {why}");
}

/// The default model's file, fetched when it is not in the cache yet; `None` after [`skip`] said why.
pub fn model_or_skip() -> Option<PathBuf> {
    let options = baton_model::ResolveOptions::from_env(&baton_model::NoProgress);
    match baton_model::resolve(&baton_model::ModelName::Default, &options) {
        Ok(baton_model::ModelSource::File(path)) => Some(path),
        Ok(other) => {
            skip(&format!("the default model is no file: {other:?}"));
            None
        }
        Err(error) => {
            skip(&format!("the default model can't be had: {error}"));
            None
        }
    }
}
