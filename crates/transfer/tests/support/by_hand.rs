//! A source that builds its frames by hand.

use baton_handoff::HandoffKey;
use baton_proto::v1;
use baton_proto::v1::kv_stream_client::KvStreamClient;
use baton_transfer::wire;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{Destination, PATIENCE};

/// A Push stream, opened for a key.
pub(crate) struct Stream {
    frames: mpsc::Sender<v1::KvFrame>,
    answers: Streaming<v1::PushProgress>,
}

impl Stream {
    pub(crate) async fn open(destination: &Destination, opening: v1::KvFrame) -> Result<Self, Status> {
        let (frames, outgoing) = mpsc::channel(8);
        frames.try_send(opening).unwrap();
        let mut client = KvStreamClient::new(destination.channel());
        let answers = client.push(ReceiverStream::new(outgoing)).await?.into_inner();
        Ok(Self { frames, answers })
    }

    pub(crate) async fn send(&self, frame: v1::KvFrame) {
        // A stream that has ended says why in its answers.
        let _ = self.frames.send(frame).await;
    }

    pub(crate) async fn answer(&mut self) -> Result<Option<v1::PushProgress>, Status> {
        tokio::time::timeout(PATIENCE, self.answers.message()).await.expect("no answer")
    }
}

pub(crate) fn opening(key: HandoffKey) -> v1::KvFrame {
    v1::KvFrame { key: Some(wire::encode_key(&key)), ..v1::KvFrame::default() }
}

/// The sum as transfer.proto defines it, bit by bit.
pub(crate) fn seal(key: &HandoffKey, frame: v1::KvFrame) -> v1::KvFrame {
    let crc32c = sum(key, &frame, &frame.payload);
    v1::KvFrame { crc32c, ..frame }
}

/// The same for a payload that lies elsewhere.
pub(crate) fn sum(key: &HandoffKey, frame: &v1::KvFrame, payload: &[u8]) -> u32 {
    let mut bytes = key.request.0.to_vec();
    bytes.extend(key.group.to_le_bytes());
    bytes.extend(key.attempt.to_le_bytes());
    bytes.extend(frame.index.to_le_bytes());
    bytes.extend(frame.offset.to_le_bytes());
    for field in [frame.layer, frame.first_block, frame.num_blocks, frame.tail_tokens] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.extend(payload);
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 };
        }
    }
    !crc
}
