//! What a router does for a request.

use baton_dispatch::{Legs, Need, Placed, RequestAction, RequestEnd, RequestFact};
use baton_handoff::{HandoffKey, InstanceId};
use baton_kv::BlockHash;

use super::live::{Group, Live};
use super::{Router, StreamOf};
use crate::context::Context;
use crate::network::{Node, Payload, Redirect, Side};
use crate::waits::Wait;
use crate::worker::{CACHE_SALT, LegSpec};

/// Sequences waiting on a worker from which on it gets no more from here.
const MAX_WAITING: u32 = 16;

/// What is to be placed.
struct Wanted {
    group: u32,
    first_sequence: u32,
    num_sequences: u32,
    num_forced: u32,
    keep_prefill: Option<InstanceId>,
}

/// Hashes of the full blocks of a prompt, as workers compute them.
fn hashes(tokens: &[u32], block_size: usize) -> Vec<BlockHash> {
    let mut hash = BlockHash::root(CACHE_SALT);
    let next = |chunk| {
        hash = hash.next(chunk);
        hash
    };
    tokens.chunks_exact(block_size).map(next).collect()
}

impl Router {
    pub(super) fn act(&mut self, context: &mut Context, request: usize, action: RequestAction) {
        match action {
            RequestAction::Place {
                group,
                avoid,
                first_sequence,
                num_sequences,
                num_forced,
                keep_prefill,
            } => {
                let wanted = Wanted { group, first_sequence, num_sequences, num_forced, keep_prefill };
                self.place(context, request, &wanted, &avoid);
            }
            RequestAction::OpenLegs(legs) => self.open_legs(context, request, legs),
            RequestAction::Redirect(legs) => self.redirect(context, request, legs),
            RequestAction::CloseDecode { group, attempt: _ } => self.close_decode(context, request, group),
            RequestAction::CloseLegs { group, attempt: _ } => self.close_legs(context, request, group),
            RequestAction::StopSequence { group, attempt, sequence } => {
                self.stop_sequence(context, request, (group, attempt), sequence);
            }
            RequestAction::Deliver { sequence, token } => {
                let Some(live) = self.live.get_mut(request) else { return };
                if live.deliver(context, request, sequence, token) {
                    self.fact(context, request, RequestFact::StopMatched { sequence });
                }
            }
            RequestAction::Finished { sequence, reason } => {
                if let Some(live) = self.live.get_mut(request) {
                    live.finish(context, sequence, reason);
                }
            }
            RequestAction::End(end) => self.ended(context, request, end),
        }
    }

    fn place(&mut self, context: &mut Context, request: usize, wanted: &Wanted, avoid: &[InstanceId]) {
        let Some(live) = self.live.get_mut(request) else { return };
        let group = wanted.group;
        let forced = live.sequences.get(wanted.first_sequence as usize).map(|stream| &stream.delivered);
        let forced = forced.and_then(|all| all.get(..wanted.num_forced as usize)).unwrap_or_default();
        let prompt = live.ask.prompt_and(forced);
        let block_size = context.shape.worker.block_size;
        let with_cache = context.shape.worker.cache && live.ask.cache;
        let hashes = if with_cache { hashes(&prompt, block_size) } else { Vec::new() };
        let need = Need {
            prompt_tokens: prompt.len() as u32,
            max_new_tokens: live.ask.max_new_tokens.saturating_sub(forced.len() as u32),
            num_sequences: wanted.num_sequences,
            block_size: block_size as u32,
            kv_bytes_per_token: context.shape.device.model.kv_token_bytes as u64,
            max_waiting: MAX_WAITING.max(context.shape.worker.max_queue as u32),
            avoid,
            hashes: &hashes,
        };
        let fact = match self.fleet.place(context.now, &need) {
            Ok(placement) => {
                *context.report.placements.entry(placement.reason).or_default() += 1;
                let decode = self.fleet.instance(placement.decode);
                let mut prefill = placement.prefill.map(|worker| self.fleet.instance(worker));
                let entry = live.groups.entry(group).or_insert(Group {
                    workers: (0, None),
                    instances: (decode, None),
                    streams: [None; 2],
                    computed: false,
                    placing: None,
                });
                let mut worker = placement.prefill;
                if let Some(kept) = wanted.keep_prefill {
                    (worker, prefill) = (entry.workers.1, Some(kept));
                }
                entry.workers = (placement.decode, worker);
                entry.instances = (decode, prefill);
                RequestFact::Placed { group, placed: Placed { decode, prefill } }
            }
            Err(error) => RequestFact::NotPlaced { group, error },
        };
        self.fact(context, request, fact);
    }

