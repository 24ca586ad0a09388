//! Starting an attempt: its place in the fleet, its legs, and word to a worker that a sequence is to end.

use std::sync::Arc;

use baton_dispatch::{Legs, Mode, PlaceError, Placed};
use baton_handoff::{HandoffKey, InstanceId};
use baton_proto::v1;
use baton_telemetry::trace::CallContext;
use bytes::Bytes;

use super::groups::Attempt;
use super::legs::{self, DecodeEvent, Leg, Live};
use super::marks::Marks;
use super::run::Run;
use super::{Output, Where};
use crate::fleet::{Found, Member, Wanted};

impl Run<'_> {
    /// Finds a place for the next attempt of a group; only a decode worker with `keep_prefill`.
    pub(super) fn place(
        &mut self,
        group: u32,
        avoid: &[InstanceId],
        num_sequences: u32,
        num_forced: u32,
        keep_prefill: Option<InstanceId>,
    ) -> Result<Placed, PlaceError> {
        let prompt_tokens = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        let found = self.app.fleet.place(&Wanted {
            prompt_tokens: prompt_tokens.saturating_add(num_forced),
            max_new_tokens: self.max_new_tokens.saturating_sub(num_forced),
            num_sequences,
            avoid,
            hashes: &self.hashes,
        });
        if let (Some(root), Err(_)) = (self.spans.on(), &found) {
            root.placing.refused(group);
        }
        let mut found = found?;
        if keep_prefill.is_some() {
            found.placed.prefill = keep_prefill;
            found.prefill = self.groups.prefill_member(group);
            (found.mode, found.reason) = (Mode::Disaggregated, REDIRECT);
        }
        let placed = Where { mode: found.mode, reason: found.reason };
        self.app.metrics.placed(placed.mode.name(), placed.reason);
        if placed.mode == Mode::Local && placed.reason == NO_PREFILL_WORKER {
            self.app.metrics.local_fallbacks.inc();
            self.app.warnings.local_fallback(placed.reason);
        }
        if self.placed.replace(placed) != Some(placed) {
            self.outbox.say(Output::Placed(placed));
        }
        let ids = found.placed;
        self.found.insert(group, found);
        Ok(ids)
    }

    /// Opens the legs of an attempt where it was placed.
    pub(super) fn open(&mut self, opened: Legs) {
        let Some(found) = self.found.remove(&opened.key.group) else { return };
        if opened.num_forced > 0 {
            self.app.metrics.resumes.inc();
        }
        let marks = self.spans.on().map(|root| Box::new(Marks::begin(root, &opened, &found)));
        let attempt = self.attempt(&opened, &found, marks);
        self.groups.open(opened.key.group, attempt);
    }

    /// Opens the Decode leg of an attempt where it was placed, and has what the last attempt computed sent there.
    pub(super) fn redirect(&mut self, opened: Legs) {
        let group = opened.key.group;
        let (Some(found), Some(mut last)) = (self.found.remove(&group), self.groups.take(group)) else {
            return;
        };
        self.app.metrics.redirects.inc();
        if let (Some(root), Some(marks)) = (self.spans.on(), &mut last.marks) {
            marks.redirect(root, &opened, &found);
        }
        let common = self.common(&opened);
        let source = last.prefill_member.as_deref();
        let decode = Some(self.decode_leg(&opened, &found, &common, (source, last.marks.as_deref())));
        let request = v1::RedirectRequest {
            key: Some(wire_key(HandoffKey { attempt: last.attempt, ..opened.key })),
            new_key: Some(common.key),
            destination: Some(destination(&found)),
        };
        let redirect =
            last.prefill_member.as_ref().map(|member| legs::redirect(member, request, self.context()));
        let attempt = Attempt {
            attempt: opened.key.attempt,
            redirect: redirect.map(|redirect| Box::pin(redirect) as _),
            decode,
            decode_member: found.decode,
            ..last
        };
        self.groups.open(group, attempt);
    }

    fn attempt(&self, opened: &Legs, found: &Found, marks: Option<Box<Marks>>) -> Attempt {
        let common = self.common(opened);
        let prefill = found.prefill.as_ref().filter(|_| !opened.local).map(|member| {
            let request = v1::PrefillRequest {
                key: Some(common.key.clone()),
                prompt: common.prompt.clone(),
                sampling: Some(self.sampling),
                stopping: Some(common.stopping.clone()),
                destination: opened.decode.then(|| destination(found)),
                num_generated: opened.num_forced,
                terms: Some(common.terms),
            };
            let context = marks.as_ref().and_then(|marks| marks.prefill_context(self.trace));
            legs::prefill(member, request, live(opened), context.unwrap_or_else(|| self.context()))
        });
        Attempt {
            attempt: opened.key.attempt,
            prefill,
            redirect: None,
            decode: opened.decode.then(|| {
                let source = found.prefill.as_deref().filter(|_| !opened.local);
                self.decode_leg(opened, found, &common, (source, marks.as_deref()))
            }),
            prefill_member: found.prefill.clone(),
            decode_member: Arc::clone(&found.decode),
            resumes: opened.num_forced > 0,
            marks,
        }
    }

    /// `source` computes the prompt, if another worker does.
    fn decode_leg(
        &self,
        opened: &Legs,
        found: &Found,
        common: &Common,
        (source, marks): (Option<&Member>, Option<&Marks>),
    ) -> Leg<DecodeEvent> {
        // A prefix cache promises the bits of its own worker's numerics: what another device computed stays out of it.
        let is_foreign = source.is_some_and(|source| source.numerics_id() != found.decode.numerics_id());
        let no_prefix_cache = common.terms.no_prefix_cache || is_foreign;
        let request = v1::DecodeRequest {
            key: Some(common.key.clone()),
            prompt: common.prompt.clone(),
            sampling: Some(self.sampling),
            stopping: Some(common.stopping.clone()),
            local: opened.local,
            num_generated: opened.num_forced,
            terms: Some(v1::Terms { no_prefix_cache, ..common.terms }),
        };
        let context = marks.and_then(|marks| marks.decode_context(self.trace));
        legs::decode(&found.decode, request, live(opened), context.unwrap_or_else(|| self.context()))
    }

    /// For a call that has no span of its own.
    fn context(&self) -> CallContext {
        CallContext { parent: self.trace, root: self.trace.span_id, reserve: [0; 8] }
    }

    fn common(&self, opened: &Legs) -> Common {
        let given = self.answer.token_ids(opened.first_sequence);
        let forced = given.get(..opened.num_forced as usize).unwrap_or(given);
        Common {
            key: wire_key(opened.key),
            prompt: self.prompt.iter().chain(forced).copied().collect(),
            stopping: v1::Stopping {
                max_new_tokens: opened.max_new_tokens,
                stop_token_ids: self.stop_tokens.clone(),
            },
            terms: v1::Terms {
                num_sequences: opened.num_sequences,
                first_sequence: opened.first_sequence,
                age_ms: u64::try_from(self.arrived.elapsed().as_millis()).unwrap_or(u64::MAX),
                priority: self.priority,
                no_prefix_cache: self.no_prefix_cache,
                preempted: opened.preempted,
                timeout_ms: self.deadline.left_ms(),
            },
        }
    }

    /// Tells the decode worker that nothing more is wanted of a sequence.
    pub(super) fn stop(&mut self, group: u32, attempt: u32, sequence: u32) {
        let context = self.context();
        let Some(live) = self.groups.get(group, attempt) else { return };
        let Some(leg) = &mut live.decode else { return };
        leg.stop(sequence);
        let key = HandoffKey { request: self.id, group, attempt };
        legs::stop(&live.decode_member, v1::StopRequest { key: Some(wire_key(key)), sequence }, context);
    }
}

/// The reason for a pair whose prefill worker has computed the prompt already.
const REDIRECT: &str = "redirect";

/// Placement's reason for a *local* run that nobody wanted.
const NO_PREFILL_WORKER: &str = "no_prefill_worker";

/// What both legs of an attempt are told.
struct Common {
    key: v1::HandoffKey,
    prompt: Vec<u32>,
    stopping: v1::Stopping,
    terms: v1::Terms,
}

fn live(opened: &Legs) -> Live {
    Live::new(opened.first_sequence, opened.num_sequences)
}

fn destination(found: &Found) -> v1::Destination {
    v1::Destination {
        address: found.decode.address.clone(),
        instance_id: Bytes::copy_from_slice(&found.placed.decode.0),
    }
}

fn wire_key(key: HandoffKey) -> v1::HandoffKey {
    v1::HandoffKey { request: Bytes::copy_from_slice(&key.request.0), group: key.group, attempt: key.attempt }
}
