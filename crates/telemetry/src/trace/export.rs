//! The thread that takes finished spans out of the queue and gives them to a collector and a file.
//!
//! It has a runtime of its own, so that neither waits for the process's other work nor holds it up. Whatever the collector does,
//! an export ends within its timeout, and all ends with the bound that [`TracingGuard::shutdown`] is given.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use opentelemetry::KeyValue;
use opentelemetry_otlp::{WithExportConfig, WithHttpConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{MissedTickBehavior, sleep, sleep_until};

use super::config::{Collector, Protocol, TracingConfig};
use super::file::SpanFile;
use super::otlp::Converter;
use super::tracing::{Finished, Shared, Tracing};
use crate::TelemetryError;
use crate::names::resource;

/// How often what waits for a decision is looked through for what is too old.
const EXPIRE_EVERY: Duration = Duration::from_secs(5);

/// At most one line of the log tells of failed exports in this time.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// How much the thread gives way to others, 0 to 19.
const NICENESS: i32 = 10;

/// What kind of process this is.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    /// `baton-router`, `baton-prefill-worker` or `baton-decode-worker`.
    pub name: &'static str,
    /// Version of the program.
    pub version: &'static str,
}

/// Ends exporting.
#[derive(Debug)]
pub struct TracingGuard {
    /// When all must have ended.
    stop: watch::Sender<Option<Instant>>,
    ended: oneshot::Receiver<()>,
}

impl TracingGuard {
    /// Exports what is queued, for `bound` at most. Recorders dropped later count as dropped.
    pub async fn shutdown(self, bound: Duration) {
        let _ = self.stop.send(Some(Instant::now() + bound));
        // The thread keeps to the bound itself; this is for one that does not get to run.
        let _ = tokio::time::timeout(bound, self.ended).await;
    }
}

impl Tracing {
    /// Starts the exporter's thread. The guard must live as long as spans are to be exported.
    ///
    /// # Errors
    /// [`TelemetryError::File`] when the file can't be opened; [`TelemetryError::Exporter`] when there can be no exporter.
    pub fn start(config: TracingConfig, service: Service) -> Result<(Self, TracingGuard), TelemetryError> {
        let file = config.file.as_deref().map(SpanFile::open).transpose()?;
        let (tracing, queue, shared) = Self::open(config.sampler, config.max_queued);
        let broken = |error: &dyn std::fmt::Display| TelemetryError::Exporter(error.to_string());
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| broken(&e))?;
        let collector = {
            let _inside = runtime.enter();
            config.collector.as_ref().map(|collector| connect(collector, config.timeout)).transpose()
        };
        let collector = match collector {
            Ok(collector) => collector,
            Err(error) => {
                // Dropping it would block, which a caller's runtime forbids.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let (stop, stopped) = watch::channel(None);
        let (end, ended) = oneshot::channel();
        let exporter = Exporter {
            shared,
            collector,
            file,
            converter: Converter::new(),
            resource: None,
            service,
            config,
            stopped,
            failures: Failures::default(),
        };
        let run = move || {
            give_way();
            runtime.block_on(exporter.run(queue));
            runtime.shutdown_background();
            let _ = end.send(());
        };
        std::thread::Builder::new().name("spans".to_owned()).spawn(run).map_err(|e| broken(&e))?;
        Ok((tracing, TracingGuard { stop, ended }))
    }
}

/// On whatever core the thread finds itself, computing comes first.
fn give_way() {
    // Elsewhere the call would concern the whole process.
    #[cfg(target_os = "linux")]
    // SAFETY: plain system call without pointers; 0 means the calling thread. Failing costs nothing but the courtesy.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS);
    }
}

fn connect(
    collector: &Collector,
    timeout: Duration,
) -> Result<opentelemetry_otlp::SpanExporter, TelemetryError> {
    let builder = opentelemetry_otlp::SpanExporter::builder();
    // An export that failed is dropped: what it holds up is worth more than what it holds.
    let once = opentelemetry_otlp::RetryPolicy::disabled();
    let exporter = match collector.protocol {
        Protocol::Grpc => builder
            .with_tonic()
            .with_endpoint(&collector.endpoint)
            .with_timeout(timeout)
            .with_retry_policy(once)
            .build(),
        Protocol::Http => builder
            .with_http()
            .with_endpoint(&collector.endpoint)
            .with_timeout(timeout)
            .with_retry_policy(once)
            .build(),
    };
    exporter.map_err(|error| TelemetryError::Exporter(format!("{}: {error}", collector.endpoint)))
}

struct Exporter {
    shared: Arc<Shared>,
    collector: Option<opentelemetry_otlp::SpanExporter>,
    file: Option<SpanFile>,
    converter: Converter,
    /// Known from the first batch on, when the process has an instance id.
    resource: Option<Resource>,
    service: Service,
    config: TracingConfig,
    stopped: watch::Receiver<Option<Instant>>,
    failures: Failures,
}

