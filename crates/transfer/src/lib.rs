//! Owns KV frames on the wire: cutting, sending under credit, receiving, checksums, and the connections between workers; and the
//! conversions between wire messages and the pure types of a handoff.
//!
//! Must never know an engine, a scheduler or what the handoff's machines decide: it is told how far to transmit, which frame to
//! send again, when to stop, and it tells what happened.

mod bulk;
mod channel;
mod checksum;
mod claim;
mod control;
mod coverage;
mod device;
mod error;
mod frames;
mod heap;
mod incoming;
mod lent;
mod outgoing;
mod payload;
mod peers;
mod probe;
mod progress;
mod push;
mod receiver;
mod ring;
mod sender;
mod service;
#[cfg(target_os = "linux")]
mod shared;
#[cfg(not(target_os = "linux"))]
#[path = "shared_elsewhere.rs"]
mod shared;
mod transport;
mod view;
pub mod wire;
mod writer;

pub use bulk::Bulk;
pub use channel::{
    BULK_WINDOW_BYTES, bulk_endpoint, bulk_server_builder, control_endpoint, control_server_builder,
};
pub use checksum::append as append_checksum;
pub use control::{Control, open_control};
pub use error::TransferError;
pub use frames::{Frame, FramePlan, MAX_FRAME_BYTES, TokenSpan};
pub use peers::{
    Identity, Peer, Peers, PeersConfig, answer_handshake, answer_handshake_for, answer_handshake_over,
};
pub use progress::{MAX_TOKENS, Progress};
pub use receiver::{Grant, ReceiveReport, Receiver, ReceiverEvent, Receivers};
pub use sender::{Sender, SenderConfig, SenderEvent, SentTotals, sender, sender_with_frames};
pub use service::{KvStreamService, kv_stream_server};
pub use transport::Transport;

/// Payload that a frame has at most, unless one block of one layer is larger. Measured over loopback: 64 KiB, 128 KiB and 256 KiB lie
/// within a tenth of each other, 1 MiB takes a fifth more CPU time; a smaller frame is resent and paced more finely.
pub const FRAME_BYTES: usize = 128 * 1024;

/// The same for payloads in shared memory: each costs two small messages, so fewer and larger ones are cheaper; 1 MiB
/// took less CPU time, but left the two ends less to do at the same time: 12.1 to 12.5 instead of 12.7 to 13.6 GB/s.
pub const SHARED_FRAME_BYTES: usize = 512 * 1024;

/// The same for payloads in device memory, where each costs a launch and a wait besides: as large as a ring in shared memory takes, so that a
/// stream can go on there. An estimate: it was not measured on a card.
pub const DEVICE_FRAME_BYTES: usize = ring::MAX_SHARED_FRAME_BYTES;
