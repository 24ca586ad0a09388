//! The loop of one request: facts in, actions out, until its end.

use std::sync::Arc;
use std::time::Instant;

use baton_dispatch::{
    DecodeFact, Legs, Mode, Need, PlaceError, Placed, Placement, PrefillFact, Request, RequestAction,
    RequestConfig, RequestEnd, RequestFact, RetryLimits, Time, place,
};
use baton_handoff::{Cause, FinishReason, InstanceId, SampledToken};
use baton_proto::v1;
use bytes::Bytes;
use tokio::sync::mpsc;

use super::answer::Answer;
use super::legs::{self, DecodeEvent, Leg, LegEvent, PrefillEvent};
use super::outbox::{Outbox, Unheard};
use super::{Kv, Order, Output, Summary, Usage, finish_name};
use crate::accept::Held;
use crate::api_error::ApiError;
use crate::app::{App, shutting_down, unavailable};

/// Requests waiting on a worker from which on it gets no more from here.
const MAX_WAITING: u32 = 256;

/// Runs a request to its end. The client is gone when the receiver of `outputs` is.
pub(crate) async fn run(app: Arc<App>, order: Order, outputs: mpsc::Sender<Output>) {
    let mut run = Run::new(&app, order, outputs);
    let mut fact = RequestFact::Start;
    let result = loop {
        run.handle(fact);
        if let Err(unheard) = run.outbox.flush().await {
            run.slow_reader = matches!(unheard, Unheard::Slow);
            run.handle(RequestFact::ClientGone);
        }
        match run.ended {
            Some(end) => break run.result(end).await,
            None => fact = run.next().await,
        }
    };
    run.record(&result);
    // Given back before the client hears of the end, so that it can come again at once.
    run.held = None;
    run.outbox.end(result);
}

struct Run<'a> {
    app: &'a App,
    request: Request,
    prompt: Vec<u32>,
    sampling: v1::Sampling,
    stop_tokens: Vec<u32>,
    max_new_tokens: u32,
    trace: baton_telemetry::trace::TraceContext,
    answer: Answer,
    outbox: Outbox,
    placement: Option<(Placement, Placed)>,
    prefill: Option<(u32, Leg<PrefillEvent>)>,
    decode: Option<(u32, Leg<DecodeEvent>)>,
    /// Tokens of one message that were not yet handled.
    tokens: std::collections::VecDeque<(u32, SampledToken)>,
    kv: Option<Kv>,
    cached_tokens: u32,
    /// The client did not read: its buffer is full.
    slow_reader: bool,
    ended: Option<RequestEnd>,
    held: Option<Held>,
}

impl<'a> Run<'a> {
    fn new(app: &'a App, order: Order, outputs: mpsc::Sender<Output>) -> Self {
        let config = RequestConfig {
            request: order.id,
            group: 0,
            max_new_tokens: order.max_new_tokens,
            stop_tokens: order.stop_tokens.clone(),
            deadline: None,
            limits: RetryLimits::default(),
        };
        Self {
            app,
            request: Request::new(config),
            prompt: order.prompt,
            sampling: order.sampling,
            stop_tokens: order.stop_tokens,
            max_new_tokens: order.max_new_tokens,
            trace: order.trace,
            answer: Answer::new(order.detokenizer, order.stops, order.arrived),
            outbox: Outbox::new(outputs, app.slow_reader_timeout),
            placement: None,
            prefill: None,
            decode: None,
            tokens: std::collections::VecDeque::new(),
            kv: None,
            cached_tokens: 0,
            slow_reader: false,
            ended: None,
            held: Some(order.held),
        }
    }

    fn now(&self) -> Time {
        self.app.origin.elapsed()
    }

