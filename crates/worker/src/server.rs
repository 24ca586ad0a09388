//! A worker from start to end: bind, tell the address, load, serve, drain.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, header};
use baton_handoff::InstanceId;
use baton_kv::KvLayout;
use baton_proto::v1;
use baton_telemetry::metrics::{
    BlockCounts, StageGauges, StepCostGauges, StepKindGauges, VllmGauges, WorkerMetrics,
};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::core::Loaded;
use crate::links::LinkRates;
use crate::load::{self, Scheduling};
use crate::service::WorkerService;
use crate::state::{Lifecycle, State};
use crate::steps::{KindProfile, StepHandle, StepThread, StepThreadOptions};
use crate::threads::{Niceness, Threads};
use crate::{Clock, Core, WorkerConfig, WorkerError, identity};

/// What connections get to close, after everything else ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// What a role adds to a worker.
pub struct Setup {
    /// What it does.
    pub role: v1::Role,
    /// The shared options.
    pub config: WorkerConfig,
    /// How its threads give way to each other.
    pub niceness: Niceness,
    /// How its scheduler plans.
    pub scheduling: Scheduling,
    /// HTTP/2 settings of its server.
    pub server: Server,
    /// The wire form of a layout.
    pub layout_to_wire: fn(&KvLayout) -> v1::KvLayout,
}

/// A worker that serves. Dropping it ends everything at once, as a crash would.
pub struct Running {
    address: SocketAddr,
    core: Arc<Core>,
    steps: StepHandle,
    loaded: Option<oneshot::Receiver<Result<(), WorkerError>>>,
    server: Option<JoinHandle<()>>,
    close: watch::Sender<bool>,
    threads: Option<Threads>,
}

/// Starts a worker: binds, writes the address file, serves, and loads the model meanwhile. `services` makes the role's own
/// services.
///
/// # Errors
/// [`WorkerError::Config`], [`WorkerError::Bind`] or [`WorkerError::System`]; what goes wrong while the model loads is told by
/// [`Running::ready`].
pub fn start(setup: Setup, services: impl FnOnce(&Arc<Core>) -> Routes) -> Result<Running, WorkerError> {
    let Setup { role, config, niceness, scheduling, server, layout_to_wire } = setup;
    config.check()?;
    let (listener, address) = bind(&config)?;
    let threads = Threads::start(config.io_cpus.as_ref(), niceness.bulk)?;
    let instance = identity::new_instance_id()?;
    let core = Arc::new(Core::new(role, instance, config, threads.bulk().clone()));
    core.tracing.identify(&instance.to_string());
    core.metrics.read_spans(&core.tracing);
    let options = StepThreadOptions {
        cpus: core.config.cpus.clone(),
        nice: niceness.step,
        clock: core.clock,
        tracing: core.tracing.clone(),
        stall_threshold: Duration::from_millis(u64::from(core.config.stall_threshold_ms)),
    };
    let building = Arc::clone(&core);
    let thread = StepThread::spawn(options, core.metrics.clone(), core.lifecycle.clone(), move |steps| {
        let (built, loaded) = load::load(&building.config, &scheduling, steps)?;
        report_metrics(&building.metrics, &loaded);
        if building.config.metrics_compat == "vllm" {
            report_vllm_metrics(building.role, &building.metrics, &loaded);
        }
        // Nobody else sets it.
        let _ = building.loaded.set(loaded);
        Ok(built)
    })?;
    let (close, closing) = watch::channel(false);
    let io = threads.io();
    let loaded = {
        let lifecycle = core.lifecycle.clone();
        let (sender, loaded) = oneshot::channel();
        io.spawn(follow_loading(thread.built, lifecycle, sender));
        loaded
    };
    let routes = services(&core).add_service(v1::worker_server::WorkerServer::new(WorkerService::new(
        Arc::clone(&core),
        layout_to_wire,
    )));
    let server = io.spawn(serve(server, listener, routes, Arc::clone(&core), closing));
    let instance = core.instance;
    tracing::info!(%address, %instance, "listening; loading the model");
    Ok(Running {
        address,
        core,
        steps: thread.handle,
        loaded: Some(loaded),
        server: Some(server),
        close,
        threads: Some(threads),
    })
}

