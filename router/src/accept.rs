//! From a checked request to a running one: model, door, tokens, context.

use std::sync::Arc;
use std::time::Instant;

use baton_handoff::RequestId;
use baton_proto::v1;
use baton_telemetry::metrics::Gauge;
use baton_telemetry::names;
use baton_telemetry::trace::TraceContext;
use baton_text::StopStrings;
use tokio::sync::mpsc;
use tracing::Instrument;

use crate::api_error::ApiError;
use crate::app::{App, shutting_down};
use crate::ask::Ask;
use crate::deadline::Deadline;
use crate::gate::Ticket;
use crate::labels::LabelGuard;
use crate::prompt::{Length, hashed, max_new_tokens, tokens};
use crate::request::{Arrival, Order, Output, RequestSpans, run, short};
use crate::served::Served;

/// Who asks, whatever is asked.
pub(crate) struct Caller {
    pub(crate) id: RequestId,
    /// Of the request's root span.
    pub(crate) trace: TraceContext,
    pub(crate) label: Option<String>,
    pub(crate) arrived: Instant,
    pub(crate) deadline: Deadline,
    /// Until the request runs.
    pub(crate) spans: RequestSpans,
}

impl Caller {
    /// A request that came so.
    ///
    /// # Errors
    /// [`ApiError::Internal`] without randomness.
    pub(crate) fn new(app: &App, arrival: Arrival) -> Result<Self, ApiError> {
        let id = RequestId(random()?);
        let trace = app.tracing.root(arrival.parent);
        let mut spans = RequestSpans::begin(app, trace, arrival);
        if let Some(root) = spans.on() {
            root.set(names::BATON_REQUEST_ID, id.to_string());
        }
        let deadline = Deadline::new(arrival.at, None, app.request_timeout);
        Ok(Self { id, trace, label: None, arrived: arrival.at, deadline, spans })
    }

    /// Takes the caller's own label.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] when it can't be used.
    pub(crate) fn set_label(&mut self, label: &[u8]) -> Result<(), ApiError> {
        let label = crate::labels::check(label)?;
        if let Some(root) = self.spans.on() {
            root.set(names::CLIENT_REQUEST_ID, label.clone());
        }
        self.label = Some(label);
        Ok(())
    }

    /// Counts a request that is refused before it runs; answers with its spans, which end with the answer.
    pub(crate) fn refuse(&mut self, app: &App, error: &ApiError) -> RequestSpans {
        app.metrics.request_ended("none", error.code());
        let mut spans = self.spans.take();
        spans.refused(error);
        spans
    }
}

fn random<const N: usize>() -> Result<[u8; N], ApiError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| ApiError::Internal(format!("no randomness: {error}")))?;
    Ok(bytes)
}

/// What a request holds while it lives.
pub(crate) struct Held {
    _ticket: Ticket,
    _label: Option<LabelGuard>,
    _counted: Counted,
}

/// Counts a request in flight until it is dropped.
struct Counted(Gauge);

impl Counted {
    fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// A request that runs; dropping `outputs` cancels it.
pub(crate) struct Accepted {
    pub(crate) model: String,
    pub(crate) outputs: mpsc::Receiver<Output>,
}

/// Admits a request and starts it.
///
/// # Errors
/// Everything that can be said before any worker hears of it.
pub(crate) async fn accept(app: &Arc<App>, ask: Ask, caller: &mut Caller) -> Result<Accepted, ApiError> {
    let deadline = caller.deadline;
    deadline.bound(admit(app, ask, caller)).await
}

async fn admit(app: &Arc<App>, ask: Ask, caller: &mut Caller) -> Result<Accepted, ApiError> {
    if app.draining.is_cancelled() {
        return Err(shutting_down());
    }
    let served = app.served()?;
    if let Some(root) = caller.spans.on() {
        let asked = ask.model.as_deref().filter(|model| !model.is_empty()).unwrap_or(&served.name);
        root.set(names::GEN_AI_REQUEST_MODEL, short(asked));
    }
    check_model(served, ask.model.as_deref())?;
    let label = caller.label.as_deref().map(|label| app.labels.take(label)).transpose()?;
    let ticket = pass(app, caller).await?;
    let counted = Counted::new(&app.metrics.num_requests_in_flight);
    let prompt = tokens(app, ask.input, ask.input_field).await?;
    if let Some(root) = caller.spans.on() {
        root.tokenized(None);
    }
    let length = Length { num_tokens: prompt.len(), field: ask.input_field, n: ask.n };
    let max_new_tokens = max_new_tokens(length, ask.max_tokens, app.context(served), app.fleet.largest())?;
    let stops = || StopStrings::new(&ask.stop).map_err(|error| ApiError::invalid("stop", error.to_string()));
    let choices =
        (0..ask.n).map(|_| Ok((served.text.detokenizer(), stops()?))).collect::<Result<_, ApiError>>()?;
    let (prompt, hashes) =
        if ask.no_prefix_cache { (prompt, Vec::new()) } else { hashed(app, prompt).await? };
    let seed = ask.seed.map_or_else(|| random().map(u64::from_le_bytes), Ok)?;
    let order = Order {
        id: caller.id,
        trace: caller.trace,
        arrived: caller.arrived,
        deadline: caller.deadline,
        prompt,
        sampling: v1::Sampling { temperature: ask.temperature, top_p: ask.top_p, top_k: 0, min_p: 0.0, seed },
        stop_tokens: if ask.ignore_eos { Vec::new() } else { served.end_tokens.clone() },
        max_new_tokens,
        priority: ask.priority,
        no_prefix_cache: ask.no_prefix_cache,
        hashes,
        choices,
        held: Held { _ticket: ticket, _label: label, _counted: counted },
        spans: caller.spans.take(),
    };
    // One more than tokens may wait: there is always room for the end.
    let (sender, outputs) = mpsc::channel(app.max_output_buffer + 1);
    let span = baton_telemetry::log::request_span(&caller.id.to_string(), &caller.trace.trace_id_hex());
    tokio::spawn(run(Arc::clone(app), order, sender).instrument(span));
    Ok(Accepted { model: served.name.clone(), outputs })
}

/// Passes the door, timed.
async fn pass(app: &App, caller: &mut Caller) -> Result<Ticket, ApiError> {
    let came = Instant::now();
    if let Some(root) = caller.spans.on() {
        root.at_door();
    }
    let ticket = enter(app).await?;
    if let Some(root) = caller.spans.on() {
        root.let_in();
    }
    app.metrics.queue.observe_traced(came.elapsed().as_secs_f64(), &caller.trace);
    Ok(ticket)
}

/// Passes the door.
///
/// # Errors
/// [`ApiError::Shed`], or [`ApiError::Unavailable`] when the router stops meanwhile.
pub(crate) async fn enter(app: &App) -> Result<Ticket, ApiError> {
    tokio::select! {
        entered = app.gate.enter() => entered.map_err(|shed| ApiError::Shed { retry_after_ms: shed.retry_after_ms }),
        () = app.cut.cancelled() => Err(shutting_down()),
    }
}

/// # Errors
/// [`ApiError::UnknownModel`] naming the one that is served.
pub(crate) fn check_model(served: &Served, name: Option<&str>) -> Result<(), ApiError> {
    match name {
        Some(name) if !served.is_called(name) => {
            let name = name.chars().filter(|character| !character.is_control()).take(128).collect();
            Err(ApiError::UnknownModel { name, served: served.name.clone() })
        }
        _ => Ok(()),
    }
}
