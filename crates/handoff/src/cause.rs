//! Why a leg or a handoff ended without a result.

/// The closed set of causes; one to one with `baton.v1.Cause` on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Cause {
    /// The client hung up, or the router dropped the leg.
    #[error("cancelled")]
    Cancelled,
    /// The request's own deadline passed.
    #[error("deadline exceeded")]
    Deadline,
    /// A live leg has this key already.
    #[error("duplicate of a live request")]
    Duplicate,
    /// The message was meant for another process that had this address.
    #[error("another instance answers at this address")]
    WrongInstance,
    /// No room now; nothing was computed.
    #[error("busy")]
    Busy,
    /// It can never fit here.
    #[error("too large for this worker")]
    TooLarge,
    /// The two workers' KV layouts differ.
    #[error("KV layouts differ")]
    Layout,
    /// A frame failed its checksum twice.
    #[error("KV corrupted in transfer")]
    Corrupt,
    /// The other worker's stream ended, or it could not be reached.
    #[error("the other worker was lost")]
    PeerLost,
    /// No leg with this key is, or recently was, here.
    #[error("no such handoff")]
    NotFound,
    /// The worker takes no new work.
    #[error("draining")]
    Draining,
    /// A grant was not used, or a handoff made no progress, within its bound.
    #[error("handoff made no progress within its bound")]
    Expired,
    /// The peer broke the protocol.
    #[error("protocol violation")]
    Protocol,
    /// The model executor failed.
    #[error("engine failure")]
    Engine,
    /// The first token ended the sequence: the decode leg has nothing to do.
    #[error("not needed")]
    NotNeeded,
    /// The client reads slower than the output buffer allows.
    #[error("the client reads too slowly")]
    SlowReader,
    /// The sequence gave up its blocks to others; it is to be resumed elsewhere.
    #[error("preempted")]
    Preempted,
}

impl Cause {
    /// Every cause, for exhaustive tests and metrics.
    pub const ALL: [Self; 17] = [
        Self::Cancelled,
        Self::Deadline,
        Self::Duplicate,
        Self::WrongInstance,
        Self::Busy,
        Self::TooLarge,
        Self::Layout,
        Self::Corrupt,
        Self::PeerLost,
        Self::NotFound,
        Self::Draining,
        Self::Expired,
        Self::Protocol,
        Self::Engine,
        Self::NotNeeded,
        Self::SlowReader,
        Self::Preempted,
    ];

    /// Whether a handoff that its destination ended for this cause, or that was lost with it, may succeed with another one.
    pub const fn is_of_destination(self) -> bool {
        match self {
            Self::Cancelled
            | Self::WrongInstance
            | Self::Busy
            | Self::Corrupt
            | Self::PeerLost
            | Self::NotFound
            | Self::Draining
            | Self::Expired
            | Self::Preempted => true,
            Self::Deadline
            | Self::Duplicate
            | Self::TooLarge
            | Self::Layout
            | Self::Protocol
            | Self::Engine
            | Self::NotNeeded
            | Self::SlowReader => false,
        }
    }

    /// A stable name for metrics, logs and spans.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::Deadline => "deadline",
            Self::Duplicate => "duplicate",
            Self::WrongInstance => "wrong_instance",
            Self::Busy => "busy",
            Self::TooLarge => "too_large",
            Self::Layout => "layout",
            Self::Corrupt => "corrupt",
            Self::PeerLost => "peer_lost",
            Self::NotFound => "not_found",
            Self::Draining => "draining",
            Self::Expired => "expired",
            Self::Protocol => "protocol",
            Self::Engine => "engine",
            Self::NotNeeded => "not_needed",
            Self::SlowReader => "slow_reader",
            Self::Preempted => "preempted",
        }
    }
}