impl Exporter {
    async fn run(mut self, mut queue: mpsc::Receiver<Vec<Finished>>) {
        let mut batch: Vec<Finished> = Vec::new();
        let mut due: Option<Instant> = None;
        let mut stopped = self.stopped.clone();
        let mut expire = tokio::time::interval(EXPIRE_EVERY);
        expire.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let full = batch.len() >= self.config.max_batch;
            if full || due.is_some_and(|due| due <= Instant::now()) {
                due = None;
                self.export(&mut batch).await;
            }
            let wait = async {
                match due {
                    Some(due) => sleep_until(due.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                _ = stopped.wait_for(Option::is_some) => break,
                finished = queue.recv() => {
                    let Some(finished) = finished else { break };
                    self.shared.dequeued(finished.len());
                    batch.extend(finished);
                    due.get_or_insert_with(|| Instant::now() + self.config.delay);
                }
                () = wait => {}
                _ = expire.tick() => self.shared.expire(Instant::now()),
            }
        }
        queue.close();
        while let Ok(finished) = queue.try_recv() {
            self.shared.dequeued(finished.len());
            batch.extend(finished);
        }
        self.export(&mut batch).await;
    }

    /// Empties `batch`, whatever comes of it.
    async fn export(&mut self, batch: &mut Vec<Finished>) {
        self.settle_resource();
        while !batch.is_empty() {
            let num = batch.len().min(self.config.max_batch);
            let spans: Vec<SpanData> =
                batch.drain(..num).map(|finished| self.converter.span_data(finished)).collect();
            let written = match (&mut self.file, &self.resource) {
                (Some(file), Some(resource)) => file.append(spans.clone(), resource),
                _ => Ok(()),
            };
            let sent = match &self.collector {
                Some(collector) => self.within(collector.export(spans)).await,
                None => Ok(()),
            };
            match sent.and(written) {
                Ok(()) => self.shared.counts().exported(num),
                Err(error) => {
                    self.shared.counts().export_failed(num);
                    if let Some(num_spans) = self.failures.failed(num, Instant::now()) {
                        ::tracing::warn!(num_spans, %error, "spans could not be exported and are dropped");
                    }
                }
            }
        }
    }

    /// Waits for an export, no longer than its timeout and no longer than a shutdown allows.
    async fn within(
        &self,
        export: impl Future<Output = opentelemetry_sdk::error::OTelSdkResult>,
    ) -> Result<(), String> {
        let mut stopped = self.stopped.clone();
        let stop = async {
            let until = stopped.wait_for(Option::is_some).await.ok().and_then(|until| *until);
            // Without a time the guard was dropped: nobody waits.
            if let Some(until) = until {
                sleep_until(until.into()).await;
            }
        };
        tokio::select! {
            biased;
            exported = export => exported.map_err(|error| error.to_string()),
            () = sleep(self.config.timeout) => Err(format!("no answer within {:?}", self.config.timeout)),
            () = stop => Err("no answer before this process ended".to_owned()),
        }
    }

    fn settle_resource(&mut self) {
        if self.resource.is_some() {
            return;
        }
        let resource = self.describe();
        if let Some(collector) = &mut self.collector {
            collector.set_resource(&resource);
        }
        self.resource = Some(resource);
    }

    fn describe(&self) -> Resource {
        let instance = self.shared.instance().map_or_else(
            || super::new_trace_id().iter().map(|byte| format!("{byte:02x}")).collect(),
            str::to_owned,
        );
        let mut pairs: BTreeMap<String, String> = [
            (resource::SERVICE_NAME, self.service.name.to_owned()),
            (resource::SERVICE_VERSION, self.service.version.to_owned()),
            (resource::SERVICE_INSTANCE_ID, instance),
            (resource::HOST_NAME, host_name()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
        pairs.extend(self.config.resource.clone());
        let pairs = pairs.into_iter().map(|(key, value)| KeyValue::new(key, value));
        Resource::builder_empty().with_attributes(pairs).build()
    }
}

/// The machine's name, as far as it can be had without asking the network.
fn host_name() -> String {
    let named = |text: String| Some(text.trim().to_owned()).filter(|name| !name.is_empty());
    let from_file = |path: &str| std::fs::read_to_string(path).ok().and_then(named);
    let from_command = || {
        let output = std::process::Command::new("hostname").output().ok()?;
        named(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    from_file("/proc/sys/kernel/hostname")
        .or_else(|| std::env::var("HOSTNAME").ok().and_then(named))
        .or_else(from_command)
        .unwrap_or_else(|| "unknown".to_owned())
}

/// Decides when the log is told of failed exports: not of each.
#[derive(Debug, Default)]
struct Failures {
    logged: Option<Instant>,
    num_spans: usize,
}

impl Failures {
    /// Spans were lost. Returns how many since the last line of the log, when it is time for another.
    fn failed(&mut self, num_spans: usize, now: Instant) -> Option<usize> {
        self.num_spans += num_spans;
        if self.logged.is_some_and(|logged| now.saturating_duration_since(logged) < LOG_EVERY) {
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.num_spans))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_hears_of_failures_once_a_minute_and_of_all_spans() {
        let start = Instant::now();
        let mut failures = Failures::default();
        assert_eq!(failures.failed(5, start), Some(5));
        assert_eq!(failures.failed(7, start + LOG_EVERY / 2), None);
        assert_eq!(failures.failed(1, start + LOG_EVERY), Some(8));
        assert_eq!(failures.failed(1, start + LOG_EVERY), None);
    }

    /// Of the calling thread.
    #[cfg(target_os = "linux")]
    fn nice() -> i32 {
        // SAFETY: plain system call without pointers; 0 means the calling thread.
        unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn only_the_thread_that_gives_way_is_nice() {
        let before = nice();
        let given = std::thread::spawn(|| {
            give_way();
            nice()
        });
        assert_eq!(given.join().expect("no panic"), NICENESS.max(before));
        assert_eq!(nice(), before);
    }
}
