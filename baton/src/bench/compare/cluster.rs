//! One cluster that is compared: `baton up` as a child, and what its processes say of themselves.

use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_telemetry::scrape::{CAUSE, DECODE_BLOCKED_SECONDS, HOL_AVOIDED_SECONDS, Scrape};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Child;

use super::layout::Start;
use super::measured::MeasuredWorker;
use crate::client::Client;
use crate::exit::Failure;
use crate::up::{self, Launch};

/// How long a cluster may take to load and to answer; a first download happens in it.
const READY: Duration = Duration::from_secs(600);
/// Between two looks at a cluster that starts.
const PAUSE: Duration = Duration::from_millis(100);
/// What a cluster gets to stop in: its own drain timeout and a little, since nothing runs any more.
const STOP: Duration = Duration::from_secs(15);
/// Last lines of a cluster's output that are kept for the case that it fails.
const LAST_LINES: usize = 20;

/// A cluster that runs, and that ends when this is stopped or dropped.
pub(super) struct Cluster {
    child: Child,
    /// Its HTTP face.
    pub(super) client: Client,
    /// Each worker's role and face.
    workers: Vec<(String, Client)>,
    /// Tokens of prompt and answer together.
    pub(super) context: u32,
    lines: Arc<Mutex<Vec<String>>>,
}

/// What all clusters of a comparison have in common.
#[derive(Debug, Clone)]
pub(super) struct Common {
    /// Arguments before the command: logs, configuration file.
    pub(super) global: Vec<OsString>,
    /// The model.
    pub(super) model: String,
    /// The CPUs that they share.
    pub(super) cpus: Vec<usize>,
}

impl Cluster {
    /// Starts one and waits until a chat would succeed. `running` holds it from the first moment on, so that whoever gives up
    /// waiting can stop it.
    ///
    /// # Errors
    /// [`Failure::Child`] when it ends instead, [`Failure::Worker`] when it takes too long.
    pub(super) async fn start<'a>(
        common: &Common,
        start: Start,
        running: &'a mut Option<Self>,
    ) -> Result<&'a Self, Failure> {
        let ports = free_ports()?;
        let client = Client::new(&format!("http://127.0.0.1:{}", ports[0]))?;
        let mut arguments = common.global.clone();
        arguments.push("up".into());
        arguments.push(format!("--model={}", common.model).into());
        if !common.cpus.is_empty() {
            arguments.push(format!("--cpus={}", up::as_list(&common.cpus)).into());
        }
        arguments.push(format!("--http-port={}", ports[0]).into());
        arguments.push(format!("--grpc-port={}", ports[1]).into());
        arguments.extend(start.arguments.into_iter().map(OsString::from));
        let launch = Launch { arguments, environment: start.environment, ..Launch::default() };
        let mut child = up::start_again(&launch)
            .map_err(|error| Failure::Unexpected(format!("can't start `baton up`: {error}")))?;
        let lines = Arc::new(Mutex::new(Vec::new()));
        keep_lines(child.stdout.take(), &lines);
        keep_lines(child.stderr.take(), &lines);
        let cluster = running.insert(Self { child, client, workers: Vec::new(), context: 0, lines });
        match tokio::time::timeout(READY, cluster.become_ready()).await {
            Ok(ready) => ready?,
            Err(_) => return Err(Failure::Worker(cluster.told("was not ready in time"))),
        }
        Ok(cluster)
    }

    async fn become_ready(&mut self) -> Result<(), Failure> {
        let health = loop {
            tokio::select! {
                status = self.child.wait() => {
                    let how = status.as_ref().map_or_else(ToString::to_string, |status| up::describe_end(*status));
                    let code = status.ok().and_then(|status| status.code()).and_then(|code| u8::try_from(code).ok());
                    return Err(Failure::Child { line: self.told(&how), code: code.filter(|code| *code > 0).unwrap_or(7) });
                }
                health = self.client.get("/health") => {
                    if let Ok(health) = health {
                        break health;
                    }
                }
            }
            tokio::time::sleep(PAUSE).await;
        };
        self.context =
            health["context"].as_u64().and_then(|context| u32::try_from(context).ok()).unwrap_or(u32::MAX);
        let workers = health["workers"].as_array().map_or(&[][..], Vec::as_slice);
        for worker in workers {
            let Some(address) = worker["address"].as_str() else { continue };
            let (role, address) =
                (worker["role"].as_str().unwrap_or_default(), address.trim_start_matches("http://"));
            self.workers.push((role.to_owned(), Client::new(&format!("http://{address}"))?));
        }
        Ok(())
    }

    fn told(&self, how: &str) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        format!("a cluster {how}; its last lines:\n  {}", lines.join("\n  "))
    }

    /// What its processes have counted so far.
    ///
    /// # Errors
    /// [`Failure::Unexpected`] when one of them does not answer.
    pub(super) async fn counts(&self) -> Result<Counts, Failure> {
        let avoided_s = Scrape::parse(&self.client.text("/metrics").await?).sum(HOL_AVOIDED_SECONDS);
        let mut counts = Counts { avoided_ms: avoided_s.map(|seconds| seconds * 1e3), ..Counts::default() };
        for (role, worker) in &self.workers {
            let scrape = Scrape::parse(&worker.text("/metrics").await?);
            for (cause, seconds) in scrape.by_label(DECODE_BLOCKED_SECONDS, CAUSE) {
                counts.add_blocked(cause, seconds * 1e3);
            }
            counts.workers.push(MeasuredWorker::of(role, &scrape));
        }
        Ok(counts)
    }

    /// Ends it, at once when `now` becomes ready; it has ended when this returns.
    pub(super) async fn stop(&mut self, now: impl Future<Output = ()>) {
        up::stop_child(&mut self.child, STOP, now).await;
    }
}

