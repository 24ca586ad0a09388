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
use baton_telemetry::trace::TraceContext;
use tokio::sync::mpsc;

use super::answer::Answer;
use super::cost::{Kv, Neighbours};
use super::groups::{Groups, Heard, Said};
use super::legs::{DecodeEvent, Leg, PrefillEvent};
use super::marks::{Marks, failure};
use super::outbox::{Outbox, Unheard};
use super::spans::Root;
use super::{Order, Output, RequestSpans, Where};
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
    let spans = run.spans.take();
    run.outbox.end(result, spans);
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
    pub(super) trace: TraceContext,
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
    pub(super) spans: RequestSpans,
    pub(super) neighbours: Neighbours,
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
            answer: Answer::new(order.choices, order.arrived, order.trace),
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
            spans: order.spans,
            neighbours: Neighbours::default(),
            held: Some(order.held),
        }
    }

    fn now(&self) -> Time {
        self.app.origin.elapsed()
    }

    /// The next thing that happens.
    async fn next(&mut self) -> RequestFact {
        loop {
            if let Some(fact) = self.try_next().await {
                return fact;
            }
        }
    }

    /// What happens next, if it changes anything.
    async fn try_next(&mut self) -> Option<RequestFact> {
        let deadline = self.request.deadline().map(|at| self.app.origin + at);
        // Tokens that come without a pause don't keep time from passing.
        if deadline.is_some_and(|at| at <= Instant::now()) {
            return Some(RequestFact::Tick);
        }
        if let Some(token) = self.tokens.pop_front() {
            return Some(token.fact());
        }
        let ticked = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.outbox.closed() => Some(RequestFact::ClientGone),
            () = self.app.cut.cancelled() => Some(RequestFact::ClientGone),
            heard = self.groups.next() => self.heard(heard),
            () = ticked => Some(RequestFact::Tick),
        }
    }

    /// What that means for the request, if anything.
    fn heard(&mut self, heard: Heard) -> Option<RequestFact> {
        let Heard { group, attempt, said } = heard;
        let (attempt, event) = match said {
            // It may have been said before the leg went on under this attempt.
            Said::Prefill(Some(PrefillEvent::HandoffFailed { attempt, cause })) => {
                (attempt, PrefillFact::HandoffFailed(cause))
            }
            Said::NotRedirected => (attempt, PrefillFact::NotRedirected),
            Said::Prefill(Some(PrefillEvent::Opened)) => return None,
            Said::Prefill(event) => (attempt, self.prefill_fact(group, attempt, event)),
            Said::Decode(event) => return self.decode_fact(group, attempt, event),
        };
        Some(RequestFact::Prefill { group, attempt, event })
    }

    fn prefill_fact(&mut self, group: u32, attempt: u32, event: Option<PrefillEvent>) -> PrefillFact {
        match event {
            Some(PrefillEvent::FirstTokens { tokens, cached_tokens }) => {
                self.count_cached(group, attempt, cached_tokens);
                self.mark(group, attempt, |marks, root| marks.first_token(root, cached_tokens));
                PrefillFact::FirstTokens(tokens)
            }
            Some(PrefillEvent::HandoffFailed { cause, .. }) => PrefillFact::HandoffFailed(cause),
            Some(PrefillEvent::Fact(fact)) => fact,
            Some(PrefillEvent::Opened) | None => PrefillFact::Lost,
        }
    }

    fn decode_fact(&mut self, group: u32, attempt: u32, event: Option<DecodeEvent>) -> Option<RequestFact> {
        let event = match event {
            Some(DecodeEvent::Opened) => {
                self.mark(group, attempt, Marks::taken);
                return None;
            }
            Some(DecodeEvent::Stalled(stall)) => {
                if let Some(root) = self.spans.on() {
                    root.stalled(stall);
                }
                return None;
            }
            Some(DecodeEvent::Started(started)) => {
                self.neighbours.started(started.avoided);
                self.count_kv(started.kv);
                self.count_cached(group, attempt, started.cached_tokens);
                DecodeFact::Started
            }
            Some(DecodeEvent::Tokens { sequence, tokens }) => {
                let token = |token| Token { group, attempt, sequence, token };
                self.tokens.extend(tokens.into_iter().map(token));
                match self.tokens.pop_front() {
                    Some(token) => return Some(token.fact()),
                    None => DecodeFact::Failed(Cause::Protocol),
                }
            }
            Some(DecodeEvent::Finished { sequence, reason, stats }) => {
                self.neighbours.finished(stats);
                DecodeFact::Finished { sequence, reason }
            }
            Some(DecodeEvent::Fact(fact)) => fact,
            None => DecodeFact::Lost,
        };
        match event {
            DecodeFact::Preempted { sequence } => {
                if let Some(root) = self.spans.on() {
                    root.preempted(sequence);
                }
                self.preempted();
            }
            DecodeFact::Failed(Cause::Preempted) => self.preempted(),
            _ => {}
        }
        Some(RequestFact::Decode { group, attempt, event })
    }

    /// Marks something of an attempt that is open, if anything is marked.
    fn mark(&mut self, group: u32, attempt: u32, what: impl FnOnce(&mut Marks, &mut Root)) {
        let Some(root) = self.spans.on() else { return };
        if let Some(marks) = self.groups.get(group, attempt).and_then(|live| live.marks.as_deref_mut()) {
            what(marks, root);
        }
    }

    /// Adds up the transfers of all attempts.
    fn count_kv(&mut self, kv: Option<Kv>) {
        if let Some(kv) = kv {
            self.kv.get_or_insert_default().add(&kv);
        }
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
        let why = failure(&fact);
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
                RequestAction::CloseDecode { group, attempt } => self.close_decode(group, attempt, why),
                RequestAction::CloseLegs { group, attempt } => self.close(group, attempt, why),
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

    fn close(&mut self, group: u32, attempt: u32, why: Option<&'static str>) {
        self.close_decode(group, attempt, why);
        let marks = self.groups.close(group, attempt);
        if let (Some(root), Some(marks)) = (self.spans.on(), marks) {
            marks.close(root, why);
        }
    }

    fn close_decode(&mut self, group: u32, attempt: u32, why: Option<&'static str>) {
        self.mark(group, attempt, |marks, root| marks.close_decode(root, why));
        self.groups.close_decode(group, attempt);
        self.tokens.retain(|token| (token.group, token.attempt) != (group, attempt));
    }

    fn deliver(&mut self, sequence: u32, token: SampledToken) {
        let now = Instant::now();
        if let Some(root) = self.spans.on() {
            root.delivered(sequence, self.answer.last_at(sequence), now);
        }
        let step = self.answer.push(sequence, token.id, now, &self.app.metrics);
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
