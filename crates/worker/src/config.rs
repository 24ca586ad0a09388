//! The options that both kinds of worker share; each is defined here and nowhere else.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_engine::Quantize;
use baton_kv::KvDtype;
use baton_telemetry::trace::Tracing;

use crate::cpus::CpuList;
use crate::device::DeviceName;
use crate::size::ByteSize;
use crate::{WorkerError, limits};

/// Options of a worker. Every doc comment is the option's help text.
#[derive(Clone, Debug, clap::Args)]
pub struct WorkerConfig {
    /// Address to serve gRPC and /metrics on; port 0 picks a free one
    #[arg(long, env = "BATON_LISTEN", value_name = "IP:PORT", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,

    /// File to write the bound address to, as soon as it is bound [default: none]
    #[arg(long, env = "BATON_ADDRESS_FILE", value_name = "PATH")]
    pub address_file: Option<PathBuf>,

    /// Model: 'default', 'builtin:tiny', a GGUF file, or a hub id such as org/name or org/name:file.gguf
    #[arg(long, env = "BATON_MODEL", value_name = "MODEL", default_value = "default")]
    pub model: String,

    /// Folder that models are kept in [default: baton in the user's cache folder]
    #[arg(long, env = "BATON_CACHE_DIR", value_name = "PATH")]
    pub cache_dir: Option<PathBuf>,

    /// Device to compute on: cpu, cuda:N, or auto for the first CUDA device that can be used and the CPU where there is none. On a CUDA
    /// device weights and activations have the type of --kv-dtype, f16 or bf16
    #[arg(long, env = "BATON_DEVICE", value_name = "NAME", default_value = "cpu")]
    pub device: DeviceName,

    /// Compute threads, 1 to 256 [default: the CPUs of --cpus, or those this process may use]
    #[arg(long, env = "BATON_THREADS", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,

    /// CPUs to bind the compute threads to, such as 0,2-3 [default: not bound]
    #[arg(long, env = "BATON_CPUS", value_name = "LIST")]
    pub cpus: Option<CpuList>,

    /// CPUs to bind the network threads to, such as 0,2-3 [default: not bound]
    #[arg(long, env = "BATON_IO_CPUS", value_name = "LIST")]
    pub io_cpus: Option<CpuList>,

    /// Memory for KV blocks in bytes, with K, M, G or T behind it [default: 1,024 tokens for each of --max-num-seqs,
    /// or one whole context if that is more, but at most a quarter of the memory of this machine or container]
    #[arg(long, env = "BATON_KV_MEMORY", value_name = "BYTES")]
    pub kv_memory: Option<ByteSize>,

    /// Tokens of prompt and output together, at most, from 16 up [default: the model's context]
    #[arg(long, env = "BATON_CONTEXT", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(16..))]
    pub context: Option<u32>,

    /// Sequences that hold KV blocks at once, 1 to 4096
    #[arg(long, env = "BATON_MAX_NUM_SEQS", value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_num_seqs: u32,

    /// Sequences that wait, at most, 1 to 65536; more are refused as busy
    #[arg(long, env = "BATON_MAX_QUEUE", value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_queue: u32,

    /// Tokens of a KV block, a power of two from 16 to 256; the same on all workers
    #[arg(long, env = "BATON_BLOCK_SIZE", value_name = "TOKENS", default_value_t = 16, value_parser = block_size)]
    pub block_size: usize,

    /// Arithmetic: 'auto' rounds activations to 8 bits where weights are quantised, 'f32' widens both
    #[arg(long, env = "BATON_PRECISION", value_name = "NAME", default_value = "auto", value_parser = ["auto", "f32"])]
    pub precision: String,

    /// Rounds the weights while they are loaded: 'none' keeps them as stored, 'int8' takes 8 bits for each where the model has F32,
    /// F16 or BF16 (safetensors), on a CUDA device whatever it has; the same on all workers
    #[arg(long, env = "BATON_QUANTIZE", value_name = "NAME", default_value = "none")]
    pub quantize: Quantize,

    /// Element type of the KV cache: f16, bf16, f32 or fp8 (e4m3 with a scale for each head of a token: half the memory and half the
    /// bytes to move); the same on all workers
    #[arg(long, env = "BATON_KV_DTYPE", value_name = "NAME", default_value = "f16")]
    pub kv_dtype: KvDtype,

    /// Tokens that one step computes, at most: the chunk a long prompt is cut into, one block to 65536
    #[arg(long, env = "BATON_MAX_STEP_TOKENS", value_name = "TOKENS", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(16..=65536))]
    pub max_step_tokens: u32,

