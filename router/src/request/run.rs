//! The loop of one request: facts in, actions out, until its end.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use baton_dispatch::{
    DecodeFact, PrefillFact, Request, RequestAction, RequestConfig, RequestEnd, RequestFact, RetryLimits,
    Time, Verdict,
};
use baton_handoff::{Cause, FinishReason, InstanceId, RequestId, SampledToken};
use baton_kv::BlockHash;
use baton_proto::v1;
use tokio::sync::mpsc;

use super::answer::Answer;
use super::groups::{Groups, Heard, Said};
use super::legs::{DecodeEvent, Leg, PrefillEvent};
use super::outbox::{Outbox, Unheard};
use super::{Kv, Order, Output, Where};
use crate::accept::Held;
use crate::app::App;
use crate::deadline::Deadline;
use crate::fleet::Found;

/// Runs a request to its end. The client is gone when the receiver of `outputs` is.
pub(crate) async fn run(app: Arc<App>, order: Order, outputs: mpsc::Sender<Output>) {
    let mut run = Run::new(&app, order, outputs);
    let mut fact = RequestFact::Start;
    let result = loop {
        run.handle(fact);
        if let Err(unheard) = run.outbox.flush().await {
            run.unheard = Some(unheard);
            run.handle(RequestFact::ClientGone);
        }
        match run.ended {
            Some(end) => break run.result(end),
            None => fact = run.next().await,
        }
    };
    run.record(&result);
    // Given back before the client hears of the end, so that it can come again at once.
    run.held = None;
    run.outbox.end(result);
}

/// One request while it runs.
pub(super) struct Run<'a> {
    pub(super) app: &'a App,
    pub(super) id: RequestId,
    pub(super) request: Request,
    pub(super) prompt: Vec<u32>,
    pub(super) hashes: Vec<BlockHash>,
    pub(super) sampling: v1::Sampling,
    pub(super) stop_tokens: Vec<u32>,
    pub(super) num_sequences: u32,
    pub(super) max_new_tokens: u32,
    pub(super) priority: i32,
    pub(super) no_prefix_cache: bool,
    pub(super) arrived: Instant,
    pub(super) deadline: Deadline,
    pub(super) trace: baton_telemetry::trace::TraceContext,
    pub(super) answer: Answer,
    pub(super) outbox: Outbox,
    /// Where the next attempt of each group runs, from its placement until its legs are opened.
    pub(super) found: BTreeMap<u32, Found>,
    pub(super) groups: Groups,
    /// Tokens of one message that were not yet handled.
    tokens: VecDeque<Token>,
    /// The last placement's.
    pub(super) placed: Option<Where>,
    pub(super) kv: Option<Kv>,
    pub(super) cached_tokens: u32,
    pub(super) num_preemptions: u32,
    /// The choice that ended last, once all have.
    pub(super) last: Option<(u32, FinishReason)>,
    /// Why the client hears nothing more.
    pub(super) unheard: Option<Unheard>,
    /// Workers that fell over under this request, by process, with their addresses.
    pub(super) lost: BTreeMap<InstanceId, String>,
    pub(super) ended: Option<RequestEnd>,
    held: Option<Held>,
}

struct Token {
    group: u32,
    attempt: u32,
    sequence: u32,
    token: SampledToken,
}

impl Token {
    fn fact(self) -> RequestFact {
        let event = DecodeFact::Token { sequence: self.sequence, token: self.token };
        RequestFact::Decode { group: self.group, attempt: self.attempt, event }
    }
}

impl<'a> Run<'a> {
    fn new(app: &'a App, order: Order, outputs: mpsc::Sender<Output>) -> Self {
        let num_sequences = u32::try_from(order.choices.len()).unwrap_or(u32::MAX);
        let config = RequestConfig {
            request: order.id,
            num_sequences,
            max_new_tokens: order.max_new_tokens,
            stop_tokens: order.stop_tokens.clone(),
            deadline: order.deadline.at().map(|at| at.saturating_duration_since(app.origin)),
            limits: RetryLimits::default(),
        };
        Self {
            app,
            id: order.id,
            request: Request::new(config),
            prompt: order.prompt,
            hashes: order.hashes,
            sampling: order.sampling,
            stop_tokens: order.stop_tokens,
            num_sequences,
            max_new_tokens: order.max_new_tokens,
            priority: order.priority,
            no_prefix_cache: order.no_prefix_cache,
            arrived: order.arrived,
            deadline: order.deadline,
            trace: order.trace,
            answer: Answer::new(order.choices, order.arrived),
            outbox: Outbox::new(outputs, app.slow_reader_timeout),
            found: BTreeMap::new(),
            groups: Groups::default(),
            tokens: VecDeque::new(),
            placed: None,
            kv: None,
            cached_tokens: 0,
            num_preemptions: 0,
            last: None,
            unheard: None,
            lost: BTreeMap::new(),
            ended: None,
            held: Some(order.held),
        }
    }

