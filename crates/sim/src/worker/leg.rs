//! What a worker keeps of a leg.

use std::sync::Arc;
use std::time::Duration;

use baton_handoff::{Destination, FirstToken, HandoffKey, InstanceId, Source, Time};
use baton_kv::ReadLease;
use baton_scheduler::{NewSequence, Origin, SamplingParams, SequenceId};

use super::receiver::Receiver;
use super::sender::Sender;
use crate::network::StreamId;
use crate::waits::Wait;

/// What a router asks of a worker.
#[derive(Clone, Debug)]
pub(crate) struct LegSpec {
    pub(crate) key: HandoffKey,
    /// With tokens delivered earlier at its end.
    pub(crate) prompt: Arc<[u32]>,
    pub(crate) num_generated: u32,
    pub(crate) num_sequences: u32,
    /// Number, within the request, of the first of them.
    pub(crate) first_sequence: u32,
    pub(crate) max_new_tokens: u32,
    pub(crate) seed: u64,
    pub(crate) stop_tokens: Vec<u32>,
    /// Since the router accepted the request, when this was sent.
    pub(crate) age: Duration,
    pub(crate) priority: i32,
    /// Whether it may use the prefix cache.
    pub(crate) cache: bool,
    pub(crate) preempted: bool,
    /// A decode leg that computes its prompt.
    pub(crate) local: bool,
    /// A prefill leg's decode worker: address and instance.
    pub(crate) destination: Option<(usize, InstanceId)>,
}

impl LegSpec {
    /// `ids`: one for each of its sequences.
    pub(crate) fn sequence(&self, ids: &[SequenceId], origin: Origin) -> NewSequence {
        NewSequence {
            id: ids.first().copied().unwrap_or(SequenceId(0)),
            siblings: ids.get(1..).unwrap_or_default().to_vec(),
            origin,
            prompt: self.prompt.to_vec(),
            sampling: SamplingParams { temperature: 1.0, seed: self.seed, ..SamplingParams::GREEDY },
            sequence: self.first_sequence,
            num_generated: self.num_generated,
            max_new_tokens: self.max_new_tokens,
            stop_tokens: self.stop_tokens.clone(),
            cache: self.cache,
            age: self.age,
            priority: self.priority,
            preempted: self.preempted,
        }
    }
}

/// What a stream is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamUse {
    Router,
    Control,
    Bulk,
}

/// How far a leg has come, as the rules about waits and blocks see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LegStage {
    /// Prefill: in line.
    Queued,
    /// Prefill: the destination has not answered.
    Offered,
    /// Prefill: the destination has room; waits for blocks here.
    Granted,
    /// Prefill: holds the prompt's blocks.
    Computing,
    /// Prefill: all is computed; the blocks stay for the destination.
    Holding,
    /// Prefill: the handoff failed, and a redirect, or its answer, is waited for; no longer than the timer `hold`, so that nobody waits
    /// for these blocks for good.
    Held,
    /// Prefill: the blocks are back, the other side is still to acknowledge.
    Ending,
    /// Decode: no offer yet.
    BeforeOffer,
    /// Decode: waits for blocks.
    Reserving,
    /// Decode: holds blocks that are being written.
    Receiving,
    /// Decode: holds blocks and generates.
    Running,
}

impl LegStage {
    pub(crate) const fn wait(self) -> Wait {
        match self {
            Self::Queued => Wait::Queue,
            Self::Offered => Wait::Offer,
            Self::Granted => Wait::Open,
            Self::Computing => Wait::Compute,
            Self::Holding | Self::Held | Self::Ending => Wait::Hold,
            Self::BeforeOffer => Wait::BeforeOffer,
            Self::Reserving => Wait::Reserve,
            Self::Receiving => Wait::Receive,
            Self::Running => Wait::Token,
        }
    }

    /// Whether it holds blocks, and whether it waits for some.
    pub(crate) const fn blocks(self) -> (bool, bool) {
        (self.holds_blocks(), self.waits_for_blocks())
    }

    const fn holds_blocks(self) -> bool {
        matches!(self, Self::Computing | Self::Holding | Self::Receiving | Self::Running)
    }

    /// Here, now or once the other side has answered.
    const fn waits_for_blocks(self) -> bool {
        matches!(self, Self::Offered | Self::Granted | Self::Reserving)
    }
}

/// What both kinds of leg have.
pub(crate) struct LegState {
    pub(crate) spec: LegSpec,
    /// One for each of its sequences.
    pub(crate) ids: Vec<SequenceId>,
    /// To the router, while it listens.
    pub(crate) stream: Option<StreamId>,
    pub(crate) control: Option<StreamId>,
    pub(crate) stage: LegStage,
    /// When it came there, or last moved on within it.
    pub(crate) since: Time,
}

impl LegState {
    /// Which of its sequences this is.
    pub(crate) fn nth(&self, id: SequenceId) -> usize {
        self.ids.iter().position(|other| *other == id).unwrap_or(0)
    }

    pub(crate) fn head(&self) -> SequenceId {
        self.ids.first().copied().unwrap_or(SequenceId(0))
    }
}

/// Boxed, so that a search among a worker's legs goes over keys that lie close together.
pub(crate) enum Leg {
    Prefill(Box<PrefillLeg>),
    Decode(Box<DecodeLeg>),
}

pub(crate) struct PrefillLeg {
    pub(crate) state: LegState,
    /// `None`: one token is asked for, and nothing is handed off.
    pub(crate) source: Option<Source>,
    pub(crate) skip_tokens: usize,
    /// Until the sender takes it.
    pub(crate) lease: Option<ReadLease>,
    /// The same, as long as it may have to be sent again.
    pub(crate) held: Option<ReadLease>,
    pub(crate) sender: Option<Sender>,
    /// Until there is one for each sequence.
    pub(crate) first: Vec<FirstToken>,
}

pub(crate) struct DecodeLeg {
    pub(crate) state: LegState,
    /// `None`: local.
    pub(crate) destination: Option<Destination>,
    pub(crate) receiver: Option<Receiver>,
    pub(crate) granted: bool,
    pub(crate) started: bool,
    /// Of each sequence: it has not ended.
    pub(crate) open: Vec<bool>,
    /// Of each sequence: nothing more of it is wanted, once the group runs.
    pub(crate) stopped: Vec<bool>,
}

impl Leg {
    /// Reads what a token of it reads.
    pub(crate) fn warm(&self) {
        let LegState { stage, since, ids, spec, .. } = self.state();
        std::hint::black_box((*stage, *since, ids.first().copied(), spec.first_sequence));
        if let Self::Decode(leg) = self {
            std::hint::black_box((leg.started, leg.open.first().copied(), leg.receiver.is_some()));
        }
    }

    pub(crate) fn deadline(&self) -> Option<Time> {
        match self {
            Self::Prefill(leg) => leg.source.as_ref()?.deadline(),
            Self::Decode(leg) => leg.destination.as_ref()?.deadline(),
        }
    }

    pub(crate) fn state(&self) -> &LegState {
        match self {
            Self::Prefill(leg) => &leg.state,
            Self::Decode(leg) => &leg.state,
        }
    }

    pub(crate) fn state_mut(&mut self) -> &mut LegState {
        match self {
            Self::Prefill(leg) => &mut leg.state,
            Self::Decode(leg) => &mut leg.state,
        }
    }
}
