//! A cluster of real processes on loopback.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{self, Answer, Completion, EventStream};
use crate::netns::{Cable, Side};
use crate::proxy::Proxy;
use crate::worker::{Role, Worker, read_address, scrape};
use crate::{LogDir, Metrics, Process, eventually};

/// The longest wait until a cluster could serve.
pub const READY_BOUND: Duration = Duration::from_secs(120);

/// Any port of this machine.
const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// What to start. The default is one prefill and one decode worker with `builtin:tiny`.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    /// Prefill workers.
    pub num_prefill: usize,
    /// Decode workers.
    pub num_decode: usize,
    /// Let decode workers compute prompts; prefill workers are then usually 0.
    pub colocated: bool,
    /// `--model` of every role.
    pub model: String,
    /// `--threads` of each worker.
    pub threads: usize,
    /// `--kv-memory` of each worker; left out when empty.
    pub kv_memory: String,
    /// `--max-step-tokens` of each worker.
    pub max_step_tokens: Option<usize>,
    /// `--block-size` of each worker.
    pub block_size: Option<usize>,
    /// `--precision` of each worker.
    pub precision: Option<String>,
    /// `--kv-dtype` of each worker.
    pub kv_dtype: Option<String>,
    /// `--prefix-cache` of each worker; off, so that a repeated prompt is computed and moved again.
    pub prefix_cache: bool,
    /// `--kv-transport` of each worker; over a proxy or a cable it is `grpc` unless set, since through memory that both map nothing would pass.
    pub kv_transport: Option<String>,
    /// `--max-local-tokens` of the router; 0, so that short prompts are handed off too.
    pub max_local_tokens: usize,
    /// Put a [`Proxy`] before each decode worker.
    pub proxied: bool,
    /// Run decode workers at the far side of this cable, and everything else where the caller's thread is: the near side.
    pub cable: Option<Arc<Cable>>,
    /// More arguments of both kinds of worker.
    pub worker_args: Vec<String>,
    /// More arguments of prefill workers.
    pub prefill_args: Vec<String>,
    /// More arguments of decode workers.
    pub decode_args: Vec<String>,
    /// More arguments of the router.
    pub router_args: Vec<String>,
    /// Environment of every role, `NAME=VALUE` each.
    pub env: Vec<String>,
    /// More of it for prefill workers.
    pub prefill_env: Vec<String>,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            num_prefill: 1,
            num_decode: 1,
            colocated: false,
            model: "builtin:tiny".into(),
            threads: 1,
            kv_memory: "128M".into(),
            max_step_tokens: None,
            block_size: None,
            precision: None,
            kv_dtype: None,
            prefix_cache: false,
            kv_transport: None,
            max_local_tokens: 0,
            proxied: false,
            cable: None,
            worker_args: Vec::new(),
            prefill_args: Vec::new(),
            decode_args: Vec::new(),
            router_args: Vec::new(),
            env: Vec::new(),
            prefill_env: Vec::new(),
        }
    }
}

impl ClusterConfig {
    /// The default model, with room for the golden prompts.
    pub fn golden(model: &Path) -> Self {
        Self { model: model.display().to_string(), kv_memory: "1G".into(), ..Self::default() }
    }

    /// The f32 path: weights, activations and KV.
    #[must_use]
    pub fn f32(self) -> Self {
        Self { precision: Some("f32".into()), kv_dtype: Some("f32".into()), ..self }
    }

    /// Decode workers alone, which compute prompts themselves.
    #[must_use]
    pub fn colocated(self) -> Self {
        Self { colocated: true, num_prefill: 0, ..self }
    }

    /// What a command line begins with to have the environment.
    fn env_prefix(&self) -> Vec<String> {
        env_prefix(self.env.iter())
    }

    const fn over_wire(&self) -> bool {
        self.proxied || self.cable.is_some()
    }

    fn worker_args(&self) -> Vec<String> {
        let mut args = strings(&["--model", &self.model, "--threads", &self.threads.to_string()]);
        args.extend(strings(&["--prefix-cache", if self.prefix_cache { "on" } else { "off" }]));
        let options = [
            ("--kv-memory", Some(self.kv_memory.clone()).filter(|size| !size.is_empty())),
            ("--max-step-tokens", self.max_step_tokens.map(|n| n.to_string())),
            ("--block-size", self.block_size.map(|n| n.to_string())),
            ("--precision", self.precision.clone()),
            ("--kv-dtype", self.kv_dtype.clone()),
            (
                "--kv-transport",
                self.kv_transport.clone().or_else(|| self.over_wire().then(|| "grpc".to_owned())),
            ),
        ];
        for (name, value) in options {
            args.extend(value.into_iter().flat_map(|value| [name.to_owned(), value]));
        }
        args.extend(self.worker_args.iter().cloned());
        args
    }
}

fn env_prefix<'a>(env: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut prefix: Vec<String> = env.cloned().collect();
    if !prefix.is_empty() {
        prefix.insert(0, "env".to_owned());
    }
    prefix
}

/// Owned copies.
pub fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