    /// Expected time of a step that computes prompts, at most, in milliseconds, 1 to 60000: with a long context a chunk is shorter
    /// than --max-step-tokens
    #[arg(long, env = "BATON_MAX_STEP_MS", value_name = "MS", default_value_t = 200,
          value_parser = clap::value_parser!(u32).range(1..=60000))]
    pub max_step_ms: u32,

    /// Spend at least 1/N s on every token computed, so that a small model takes the time of a large one, 0.001 to 1e9
    /// [default: as fast as it can]
    #[arg(long, env = "BATON_PACE_TOKENS_PER_S", value_name = "N", value_parser = pace)]
    pub pace_tokens_per_s: Option<f64>,

    /// Keep the KV of full blocks after their sequence ended, and use it again for prompts that begin the same: on or off
    #[arg(long, env = "BATON_PREFIX_CACHE", value_name = "on|off", default_value = "on", value_parser = on_off,
          action = clap::ArgAction::Set)]
    pub prefix_cache: bool,

    /// How KV travels to a decode worker: 'auto' within a host from device to device or else through shared memory, and over gRPC
    /// elsewhere; 'grpc' always so; 'shm' through shared memory only, 'ipc' from device to device only (CUDA IPC): other workers are refused
    #[arg(long, env = "BATON_KV_TRANSPORT", value_name = "NAME", default_value = "auto",
          value_parser = ["auto", "grpc", "shm", "ipc"])]
    pub kv_transport: String,

    /// CPU kernels: auto, amx, avx512, avx2 or portable
    #[arg(long, env = "BATON_ISA", value_name = "NAME", default_value = "auto",
          value_parser = ["auto", "amx", "avx512", "avx2", "portable"])]
    pub isa: String,

    /// CUDA devices: launch a step that only decodes as one graph, which is captured when its size comes a second time: on or off
    #[arg(long, env = "BATON_CUDA_GRAPHS", value_name = "on|off", default_value = "on", value_parser = on_off,
          action = clap::ArgAction::Set)]
    pub cuda_graphs: bool,

    /// Time that running requests get to end after SIGTERM, in seconds, 0 to 3600
    #[arg(long, env = "BATON_DRAIN_TIMEOUT", value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub drain_timeout: Duration,

    /// A gap between two tokens counts as a stall when it is this much longer than a step that only decodes, in milliseconds,
    /// 1 to 60000
    #[arg(long, env = "BATON_STALL_THRESHOLD_MS", value_name = "MS", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(1..=60000))]
    pub stall_threshold_ms: u32,

    /// Names under which /metrics also shows the load: 'vllm' adds those of vLLM
    #[arg(long, env = "BATON_METRICS_COMPAT", value_name = "NAME", default_value = "none",
          value_parser = ["none", "vllm"])]
    pub metrics_compat: String,

    /// Where spans go: made from options of the whole process.
    #[arg(skip)]
    pub tracing: Tracing,

    /// Allow an address other than loopback although nothing is encrypted or authenticated
    #[arg(long, env = "BATON_INSECURE")]
    pub insecure: bool,
}

fn block_size(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(size @ 16..=256) if usize::is_power_of_two(size) => Ok(size),
        _ => Err("a power of two from 16 to 256".to_owned()),
    }
}

fn pace(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (0.001..=1e9).contains(&rate) => Ok(rate),
        _ => Err(format!("'{text}' is no number from 0.001 to 1e9")),
    }
}

fn on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("on or off".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("seconds from 0 to 3600".to_owned()),
    }
}

impl WorkerConfig {
    /// What the parsers of the single options can't see.
    ///
    /// # Errors
    /// [`WorkerError::Config`] with the option and the limit.
    pub fn check(&self) -> Result<(), WorkerError> {
        if !self.listen.ip().is_loopback() && !self.insecure {
            let reason = format!(
                "{} is not a loopback address, and traffic is not encrypted: pass --insecure to allow it",
                self.listen.ip()
            );
            return Err(WorkerError::config("--listen", reason));
        }
        if (self.max_step_tokens as usize) < self.block_size {
            let reason = format!("{} is less than one block of {}", self.max_step_tokens, self.block_size);
            return Err(WorkerError::config("--max-step-tokens", reason));
        }
        if self.max_step_tokens < self.max_num_seqs {
            let reason = format!(
                "{} is less than --max-num-seqs {}: each running sequence needs a token in every step",
                self.max_step_tokens, self.max_num_seqs
            );
            return Err(WorkerError::config("--max-step-tokens", reason));
        }
        let allowed = CpuList::allowed().map_err(WorkerError::system("ask which CPUs may be used"))?;
        for (option, list) in [("--cpus", &self.cpus), ("--io-cpus", &self.io_cpus)] {
            if let Some(cpu) = list.as_ref().and_then(|list| list.first_outside(&allowed)) {
                return Err(WorkerError::config(
                    option,
                    format!("CPU {cpu} is not among those allowed: {allowed}"),
                ));
            }
        }
        Ok(())
    }

