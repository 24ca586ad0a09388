//! `baton up`: a whole cluster on this machine, as processes of this same executable.
//!
//! Phases run in the order in which they can fail cheaply: ports, model, plan, workers, router, a real chat. Whatever
//! goes wrong ends everything that was started.

mod checklist;
mod cores;
mod devices;
mod keep;
mod memory;
mod options;
mod output;
mod plan;
mod ports;
mod probe;
mod process;
mod progress;
mod restarts;
mod supervise;
mod warm_up;

pub(crate) use cores::{as_list, beside_prefill, far_apart};
pub(crate) use devices::settle as settle_devices;
pub(crate) use options::{PassedOn, UpOptions, adjust};
pub(crate) use process::{Launch, describe as describe_end, start as start_again, stop as stop_child};
pub(crate) use progress::Bar;
pub(crate) use supervise::Interrupts;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use baton_model::{Model, ModelName, ModelSource, ResolveOptions};

use self::checklist::{Checklist, line};
use self::plan::{Given, Plan};
use self::supervise::Supervisor;
use crate::exit::Failure;
use crate::version;

/// Chats that may fail before `up` does.
const WARM_UP_TRIES: u32 = 3;
const WARM_UP_PAUSE: Duration = Duration::from_secs(1);

/// What `up` needs to know.
#[derive(Debug)]
pub(crate) struct Up {
    /// Its options.
    pub(crate) options: UpOptions,
    /// What its children are given of them.
    pub(crate) passed: PassedOn,
    /// Arguments every child is given before its role.
    pub(crate) common: Vec<OsString>,
}

/// Runs a cluster until it is stopped.
///
/// # Errors
/// Every kind of [`Failure`]; `Ok` after a clean stop by Ctrl-C or SIGTERM.
pub(crate) async fn run(up: Up) -> Result<(), Failure> {
    let mut interrupts = Interrupts::listen()?;
    let mut supervisor = Supervisor::default();
    let outcome = tokio::select! {
        biased;
        () = interrupts.first() => Ok(()),
        failure = serve(&up, &mut supervisor) => Err(failure),
    };
    if outcome.is_ok() {
        line("stopping (Ctrl-C again to stop at once)");
    }
    let patience = up.options.worker.drain_timeout;
    let stopped = supervisor.stop(patience, interrupts.second()).await;
    outcome.and(stopped)
}

/// Brings everything up and keeps it up; ends only when it can't.
async fn serve(up: &Up, supervisor: &mut Supervisor) -> Failure {
    match start(up, supervisor).await {
        Ok(()) => supervisor.keep_up().await,
        Err(failure) => failure,
    }
}

