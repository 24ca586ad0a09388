//! A client's request, and what was delivered of it beside what an undisturbed run delivers.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_dispatch::{Legs, Request};
use baton_handoff::{FinishReason, InstanceId, RequestId, SampledToken, Time};
use baton_scheduler::{RowSampling, SamplingParams};
use baton_timing::pseudo_tokens;

use crate::context::Context;
use crate::network::StreamId;
use crate::worker::{LegSpec, VOCAB};

/// What a client asks for.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) request: RequestId,
    pub(crate) prompt: Arc<[u32]>,
    pub(crate) max_new_tokens: u32,
    pub(crate) stop_tokens: Vec<u32>,
    pub(crate) seed: u64,
    pub(crate) priority: i32,
    /// Whether it may use prefix caches.
    pub(crate) cache: bool,
    /// For each sequence: the router finds a stop string once it has this many tokens.
    pub(crate) stop_after: Vec<Option<usize>>,
    pub(crate) patience: Option<Time>,
}

impl Ask {
    pub(crate) fn num_sequences(&self) -> u32 {
        self.stop_after.len() as u32
    }

    /// The prompt, and behind it tokens that were delivered.
    pub(super) fn prompt_and(&self, forced: &[u32]) -> Arc<[u32]> {
        if forced.is_empty() { Arc::clone(&self.prompt) } else { [&*self.prompt, forced].concat().into() }
    }

    /// What an undisturbed run delivers in this sequence.
    fn expected(&self, sequence: u32, num_layers: usize) -> Vec<u32> {
        let params = SamplingParams { temperature: 1.0, seed: self.seed, ..SamplingParams::GREEDY };
        let sampling = RowSampling { params, sequence, position: 0 };
        pseudo_tokens(&self.prompt, &sampling, (num_layers, VOCAB), self.max_new_tokens, &self.stop_tokens)
    }
}

/// One of the sequences of a request.
pub(crate) struct Stream {
    expected: Vec<u32>,
    pub(crate) delivered: Vec<u32>,
    pub(crate) finished: bool,
    last_at: Option<Time>,
}

/// The legs of a sequence group, where its last placement put them.
pub(crate) struct Group {
    pub(crate) workers: (usize, Option<usize>),
    pub(crate) instances: (InstanceId, Option<InstanceId>),
    pub(crate) streams: [Option<StreamId>; 2],
    /// The prefill worker has no more to compute for it, so that it no longer counts there.
    pub(crate) computed: bool,
    /// Since when it waits for legs.
    pub(crate) placing: Option<Time>,
}

/// A request that passed the door.
pub(crate) struct Live {
    pub(crate) ask: Ask,
    pub(crate) machine: Request,
    pub(crate) sequences: Vec<Stream>,
    pub(crate) groups: BTreeMap<u32, Group>,
    /// When the client asked, and when it passed the door.
    pub(crate) asked: Time,
    pub(crate) entered: Time,
    /// As the router has it in its list.
    pub(crate) deadline: Option<Time>,
    pub(crate) resumed: bool,
}

impl Live {
    pub(crate) fn new(context: &Context, ask: Ask, machine: Request, asked: Time) -> Self {
        let num_layers = context.fidelity.num_layers();
        let stream = |sequence| Stream {
            expected: ask.expected(sequence, num_layers),
            delivered: Vec::new(),
            finished: false,
            last_at: None,
        };
        let sequences = (0..ask.num_sequences()).map(stream).collect();
        let (groups, entered) = (BTreeMap::new(), context.now);
        Self { ask, machine, sequences, groups, asked, entered, deadline: None, resumed: false }
    }

    /// Reads what a token for the client reads.
    pub(crate) fn warm(&self) {
        std::hint::black_box((self.machine.deadline(), self.machine.num_delivered()));
        for stream in &self.sequences {
            let nth = stream.delivered.len();
            std::hint::black_box((
                stream.expected.get(nth).copied(),
                stream.delivered.last().copied(),
                stream.last_at,
            ));
        }
        std::hint::black_box(self.ask.stop_after.first().copied());
    }

