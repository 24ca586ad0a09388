//! What goes into the two machines and what comes out of them.

use crate::{Cause, Commit, DestinationMessage, FirstToken, HandoffKey, InstanceId, SourceMessage};

/// What happened, as the source's shell saw it.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceFact {
    /// The prompt came near the head of the queue: offer it.
    NearHead,
    /// A message on the control stream.
    Received(DestinationMessage),
    /// Every byte below this absolute offset of the handoff's byte stream is computed and may be sent.
    Encoded {
        /// Absolute offset.
        bytes: u64,
    },
    /// Prefill is done; repeated after a [`SourceFact::Redirected`], once granted.
    Sampled {
        /// One token of each sequence of the group, in the order of their numbers.
        first: Vec<FirstToken>,
        /// Bytes of the whole stream.
        bytes: u64,
        /// Frames of the whole stream.
        frames: u64,
    },
    /// The transport took every byte below this absolute offset.
    Sent {
        /// Absolute offset.
        bytes: u64,
    },
    /// The frame of the last [`SourceAction::Resend`] was handed to the transport.
    Resent,
    /// The control stream ended, or could not be opened.
    ControlLost,
    /// The bulk stream broke.
    BulkLost,
    /// The router wants the blocks elsewhere, under another key; see [`crate::Source::can_redirect`].
    Redirected {
        /// Of the next attempt.
        key: HandoffKey,
        /// Whom the router means now.
        destination: InstanceId,
    },
    /// The router dropped the leg, or this worker gives up, for this cause.
    Cancelled(Cause),
    /// Time passed; see [`crate::Source::deadline`].
    Tick,
}

/// What the source's shell is to do, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceAction {
    /// Write this to the control stream (opening it for the offer).
    Send(SourceMessage),
    /// The destination has room: compute the prompt; after a redirect it is computed, and [`SourceFact::Sampled`] answers at once.
    Compute {
        /// Leading tokens whose KV must not be sent; they are computed nevertheless, or come from a cache.
        skip_tokens: u32,
    },
    /// Send on the bulk stream (opening it if need be) up to this absolute offset; replaces earlier ones.
    Transmit {
        /// Absolute offset: the smaller of credit and encoded bytes.
        up_to: u64,
    },
    /// Send this frame once more, beside credit.
    Resend {
        /// Index of the frame.
        frame: u64,
    },
    /// Open the bulk stream anew and send again from the frame that holds this offset; a later `Transmit` says how far.
    Reopen {
        /// Absolute offset; everything below it is verified at the destination.
        from: u64,
    },
    /// Stop the bulk sender and close its stream: no byte is read from the blocks after this.
    Fence,
    /// The handoff failed for this cause and the control stream is to be closed, but the blocks are kept for a while: tell the router,
    /// which may answer with [`SourceFact::Redirected`].
    Hold(Cause),
    /// The blocks are no longer needed: give the sequence up, or release it when it is held.
    Release,
    /// Nothing more follows.
    End(SourceEnd),
}

/// How a handoff ended for its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceEnd {
    /// The destination runs the sequence.
    Committed,
    /// It failed; the attempt is over.
    Failed(Cause),
    /// The first tokens ended every sequence.
    NotNeeded,
}

/// What happened, as the destination's shell saw it.
#[derive(Clone, Debug, PartialEq)]
pub enum DestinationFact {
    /// An offer for this key came, or was parked and is matched now.
    Offered {
        /// Who offers.
        source: InstanceId,
        /// Whom the router meant.
        destination: InstanceId,
        /// Tokens of the prompt.
        prompt_tokens: u32,
    },
    /// The scheduler reserved all blocks. The shell keeps their write lease for the writer. When the machine answers with
    /// anything but a grant, it drops the lease at once.
    Reserved {
        /// Leading tokens that are here already; a multiple of the block size.
        skip_tokens: u32,
        /// Bytes of KV of all other tokens.
        bytes: u64,
    },
    /// The scheduler can't reserve them now.
    NoRoom,
    /// Every byte below this absolute offset of the handoff's byte stream is verified and lies in its block.
    Verified {
        /// Absolute offset.
        bytes: u64,
    },
    /// This frame failed its checksum.
    Corrupt {
        /// Index of the frame.
        frame: u64,
    },
    /// A message on the control stream (an offer among them is the same as [`DestinationFact::Offered`]).
    Received(SourceMessage),
    /// The control stream ended.
    ControlLost,
    /// The bulk stream broke; the source may open it once more.
    BulkLost,
    /// The write lease is gone: nothing will write into the reserved blocks any more. Follows every
    /// [`DestinationAction::Fence`], at once when no writer was running.
    WriterEnded,
    /// The router dropped the leg, or this worker gives up, for this cause.
    Cancelled(Cause),
    /// Time passed; see [`crate::Destination::deadline`].
    Tick,
}

/// What the destination's shell is to do, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum DestinationAction {
    /// Ask the scheduler for all blocks of the prompt; it answers `Reserved` or `NoRoom`.
    Reserve,
    /// Write this to the control stream.
    Send(DestinationMessage),
    /// Fence the write lease and end the writer; `WriterEnded` answers.
    Fence,
    /// Every byte is verified and the writer is gone: the sequences run from here.
    Run(Commit),
    /// Give the sequence up in the scheduler; its blocks return (they are pinned while the lease lives).
    Free,
    /// Nothing but answers to late messages follows.
    End(DestinationEnd),
}

/// How a handoff ended for its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationEnd {
    /// The sequence runs here.
    Committed,
    /// It failed; the attempt is over.
    Failed(Cause),
}
