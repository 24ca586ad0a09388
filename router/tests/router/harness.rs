//! A router with scripted workers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_router::{Router, RouterConfig, Running};
use baton_telemetry::trace::{Sampler, Tracing};
use clap::Parser;

use crate::client::Client;
use crate::fake::{FakeWorker, Kind, Script};
use crate::spans::Spans;

#[derive(Parser)]
#[command(args_override_self = true)]
struct Command {
    #[command(flatten)]
    router: RouterConfig,
}

/// A router, its workers, and a client that speaks to it.
pub(crate) struct Cluster {
    pub(crate) router: Running,
    pub(crate) prefill: Vec<FakeWorker>,
    pub(crate) decode: Vec<FakeWorker>,
    pub(crate) client: Client,
    pub(crate) script: Arc<Script>,
}

/// How many workers of each kind.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) num_prefill: usize,
    pub(crate) num_decode: usize,
}

pub(crate) const ONE_PAIR: Shape = Shape { num_prefill: 1, num_decode: 1 };

/// Options for a router that serves these workers.
pub(crate) fn config(prefill: &[FakeWorker], decode: &[FakeWorker], options: &[&str]) -> RouterConfig {
    let mut arguments: Vec<String> = ["router", "--model", "builtin:tiny", "--http-listen", "127.0.0.1:0"]
        .iter()
        .chain(&["--grpc-listen", "127.0.0.1:0", "--heartbeat-timeout", "10"])
        // Prompts of tests are short: they would stay on the decode worker.
        .chain(&["--max-local-tokens", "0"])
        .map(ToString::to_string)
        .collect();
    for (option, workers) in [("--prefill-worker", prefill), ("--decode-worker", decode)] {
        for worker in workers {
            arguments.push(option.to_owned());
            arguments.push(worker.address());
        }
    }
    // Later options win over the ones above.
    arguments.extend(options.iter().map(ToString::to_string));
    Command::try_parse_from(arguments).expect("options").router
}

impl Cluster {
    /// Starts everything and waits until a chat would be served.
    pub(crate) async fn start(shape: Shape, script: Script, options: &[&str]) -> Self {
        let cluster = Self::start_cold(shape, script, options).await;
        cluster.until_healthy().await;
        cluster
    }

    /// Starts everything with tracing on, of which this share is sampled, and waits until every worker is ready.
    pub(crate) async fn traced(shape: Shape, script: Script, options: &[&str], ratio: f64) -> (Self, Spans) {
        let (tracing, receiver) = Tracing::collecting(Sampler { parent_based: true, ratio });
        let cluster = Self::launch(shape, script, options, tracing).await;
        cluster.until_all_ready().await;
        cluster.until_healthy().await;
        (cluster, Spans::new(receiver))
    }

    /// Starts everything, waits for nothing.
    pub(crate) async fn start_cold(shape: Shape, script: Script, options: &[&str]) -> Self {
        Self::launch(shape, script, options, Tracing::off()).await
    }

    async fn launch(shape: Shape, script: Script, options: &[&str], tracing: Tracing) -> Self {
        let script = Arc::new(script);
        let workers =
            |kind, num| (0..num).map(|_| FakeWorker::start(kind, Arc::clone(&script))).collect::<Vec<_>>();
        let prefill = workers(Kind::Prefill, shape.num_prefill);
        let decode = workers(Kind::Decode, shape.num_decode);
        let config = RouterConfig { tracing, ..config(&prefill, &decode, options) };
        let router = Router::start(config).await.expect("router starts");
        let client = Client::new(router.http);
        Self { router, prefill, decode, client, script }
    }

    pub(crate) async fn until_healthy(&self) {
        eventually("the router is healthy", async || self.client.get("/health").await.status == 200).await;
    }

    pub(crate) async fn until_all_ready(&self) {
        let num = self.prefill.len() + self.decode.len();
        eventually("every worker is ready", async || {
            self.client.get("/health").await.json()["workers"].to_string().matches("\"ready\"").count() == num
        })
        .await;
    }

    /// Requests that reached any worker.
    pub(crate) fn num_legs(&self) -> usize {
        self.prefill.iter().chain(&self.decode).map(|worker| worker.num_legs()).sum()
    }

    pub(crate) fn num_open(&self) -> usize {
        self.prefill.iter().chain(&self.decode).map(|worker| worker.num_open()).sum()
    }

    pub(crate) async fn until_no_leg_is_open(&self) {
        eventually("every leg is closed", async || self.num_open() == 0).await;
    }

    /// Requests that ended so.
    pub(crate) fn num_ended(&self, mode: &'static str, outcome: &'static str) -> u64 {
        self.router.metrics().num_requests_ended(mode, outcome)
    }

    /// Requests that have not ended.
    pub(crate) fn num_in_flight(&self) -> i64 {
        self.router.metrics().num_requests_in_flight.get()
    }
}

/// Waits until it holds, and fails with `what` if it does not within 10 s.
pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begin = Instant::now();
    while !holds().await {
        assert!(begin.elapsed() < Duration::from_secs(10), "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
