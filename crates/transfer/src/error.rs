//! Why a transfer can't go on.

use baton_handoff::{Cause, HandoffKey, InstanceId};

/// Named for what the caller does next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// The connection could not be made, or ended: try again later, or give the peer up.
    #[error("{address}: {detail}")]
    Lost {
        /// "host:port" of the peer.
        address: String,
        /// What the transport said.
        detail: String,
    },
    /// Another process answers at this address: ask the fleet view again.
    #[error("{address}: instance {found} answers, {expected} was meant")]
    WrongInstance {
        /// "host:port" of the peer.
        address: String,
        /// Whom the caller meant.
        expected: InstanceId,
        /// Who answered.
        found: InstanceId,
    },
    /// The two workers can never exchange KV: place the request elsewhere. The text names both sides.
    #[error("{0}")]
    Layout(String),
    /// The peer broke the protocol: abort the handoff.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// A limit of this process is reached: refuse, and offer again later.
    #[error("{what}: the limit of {limit} is reached")]
    Full {
        /// What there are too many of.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The key is live already: refuse the newcomer.
    #[error("handoff {0} is live already")]
    Duplicate(HandoffKey),
}

impl TransferError {
    /// The cause with which a handoff ends because of this.
    pub const fn cause(&self) -> Cause {
        match self {
            Self::Lost { .. } => Cause::PeerLost,
            Self::WrongInstance { .. } => Cause::WrongInstance,
            Self::Layout(_) => Cause::Layout,
            Self::Protocol(_) => Cause::Protocol,
            Self::Full { .. } => Cause::Busy,
            Self::Duplicate(_) => Cause::Duplicate,
        }
    }

    /// A wire message of which `field` is not what the protocol allows.
    pub(crate) fn malformed(field: &str, problem: impl std::fmt::Display) -> Self {
        Self::Protocol(format!("{field}: {problem}"))
    }
}

impl From<TransferError> for tonic::Status {
    fn from(error: TransferError) -> Self {
        let code = match error {
            TransferError::Lost { .. } => tonic::Code::Unavailable,
            TransferError::WrongInstance { .. } | TransferError::Layout(_) => tonic::Code::FailedPrecondition,
            TransferError::Protocol(_) => tonic::Code::InvalidArgument,
            TransferError::Full { .. } => tonic::Code::ResourceExhausted,
            TransferError::Duplicate(_) => tonic::Code::AlreadyExists,
        };
        Self::new(code, error.to_string())
    }
}
