//! Starting, serving and stopping.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt;
use baton_dispatch::{Layout, Placer};
use baton_proto::v1::inference_server::InferenceServer;
use baton_telemetry::metrics::RouterMetrics;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::server::TcpIncoming;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::server::HealthReporter;

use crate::app::App;
use crate::fleet::{Discovery, Fleet, Patience};
use crate::rpc::{InferenceService, stamp};
use crate::served::Served;
use crate::{RouterConfig, RouterError, listen, web};

/// How often the gRPC health service is told what /health would say.
const HEALTH_PERIOD: Duration = Duration::from_millis(100);

/// Time in which a request that was cut says so to its client.
const CUT_TIMEOUT: Duration = Duration::from_millis(500);

/// A router process in the making.
pub struct Router;

/// A router that serves.
pub struct Running {
    /// Where HTTP is served.
    pub http: SocketAddr,
    /// Where gRPC is served.
    pub grpc: SocketAddr,
    app: Arc<App>,
    /// Ends what serves, once nothing is to be waited for.
    faces: JoinSet<Result<(), RouterError>>,
    /// Keeps the view of the fleet and the health service current.
    background: JoinSet<()>,
    /// Ends with why the model can't be used, or when it is ready.
    load: Option<JoinHandle<Result<(), RouterError>>>,
    drain_timeout: Duration,
}

/// Serves until `shutdown` resolves, then lets running requests end, for as long as the drain timeout allows.
///
/// # Errors
/// [`RouterError`]: what keeps it from starting, a model that can't be used, or a listener that fails.
pub async fn run(config: RouterConfig, shutdown: impl Future<Output = ()>) -> Result<(), RouterError> {
    let mut running = Router::start(config).await?;
    let failed = tokio::select! {
        () = shutdown => None,
        error = running.failure() => Some(error),
    };
    match failed {
        None => {
            tracing::info!("router stops: running requests may end");
            running.shutdown().await;
            Ok(())
        }
        Some(error) => Err(error),
    }
}

impl Router {
    /// Takes both addresses, writes the address files, and serves. The tokenizer loads meanwhile: /health says when.
    ///
    /// # Errors
    /// [`RouterError::Config`], [`RouterError::Bind`], [`RouterError::System`].
    pub async fn start(config: RouterConfig) -> Result<Running, RouterError> {
        config.check()?;
        let http = listen::bind(config.http_listen, "--http-listen").await?;
        let grpc = listen::bind(config.grpc_listen, "--grpc-listen").await?;
        let (http_address, grpc_address) = (listen::bound(&http)?, listen::bound(&grpc)?);
        for (path, address) in
            [(&config.http_address_file, http_address), (&config.grpc_address_file, grpc_address)]
        {
            if let Some(path) = path {
                listen::write_address(path, address)?;
            }
        }
        let patience =
            Patience { heartbeat_timeout: config.heartbeat_timeout, stall_timeout: config.stall_timeout };
        let fleet = Fleet::new(&Discovery::from_config(&config), patience, placer(&config)?)?;
        let (app, decisions) = App::new(&config, Arc::clone(&fleet));
        let app = Arc::new(app);
        let (reporter, health) = tonic_health::server::health_reporter();
        let mut background = JoinSet::new();
        background.spawn(fleet.watch());
        background.spawn(decisions.run());
        background.spawn(report_health(Arc::clone(&app), reporter));
        let mut faces = JoinSet::new();
        faces.spawn(serve_http(http, Arc::clone(&app)));
        faces.spawn(serve_grpc(grpc, Arc::clone(&app), health));
        tracing::info!(http = %http_address, grpc = %grpc_address, "router listens");
        let drain_timeout = config.drain_timeout;
        let load = tokio::spawn(load(Arc::clone(&app), config));
        Ok(Running {
            http: http_address,
            grpc: grpc_address,
            app,
            faces,
            background,
            load: Some(load),
            drain_timeout,
        })
    }
}

impl Running {
    /// What this router counts.
    pub fn metrics(&self) -> &RouterMetrics {
        &self.app.metrics
    }

    /// Resolves when the router can't go on: its model can't be used, or a listener failed. Cancel-safe.
    pub async fn failure(&mut self) -> RouterError {
        loop {
            tokio::select! {
                loaded = joined(&mut self.load) => {
                    self.load = None;
                    match loaded {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => return error,
                        Err(error) => return task_failed("load the tokenizer", &error),
                    }
                }
                Some(ended) = self.faces.join_next() => match ended {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return error,
                    Err(error) => return task_failed("serve", &error),
                },
            }
        }
    }