/// What a cluster has counted of stalls since it started.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Counts {
    /// How long its decoding sequences would have been blocked in a colocated cluster; `None` before anything was counted.
    pub(super) avoided_ms: Option<f64>,
    /// How long they were blocked, by cause.
    pub(super) blocked_ms: Vec<(String, f64)>,
    /// What each worker's steps cost it by now.
    pub(super) workers: Vec<MeasuredWorker>,
}

impl Counts {
    fn add_blocked(&mut self, cause: &str, ms: f64) {
        match self.blocked_ms.iter_mut().find(|(known, _)| known == cause) {
            Some((_, sum)) => *sum += ms,
            None => self.blocked_ms.push((cause.to_owned(), ms)),
        }
    }

    /// What was counted since `before`.
    pub(super) fn since(&self, before: &Self) -> Self {
        let mut since = Self {
            avoided_ms: self.avoided_ms.map(|now| now - before.avoided_ms.unwrap_or(0.0)),
            blocked_ms: self.blocked_ms.clone(),
            workers: self.workers.clone(),
        };
        for (cause, ms) in &before.blocked_ms {
            since.add_blocked(cause, -ms);
        }
        since
    }
}

/// Two ports that nobody uses now. They are bound together, so that they differ.
fn free_ports() -> Result<[u16; 2], Failure> {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let ports = || -> std::io::Result<[u16; 2]> {
        let listeners = [bind()?, bind()?];
        Ok([listeners[0].local_addr()?.port(), listeners[1].local_addr()?.port()])
    };
    ports().map_err(|error| Failure::Bind(format!("no free port: {error}")))
}

/// Reads a pipe to its end, so that nobody who writes into it waits, and keeps the last lines.
fn keep_lines(pipe: Option<impl AsyncRead + Unpin + Send + 'static>, kept: &Arc<Mutex<Vec<String>>>) {
    let Some(pipe) = pipe else { return };
    let kept = Arc::clone(kept);
    tokio::spawn(async move {
        let mut lines = BufReader::new(pipe).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() == LAST_LINES {
                kept.remove(0);
            }
            kept.push(line);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_counted_since_counts() {
        let mut before = Counts { avoided_ms: None, ..Counts::default() };
        before.add_blocked("local_prefill", 5.0);
        let mut after = Counts { avoided_ms: Some(70.0), ..Counts::default() };
        after.add_blocked("local_prefill", 25.0);
        after.add_blocked("resume", 1.0);
        after.add_blocked("local_prefill", 10.0);
        let since = after.since(&before);
        assert_eq!(since.avoided_ms, Some(70.0));
        assert_eq!(since.blocked_ms, [("local_prefill".to_owned(), 30.0), ("resume".to_owned(), 1.0)]);
        let [a, b] = free_ports().unwrap();
        assert_ne!(a, b);
    }
}
