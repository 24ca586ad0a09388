//! The spans of one leg: gathered while it runs, handed on when it ends. Costs nothing where nothing is traced.

use std::time::Duration;

use baton_handoff::{Cause, HandoffKey, Time};
use baton_proto::v1::decode_server;
use baton_telemetry::names;
use baton_telemetry::trace::{APART, CallContext, Chunks, Recorder, Span, SpanKind, TraceContext, Tracing};
use baton_worker::{Clock, RunStats, Stall};

use crate::kv_cost::{Cost, Marks};

/// Stalls of one sequence that have spans: the longest ones.
const MAX_STALLS: usize = 16;

/// Of all of a leg: with sixteen sequences there is room for their runs, for sixteen chunks and for what else a leg has.
const MAX_STALLS_OF_LEG: usize = 64;

/// Where a leg's spans belong.
#[derive(Clone, Copy)]
pub(crate) struct Called {
    /// What the caller said.
    pub(crate) call: Option<CallContext>,
    /// Which leg.
    pub(crate) key: HandoffKey,
    /// When the call came.
    pub(crate) accepted: Time,
}

/// The spans of one leg.
pub(crate) struct LegSpans {
    recorder: Recorder,
    clock: Clock,
    called: Called,
    /// The source's span that sends the KV.
    sent: Option<TraceContext>,
    /// Of the span `decode`.
    id: [u8; 8],
    /// When `decode` began.
    began: Option<Time>,
    /// When the last span of what led up to the run ended.
    prepared: Time,
    /// When the sequences began to run.
    started: Option<Time>,
    chunks: Chunks,
    stalls: Vec<Stall>,
    /// Stalls of sequences that ended, by how long they were blocked. They are recorded last: a recorder has an end, and what they lie below must
    /// be in it.
    stalled: Vec<(Duration, Span)>,
}

impl LegSpans {
    pub(crate) fn new(tracing: &Tracing, clock: Clock, called: Called) -> Self {
        let recorder = called.call.map_or_else(Recorder::default, |call| tracing.recorder(call.parent));
        Self {
            id: recorder.draw_id(),
            recorder,
            clock,
            called,
            sent: None,
            began: None,
            prepared: called.accepted,
            started: None,
            chunks: Chunks::default(),
            stalls: Vec::new(),
            stalled: Vec::new(),
        }
    }

    /// The trace, and the span of this worker that serves the request in it.
    pub(crate) fn served_by(&self) -> Option<TraceContext> {
        self.recorder.context_of(self.id)
    }

    /// For exemplars.
    pub(crate) fn trace(&self) -> TraceContext {
        self.recorder.trace()
    }

    fn span(&self, name: &'static str, parent: [u8; 8], (start, end): (Time, Time)) -> Span {
        let [start, end] = [start, end].map(|time| self.clock.instant(time));
        Span::new(name, SpanKind::Internal, Some(parent), start, end)
    }

    /// A part of what leads up to the run, from where the last one ended to `end`; none if that was no time.
    fn prepare(&mut self, name: &'static str, end: Time) -> Option<Span> {
        let start = self.prepared + APART;
        (start < end).then(|| {
            self.prepared = end;
            self.span(name, self.id, (start, end))
        })
    }

    fn server(&self, name: &'static str, parent: [u8; 8], (start, end): (Time, Time)) -> Span {
        let [start, end] = [start, end].map(|time| self.clock.instant(time));
        Span::new(name, SpanKind::Server, Some(parent), start, end)
            .of_call(decode_server::SERVICE_NAME, "Decode")
            .with(names::BATON_REQUEST_ID, self.called.key.request.to_string())
            .with(names::ATTEMPT, self.called.key.attempt)
    }

    /// The leg is known here.
    pub(crate) fn registered(&mut self, now: Time) {
        let Some(call) = self.called.call.filter(|call| call.reserve != [0; 8]) else { return };
        if self.recorder.is_on() {
            let span = self.server(names::span::RESERVE, call.reserve, (self.called.accepted, now));
            self.recorder.record(span);
        }
    }

    /// From `at` on the sequences could go on, were all there that they need.
    pub(crate) fn begin(&mut self, at: Time) {
        self.began = self.began.or(Some(at));
        self.prepared = at;
    }

    /// The source's span that sends the KV. One of another trace is nobody's parent here.
    pub(crate) fn sent_by(&mut self, source: Option<TraceContext>) {
        let trace_id = self.recorder.trace().trace_id;
        self.sent = source.filter(|source| source.trace_id == trace_id).or(self.sent);
    }

    /// The transfer is over: everything is verified, or the leg ends for this cause.
    pub(crate) fn received(&mut self, marks: &Marks, ended: Option<Cause>) {
        let (Some(first), Some(last)) = (marks.first_frame, marks.verified.or(marks.first_frame)) else {
            return;
        };
        let Some(call) = self.called.call.filter(|_| self.recorder.is_on()) else { return };
        let parent = self.sent.map_or(call.root, |sent| sent.span_id);
        let [start, end] = [first, last].map(|time| self.clock.instant(time));
        let span = Span::new(names::span::KV_RECV, SpanKind::Consumer, Some(parent), start, end)
            .with(names::KV_BYTES, marks.bytes)
            .with(names::KV_FRAMES, marks.frames)
            .with(names::KV_WIRE_MS, ms(marks.wire));
        self.recorder.record(match ended {
            Some(cause) => ended_by(span, cause),
            None => span,
        });
    }

