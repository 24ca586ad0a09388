//! What a worker keeps of a leg.

use baton_handoff::{Destination, HandoffKey, InstanceId, Source, Time};
use baton_kv::ReadLease;
use baton_scheduler::{NewSequence, Origin, SamplingParams, SequenceId};

use super::receiver::Receiver;
use super::sender::Sender;
use crate::network::StreamId;

/// What a router asks of a worker.
#[derive(Clone, Debug)]
pub(crate) struct LegSpec {
    pub(crate) key: HandoffKey,
    /// With tokens delivered earlier at its end.
    pub(crate) prompt: Vec<u32>,
    pub(crate) num_generated: u32,
    pub(crate) max_new_tokens: u32,
    pub(crate) seed: u64,
    pub(crate) stop_tokens: Vec<u32>,
    /// A decode leg that computes its prompt.
    pub(crate) local: bool,
    /// A prefill leg's decode worker: address and instance.
    pub(crate) destination: Option<(usize, InstanceId)>,
}

impl LegSpec {
    pub(crate) fn sequence(&self, id: SequenceId, origin: Origin, cache: bool) -> NewSequence {
        NewSequence {
            id,
            origin,
            prompt: self.prompt.clone(),
            sampling: SamplingParams { seed: self.seed, ..SamplingParams::GREEDY },
            sequence: 0,
            num_generated: self.num_generated,
            max_new_tokens: self.max_new_tokens,
            stop_tokens: self.stop_tokens.clone(),
            cache,
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

pub(crate) enum Leg {
    Prefill(PrefillLeg),
    Decode(DecodeLeg),
}

pub(crate) struct PrefillLeg {
    pub(crate) spec: LegSpec,
    pub(crate) id: SequenceId,
    /// To the router, while it listens.
    pub(crate) stream: Option<StreamId>,
    /// `None`: one token is asked for, and nothing is handed off.
    pub(crate) source: Option<Source>,
    pub(crate) control: Option<StreamId>,
    pub(crate) skip_tokens: usize,
    /// Until the sender takes it.
    pub(crate) lease: Option<ReadLease>,
    pub(crate) sender: Option<Sender>,
}

pub(crate) struct DecodeLeg {
    pub(crate) spec: LegSpec,
    pub(crate) id: SequenceId,
    /// To the router, while it listens.
    pub(crate) stream: Option<StreamId>,
    /// `None`: local.
    pub(crate) destination: Option<Destination>,
    pub(crate) control: Option<StreamId>,
    pub(crate) receiver: Option<Receiver>,
    pub(crate) granted: bool,
}

impl Leg {
    pub(crate) fn deadline(&self) -> Option<Time> {
        match self {
            Self::Prefill(leg) => leg.source.as_ref()?.deadline(),
            Self::Decode(leg) => leg.destination.as_ref()?.deadline(),
        }
    }
}