    /// Takes no new requests, lets running ones end within the drain timeout, then cuts what is left.
    pub async fn shutdown(mut self) {
        self.app.draining.cancel();
        if !self.faces_end(self.drain_timeout).await {
            tracing::warn!("the drain timeout is over: requests that still run are cut");
            self.app.cut.cancel();
            self.faces_end(CUT_TIMEOUT).await;
        }
        self.faces.shutdown().await;
        self.background.shutdown().await;
    }

    /// Whether both faces ended within `bound`.
    async fn faces_end(&mut self, bound: Duration) -> bool {
        let ended = async { while self.faces.join_next().await.is_some() {} };
        tokio::time::timeout(bound, ended).await.is_ok()
    }
}

fn placer(config: &RouterConfig) -> Result<Placer, RouterError> {
    let layout = if config.colocated { Layout::Colocated } else { Layout::Disaggregated };
    let mut seed = [0; 8];
    // Routers that share a fleet are not to draw the same workers.
    getrandom::fill(&mut seed)
        .map_err(|error| RouterError::system("draw a seed")(std::io::Error::other(error.to_string())))?;
    let placer = Placer::new(layout, config.placement.policy, u64::from_le_bytes(seed));
    Ok(placer.with_max_local_tokens(config.placement.max_local_tokens))
}

async fn load(app: Arc<App>, config: RouterConfig) -> Result<(), RouterError> {
    let loading = tokio::task::spawn_blocking(move || Served::load(&config));
    let served = loading.await.map_err(|error| task_failed("load the tokenizer", &error))??;
    tracing::info!(model = served.name, "tokenizer ready");
    app.set_served(served);
    Ok(())
}

/// The task's result; never resolves when there is no task any more.
async fn joined<T>(task: &mut Option<JoinHandle<T>>) -> Result<T, tokio::task::JoinError> {
    match task {
        Some(task) => task.await,
        None => std::future::pending().await,
    }
}

fn task_failed(action: &str, error: &tokio::task::JoinError) -> RouterError {
    RouterError::system(action)(std::io::Error::other(error.to_string()))
}

async fn serve_http(listener: TcpListener, app: Arc<App>) -> Result<(), RouterError> {
    let stop = app.draining.clone();
    // Tokens are small: they are not to wait until they fill a packet.
    let listener = listener.tap_io(|connection| {
        let _ = connection.set_nodelay(true);
    });
    axum::serve(listener, web::routes(app))
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
        .map_err(RouterError::system("serve HTTP"))
}

async fn serve_grpc(
    listener: TcpListener,
    app: Arc<App>,
    health: HealthServer<impl Health>,
) -> Result<(), RouterError> {
    let stop = app.draining.clone();
    let max_bytes = usize::try_from(app.max_body_bytes).unwrap_or(usize::MAX);
    let inference = InferenceServer::new(InferenceService::new(app)).max_decoding_message_size(max_bytes);
    let inference = InterceptedService::new(inference, stamp);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(baton_proto::FILE_DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let failed = |error: String| RouterError::system("serve gRPC")(std::io::Error::other(error));
    tonic::transport::Server::builder()
        .add_service(inference)
        .add_service(health)
        .add_service(reflection().build_v1().map_err(|error| failed(error.to_string()))?)
        .add_service(reflection().build_v1alpha().map_err(|error| failed(error.to_string()))?)
        .serve_with_incoming_shutdown(
            TcpIncoming::from(listener).with_nodelay(Some(true)),
            stop.cancelled_owned(),
        )
        .await
        .map_err(|error| failed(error.to_string()))
}

/// Tells the gRPC health service what /health would say.
async fn report_health(app: Arc<App>, reporter: HealthReporter) {
    let mut before = None;
    let mut ticks = tokio::time::interval(HEALTH_PERIOD);
    loop {
        ticks.tick().await;
        let status =
            if app.missing().is_empty() { ServingStatus::Serving } else { ServingStatus::NotServing };
        if before.replace(status) == Some(status) {
            continue;
        }
        reporter.set_service_status("", status).await;
        reporter.set_service_status(SERVICE, status).await;
    }
}

/// The service's full name.
const SERVICE: &str = baton_proto::v1::inference_server::SERVICE_NAME;