    pub(crate) fn is_untouched(&self) -> bool {
        self.sequences.iter().all(|stream| stream.delivered.is_empty())
    }

    pub(crate) fn has_legs(&self) -> bool {
        self.groups.values().any(|group| group.streams != [None; 2])
    }

    /// A token for the client: the next one of the undisturbed run, or a rule is broken. True when a stop string is found with it.
    pub(crate) fn deliver(
        &mut self,
        context: &mut Context,
        request: usize,
        sequence: u32,
        token: SampledToken,
    ) -> bool {
        let now = context.now;
        if self.is_untouched() {
            context.first_token(request, now - self.asked);
        }
        let Some(stream) = self.sequences.get_mut(sequence as usize) else {
            context.violate(|| format!("a token of sequence {sequence}, which was not asked for"));
            return false;
        };
        let nth = stream.delivered.len();
        let expected = stream.expected.get(nth).copied();
        if token.index as usize != nth || expected != Some(token.id) || stream.finished {
            let finished = stream.finished;
            context.violate(|| {
                format!(
                    "sequence {sequence}: {token:?} delivered, {expected:?} expected at {nth}; \
                     finished before: {finished}"
                )
            });
        }
        stream.delivered.push(token.id);
        context.report.num_tokens += 1;
        if let Some(last) = stream.last_at.replace(now) {
            context.gap(request, nth, now - last);
        }
        self.ask.stop_after[sequence as usize] == Some(nth + 1)
    }

    /// A sequence is complete: all of the undisturbed run is delivered, or it goes as far as its stop string.
    pub(crate) fn finish(&mut self, context: &mut Context, sequence: u32, reason: FinishReason) {
        let stop_after = self.ask.stop_after.get(sequence as usize).copied().flatten();
        let Some(stream) = self.sequences.get_mut(sequence as usize) else { return };
        if std::mem::replace(&mut stream.finished, true) {
            context.violate(|| format!("sequence {sequence} finished twice"));
        }
        if stop_after == Some(stream.delivered.len()) {
            return;
        }
        let stops = stream.expected.last().is_some_and(|last| self.ask.stop_tokens.contains(last));
        let right = if stops { FinishReason::Stop } else { FinishReason::Length };
        if stream.delivered != stream.expected || reason != right {
            let (got, want) = (stream.delivered.len(), stream.expected.len());
            context.violate(|| {
                format!("sequence {sequence} finished as {reason:?} with {got} tokens of {want}")
            });
        }
    }

    /// What both legs of an attempt are told. `None`: they force other tokens than were delivered.
    pub(crate) fn spec(&self, legs: &Legs, now: Time) -> Option<LegSpec> {
        let streams =
            self.sequences.get(legs.first_sequence as usize..)?.get(..legs.num_sequences as usize)?;
        let forced = streams.first()?.delivered.as_slice();
        let fits = legs.num_forced as usize == forced.len()
            && (legs.num_sequences == 1 || streams.iter().all(|stream| stream.delivered.is_empty()))
            && streams.iter().all(|stream| !stream.finished);
        fits.then(|| self.leg_spec(legs, now))?
    }

    /// The same without looking at what was delivered since the attempt began.
    pub(crate) fn leg_spec(&self, legs: &Legs, now: Time) -> Option<LegSpec> {
        let delivered = &self.sequences.get(legs.first_sequence as usize)?.delivered;
        let forced = delivered.get(..legs.num_forced as usize)?;
        let group = self.groups.get(&legs.key.group)?;
        Some(LegSpec {
            key: legs.key,
            prompt: self.ask.prompt_and(forced),
            num_generated: legs.num_forced,
            num_sequences: legs.num_sequences,
            first_sequence: legs.first_sequence,
            max_new_tokens: legs.max_new_tokens,
            seed: self.ask.seed,
            stop_tokens: self.ask.stop_tokens.clone(),
            age: now - self.asked,
            priority: self.ask.priority,
            cache: self.ask.cache,
            preempted: legs.preempted,
            local: legs.local,
            destination: legs.decode.then_some((group.workers.0, group.instances.0)),
        })
    }
}