impl Core {
    fn new(role: v1::Role, instance: InstanceId, config: WorkerConfig, bulk: tokio::runtime::Handle) -> Self {
        Self {
            role,
            instance,
            tracing: config.tracing.clone(),
            config,
            clock: Clock::start(),
            lifecycle: Lifecycle::default(),
            metrics: WorkerMetrics::new(),
            links: LinkRates::default(),
            bulk,
            loaded: std::sync::OnceLock::new(),
            num_legs: watch::Sender::new(0),
            closing: watch::Sender::new(false),
        }
    }
}

impl Running {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What its services share.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Waits until the model is loaded.
    ///
    /// # Errors
    /// Why it could not be; the second call after an error says less.
    pub async fn ready(&mut self) -> Result<(), WorkerError> {
        let lost = || WorkerError::Engine("the step thread ended while it loaded the model".to_owned());
        match self.loaded.take() {
            Some(loaded) => loaded.await.unwrap_or_else(|_| Err(lost())),
            None if self.core.lifecycle.is_ready() => Ok(()),
            None => Err(lost()),
        }
    }

    /// Waits until the worker can't work any more; says why.
    pub async fn failed(&self) -> String {
        let mut state = self.core.lifecycle.watch();
        let failed = state.wait_for(|state| matches!(state, State::Failed(_))).await;
        match failed.as_deref() {
            Ok(State::Failed(reason)) => reason.clone(),
            // The sender lives in `self.core`.
            _ => String::new(),
        }
    }

    /// Ends gracefully: no new requests, up to `--drain-timeout` for running ones, then everything ends. A decode worker hands over
    /// after half that time what still runs: its sequences can go on elsewhere, and the router is to hear of it in time. A prefill
    /// worker's can't: it stays until their receivers have committed.
    pub async fn shutdown(mut self) {
        self.core.lifecycle.set(State::Draining);
        let end = tokio::time::Instant::now() + self.core.config.drain_timeout;
        if self.core.role == v1::Role::Decode {
            let half = self.core.config.drain_timeout / 2;
            if tokio::time::timeout(half, self.core.quiet()).await.is_err() {
                tracing::info!("what still runs after half of --drain-timeout is handed over");
                self.steps.stop();
            }
        }
        if tokio::time::timeout_at(end, self.core.quiet()).await.is_err() {
            tracing::warn!("requests still run after --drain-timeout; they end now");
        }
        self.steps.stop();
        self.core.closing.send_replace(true);
        self.close.send_replace(true);
        if let Some(mut server) = self.server.take()
            && tokio::time::timeout(CLOSE_TIMEOUT, &mut server).await.is_err()
        {
            server.abort();
        }
    }

    /// Serves until `shutdown` is done, or until the worker fails.
    ///
    /// # Errors
    /// Why the model could not be loaded, or why the worker failed.
    pub async fn until(mut self, shutdown: impl Future<Output = ()>) -> Result<(), WorkerError> {
        let mut shutdown = std::pin::pin!(shutdown);
        tokio::select! {
            loaded = self.ready() => loaded?,
            () = &mut shutdown => {
                self.shutdown().await;
                return Ok(());
            }
        }
        tokio::select! {
            reason = self.failed() => return Err(WorkerError::Engine(reason)),
            () = &mut shutdown => {}
        }
        self.shutdown().await;
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Connections first: nobody is to hear of what ends after them.
        self.threads = None;
        self.steps.stop();
    }
}

fn bind(config: &WorkerConfig) -> Result<(TcpListener, SocketAddr), WorkerError> {
    let failed = |source| WorkerError::Bind { address: config.listen, option: "--listen", source };
    let listener = TcpListener::bind(config.listen).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    if let Some(path) = &config.address_file {
        write_address(path, address)?;
    }
    Ok((listener, address))
}

/// Whoever waits for the file never reads half of it: it gets its name last.
fn write_address(path: &Path, address: SocketAddr) -> Result<(), WorkerError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}", std::process::id()));
    let temporary = path.with_file_name(name);
    std::fs::write(&temporary, format!("{address}\n")).map_err(WorkerError::file("write", &temporary))?;
    std::fs::rename(&temporary, path).map_err(WorkerError::file("write", path))
}

async fn follow_loading(
    built: oneshot::Receiver<Result<(), WorkerError>>,
    lifecycle: Lifecycle,
    sender: oneshot::Sender<Result<(), WorkerError>>,
) {
    // A step thread that ended without a word panicked.
    let result =
        built.await.unwrap_or_else(|_| Err(WorkerError::Engine("loading the model panicked".to_owned())));
    match &result {
        Ok(()) => lifecycle.set(State::Ready),
        Err(error) => lifecycle.set(State::Failed(error.to_string())),
    }
    // Nobody may be waiting.
    let _ = sender.send(result);
}