    fn now(&self) -> Time {
        self.app.origin.elapsed()
    }

    /// The next thing that happens.
    async fn next(&mut self) -> RequestFact {
        let deadline = self.request.deadline().map(|at| self.app.origin + at);
        // Tokens that come without a pause don't keep time from passing.
        if deadline.is_some_and(|at| at <= Instant::now()) {
            return RequestFact::Tick;
        }
        if let Some(token) = self.tokens.pop_front() {
            return token.fact();
        }
        let ticked = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.outbox.closed() => RequestFact::ClientGone,
            () = self.app.cut.cancelled() => RequestFact::ClientGone,
            heard = self.groups.next() => self.heard(heard),
            () = ticked => RequestFact::Tick,
        }
    }

    fn heard(&mut self, heard: Heard) -> RequestFact {
        let Heard { group, attempt, said } = heard;
        match said {
            // It may have been said before the leg went on under this attempt.
            Said::Prefill(Some(PrefillEvent::HandoffFailed { attempt, cause })) => {
                RequestFact::Prefill { group, attempt, event: PrefillFact::HandoffFailed(cause) }
            }
            Said::NotRedirected => RequestFact::Prefill { group, attempt, event: PrefillFact::NotRedirected },
            Said::Prefill(event) => {
                RequestFact::Prefill { group, attempt, event: self.prefill_fact(group, attempt, event) }
            }
            Said::Decode(event) => self.decode_fact(group, attempt, event),
        }
    }

    fn prefill_fact(&mut self, group: u32, attempt: u32, event: Option<PrefillEvent>) -> PrefillFact {
        match event {
            Some(PrefillEvent::FirstTokens { tokens, cached_tokens }) => {
                self.count_cached(group, attempt, cached_tokens);
                PrefillFact::FirstTokens(tokens)
            }
            Some(PrefillEvent::HandoffFailed { cause, .. }) => PrefillFact::HandoffFailed(cause),
            Some(PrefillEvent::Fact(fact)) => fact,
            None => PrefillFact::Lost,
        }
    }

    fn decode_fact(&mut self, group: u32, attempt: u32, event: Option<DecodeEvent>) -> RequestFact {
        let event = match event {
            Some(DecodeEvent::Started { kv, cached_tokens }) => {
                self.count_kv(kv);
                self.count_cached(group, attempt, cached_tokens);
                DecodeFact::Started
            }
            Some(DecodeEvent::Tokens { sequence, tokens }) => {
                let token = |token| Token { group, attempt, sequence, token };
                self.tokens.extend(tokens.into_iter().map(token));
                match self.tokens.pop_front() {
                    Some(token) => return token.fact(),
                    None => DecodeFact::Failed(Cause::Protocol),
                }
            }
            Some(DecodeEvent::Fact(fact)) => fact,
            None => DecodeFact::Lost,
        };
        if matches!(event, DecodeFact::Preempted { .. } | DecodeFact::Failed(Cause::Preempted)) {
            self.preempted();
        }
        RequestFact::Decode { group, attempt, event }
    }

    /// Adds up the transfers of all attempts.
    fn count_kv(&mut self, kv: Option<Kv>) {
        let Some(kv) = kv else { return };
        let sum = self.kv.get_or_insert_default();
        sum.bytes += kv.bytes;
        sum.total_ms += kv.total_ms;
        sum.exposed_ms += kv.exposed_ms;
    }

    /// What caches saved when the prompt was first computed. What a resumed attempt finds there is the request's own work.
    fn count_cached(&mut self, group: u32, attempt: u32, cached_tokens: u32) {
        if self.groups.get(group, attempt).is_some_and(|live| !live.resumes) {
            self.cached_tokens = self.cached_tokens.max(cached_tokens);
        }
    }

    fn preempted(&mut self) {
        if self.num_preemptions == 0 {
            self.app.metrics.preempted_requests.inc();
        }
        self.num_preemptions += 1;
    }

    fn handle(&mut self, fact: RequestFact) {
        let suspect = self.suspect(&fact);
        let num_ignored = self.request.ignored();
        self.request.handle(self.now(), fact);
        if self.request.ignored() == num_ignored {
            self.lost.extend(suspect);
        }
        while let Some(action) = self.request.poll() {
            match action {
                RequestAction::Place {
                    group,
                    avoid,
                    first_sequence: _,
                    num_sequences,
                    num_forced,
                    keep_prefill,
                } => {
                    let fact = match self.place(group, &avoid, num_sequences, num_forced, keep_prefill) {
                        Ok(placed) => RequestFact::Placed { group, placed },
                        Err(error) => RequestFact::NotPlaced { group, error },
                    };
                    self.request.handle(self.now(), fact);
                }
                RequestAction::OpenLegs(legs) => self.open(legs),
                RequestAction::Redirect(legs) => self.redirect(legs),
                RequestAction::CloseDecode { group, attempt } => self.close_decode(group, attempt),
                RequestAction::CloseLegs { group, attempt } => self.close(group, attempt),
                RequestAction::StopSequence { group, attempt, sequence } => {
                    self.stop(group, attempt, sequence);
                }
                RequestAction::Deliver { sequence, token } => self.deliver(sequence, token),
                RequestAction::Finished { sequence, reason } => self.finished(sequence, reason),
                RequestAction::End(end) => self.ended = Some(end),
            }
        }
    }

    /// The worker that fell over, if that is what happened.
    fn suspect(&mut self, fact: &RequestFact) -> Option<(InstanceId, String)> {
        let fell_over = |cause| Verdict::of(cause) == Verdict::WorkerLost;
        match *fact {
            RequestFact::Prefill { group, attempt, ref event } => {
                let lost = match event {
                    PrefillFact::Lost => true,
                    PrefillFact::Failed(cause) => fell_over(*cause),
                    PrefillFact::FirstTokens(_)
                    | PrefillFact::Done
                    | PrefillFact::HandoffFailed(_)
                    | PrefillFact::NotRedirected
                    | PrefillFact::Unreachable => false,
                };
                let leg = self.groups.get(group, attempt)?.prefill.as_ref();
                leg.filter(|_| lost).map(Leg::worker)
            }
            RequestFact::Decode { group, attempt, event } => {
                let lost = match event {
                    DecodeFact::Lost => true,
                    DecodeFact::Failed(cause) => fell_over(cause),
                    _ => false,
                };
                let leg = self.groups.get(group, attempt)?.decode.as_ref();
                leg.filter(|_| lost).map(Leg::worker)
            }
            _ => None,
        }
    }

    fn close(&mut self, group: u32, attempt: u32) {
        self.close_decode(group, attempt);
        self.groups.close(group, attempt);
    }

    fn close_decode(&mut self, group: u32, attempt: u32) {
        self.groups.close_decode(group, attempt);
        self.tokens.retain(|token| (token.group, token.attempt) != (group, attempt));
    }

    fn deliver(&mut self, sequence: u32, token: SampledToken) {
        let step = self.answer.push(sequence, token.id, Instant::now(), &self.app.metrics);
        self.outbox.say(Output::Piece { index: sequence, text: step.text, token_ids: vec![token.id] });
        if step.stopped {
            self.request.handle(self.now(), RequestFact::StopMatched { sequence });
        }
    }

    fn finished(&mut self, index: u32, reason: FinishReason) {
        let text = self.answer.finish(index, reason);
        if !text.is_empty() {
            self.outbox.say(Output::Piece { index, text, token_ids: Vec::new() });
        }
        if self.answer.is_finished() {
            // Told with the end of all.
            self.last = Some((index, reason));
        } else {
            self.outbox.say(Output::Finished { index, reason });
        }
    }
}