async fn start(up: &Up, supervisor: &mut Supervisor) -> Result<(), Failure> {
    let options = &up.options;
    let mut list = Checklist::new(&format!("baton {}", version::line()));
    options.worker.check().map_err(|error| Failure::Usage(error.to_string()))?;
    check_ports(options)?;
    options.tracing.check()?;
    if let Some(folder) = &options.traces {
        let failed = |error| Failure::Usage(format!("--traces {}: {error}", folder.display()));
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    list.done("ports", &format!("HTTP {}, gRPC {}", options.http_port, options.grpc_port));

    let (source, model) = load_model(options).await?;
    list.done("model", &describe(&source, &model));

    let folder = supervisor.private_folder()?;
    let given = Given { options, passed: &up.passed, common: &up.common };
    let plan = Plan::new(given, &source, &model, &folder)?;
    list.done("plan", &plan.memory);
    list.detail(&format!("cores: {}", plan.cores));
    list.detail(&describe_limits(options));

    supervisor.start_workers(plan.workers.clone());
    let addresses = supervisor.addresses(plan.workers.len()).await?;
    supervisor.start_router(plan.router(given, &addresses));
    supervisor.workers_ready().await?;
    list.done(
        "workers",
        &format!("{} prefill, {} decode", plan.num_prefill, plan.workers.len() - plan.num_prefill),
    );
    supervisor.all_ready().await?;
    list.done("router", "ready");

    let outcome = warm_up(options, supervisor).await?;
    list.done("warm-up", &outcome);
    say_ready(options, list.total_seconds());
    Ok(())
}

/// A process that dies under the chat is started again; that is no reason to give up.
async fn warm_up(options: &UpOptions, supervisor: &mut Supervisor) -> Result<String, Failure> {
    let base = format!("http://127.0.0.1:{}", options.http_port);
    let mut tries_left = WARM_UP_TRIES;
    loop {
        tries_left -= 1;
        let failure = match supervisor.beside(warm_up::chat(&base)).await {
            Err(failure) if tries_left > 0 => failure,
            outcome => return outcome,
        };
        line(&format!("{failure}; trying again"));
        // By then the deaths of processes that broke it were heard of.
        let pause = async {
            tokio::time::sleep(WARM_UP_PAUSE).await;
            Ok(())
        };
        supervisor.beside(pause).await?;
        supervisor.all_ready().await?;
    }
}

fn check_ports(options: &UpOptions) -> Result<(), Failure> {
    if options.http_port == options.grpc_port {
        return Err(Failure::Usage(format!("--http-port and --grpc-port are both {}", options.http_port)));
    }
    ports::check_free(options.http_port, "--http-port")?;
    ports::check_free(options.grpc_port, "--grpc-port")
}

/// Finds the model, fetching it the first time, and opens it.
async fn load_model(options: &UpOptions) -> Result<(ModelSource, Model), Failure> {
    let name: ModelName = options.worker.model.parse()?;
    let cache_dir: Option<PathBuf> = options.worker.cache_dir.clone();
    let loading = tokio::task::spawn_blocking(move || {
        let bar = Bar::default();
        let mut resolving = ResolveOptions::from_env(&bar);
        if let Some(folder) = cache_dir {
            resolving.cache_dir = folder;
        }
        let source = baton_model::resolve(&name, &resolving)?;
        let model = Model::open(&source)?;
        Ok((source, model))
    });
    loading.await.map_err(|error| Failure::Unexpected(error.to_string()))?
}

fn describe(source: &ModelSource, model: &Model) -> String {
    let config = &model.config;
    let place = match source {
        ModelSource::Tiny => String::new(),
        ModelSource::File(path) | ModelSource::Folder(path) => format!(" ({})", path.display()),
    };
    format!("{}, {} layers, context {} tokens{place}", config.name, config.num_layers, config.context)
}

fn describe_limits(options: &UpOptions) -> String {
    let worker = &options.worker;
    format!(
        "a worker: {} sequences, {} waiting; blocks of {} tokens, KV {}, precision {}",
        worker.max_num_seqs, worker.max_queue, worker.block_size, worker.kv_dtype, worker.precision
    )
}

fn say_ready(options: &UpOptions, seconds: f64) {
    let (http, grpc) = (options.http_port, options.grpc_port);
    let question = r#"{"role": "user", "content": "Why is the sky blue?"}"#;
    line(&format!("\nready in {seconds:.1} s; Ctrl-C stops everything. Try one of these:\n"));
    line(&format!(
        "  curl -N http://127.0.0.1:{http}/v1/chat/completions -H 'Content-Type: application/json' \
         -d '{{\"messages\": [{question}], \"max_tokens\": 100, \"stream\": true}}'\n"
    ));
    line(&format!(
        "  grpcurl -plaintext -d '{{\"chat\": {{\"messages\": [{question}]}}, \"max_tokens\": 100}}' \
         127.0.0.1:{grpc} baton.v1.Inference/Generate\n"
    ));
    let url = if http == 8080 { String::new() } else { format!(" --url http://127.0.0.1:{http}") };
    line(&format!("  baton chat \"Why is the sky blue?\"{url}\n"));
}
