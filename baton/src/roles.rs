//! Running one role in this process: logs, a runtime, signals, and how it ends.

use std::time::Duration;

use baton_router::RouterError;
use baton_telemetry::log::{self, LogConfig};
use baton_telemetry::trace::TracingGuard;
use baton_worker::{Turns, WorkerError};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::{Commands, GlobalOptions};
use crate::exit::Failure;
use crate::tracing::{self, Traced};

/// What a runtime's leftovers get when a command is done.
const SHUTDOWN: Duration = Duration::from_secs(1);

/// Runs a role until it is told to stop.
///
/// # Errors
/// What the role reports; [`Failure::Unexpected`] for a command that is no role.
pub(crate) fn run(command: Commands, global: &GlobalOptions) -> Result<(), Failure> {
    let name = match &command {
        Commands::Router(_) => "router",
        Commands::PrefillWorker(_) => "prefill-worker",
        Commands::DecodeWorker(_) => "decode-worker",
        _ => return Err(Failure::Unexpected("this command is not a role".to_owned())),
    };
    init_logs(name, global)?;
    watch_parent();
    let runtime = match &command {
        Commands::Router(_) => {
            // Beside a step on the same core; a refusal only costs waits.
            let _ = Turns::NextShort.take();
            threads(num_router_threads())?
        }
        // A worker brings its own threads; this one only waits for signals.
        _ => one_thread()?,
    };
    let (outcome, guard) = runtime.block_on(serve(command))?;
    // What is left of requests hands its spans on when it is dropped.
    runtime.shutdown_timeout(SHUTDOWN);
    tracing::finish(guard)?;
    outcome
}

/// Runs a role to its end. The guard is to be given time for the last spans.
async fn serve(command: Commands) -> Result<(Result<(), Failure>, Option<TracingGuard>), Failure> {
    let shutdown = shutdown()?;
    Ok(match command {
        Commands::Router(Traced { mut config, tracing }) => {
            let (tracing, guard) = tracing.start("baton-router")?;
            config.tracing = tracing;
            (baton_router::run(config, shutdown).await.map_err(Failure::from), guard)
        }
        Commands::PrefillWorker(Traced { mut config, tracing }) => {
            let (tracing, guard) = tracing.start("baton-prefill-worker")?;
            config.worker.tracing = tracing;
            (baton_prefill_worker::run(config, shutdown).await.map_err(Failure::from), guard)
        }
        Commands::DecodeWorker(Traced { mut config, tracing }) => {
            let (tracing, guard) = tracing.start("baton-decode-worker")?;
            config.worker.tracing = tracing;
            (baton_decode_worker::run(config, shutdown).await.map_err(Failure::from), guard)
        }
        _ => (Ok(()), None),
    })
}

fn init_logs(role: &str, global: &GlobalOptions) -> Result<(), Failure> {
    let config = LogConfig {
        format: global.log_format,
        level: global.log_level.clone(),
        role: role.to_owned(),
        content: global.log_content,
    };
    log::init(config).map_err(|error| Failure::Usage(error.to_string()))
}

/// A runtime of one thread: the one that waits for it.
///
/// # Errors
/// [`Failure::Unexpected`].
pub(crate) fn one_thread() -> Result<Runtime, Failure> {
    Builder::new_current_thread().enable_all().build().map_err(no_runtime)
}

fn threads(count: usize) -> Result<Runtime, Failure> {
    Builder::new_multi_thread()
        .worker_threads(count)
        .thread_name("router")
        .enable_all()
        .build()
        .map_err(no_runtime)
}

fn no_runtime(error: std::io::Error) -> Failure {
    Failure::Unexpected(format!("can't start threads: {error}"))
}

/// Tokenizing takes time, so that more than one thread helps; more than a few only get into the workers' way.
fn num_router_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get()).clamp(1, 4)
}

/// Done at the first SIGINT or SIGTERM. A second one ends the process at once.
fn shutdown() -> Result<impl Future<Output = ()>, Failure> {
    let of =
        |kind| signal(kind).map_err(|error| Failure::Unexpected(format!("can't handle signals: {error}")));
    let (mut interrupt, mut terminate) = (of(SignalKind::interrupt())?, of(SignalKind::terminate())?);
    let (asked, first) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        // The role may have ended by itself; then nobody listens.
        let _ = asked.send(());
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        std::process::exit(i32::from(Failure::Interrupted.code()));
    });
    Ok(async move {
        // An error means that the task above is gone, as when the runtime ends.
        let _ = first.await;
    })
}

/// Ends this process when the `up` that started it is gone, where the kernel does not do so.
fn watch_parent() {
    if cfg!(target_os = "linux") {
        return;
    }
    let Some(parent) = std::env::var("BATON_PARENT_PID").ok().and_then(|pid| pid.parse::<u32>().ok()) else {
        return;
    };
    std::thread::spawn(move || {
        while std::os::unix::process::parent_id() == parent {
            std::thread::sleep(Duration::from_millis(500));
        }
        std::process::exit(i32::from(Failure::Worker(String::new()).code()));
    });
}

impl From<WorkerError> for Failure {
    fn from(error: WorkerError) -> Self {
        let line = error.to_string();
        match error {
            WorkerError::Config { .. } => Self::Usage(line),
            WorkerError::Bind { .. } => Self::Bind(line),
            WorkerError::Model(model) => Self::from(model),
            WorkerError::Unsupported(_) => Self::Model(line),
            WorkerError::Memory(_) => Self::Memory(line),
            WorkerError::Engine(_) | WorkerError::System { .. } => Self::Unexpected(line),
        }
    }
}

impl From<RouterError> for Failure {
    fn from(error: RouterError) -> Self {
        let line = error.to_string();
        match error {
            RouterError::Config { .. } => Self::Usage(line),
            RouterError::Bind { .. } => Self::Bind(line),
            RouterError::Model(model) => Self::from(model),
            RouterError::Text(_) => Self::Model(line),
            RouterError::System { .. } => Self::Unexpected(line),
        }
    }
}