    /// Compute threads: as configured, or one for each CPU that may be used, no more than the container's quota.
    pub fn num_threads(&self) -> usize {
        if let Some(threads) = self.threads {
            return usize::from(threads);
        }
        let cpus = match &self.cpus {
            Some(list) => list.num_cpus(),
            None => CpuList::allowed().map_or(1, |list| list.num_cpus()),
        };
        cpus.min(limits::cpu_quota().unwrap_or(usize::MAX)).clamp(1, 256)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser, Debug)]
    struct Command {
        #[command(flatten)]
        worker: WorkerConfig,
    }

    fn parse(arguments: &[&str]) -> Result<WorkerConfig, String> {
        let arguments = ["worker"].iter().chain(arguments);
        let command = Command::try_parse_from(arguments).map_err(|error| error.to_string())?;
        command.worker.check().map_err(|error| error.to_string())?;
        Ok(command.worker)
    }

    #[test]
    fn defaults_are_usable() {
        let config = parse(&[]).unwrap();
        assert!(config.listen.ip().is_loopback());
        assert_eq!((config.block_size, config.kv_dtype), (16, KvDtype::F16));
        for dtype in KvDtype::ALL {
            assert_eq!(parse(&["--kv-dtype", dtype.name()]).unwrap().kv_dtype, dtype);
        }
        assert_eq!(config.quantize, Quantize::None);
        assert_eq!(parse(&["--quantize", "int8"]).unwrap().quantize, Quantize::Int8);
        assert!(config.prefix_cache && !parse(&["--prefix-cache=off"]).unwrap().prefix_cache);
        assert_eq!(config.drain_timeout, Duration::from_secs(5));
        assert!(config.num_threads() >= 1);
    }

    #[test]
    fn bad_values_are_refused_with_the_option_named() {
        for (arguments, option) in [
            (vec!["--kv-memory", "1.5G"], "--kv-memory"),
            (vec!["--kv-memory", "lots"], "--kv-memory"),
            (vec!["--cpus", "2-1"], "--cpus"),
            (vec!["--io-cpus", "0,0"], "--io-cpus"),
            (vec!["--cpus", "1023"], "--cpus"),
            (vec!["--block-size", "24"], "--block-size"),
            (vec!["--block-size", "8"], "--block-size"),
            (vec!["--threads", "0"], "--threads"),
            (vec!["--context", "8"], "--context"),
            (vec!["--kv-dtype", "int4"], "--kv-dtype"),
            (vec!["--quantize", "int4"], "--quantize"),
            (vec!["--precision", "f64"], "--precision"),
            (vec!["--prefix-cache", "yes"], "--prefix-cache"),
            (vec!["--prefix-cache"], "--prefix-cache"),
            (vec!["--isa", "neon"], "--isa"),
            (vec!["--max-num-seqs", "0"], "--max-num-seqs"),
            (vec!["--max-num-seqs", "600"], "--max-step-tokens"),
            (vec!["--block-size", "64", "--max-step-tokens", "32"], "--max-step-tokens"),
            (vec!["--max-step-ms", "0"], "--max-step-ms"),
            (vec!["--drain-timeout=-1"], "--drain-timeout"),
            (vec!["--listen", "localhost"], "--listen"),
        ] {
            let error = parse(&arguments).unwrap_err();
            assert!(error.contains(option), "{arguments:?}: {error}");
        }
    }

    #[test]
    fn another_address_than_loopback_needs_insecure() {
        let error = parse(&["--listen", "0.0.0.0:7000"]).unwrap_err();
        assert!(
            error.contains("--listen") && error.contains("0.0.0.0") && error.contains("--insecure"),
            "{error}"
        );
        assert!(!error.contains('\n'), "{error}");
        parse(&["--listen", "0.0.0.0:7000", "--insecure"]).unwrap();
        parse(&["--listen", "[::1]:7000"]).unwrap();
    }

    #[test]
    fn threads_follow_the_cpus_given() {
        let first = CpuList::allowed().unwrap().as_slice()[0].to_string();
        assert_eq!(parse(&["--cpus", &first]).unwrap().num_threads(), 1);
        assert_eq!(parse(&["--cpus", &first, "--threads", "3"]).unwrap().num_threads(), 3);
    }
}