    /// What came by handoff runs.
    pub(crate) fn run_received(&mut self, at: Time, marks: &Marks, cost: &Cost) {
        self.started = Some(at);
        let Some(began) = self.began.filter(|_| self.recorder.is_on()) else { return };
        let boundary = marks.boundary.unwrap_or(at).max(began);
        self.recorder.record(self.span(names::span::DECODE_QUEUE, self.id, (began, boundary)));
        self.prepared = boundary;
        let exposed = marks.verified.filter(|_| !cost.exposed.is_zero());
        if let Some(span) = exposed.and_then(|verified| self.prepare(names::span::KV_WAIT, verified)) {
            let span = span
                .with(names::KV_EXPOSED_MS, ms(cost.exposed))
                .with(names::KV_WIRE_MS, ms(cost.exposed_wire()))
                .with(names::KV_CREDIT_MS, ms(cost.credit))
                .with(names::KV_RESEND_MS, ms(cost.resend));
            self.recorder.record(span);
        }
        if let Some(span) = self.prepare(names::span::DECODE_COMMIT, at) {
            self.recorder.record(span);
        }
    }

    /// A step that ended at `end` computed the prompt up to `num_tokens`.
    pub(crate) fn chunk(&mut self, (began, end): (Time, Time), num_tokens: usize) {
        if self.recorder.is_on() && self.started.is_none() {
            let step = (self.clock.instant(began), self.clock.instant(end));
            self.chunks.add(step, num_tokens);
        }
    }

    /// What was computed here runs; its first step began at `first_step`.
    pub(crate) fn run_computed(&mut self, at: Time, first_step: Time, cached_tokens: usize) {
        self.started = Some(at);
        if self.recorder.is_on() {
            self.record_prompt(first_step, cached_tokens);
        }
    }

    fn record_prompt(&mut self, first_step: Time, cached_tokens: usize) {
        let accepted = self.called.accepted;
        self.recorder.record(self.span(names::span::PREFILL_QUEUE, self.id, (accepted, first_step)));
        self.prepared = first_step;
        let queued = self.clock.instant(first_step);
        for span in std::mem::take(&mut self.chunks).spans(self.id, queued, cached_tokens) {
            self.prepared = self.clock.at(span.end());
            self.recorder.record(span);
        }
    }

    /// A sequence stalled.
    pub(crate) fn stall(&mut self, stall: &Stall) {
        if !self.recorder.is_on() {
            return;
        }
        let of_it = || self.stalls.iter().enumerate().filter(|(_, known)| known.sequence == stall.sequence);
        if of_it().count() < MAX_STALLS {
            self.stalls.push(*stall);
        } else if let Some((at, shortest)) = of_it().min_by_key(|(_, known)| known.blocked)
            && shortest.blocked < stall.blocked
        {
            self.stalls[at] = *stall;
        }
    }

    /// A sequence ended, in whatever way, and ran so.
    pub(crate) fn ran(&mut self, sequence: u32, end: Time, stats: &RunStats) {
        let Some(started) = self.started.filter(|_| self.recorder.is_on()) else { return };
        let start = started.max(self.prepared + APART);
        let run = self
            .span(names::span::DECODE_RUN, self.id, (start, end))
            .with(names::SEQUENCE, sequence)
            .with(names::STEPS, stats.steps)
            .with(names::BATCH_MAX, stats.batch_max)
            .with(names::ITL_P50_MS, ms(stats.itl_p50))
            .with(names::ITL_P99_MS, ms(stats.itl_p99))
            .with(names::ITL_MAX_MS, ms(stats.itl_max));
        for stall in self.stalls.extract_if(.., |stall| stall.sequence == sequence).collect::<Vec<_>>() {
            let from = stall.from.max(start);
            let mut span = self
                .span(names::span::DECODE_STALL, run.id(), (from, stall.to.min(end)))
                .with(names::STALL_CAUSE, stall.cause.name())
                .with(names::STALL_BLOCKED_MS, ms(stall.blocked));
            if let Some(blocker) = stall.blocker {
                span = span.with(names::STALL_BLOCKER, blocker.request.to_string());
                span = blocker.trace.into_iter().fold(span, Span::linked);
            }
            self.stalled.push((stall.blocked, span));
        }
        self.recorder.record(run);
    }

    /// The leg is over.
    pub(crate) fn end(&mut self, now: Time, cause: Cause) {
        let Some(call) = self.called.call.filter(|_| self.recorder.is_on()) else { return };
        // Who failed before it could have gone on has no `decode`: the router has none either.
        let Some(began) = self.began else { return };
        let span = self.server(names::span::DECODE, call.parent.span_id, (began, now)).with_id(self.id);
        self.recorder.record(ended_by(span, cause));
        let mut stalled = std::mem::take(&mut self.stalled);
        stalled.sort_unstable_by_key(|(blocked, _)| std::cmp::Reverse(*blocked));
        for (_, span) in stalled.into_iter().take(MAX_STALLS_OF_LEG) {
            self.recorder.record(span);
        }
    }
}

fn ended_by(span: Span, cause: Cause) -> Span {
    match cause {
        // It ended as it should, or nobody needs what is left of it.
        Cause::Duplicate | Cause::NotNeeded => span,
        cause => span.with(names::ERROR_TYPE, cause.name()).failed(cause.to_string()),
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests;
