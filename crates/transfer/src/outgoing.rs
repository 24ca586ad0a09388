//! Encoding frames straight out of block memory: one copy, from the arena into the buffer that HTTP/2 sends, or into shared memory.

use std::sync::{Arc, Weak};

use baton_handoff::HandoffKey;
use baton_kv::{BlockMemory, BlockOrder, BlockSlice, MemoryError, ReadLease};
use baton_proto::bulk::{BULK_BUFFER_BYTES, bulk_buffer_settings};
use baton_proto::v1;
use bytes::BufMut;
use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, EncodeBuf, Encoder};
use tonic_prost::{ProstCodec, ProstDecoder};

use crate::frames::Frame;
use crate::{checksum, wire};

/// Tag of `KvFrame.payload`: field 8, length-delimited.
const PAYLOAD_TAG: u8 = 8 << 3 | 2;

/// More than the other fields of a `KvFrame` ever take.
const HEADER_BYTES: usize = 128;

/// Where the bytes of a handoff's frames are read; its lease pins them until the sender ends.
pub(crate) struct Blocks {
    pub(crate) memory: Arc<dyn BlockMemory>,
    pub(crate) lease: ReadLease,
    pub(crate) key: HandoffKey,
}

/// How long the sender waited before a frame, since the frame before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waits {
    pub(crate) idle_us: u64,
    pub(crate) credit_us: u64,
}

/// One message of a Push stream.
pub(crate) enum Outgoing {
    /// The first message, and frames whose payload lies elsewhere: all there is to say is in it.
    Message(Box<v1::KvFrame>),
    /// KV, read when the message is encoded. A frame that the transport has not asked for yet doesn't pin blocks that the sender
    /// has let go of.
    Kv { frame: Frame, waits: Waits, blocks: Weak<Blocks> },
}

impl Outgoing {
    /// The first message: names the handoff, and beside it where its payloads lie, see [`crate::lent::Lent::opening`].
    pub(crate) fn opening(key: &HandoffKey, place: v1::KvFrame) -> Self {
        Self::Message(Box::new(v1::KvFrame { key: Some(wire::encode_key(key)), ..place }))
    }
}

/// Everything about a frame but its payload and its sum.
pub(crate) fn header(frame: &Frame, waits: Waits) -> v1::KvFrame {
    v1::KvFrame {
        index: frame.index,
        offset: frame.offset,
        layer: frame.layer,
        first_block: frame.first_block,
        num_blocks: frame.num_blocks,
        tail_tokens: frame.tail_tokens,
        idle_us: waits.idle_us,
        credit_wait_us: waits.credit_us,
        ..v1::KvFrame::default()
    }
}

impl Blocks {
    /// Gives a frame's payload to `take`, in order, and returns the frame's sum: `take` appends each part to the sum that it is given. `tail`
    /// is scratch memory.
    pub(crate) fn read(
        &self,
        frame: &Frame,
        tail: &mut Vec<u8>,
        mut take: impl FnMut(u32, &[u8]) -> u32,
    ) -> Result<u32, MemoryError> {
        let mut crc = header_crc(&self.key, frame);
        let run = frame.run();
        let order = match frame.tail_tokens as usize {
            0 => BlockOrder::Own,
            whole if whole == self.memory.layout().block_size => BlockOrder::Canonical,
            num_tokens => {
                tail.clear();
                self.memory.gather(
                    &self.lease,
                    BlockSlice { layer: run.layer, nth: run.first, num_tokens },
                    tail,
                )?;
                return Ok(take(crc, tail));
            }
        };
        self.memory.read_blocks(&self.lease, run, order, &mut |bytes| crc = take(crc, bytes))?;
        Ok(crc)
    }
}

/// CRC-32C of what stands before the payload; the payload's bytes are appended to it.
pub(crate) fn header_crc(key: &HandoffKey, frame: &Frame) -> u32 {
    let mut header = [0u8; 16 + 8 + 16 + 16];
    let mut rest = &mut header[..];
    rest.put_slice(&key.request.0);
    rest.put_u32_le(key.group);
    rest.put_u32_le(key.attempt);
    rest.put_u64_le(frame.index);
    rest.put_u64_le(frame.offset);
    for field in [frame.layer, frame.first_block, frame.num_blocks, frame.tail_tokens] {
        rest.put_u32_le(field);
    }
    crc32c::crc32c(&header)
}

/// Encodes [`Outgoing`] as `KvFrame`.
pub(crate) struct FrameEncoder {
    tail: Vec<u8>,
}

impl FrameEncoder {
    fn encode_kv(
        &mut self,
        frame: &Frame,
        waits: Waits,
        blocks: &Blocks,
        buf: &mut impl BufMut,
    ) -> Result<(), Status> {
        put_message(&header(frame, waits), buf)?;
        buf.put_u8(PAYLOAD_TAG);
        prost::encode_length_delimiter(frame.len as usize, buf).map_err(no_room)?;
        // Summed right after it was copied: copying fetches it from far memory as fast as can be, and then it is near.
        let read = blocks.read(frame, &mut self.tail, |crc, bytes| {
            buf.put_slice(bytes);
            checksum::append(crc, bytes)
        });
        let crc = read.map_err(|error| Status::internal(format!("frame {}: {error}", frame.index)))?;
        // Fields of one message may be written apart: concatenated messages merge.
        put_message(&v1::KvFrame { crc32c: crc, ..v1::KvFrame::default() }, buf)
    }
}

fn put_message(message: &v1::KvFrame, buf: &mut impl BufMut) -> Result<(), Status> {
    message.encode(buf).map_err(no_room)
}

/// Buffers here grow, so this can't happen.
fn no_room(error: prost::EncodeError) -> Status {
    Status::internal(error.to_string())
}

impl Encoder for FrameEncoder {
    type Item = Outgoing;
    type Error = Status;

    fn encode(&mut self, item: Outgoing, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        match item {
            Outgoing::Message(message) => put_message(&message, buf),
            Outgoing::Kv { frame, waits, blocks } => {
                let Some(blocks) = blocks.upgrade() else {
                    return Err(Status::cancelled("the handoff was fenced"));
                };
                let needed = HEADER_BYTES + frame.len as usize;
                if buf.chunk_mut().len() < needed {
                    // A buffer that was handed over whole is replaced by one that takes several frames.
                    buf.reserve(needed.max(BULK_BUFFER_BYTES));
                }
                self.encode_kv(&frame, waits, &blocks, buf)
            }
        }
    }

    fn buffer_settings(&self) -> BufferSettings {
        bulk_buffer_settings()
    }
}

/// Codec of the client side of Push.
#[derive(Default)]
pub(crate) struct PushCodec;

impl Codec for PushCodec {
    type Encode = Outgoing;
    type Decode = v1::PushProgress;
    type Encoder = FrameEncoder;
    type Decoder = ProstDecoder<v1::PushProgress>;

    fn encoder(&mut self) -> FrameEncoder {
        FrameEncoder { tail: Vec::new() }
    }

    fn decoder(&mut self) -> Self::Decoder {
        // Answers are small, unlike what this codec encodes.
        ProstCodec::<v1::PushProgress, v1::PushProgress>::raw_decoder(BufferSettings::default())
    }
}
