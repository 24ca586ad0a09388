//! Options about traces, of the roles and of `up`.

use std::path::PathBuf;
use std::time::Duration;

use baton_telemetry::trace::{Service, Tracing, TracingConfig, TracingGuard, TracingOptions};

use crate::exit::Failure;

/// How long the end of a process waits for spans to be exported.
const FLUSH: Duration = Duration::from_secs(1);

/// Where spans go, for every role. Without any of it, nothing is traced.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Traces")]
pub(crate) struct TracingArgs {
    /// Collector to send spans to, such as http://127.0.0.1:4317; OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf speaks HTTP to it [default:
    /// OTEL_EXPORTER_OTLP_ENDPOINT, or none]
    #[arg(long, env = "BATON_OTLP_ENDPOINT", value_name = "URL")]
    pub(crate) otlp_endpoint: Option<String>,

    /// Share of the traces that are exported whatever happens, 0 to 1; those that stall, fail or miss an objective always are [default: what
    /// OTEL_TRACES_SAMPLER says, or 1]
    #[arg(long, env = "BATON_TRACE_SAMPLE_RATIO", value_name = "R", value_parser = ratio)]
    pub(crate) trace_sample_ratio: Option<f64>,
}

/// The same, and a file.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Traces")]
pub(crate) struct RoleTracing {
    #[command(flatten)]
    pub(crate) args: TracingArgs,

    /// File to append spans to as OTLP JSON, a batch a line; `baton trace export` makes of it what Jaeger reads [default: none]
    #[arg(long, env = "BATON_TRACE_FILE", value_name = "PATH")]
    pub(crate) trace_file: Option<PathBuf>,
}

/// A role with its options about traces.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Traced<Config: clap::Args> {
    #[command(flatten)]
    pub(crate) config: Config,
    #[command(flatten)]
    pub(crate) tracing: RoleTracing,
}

impl TracingArgs {
    fn options(&self) -> TracingOptions {
        TracingOptions {
            otlp_endpoint: self.otlp_endpoint.clone(),
            sample_ratio: self.trace_sample_ratio,
            file: None,
        }
    }

    /// What `up` asks before it starts processes that would all say the same.
    ///
    /// # Errors
    /// [`Failure::Usage`] for an endpoint that can't be used.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let read = TracingConfig::read(&self.options(), |name| std::env::var(name).ok());
        read.map(drop).map_err(|error| Failure::Usage(error.to_string()))
    }
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err(format!("'{text}' is no number from 0 to 1")),
    }
}

impl RoleTracing {
    /// Sets tracing up for a role: `router`, `prefill-worker` or `decode-worker`. The guard, if there is one, is for [`finish`].
    ///
    /// # Errors
    /// [`Failure::Usage`] for an endpoint or a file that can't be used.
    pub(crate) fn start(&self, service: &'static str) -> Result<(Tracing, Option<TracingGuard>), Failure> {
        let options = TracingOptions { file: self.trace_file.clone(), ..self.args.options() };
        let usage = |error: baton_telemetry::TelemetryError| Failure::Usage(error.to_string());
        let Some(config) = TracingConfig::from_environment(&options).map_err(usage)? else {
            return Ok((Tracing::off(), None));
        };
        let service = Service { name: service, version: env!("CARGO_PKG_VERSION") };
        let (tracing, guard) = Tracing::start(config, service).map_err(usage)?;
        Ok((tracing, Some(guard)))
    }
}

/// Has what was recorded exported, within a bound.
///
/// # Errors
/// [`Failure::Unexpected`] when there can be no runtime to wait on.
pub(crate) fn finish(guard: Option<TracingGuard>) -> Result<(), Failure> {
    let Some(guard) = guard else { return Ok(()) };
    crate::roles::one_thread()?.block_on(guard.shutdown(FLUSH));
    Ok(())
}
