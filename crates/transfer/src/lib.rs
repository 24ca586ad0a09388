//! Owns KV frames on the wire: cutting, sending under credit, receiving, checksums, and the connections between workers; and the
//! conversions between wire messages and the pure types of a handoff.
//!
//! Must never know an engine, a scheduler or what the handoff's machines decide: it is told how far to transmit, which frame to
//! send again, when to stop, and it tells what happened.

mod channel;
mod claim;
mod control;
mod coverage;
mod error;
mod frames;
mod outgoing;
mod peers;
mod progress;
mod push;
mod receiver;
mod sender;
mod service;
pub mod wire;
mod writer;

pub use channel::{
    BULK_WINDOW_BYTES, bulk_endpoint, bulk_server_builder, control_endpoint, control_server_builder,
};
pub use control::{Control, open_control};
pub use error::TransferError;
pub use frames::{Frame, FramePlan, MAX_FRAME_BYTES, TokenSpan};
pub use peers::{Identity, Peer, Peers, PeersConfig, answer_handshake};
pub use progress::{MAX_TOKENS, Progress};
pub use receiver::{Grant, ReceiveReport, Receiver, ReceiverEvent, Receivers};
pub use sender::{Sender, SenderConfig, SenderEvent, SentTotals, sender, sender_with_frames};
pub use service::{KvStreamService, kv_stream_server};

/// Payload that a frame has at most, unless one block of one layer is larger. Measured over loopback: 64 KiB, 128 KiB and 256 KiB lie
/// within a tenth of each other, 1 MiB takes a fifth more CPU time; a smaller frame is resent and paced more finely.
pub const FRAME_BYTES: usize = 128 * 1024;