    /// The next thing that happens.
    async fn next(&mut self) -> RequestFact {
        if let Some((attempt, token)) = self.tokens.pop_front() {
            return RequestFact::Decode { attempt, event: DecodeFact::Token(token) };
        }
        let deadline = self.request.deadline().map(|at| tokio::time::Instant::from_std(self.app.origin + at));
        let ticked = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.outbox.closed() => RequestFact::ClientGone,
            () = self.app.cut.cancelled() => RequestFact::ClientGone,
            (attempt, event) = next_of(&mut self.prefill) => self.prefill_fact(attempt, event),
            (attempt, event) = next_of(&mut self.decode) => self.decode_fact(attempt, event),
            () = ticked => RequestFact::Tick,
        }
    }

    fn prefill_fact(&mut self, attempt: u32, event: Option<PrefillEvent>) -> RequestFact {
        let event = match event {
            Some(PrefillEvent::FirstToken { token, finish, cached_tokens }) => {
                self.cached_tokens = cached_tokens;
                PrefillFact::FirstToken { token, finish }
            }
            Some(PrefillEvent::Fact(fact)) => fact,
            None => PrefillFact::Lost,
        };
        RequestFact::Prefill { attempt, event }
    }

    fn decode_fact(&mut self, attempt: u32, event: Option<DecodeEvent>) -> RequestFact {
        let event = match event {
            Some(DecodeEvent::Started { kv, cached_tokens }) => {
                self.kv = kv.or(self.kv);
                self.cached_tokens = self.cached_tokens.max(cached_tokens);
                DecodeFact::Started
            }
            Some(DecodeEvent::Tokens(tokens)) => {
                self.tokens.extend(tokens.into_iter().map(|token| (attempt, token)));
                match self.tokens.pop_front() {
                    Some((_, token)) => DecodeFact::Token(token),
                    None => DecodeFact::Failed(Cause::Protocol),
                }
            }
            Some(DecodeEvent::Fact(fact)) => fact,
            None => DecodeFact::Lost,
        };
        RequestFact::Decode { attempt, event }
    }

    fn handle(&mut self, fact: RequestFact) {
        self.request.handle(self.now(), fact);
        while let Some(action) = self.request.poll() {
            match action {
                RequestAction::Place { avoid } => {
                    let fact = match self.place(&avoid) {
                        Ok(placed) => RequestFact::Placed(placed),
                        Err(error) => RequestFact::NotPlaced(error),
                    };
                    self.request.handle(self.now(), fact);
                }
                RequestAction::OpenLegs(legs) => self.open(legs),
                RequestAction::CloseLegs { attempt } => self.close(attempt),
                RequestAction::Deliver(token) => self.deliver(token),
                RequestAction::End(end) => self.ended = Some(end),
            }
        }
    }

    fn place(&mut self, avoid: &[InstanceId]) -> Result<Placed, PlaceError> {
        let num_delivered = u32::try_from(self.answer.token_ids().len()).unwrap_or(u32::MAX);
        let prompt_tokens = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        let need = Need {
            prompt_tokens: prompt_tokens.saturating_add(num_delivered),
            max_new_tokens: self.max_new_tokens.saturating_sub(num_delivered),
            block_size: self.app.fleet.block_size().unwrap_or(1),
            max_waiting: MAX_WAITING,
            avoid,
        };
        let views = self.app.fleet.views();
        let placement = place(&views, &need, self.app.policy)?;
        let instance = |index: usize| views.get(index).map(|view| view.instance);
        let placed = Placed {
            decode: instance(placement.decode).ok_or(PlaceError::NoWorker)?,
            prefill: placement.prefill.and_then(instance),
        };
        if placement.mode == Mode::Local {
            self.app.metrics.local_fallbacks.inc();
            self.app.warnings.local_fallback(placement.reason);
        }
        if self.placement.is_none_or(|(before, _)| before.mode != placement.mode) {
            self.outbox.say(Output::Placed(placement.mode));
        }
        self.placement = Some((placement, placed));
        Ok(placed)
    }

    fn open(&mut self, opened: Legs) {
        let Some((placement, placed)) = self.placement else { return };
        let attempt = opened.key.attempt;
        let forced = self.answer.token_ids().get(..opened.num_forced as usize).unwrap_or_default();
        let prompt: Vec<u32> = self.prompt.iter().chain(forced).copied().collect();
        let key = v1::HandoffKey {
            request: Bytes::copy_from_slice(&opened.key.request.0),
            group: opened.key.group,
            attempt,
        };
        let stopping =
            v1::Stopping { max_new_tokens: opened.max_new_tokens, stop_token_ids: self.stop_tokens.clone() };
        let decode = self.app.fleet.member(placement.decode);
        let prefill =
            placement.prefill.filter(|_| !opened.local).and_then(|index| self.app.fleet.member(index));
        if let Some(member) = prefill {
            let destination = decode.filter(|_| opened.decode).map(|decode| v1::Destination {
                address: decode.address.clone(),
                instance_id: Bytes::copy_from_slice(&placed.decode.0),
            });
            let request = v1::PrefillRequest {
                key: Some(key.clone()),
                prompt: prompt.clone(),
                sampling: Some(self.sampling),
                stopping: Some(stopping.clone()),
                destination,
                num_generated: opened.num_forced,
            };
            self.prefill = Some((attempt, legs::prefill(member, request, self.trace)));
        }
        if let Some(member) = decode.filter(|_| opened.decode) {
            let request = v1::DecodeRequest {
                key: Some(key),
                prompt,
                sampling: Some(self.sampling),
                stopping: Some(stopping),
                local: opened.local,
                num_generated: opened.num_forced,
            };
            self.decode = Some((attempt, legs::decode(member, request, self.trace)));
        }
    }

    fn close(&mut self, attempt: u32) {
        if self.prefill.as_ref().is_some_and(|(opened, _)| *opened == attempt) {
            self.prefill = None;
        }
        if self.decode.as_ref().is_some_and(|(opened, _)| *opened == attempt) {
            self.decode = None;
        }
        self.tokens.clear();
    }

    fn deliver(&mut self, token: SampledToken) {
        let step = self.answer.push(token.id, Instant::now(), &self.app.metrics);
        self.outbox.say(Output::Piece { text: step.text, token_ids: vec![token.id] });
        if step.stopped {
            self.request.handle(self.now(), RequestFact::StopMatched);
        }
    }

    /// What the client hears at the end, after all text was handed on.
    async fn result(&mut self, end: RequestEnd) -> Result<Summary, ApiError> {
        let reason = match end {
            RequestEnd::Finished(reason) => reason,
            RequestEnd::Cancelled if self.slow_reader => {
                return Err(ApiError::Failed { cause: Cause::SlowReader });
            }
            RequestEnd::Cancelled if self.app.cut.is_cancelled() => return Err(shutting_down()),
            RequestEnd::Cancelled => return Err(ApiError::Failed { cause: Cause::Cancelled }),
            RequestEnd::Unplaced { error, retry_after_ms } => {
                return Err(self.unplaced(error, retry_after_ms));
            }
            RequestEnd::Failed { cause, retry_after_ms } => {
                return Err(ApiError::from_cause(cause, retry_after_ms));
            }
        };
        if self.slow_reader {
            return Err(ApiError::Failed { cause: Cause::SlowReader });
        }
        let rest = self.answer.flush();
        if !rest.is_empty() {
            self.outbox.say(Output::Piece { text: rest, token_ids: Vec::new() });
            match self.outbox.flush().await {
                Ok(()) => {}
                Err(Unheard::Slow) => return Err(ApiError::Failed { cause: Cause::SlowReader }),
                Err(Unheard::Gone) => return Err(ApiError::Failed { cause: Cause::Cancelled }),
            }
        }
        Ok(self.summary(reason))
    }

    fn unplaced(&self, error: PlaceError, retry_after_ms: Option<u64>) -> ApiError {
        match error {
            PlaceError::NoWorker => {
                unavailable(format!("no worker can serve this now; missing: {}", self.missing()))
            }
            PlaceError::Saturated => ApiError::Shed { retry_after_ms: retry_after_ms.unwrap_or(1000) },
            PlaceError::TooLarge => ApiError::from_cause(Cause::TooLarge, None),
        }
    }

    fn missing(&self) -> String {
        let missing = self.app.fleet.missing();
        if missing.is_empty() {
            "a worker that has not failed this request".to_owned()
        } else {
            missing.join(", ")
        }
    }

    fn summary(&self, reason: FinishReason) -> Summary {
        let num = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        let prompt_tokens = num(self.prompt.len());
        Summary {
            reason,
            mode: self.mode(),
            usage: Usage {
                prompt_tokens,
                completion_tokens: num(self.answer.token_ids().len()),
                cached_tokens: self.cached_tokens.min(prompt_tokens),
            },
            ttft_ms: self.answer.ttft_ms(),
            kv: self.kv,
        }
    }

    fn mode(&self) -> Mode {
        self.placement.map_or(Mode::Local, |(placement, _)| placement.mode)
    }

    fn record(&self, result: &Result<Summary, ApiError>) {
        let outcome = match result {
            Ok(summary) => finish_name(summary.reason),
            Err(error) => error.code(),
        };
        let mode = self.placement.map_or("none", |(placement, _)| placement.mode.name());
        self.app.metrics.request_ended(mode, outcome);
        self.answer.observe_end(Instant::now(), &self.app.metrics);
        let (prompt_tokens, completion_tokens) = (self.prompt.len(), self.answer.token_ids().len());
        let (ttft_ms, num_retries) = (self.answer.ttft_ms(), self.request.num_retries());
        tracing::info!(
            mode,
            outcome,
            prompt_tokens,
            completion_tokens,
            ttft_ms,
            num_retries,
            "request ended"
        );
        if baton_telemetry::log::content_enabled()
            && let Ok(served) = self.app.served()
        {
            let (prompt, completion) =
                (served.text.decode(&self.prompt), served.text.decode(self.answer.token_ids()));
            tracing::info!(prompt, completion, "request content");
        }
    }
}

/// The next event of a leg, if there is one.
async fn next_of<Event: LegEvent>(leg: &mut Option<(u32, Leg<Event>)>) -> (u32, Option<Event>) {
    match leg {
        Some((attempt, leg)) => (*attempt, leg.next().await),
        None => std::future::pending().await,
    }
}