    fn open_legs(&mut self, context: &mut Context, request: usize, legs: Legs) {
        let me = self.node();
        let HandoffKey { group, attempt, .. } = legs.key;
        let Some(live) = self.live.get_mut(request) else { return };
        live.resumed |= legs.num_forced > 0;
        let spec = live.spec(&legs, context.now);
        let Some(open) = live.groups.get_mut(&group) else { return };
        if let Some(since) = open.placing.take() {
            context.waited(Wait::Placement, since);
        }
        let report = &mut context.report;
        report.num_retries += u64::from(attempt > 0);
        report.num_splits += u64::from(group > 0 && attempt == 0);
        report.num_resumes += u64::from(legs.num_forced > 0);
        report.num_preempted_legs += u64::from(legs.preempted);
        let Some(spec) = spec.filter(|_| open.streams == [None; 2]) else {
            return context.violate(|| {
                format!("request {request}: {legs:?} forces the wrong tokens, or legs are open")
            });
        };
        let (_, prefill) = open.workers;
        let of = StreamOf {
            request,
            group,
            attempt,
            prefill: true,
            decode: legs.decode,
            may_end: false,
            call: false,
        };
        if let Some(worker) = prefill {
            let stream = context.open(me, Node::Worker(worker));
            (open.streams[0], open.computed) = (Some(stream), false);
            self.streams.insert(stream, of);
            self.fleet.entered(worker);
            context.send(stream, Side::Opener, Payload::OpenPrefill(Box::new(spec.clone())));
        }
        if legs.decode {
            self.open_decode(context, request, of, spec);
        }
    }

    fn open_decode(&mut self, context: &mut Context, request: usize, of: StreamOf, spec: LegSpec) {
        let Some(live) = self.live.get_mut(request) else { return };
        let Some(open) = live.groups.get_mut(&of.group) else { return };
        let (decode, _) = open.workers;
        let stream = context.open(Node::Router(self.index), Node::Worker(decode));
        open.streams[1] = Some(stream);
        self.streams.insert(stream, StreamOf { prefill: false, ..of });
        self.fleet.entered(decode);
        context.send(stream, Side::Opener, Payload::OpenDecode(Box::new(spec)));
    }

    /// The Decode leg of the next attempt, and the Redirect call on a stream of its own.
    fn redirect(&mut self, context: &mut Context, request: usize, legs: Legs) {
        let me = self.node();
        let HandoffKey { group, attempt, .. } = legs.key;
        let Some(live) = self.live.get_mut(request) else { return };
        let Some(spec) = live.leg_spec(&legs, context.now) else { return };
        let Some(open) = live.groups.get_mut(&group) else { return };
        if let Some(since) = open.placing.take() {
            context.waited(Wait::Placement, since);
        }
        let (decode, Some(prefill)) = open.workers else {
            return context.violate(|| format!("request {request} redirects from nowhere"));
        };
        let destination = (decode, open.instances.0);
        let [kept, None] = open.streams else {
            return context
                .violate(|| format!("request {request}: {legs:?} redirects with a decode leg open"));
        };
        let of =
            StreamOf { request, group, attempt, prefill: true, decode: true, may_end: false, call: true };
        if let Some(kept) = kept.and_then(|stream| self.streams.get_mut(stream)) {
            kept.attempt = attempt;
        }
        self.open_decode(context, request, StreamOf { call: false, ..of }, spec);
        let from = HandoffKey { attempt: attempt - 1, ..legs.key };
        let stream = context.open(me, Node::Worker(prefill));
        self.streams.insert(stream, of);
        let redirect = Redirect { from, to: legs.key, destination };
        context.send(stream, Side::Opener, Payload::Redirect(Box::new(redirect)));
    }

