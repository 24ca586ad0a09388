//! The router's options; each is defined here and nowhere else.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_dispatch::Policy;
use baton_handoff::MAX_SEQUENCES;
use baton_telemetry::trace::Tracing;

use crate::RouterError;

/// Options of the router. Every doc comment is the option's help text.
#[derive(Clone, Debug, clap::Args)]
pub struct RouterConfig {
    /// Address to serve HTTP on: the OpenAI API, /health and /metrics; port 0 picks a free one
    #[arg(long, env = "BATON_HTTP_LISTEN", value_name = "IP:PORT", default_value = "127.0.0.1:8080")]
    pub http_listen: SocketAddr,

    /// Address to serve gRPC on; port 0 picks a free one
    #[arg(long, env = "BATON_GRPC_LISTEN", value_name = "IP:PORT", default_value = "127.0.0.1:8081")]
    pub grpc_listen: SocketAddr,

    /// File to write the bound HTTP address to, as soon as it is bound [default: none]
    #[arg(long, env = "BATON_HTTP_ADDRESS_FILE", value_name = "PATH")]
    pub http_address_file: Option<PathBuf>,

    /// File to write the bound gRPC address to, as soon as it is bound [default: none]
    #[arg(long, env = "BATON_GRPC_ADDRESS_FILE", value_name = "PATH")]
    pub grpc_address_file: Option<PathBuf>,

    /// A prefill worker's address; repeat it for each, at most 1024
    #[arg(long, env = "BATON_PREFILL_WORKER", value_name = "HOST:PORT", value_delimiter = ',')]
    pub prefill_worker: Vec<String>,

    /// A decode worker's address; repeat it for each, at least 1 and at most 1024
    #[arg(long, env = "BATON_DECODE_WORKER", value_name = "HOST:PORT", value_delimiter = ',')]
    pub decode_worker: Vec<String>,

    /// Compute every prompt on the decode worker that continues it, and use no prefill worker
    #[arg(long, env = "BATON_COLOCATED")]
    pub colocated: bool,

    /// How requests are placed.
    #[command(flatten)]
    pub placement: PlacementConfig,

    /// Model whose tokenizer is used: 'default', 'builtin:tiny', a GGUF file, or a hub id such as org/name
    #[arg(long, env = "BATON_MODEL", value_name = "MODEL", default_value = "default")]
    pub model: String,

    /// Folder that models are kept in [default: baton in the user's cache folder]
    #[arg(long, env = "BATON_CACHE_DIR", value_name = "PATH")]
    pub cache_dir: Option<PathBuf>,

    /// Name that clients know the model by [default: the model's file name, or builtin:tiny]
    #[arg(long, env = "BATON_SERVED_MODEL_NAME", value_name = "NAME")]
    pub served_model_name: Option<String>,

    /// Tokens of prompt and output together, at most, from 16 up [default: the least that any worker offers]
    #[arg(long, env = "BATON_CONTEXT", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(16..))]
    pub context: Option<u32>,

    /// Requests that are worked on at once, 1 to 65536
    #[arg(long, env = "BATON_MAX_CONCURRENT", value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_concurrent: u32,

    /// Requests that wait at the door beyond those, 0 to 65536; more are refused with 429
    #[arg(long, env = "BATON_MAX_QUEUE", value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(0..=65536))]
    pub max_queue: u32,

    /// Answers of a request (its `n`), at most, 1 to 16
    #[arg(long, env = "BATON_MAX_N", value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(1..=MAX_SEQUENCES as i64))]
    pub max_n: u32,