/// A port that nobody uses now. Another process may take it before it is used, so only what can't pick its own gets one.
///
/// # Panics
/// When there is none.
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Router, prefill workers, decode workers. Dropping it kills them by their ids.
pub struct Cluster {
    /// The router.
    pub router: Process,
    /// Its HTTP address.
    pub http: SocketAddr,
    /// Its gRPC address.
    pub grpc: SocketAddr,
    /// Prefill workers.
    pub prefill: Vec<Worker>,
    /// Decode workers.
    pub decode: Vec<Worker>,
    /// What stands before each of them, when [`ClusterConfig::proxied`].
    pub proxies: Vec<Proxy>,
    // Last: the logs outlive the processes that write them.
    logs: LogDir,
}

impl Cluster {
    /// Starts everything and waits until every worker is ready and the router says it can serve.
    ///
    /// # Panics
    /// When it is not ready within [`READY_BOUND`].
    pub async fn start(config: ClusterConfig) -> Self {
        let cluster = Self::start_unready(&config).await;
        cluster.wait_ready().await;
        cluster
    }

    /// Starts everything and waits for addresses only.
    ///
    /// # Panics
    /// When a role ends, or tells no address.
    pub async fn start_unready(config: &ClusterConfig) -> Self {
        let logs = LogDir::new();
        let dir = logs.path();
        let (mut prefill, mut decode) = (Vec::new(), Vec::new());
        let mut proxies = Vec::new();
        for nth in 0..config.num_decode {
            let mut args = [config.worker_args(), config.decode_args.clone()].concat();
            let bulk_port = free_port();
            if config.proxied {
                args.extend(strings(&["--bulk-port", &bulk_port.to_string()]));
            }
            decode.push(start_decode(config, nth, dir, args).await);
            if config.proxied {
                proxies.push(Proxy::start(decode[nth].address, bulk_port).await);
            }
        }
        for nth in 0..config.num_prefill {
            let args = [config.worker_args(), config.prefill_args.clone()].concat();
            let env = env_prefix(config.env.iter().chain(&config.prefill_env));
            let (prefix, name) = (env, format!("prefill-{nth}"));
            prefill.push(Worker::start_with(prefix, Role::Prefill, &name, dir, args, LOOPBACK).await);
        }
        let prefill_at: Vec<SocketAddr> = prefill.iter().map(|worker| worker.address).collect();
        let decode_at: Vec<SocketAddr> = match config.proxied {
            true => proxies.iter().map(|proxy| proxy.address).collect(),
            false => decode.iter().map(|worker| worker.address).collect(),
        };
        let (router, http, grpc) = start_router(config, dir, &prefill_at, &decode_at).await;
        Self { router, http, grpc, prefill, decode, proxies, logs }
    }

