//! One worker process, and what its `/metrics` says.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use crate::cluster::strings;
use crate::{Metrics, Process, client, eventually};

/// Which kind of worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// `baton prefill-worker`.
    Prefill,
    /// `baton decode-worker`.
    Decode,
}

impl Role {
    /// The subcommand, which is its name in metrics too, less `-worker`.
    const fn command(self) -> &'static str {
        match self {
            Self::Prefill => "prefill-worker",
            Self::Decode => "decode-worker",
        }
    }
}

/// One worker: its process, and where it listens.
pub struct Worker {
    /// The process.
    pub process: Process,
    /// Its gRPC and metrics address; kept over a restart.
    pub address: SocketAddr,
    args: Vec<String>,
    role: Role,
    prefix: Vec<String>,
}

impl Worker {
    /// Starts one on an ephemeral port and waits for its address, not for its model.
    ///
    /// # Panics
    /// When it ends, or tells no address.
    pub async fn start(role: Role, name: &str, dir: &Path, args: Vec<String>) -> Self {
        Self::start_at(role, name, dir, args, SocketAddr::from(([127, 0, 0, 1], 0))).await
    }

    /// As [`Worker::start`], at a given address.
    ///
    /// # Panics
    /// As [`Worker::start`].
    pub async fn start_at(role: Role, name: &str, dir: &Path, args: Vec<String>, at: SocketAddr) -> Self {
        Self::start_with(Vec::new(), role, name, dir, args, at).await
    }

    /// As [`Worker::start_at`], with a command line before the binary, as [`Process::start_with`] takes it.
    ///
    /// # Panics
    /// As [`Worker::start`].
    pub async fn start_with(
        prefix: Vec<String>,
        role: Role,
        name: &str,
        dir: &Path,
        args: Vec<String>,
        at: SocketAddr,
    ) -> Self {
        let file = dir.join(format!("{name}.address"));
        let mut all = strings(&[role.command(), "--listen", &at.to_string(), "--address-file"]);
        all.push(file.display().to_string());
        all.extend(args.iter().cloned());
        let mut process = Process::start_with(&prefix, name, dir, &all, &[]);
        let address = read_address(&mut process, &file).await;
        Self { process, address, args, role, prefix }
    }

    /// Starts it again on the port it had, after it was killed.
    pub fn restart(&mut self, dir: &Path) {
        self.process.kill();
        let mut all = strings(&[self.role.command(), "--listen", &self.address.to_string()]);
        all.extend(self.args.iter().cloned());
        let name = self.process.name.clone();
        self.process = Process::start_with(&self.prefix, &name, dir, &all, &[]);
    }

    /// What its `/metrics` says.
    ///
    /// # Errors
    /// It can't be reached.
    pub async fn metrics(&self) -> Result<Metrics, String> {
        scrape(self.address).await
    }

    /// Whether its blocks are all free and it knows no sequence; else what it says.
    ///
    /// # Errors
    /// What is not at its baseline.
    pub async fn at_baseline(&self) -> Result<(), String> {
        let metrics = self.metrics().await?;
        let blocks = |state| metrics.sum("baton_blocks", &[("state", state)]);
        let total = metrics.sum("baton_blocks_total_configured", &[]);
        let num_requests = metrics.sum("baton_num_requests", &[]);
        // What only the prefix cache holds is allocatable.
        let (free, held, draining) = (blocks("free") + blocks("cached"), blocks("held"), blocks("draining"));
        if total > 0.0 && free == total && held == 0.0 && draining == 0.0 && num_requests == 0.0 {
            return Ok(());
        }
        let name = &self.process.name;
        Err(format!(
            "{name}: free {free}, held {held}, draining {draining} of {total}; {num_requests} requests"
        ))
    }
}

/// Reads the address a role wrote after it was bound.
pub(crate) async fn read_address(process: &mut Process, file: &Path) -> SocketAddr {
    eventually(&format!("{} writes its address", process.name), Duration::from_secs(20), async || {
        if let Some(status) = process.try_status() {
            panic!("{} ended with {status}:\n{}", process.name, process.output());
        }
        let text = std::fs::read_to_string(file).map_err(|error| error.to_string())?;
        text.trim().parse().map_err(|error| format!("'{text}': {error}"))
    })
    .await
}

/// What `/metrics` at an address says.
///
/// # Errors
/// It can't be reached, or answers with an error.
pub async fn scrape(at: SocketAddr) -> Result<Metrics, String> {
    let answer = client::request(at, "GET", "/metrics", None).await?;
    if !answer.status.is_success() {
        return Err(format!("/metrics: {} {}", answer.status, answer.text()));
    }
    Ok(Metrics::parse(&answer.text()))
}