    /// Bytes of a request body, at most, 1024 to 1073741824
    #[arg(long, env = "BATON_MAX_BODY_BYTES", value_name = "BYTES", default_value_t = 8 << 20,
          value_parser = clap::value_parser!(u64).range(1024..=1 << 30))]
    pub max_body_bytes: u64,

    /// Messages of a chat, at most, 1 to 65536
    #[arg(long, env = "BATON_MAX_MESSAGES", value_name = "N", default_value_t = 2048,
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_messages: u32,

    /// Stop strings of a request, at most, 0 to 64
    #[arg(long, env = "BATON_MAX_STOP_STRINGS", value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(0..=64))]
    pub max_stop_strings: u32,

    /// Bytes of a stop string, at most, 1 to 65536
    #[arg(long, env = "BATON_MAX_STOP_BYTES", value_name = "BYTES", default_value_t = 1024,
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_stop_bytes: u32,

    /// Tokens that may wait for a client that reads slowly, 16 to 65536
    #[arg(long, env = "BATON_MAX_OUTPUT_BUFFER", value_name = "TOKENS", default_value_t = 1024,
          value_parser = clap::value_parser!(u32).range(16..=65536))]
    pub max_output_buffer: u32,

    /// Time that this many tokens may wait for a client before its request is cancelled, in seconds, 0.05 to 3600
    #[arg(long, env = "BATON_SLOW_READER_TIMEOUT", value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub slow_reader_timeout: Duration,

    /// Silence after which a streamed answer carries a comment line, so that nothing between takes the connection for
    /// dead, in seconds, 0.05 to 3600
    #[arg(long, env = "BATON_KEEP_ALIVE", value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub keep_alive: Duration,

    /// Silence after which a worker counts as lost, in seconds, 0.05 to 3600
    #[arg(long, env = "BATON_HEARTBEAT_TIMEOUT", value_name = "SECONDS", default_value = "3", value_parser = seconds)]
    pub heartbeat_timeout: Duration,

    /// Time without progress after which a busy worker counts as lost, in seconds, 0.05 to 3600
    #[arg(long, env = "BATON_STALL_TIMEOUT", value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub stall_timeout: Duration,

    /// Time that running requests get to end after SIGTERM, in seconds, 0 to 3600
    #[arg(long, env = "BATON_DRAIN_TIMEOUT", value_name = "SECONDS", default_value = "5", value_parser = drain_seconds)]
    pub drain_timeout: Duration,

    /// Time that a request gets in all, from its arrival to its last token, in seconds, 0 to 86400; 0 means no bound; a client
    /// may ask for less
    #[arg(long, env = "BATON_REQUEST_TIMEOUT", value_name = "SECONDS", default_value = "0", value_parser = request_seconds)]
    pub request_timeout: Duration,

    /// What is promised about latency.
    #[command(flatten)]
    pub slo: SloConfig,

    /// Where spans go; off unless the caller sets it.
    #[arg(skip)]
    pub tracing: Tracing,

    /// Allow an address other than loopback although nothing is encrypted or authenticated
    #[arg(long, env = "BATON_INSECURE")]
    pub insecure: bool,
}

/// Options of placement: which workers a request runs on. They concern the whole cluster, so `baton up` offers them too.
#[derive(Clone, Debug, clap::Args)]
pub struct PlacementConfig {
    /// How workers are chosen: kv-aware (least expected cost, from prefix caches, queues and measured rates), least-loaded,
    /// round-robin or random-of-two
    #[arg(long = "placement", env = "BATON_PLACEMENT", value_name = "POLICY", default_value_t = Policy::default())]
    pub policy: Policy,

    /// Uncached prompt tokens up to which a decode worker may compute a prompt itself where that costs less, 0 to 65536;
    /// only with kv-aware placement
    #[arg(long, env = "BATON_MAX_LOCAL_TOKENS", value_name = "TOKENS", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(0..=65536))]
    pub max_local_tokens: u32,
}

/// Options of what is promised about latency. They concern the whole cluster, so `baton up` offers them too.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct SloConfig {
    /// Time to first token that is promised, in milliseconds, 0.1 to 3600000 [default: none]
    #[arg(long, env = "BATON_SLO_TTFT_MS", value_name = "MS", value_parser = milliseconds)]
    pub slo_ttft_ms: Option<f64>,

    /// Time between two tokens that is promised, in milliseconds, 0.1 to 3600000 [default: none]
    #[arg(long, env = "BATON_SLO_ITL_MS", value_name = "MS", value_parser = milliseconds)]
    pub slo_itl_ms: Option<f64>,
}

/// Workers of one role, at most.
const MAX_WORKERS: usize = 1024;

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.05..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("seconds from 0.05 to 3600".to_owned()),
    }
}

fn milliseconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ms) if (0.1..=3_600_000.0).contains(&ms) => Ok(ms),
        _ => Err("milliseconds from 0.1 to 3600000".to_owned()),
    }
}

fn drain_seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("seconds from 0 to 3600".to_owned()),
    }
}

fn request_seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("seconds from 0 to 86400".to_owned()),
    }
}

impl RouterConfig {
    /// What the parsers of the single options can't see.
    ///
    /// # Errors
    /// [`RouterError::Config`] with the option and the limit.
    pub fn check(&self) -> Result<(), RouterError> {
        for (option, address) in [("--http-listen", self.http_listen), ("--grpc-listen", self.grpc_listen)] {
            if !address.ip().is_loopback() && !self.insecure {
                let reason = format!(
                    "{} is not a loopback address, and traffic is not encrypted: pass --insecure to allow it",
                    address.ip()
                );
                return Err(RouterError::config(option, reason));
            }
        }
        if self.decode_worker.is_empty() {
            return Err(RouterError::config("--decode-worker", "name at least 1 decode worker"));
        }
        if self.colocated && !self.prefill_worker.is_empty() {
            let reason = "with --colocated there are no prefill workers: leave out one of the two";
            return Err(RouterError::config("--prefill-worker", reason));
        }
        check_workers("--prefill-worker", &self.prefill_worker)?;
        check_workers("--decode-worker", &self.decode_worker)?;
        if self.served_model_name.as_ref().is_some_and(|name| name.trim().is_empty()) {
            return Err(RouterError::config("--served-model-name", "a name can't be empty"));
        }
        Ok(())
    }
}