    /// All its processes.
    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        let workers = self.prefill.iter().chain(&self.decode).map(|worker| &worker.process);
        std::iter::once(&self.router).chain(workers)
    }

    /// Where logs and other files of this cluster lie.
    pub fn dir(&self) -> PathBuf {
        self.logs.path().to_owned()
    }

    /// Waits until every worker is ready in the router's eyes and a chat would succeed.
    ///
    /// # Panics
    /// After [`READY_BOUND`].
    pub async fn wait_ready(&self) {
        self.wait_workers(self.prefill.len(), self.decode.len()).await;
    }

    /// Waits until the router counts this many ready workers and says it can serve.
    ///
    /// # Panics
    /// After [`READY_BOUND`].
    pub async fn wait_workers(&self, num_prefill: usize, num_decode: usize) {
        eventually("the cluster is ready", READY_BOUND, async || {
            let metrics = scrape(self.http).await?;
            for (role, wanted) in [("prefill", num_prefill), ("decode", num_decode)] {
                let ready = metrics.sum("baton_workers", &[("role", role), ("state", "ready")]);
                if ready != wanted as f64 {
                    return Err(format!("{ready} of {wanted} {role} workers are ready"));
                }
            }
            let health = client::request(self.http, "GET", "/health", None).await?;
            if health.status.is_success() { Ok(()) } else { Err(format!("/health: {}", health.text())) }
        })
        .await;
    }

    /// Waits until the decode workers are ready in the router's eyes, whatever the prefill workers do.
    ///
    /// # Panics
    /// After [`READY_BOUND`].
    pub async fn wait_decode_ready(&self) {
        eventually("the decode workers are ready", READY_BOUND, async || {
            let metrics = scrape(self.http).await?;
            let ready = metrics.sum("baton_workers", &[("role", "decode"), ("state", "ready")]);
            if ready == self.decode.len() as f64 { Ok(()) } else { Err(format!("{ready} are ready")) }
        })
        .await;
    }

    /// Waits until every block of every worker is free again and no sequence is known.
    ///
    /// # Panics
    /// After `bound`.
    pub async fn wait_baseline(&self, bound: Duration) {
        eventually("every pool is back at its baseline", bound, async || {
            for worker in self.prefill.iter().chain(&self.decode) {
                worker.at_baseline().await?;
            }
            let in_flight = scrape(self.http).await?.sum("baton_num_requests_in_flight", &[]);
            if in_flight == 0.0 {
                Ok(())
            } else {
                Err(format!("{in_flight} requests in flight at the router"))
            }
        })
        .await;
    }

    /// Sum of a metric over all decode workers.
    ///
    /// # Panics
    /// When one can't be scraped.
    pub async fn decode_sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        sum(&self.decode, name, labels).await
    }

    /// Sum of a metric over all prefill workers.
    ///
    /// # Panics
    /// When one can't be scraped.
    pub async fn prefill_sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        sum(&self.prefill, name, labels).await
    }

    /// The router's metrics.
    ///
    /// # Panics
    /// When it can't be scraped.
    pub async fn router_metrics(&self) -> Metrics {
        scrape(self.http).await.unwrap_or_else(|error| panic!("router: {error}"))
    }

    /// Posts JSON and reads the whole answer, whatever its status.
    ///
    /// # Panics
    /// When the router can't be reached or hangs up.
    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        client::request(self.http, "POST", path, Some(body))
            .await
            .unwrap_or_else(|error| panic!("POST {path}: {error}"))
    }

    /// Completes in one answer.
    ///
    /// # Errors
    /// The answer, when it is no 200, or why there was none.
    pub async fn try_completion(&self, body: &Value) -> Result<Completion, String> {
        let answer = client::request(self.http, "POST", "/v1/completions", Some(body)).await?;
        if answer.status != 200 {
            return Err(format!("{}: {}", answer.status, answer.text()));
        }
        Ok(Completion::from_answer(&answer))
    }

    /// Completes in one answer.
    ///
    /// # Panics
    /// When that fails.
    pub async fn completion(&self, body: &Value) -> Completion {
        self.try_completion(body).await.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Greedy tokens after a prompt of token ids, end-of-sequence ignored.
    ///
    /// # Panics
    /// When that fails.
    pub async fn greedy(&self, prompt: &[u32], num_tokens: usize) -> Vec<u32> {
        self.completion(&greedy(prompt, num_tokens)).await.token_ids
    }

    /// Starts a stream and demands a 200.
    ///
    /// # Panics
    /// When that fails.
    pub async fn stream(&self, path: &str, body: &Value) -> EventStream {
        let mut stream = EventStream::post(self.http, path, body)
            .await
            .unwrap_or_else(|error| panic!("POST {path}: {error}"));
        if stream.status != 200 {
            let said = stream.next().await;
            panic!("{}: {said:?}", stream.status);
        }
        stream
    }
}

async fn start_decode(config: &ClusterConfig, nth: usize, dir: &Path, mut args: Vec<String>) -> Worker {
    let name = format!("decode-{nth}");
    let (mut prefix, mut at) = (Vec::new(), LOOPBACK);
    if let Some(cable) = &config.cable {
        args.push("--insecure".into());
        prefix = cable.prefix(Side::Far);
        at.set_ip(cable.address(Side::Far));
    }
    prefix.extend(config.env_prefix());
    Worker::start_with(prefix, Role::Decode, &name, dir, args, at).await
}

async fn sum(workers: &[Worker], name: &str, labels: &[(&str, &str)]) -> f64 {
    let mut total = 0.0;
    for worker in workers {
        let metrics =
            worker.metrics().await.unwrap_or_else(|error| panic!("{}: {error}", worker.process.name));
        total += metrics.sum(name, labels);
    }
    total
}

/// The body of a greedy completion of token ids, end-of-sequence ignored, not streamed.
pub fn greedy(prompt: &[u32], num_tokens: usize) -> Value {
    json!({
        "model": "default", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true,
    })
}

/// `body` with fields of `more` set.
#[must_use]
pub fn with(mut body: Value, more: Value) -> Value {
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    body
}

async fn start_router(
    config: &ClusterConfig,
    dir: &Path,
    prefill: &[SocketAddr],
    decode: &[SocketAddr],
) -> (Process, SocketAddr, SocketAddr) {
    let (http_file, grpc_file) = (dir.join("router.http"), dir.join("router.grpc"));
    let mut args = strings(&["router", "--http-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0"]);
    args.extend(["--http-address-file".into(), http_file.display().to_string()]);
    args.extend(["--grpc-address-file".into(), grpc_file.display().to_string()]);
    args.extend(["--model".into(), config.model.clone()]);
    for (option, workers) in [("--prefill-worker", prefill), ("--decode-worker", decode)] {
        args.extend(workers.iter().flat_map(|worker| [option.to_owned(), worker.to_string()]));
    }
    if config.colocated {
        args.push("--colocated".into());
    }
    args.extend(["--max-local-tokens".into(), config.max_local_tokens.to_string()]);
    args.extend(config.router_args.iter().cloned());
    let mut router = Process::start_with(&config.env_prefix(), "router", dir, &args, &[]);
    let http = read_address(&mut router, &http_file).await;
    let grpc = read_address(&mut router, &grpc_file).await;
    (router, http, grpc)
}