    /// The prefill worker has computed all of a group's prompt.
    pub(super) fn computed(&mut self, request: usize, group: u32) {
        let Some(open) = self.live.get_mut(request).and_then(|live| live.groups.get_mut(&group)) else {
            return;
        };
        if let (false, Some(worker), Some(_)) = (open.computed, open.workers.1, open.streams[0]) {
            open.computed = true;
            self.fleet.left(worker);
        }
    }

    fn close_decode(&mut self, context: &mut Context, request: usize, group: u32) {
        let Some(open) = self.live.get_mut(request).and_then(|live| live.groups.get_mut(&group)) else {
            return;
        };
        open.placing = Some(context.now);
        let Some(stream) = open.streams[1].take() else { return };
        self.fleet.left(open.workers.0);
        if self.streams.remove(stream).is_some() {
            context.close(stream, Side::Opener);
        }
    }

    fn close_legs(&mut self, context: &mut Context, request: usize, group: u32) {
        let Some(open) = self.live.get_mut(request).and_then(|live| live.groups.get_mut(&group)) else {
            return;
        };
        let (decode, prefill) = open.workers;
        let (streams, computed) = (std::mem::take(&mut open.streams), open.computed);
        open.placing = Some(context.now);
        for (stream, worker, counts) in [(streams[0], prefill, !computed), (streams[1], Some(decode), true)] {
            let (Some(stream), Some(worker)) = (stream, worker) else { continue };
            if counts {
                self.fleet.left(worker);
            }
            if self.streams.remove(stream).is_some() {
                context.close(stream, Side::Opener);
            }
        }
    }

    /// The Stop call: on a stream of its own, and without an answer that matters.
    fn stop_sequence(
        &mut self,
        context: &mut Context,
        request: usize,
        (group, attempt): (u32, u32),
        sequence: u32,
    ) {
        let me = self.node();
        let Some(live) = self.live.get_mut(request) else { return };
        let Some(open) = live.groups.get(&group) else { return };
        let key = HandoffKey { request: live.ask.request, group, attempt };
        if let Some(of) = open.streams[1].and_then(|stream| self.streams.get_mut(stream)) {
            of.may_end = true;
        }
        let stream = context.open(me, Node::Worker(open.workers.0));
        context.send(stream, Side::Opener, Payload::Stop(key, sequence));
    }

    fn ended(&mut self, context: &mut Context, request: usize, end: RequestEnd) {
        let Some(live) = self.live.remove(request) else { return };
        if let Some(at) = live.deadline {
            self.deadlines.remove(&(at, request));
        }
        context.has_ended(request, end == RequestEnd::Finished);
        if live.has_legs() {
            context.violate(|| format!("request {request} ended with open legs"));
        }
        self.count_end(context, request, &live, end);
        let next = self.door.leave(context.now - live.entered);
        self.admit(context, next);
    }

    fn count_end(&self, context: &mut Context, request: usize, live: &Live, end: RequestEnd) {
        let report = &mut context.report;
        report.num_ignored += live.machine.ignored();
        let untouched = live.is_untouched();
        match end {
            RequestEnd::Finished => {
                report.num_finished += 1;
                report.num_resumed += u64::from(live.resumed);
                if live.sequences.iter().any(|stream| !stream.finished) {
                    context.violate(|| format!("request {request} is over before all of its sequences"));
                }
            }
            RequestEnd::Cancelled => report.num_cancelled += 1,
            RequestEnd::Unplaced { .. } if untouched => report.num_shed += 1,
            RequestEnd::Failed { retry_after_ms: Some(_), .. } => {
                report.num_shed += 1;
                if !untouched {
                    context.violate(|| format!("request {request} is shed after a delivery"));
                }
            }
            RequestEnd::Unplaced { .. } => report.fail("unplaced"),
            RequestEnd::Failed { cause, .. } => report.fail(cause.name()),
        }
    }
}