fn check_workers(option: &'static str, addresses: &[String]) -> Result<(), RouterError> {
    if addresses.len() > MAX_WORKERS {
        return Err(RouterError::config(
            option,
            format!("{} workers; at most {MAX_WORKERS}", addresses.len()),
        ));
    }
    for (index, address) in addresses.iter().enumerate() {
        let parts = address.rsplit_once(':');
        let usable = parts.is_some_and(|(host, port)| {
            !host.is_empty()
                && !host.contains(['/', ' ', '@'])
                && port.parse::<u16>().is_ok_and(|port| port != 0)
        });
        if !usable {
            return Err(RouterError::config(option, format!("'{address}' is not host:port")));
        }
        if addresses.iter().take(index).any(|earlier| earlier == address) {
            return Err(RouterError::config(option, format!("{address} is named twice")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser, Debug)]
    struct Command {
        #[command(flatten)]
        router: RouterConfig,
    }

    fn parse(arguments: &[&str]) -> Result<RouterConfig, String> {
        let arguments = ["router"].iter().chain(arguments);
        let command = Command::try_parse_from(arguments).map_err(|error| error.to_string())?;
        command.router.check().map_err(|error| error.to_string())?;
        Ok(command.router)
    }

    #[test]
    fn defaults_are_usable() {
        let config = parse(&["--decode-worker", "127.0.0.1:7000"]).expect("usable");
        assert!(config.http_listen.ip().is_loopback() && config.grpc_listen.ip().is_loopback());
        assert_eq!(
            (config.heartbeat_timeout, config.request_timeout),
            (Duration::from_secs(3), Duration::ZERO)
        );
        assert_eq!((config.max_body_bytes, config.max_n), (8 << 20, 8));
        assert!(
            config.slo.slo_ttft_ms.is_none() && config.slo.slo_itl_ms.is_none() && !config.tracing.is_on()
        );
        assert_eq!((config.placement.policy, config.placement.max_local_tokens), (Policy::KvAware, 16));
    }

    #[test]
    fn workers_can_be_repeated() {
        let config =
            parse(&["--decode-worker", "a:1", "--decode-worker", "[::1]:2", "--prefill-worker", "p:3"]);
        assert_eq!(config.expect("usable").decode_worker, ["a:1", "[::1]:2"]);
    }

    #[test]
    fn bad_values_are_refused_with_the_option_named() {
        let worker = ["--decode-worker", "127.0.0.1:7000"];
        for (arguments, option) in [
            (vec![], "--decode-worker"),
            (vec!["--decode-worker", "nowhere"], "--decode-worker"),
            (vec!["--decode-worker", "host:0"], "--decode-worker"),
            (vec!["--decode-worker", "http://host:1"], "--decode-worker"),
            (vec!["--decode-worker", "a:1", "--decode-worker", "a:1"], "--decode-worker"),
            (vec![worker[0], worker[1], "--colocated", "--prefill-worker", "p:1"], "--prefill-worker"),
            (vec![worker[0], worker[1], "--http-listen", "0.0.0.0:80"], "--http-listen"),
            (vec![worker[0], worker[1], "--grpc-listen", "192.0.2.1:80"], "--grpc-listen"),
            (vec![worker[0], worker[1], "--context", "3"], "--context"),
            (vec![worker[0], worker[1], "--max-concurrent", "0"], "--max-concurrent"),
            (vec![worker[0], worker[1], "--placement", "nearest"], "--placement"),
            (vec![worker[0], worker[1], "--max-local-tokens", "70000"], "--max-local-tokens"),
            (vec![worker[0], worker[1], "--max-n", "0"], "--max-n"),
            (vec![worker[0], worker[1], "--max-n", "17"], "--max-n"),
            (vec![worker[0], worker[1], "--max-body-bytes", "1"], "--max-body-bytes"),
            (vec![worker[0], worker[1], "--heartbeat-timeout", "0"], "--heartbeat-timeout"),
            (vec![worker[0], worker[1], "--drain-timeout", "nan"], "--drain-timeout"),
            (vec![worker[0], worker[1], "--request-timeout", "86401"], "--request-timeout"),
            (vec![worker[0], worker[1], "--slo-ttft-ms", "0"], "--slo-ttft-ms"),
            (vec![worker[0], worker[1], "--slo-itl-ms", "nan"], "--slo-itl-ms"),
            (vec![worker[0], worker[1], "--served-model-name", " "], "--served-model-name"),
        ] {
            let error = parse(&arguments).expect_err("refused");
            assert!(error.contains(option), "{arguments:?}: {error}");
        }
    }
}