fn report_metrics(metrics: &WorkerMetrics, loaded: &Loaded) {
    let pool = loaded.pool.clone();
    metrics.read_blocks(move || {
        let counts = pool.counts();
        BlockCounts {
            free: counts.free as u64,
            cached: counts.cached as u64,
            held: counts.held as u64,
            draining: counts.draining as u64,
            total: counts.total as u64,
        }
    });
    let steps = loaded.steps.clone();
    metrics.read_step_cost(move || {
        let (cost, residual) = steps.step_cost()?;
        Some(StepCostGauges {
            fixed_s: cost.fixed_s,
            per_token_s: cost.per_token_s,
            per_context_token_s: cost.per_context_token_s,
            residual,
        })
    });
    let steps = loaded.steps.clone();
    metrics.read_step_profile(move || {
        let gauges = |profile: KindProfile| StepKindGauges {
            kind: profile.kind.name(),
            fixed_s: profile.cost.fixed_s,
            per_token_s: profile.cost.per_token_s,
            per_context_token_s: profile.cost.per_context_token_s,
            ratios: profile.ratios,
        };
        steps.step_profile().into_iter().map(gauges).collect()
    });
    let load = loaded.steps.load();
    metrics.read_requests(move || {
        let counts = load.borrow().counts;
        StageGauges {
            waiting: counts.waiting as u64,
            prefilling: counts.prefilling as u64,
            held: counts.held as u64,
            receiving: counts.receiving as u64,
            running: counts.running as u64,
        }
    });
}

/// The same under the names that dashboards made for vLLM ask for.
fn report_vllm_metrics(role: v1::Role, metrics: &WorkerMetrics, loaded: &Loaded) {
    let (load, pool) = (loaded.steps.load(), loaded.pool.clone());
    metrics.read_vllm(move || {
        let (stages, blocks) = (load.borrow().counts, pool.counts());
        let running = if role == v1::Role::Prefill { stages.prefilling } else { stages.running };
        let used = blocks.total - blocks.free - blocks.cached;
        VllmGauges {
            running: running as u64,
            waiting: stages.waiting as u64,
            kv_usage: used as f64 / blocks.total.max(1) as f64,
        }
    });
}

async fn serve(
    server: Server,
    listener: TcpListener,
    routes: Routes,
    core: Arc<Core>,
    mut closing: watch::Receiver<bool>,
) {
    let (health, health_service) = tonic_health::server::health_reporter();
    tokio::spawn(report_health(health, core.lifecycle.watch()));
    let metrics = core.metrics.clone();
    let scrape = move |headers: HeaderMap| {
        let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
        let (content_type, text) = metrics.encode_for(accept);
        std::future::ready(([(header::CONTENT_TYPE, content_type)], text))
    };
    let mut routes = routes.add_service(health_service);
    match reflection() {
        Ok(service) => routes = routes.add_service(service),
        Err(error) => tracing::warn!(%error, "no reflection"),
    }
    let router = routes.axum_router_mut();
    *router = std::mem::take(router).route("/metrics", axum::routing::get(scrape));
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return core.lifecycle.set(State::Failed(format!("the listener was refused: {error}"))),
    };
    let closed = async move {
        // An error means that the worker was dropped.
        let _ = closing.wait_for(|closing| *closing).await;
    };
    let served = server
        .accept_http1(true)
        .add_routes(routes)
        .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), closed)
        .await;
    if let Err(error) = served {
        core.lifecycle.set(State::Failed(format!("the server ended: {error}")));
    }
}

fn reflection() -> Result<
    tonic_reflection::server::v1::ServerReflectionServer<impl tonic_reflection::server::v1::ServerReflection>,
    tonic_reflection::server::Error,
> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(baton_proto::FILE_DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
}

/// Health says serving only while the worker is ready.
async fn report_health(reporter: tonic_health::server::HealthReporter, mut state: watch::Receiver<State>) {
    loop {
        let ready = *state.borrow_and_update() == State::Ready;
        let status = match ready {
            true => tonic_health::ServingStatus::Serving,
            false => tonic_health::ServingStatus::NotServing,
        };
        reporter.set_service_status("", status).await;
        if state.changed().await.is_err() {
            return;
        }
    }
}
