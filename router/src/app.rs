//! What every request of this router shares.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use baton_dispatch::DoorLimits;
use baton_telemetry::metrics::RouterMetrics;
use baton_telemetry::trace::Tracing;
use tokio_util::sync::CancellationToken;

use crate::RouterConfig;
use crate::api_error::ApiError;
use crate::ask::Limits;
use crate::fleet::Fleet;
use crate::gate::Gate;
use crate::keep::{self, Decisions, Keeper};
use crate::labels::Labels;
use crate::request::Warnings;
use crate::served::Served;
use crate::slo::Slo;

/// State of a router process.
pub(crate) struct App {
    pub(crate) limits: Limits,
    pub(crate) max_body_bytes: u64,
    pub(crate) max_output_buffer: usize,
    pub(crate) slow_reader_timeout: Duration,
    pub(crate) keep_alive: Duration,
    /// Longest time of a request.
    pub(crate) request_timeout: Option<Duration>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) labels: Arc<Labels>,
    pub(crate) metrics: RouterMetrics,
    pub(crate) warnings: Warnings,
    pub(crate) tracing: Tracing,
    /// Has workers keep traces.
    pub(crate) keeper: Keeper,
    pub(crate) slo: Slo,
    /// Set once: no new requests.
    pub(crate) draining: CancellationToken,
    /// Set when the drain timeout is over: running requests end with an error.
    pub(crate) cut: CancellationToken,
    /// Origin of the monotonic time that `baton_dispatch` hears.
    pub(crate) origin: Instant,
    served: OnceLock<Served>,
    context: Option<u32>,
}

impl App {
    /// The state, and what is to be run beside it: what tells workers which traces to keep.
    pub(crate) fn new(config: &RouterConfig, fleet: Arc<Fleet>) -> (Self, Decisions) {
        let metrics = RouterMetrics::new();
        metrics.read_spans(&config.tracing);
        let (keeper, decisions) = keep::queue(&metrics);
        let (counted, watched) = (Arc::clone(&fleet), Arc::clone(&fleet));
        metrics.read_workers(move || counted.counts());
        metrics.read_open_breakers(move || watched.open_breakers());
        let limits = DoorLimits {
            max_concurrent: config.max_concurrent as usize,
            max_queue: config.max_queue as usize,
        };
        let app = Self {
            limits: Limits {
                max_messages: config.max_messages as usize,
                max_stop_strings: config.max_stop_strings as usize,
                max_stop_bytes: config.max_stop_bytes as usize,
                max_n: config.max_n,
            },
            max_body_bytes: config.max_body_bytes,
            max_output_buffer: config.max_output_buffer as usize,
            slow_reader_timeout: config.slow_reader_timeout,
            keep_alive: config.keep_alive,
            request_timeout: Some(config.request_timeout).filter(|timeout| !timeout.is_zero()),
            fleet,
            gate: Gate::new(limits),
            labels: Arc::default(),
            metrics,
            warnings: Warnings::default(),
            tracing: config.tracing.clone(),
            keeper,
            slo: Slo::from(config.slo),
            draining: CancellationToken::new(),
            cut: CancellationToken::new(),
            origin: Instant::now(),
            served: OnceLock::new(),
            context: config.context,
        };
        (app, decisions)
    }

    /// The model is ready.
    pub(crate) fn set_served(&self, served: Served) {
        self.fleet.set_digest(served.digest);
        let _ = self.served.set(served);
    }

    /// The model, once its tokenizer is ready.
    ///
    /// # Errors
    /// [`ApiError::Unavailable`] before.
    pub(crate) fn served(&self) -> Result<&Served, ApiError> {
        self.served.get().ok_or_else(|| unavailable("the tokenizer is still loading"))
    }

    /// Tokens of prompt and output together that are offered: the least of the option, the model and the workers.
    pub(crate) fn context(&self, served: &Served) -> u32 {
        [self.context, self.fleet.context()].into_iter().flatten().fold(served.context, u32::min)
    }

    /// What keeps a chat from being served; empty when nothing does.
    pub(crate) fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if self.draining.is_cancelled() {
            missing.push("this router is shutting down".to_owned());
        }
        if self.served.get().is_none() {
            missing.push("the tokenizer (still loading)".to_owned());
        }
        missing.extend(self.fleet.missing());
        missing
    }
}

/// What requests hear that are not served any more.
pub(crate) fn shutting_down() -> ApiError {
    unavailable("this router is shutting down")
}

/// Nothing can be served now.
pub(crate) fn unavailable(message: impl Into<String>) -> ApiError {
    ApiError::Unavailable { message: message.into(), retry_after_ms: None }
}
