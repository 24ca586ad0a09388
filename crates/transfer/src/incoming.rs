//! Reading a Push stream where its bytes lie: messages are decoded out of what HTTP/2 received.
//!
//! tonic's own reader gathers every message in one buffer first; for KV that is one more copy of everything.

use std::collections::VecDeque;
use std::pin::Pin;

use baton_proto::v1;
use bytes::{Buf, Bytes};
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Body as _;

use crate::push::MAX_MESSAGE_BYTES;

/// Compression flag and length, before each message.
const PREFIX_BYTES: usize = 5;

/// The messages of one stream.
pub(crate) struct Incoming {
    body: Body,
    chunks: Chunks,
    /// Bytes of the message whose prefix was read.
    message_bytes: Option<usize>,
}

impl Incoming {
    pub(crate) fn new(body: Body) -> Self {
        Self { body, chunks: Chunks::default(), message_bytes: None }
    }

    /// The next message; `None` when the source closed the stream. Loses nothing when dropped in a `select!`.
    pub(crate) async fn message(&mut self) -> Result<Option<v1::KvFrame>, Status> {
        loop {
            if let Some(message) = self.decode()? {
                return Ok(Some(message));
            }
            let body = &mut self.body;
            match std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await {
                // What is no data are trailers, and after them nothing follows.
                Some(Ok(frame)) => self.chunks.push(frame.into_data().unwrap_or_default()),
                Some(Err(status)) => return Err(status),
                None if self.chunks.len == 0 && self.message_bytes.is_none() => return Ok(None),
                None => return Err(Status::internal("the stream ended within a message")),
            }
        }
    }

    /// A message that is here as a whole.
    fn decode(&mut self) -> Result<Option<v1::KvFrame>, Status> {
        let len = match self.message_bytes {
            Some(len) => len,
            None if self.chunks.len < PREFIX_BYTES => return Ok(None),
            None => *self.message_bytes.insert(self.chunks.prefix()?),
        };
        if self.chunks.len < len {
            return Ok(None);
        }
        self.message_bytes = None;
        let message = v1::KvFrame::decode((&mut self.chunks).take(len));
        message.map(Some).map_err(|error| Status::internal(format!("a message that is none: {error}")))
    }
}

/// Received bytes that were not decoded yet.
#[derive(Default)]
struct Chunks {
    parts: VecDeque<Bytes>,
    len: usize,
}

impl Chunks {
    fn push(&mut self, part: Bytes) {
        if !part.is_empty() {
            self.len += part.len();
            self.parts.push_back(part);
        }
    }

    /// Takes the prefix of a message, which is here, and returns the message's length in bytes.
    fn prefix(&mut self) -> Result<usize, Status> {
        if self.get_u8() != 0 {
            return Err(Status::unimplemented("compressed messages are not taken"));
        }
        let len = self.get_u32() as usize;
        if len > MAX_MESSAGE_BYTES {
            return Err(Status::out_of_range(format!(
                "a message of {len} bytes: {MAX_MESSAGE_BYTES} are taken at most"
            )));
        }
        Ok(len)
    }
}

impl Buf for Chunks {
    fn remaining(&self) -> usize {
        self.len
    }

    fn chunk(&self) -> &[u8] {
        self.parts.front().map_or(&[], |part| part)
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.len, "{count} bytes of {}", self.len);
        self.len -= count;
        while let Some(front) = self.parts.front_mut() {
            if count < front.len() {
                return front.advance(count);
            }
            count -= front.len();
            self.parts.pop_front();
        }
    }

    /// No copy when the bytes lie in one chunk, as those of a frame do unless HTTP/2 cut it.
    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        if let Some(front) = self.parts.front()
            && len <= front.len()
        {
            let bytes = front.slice(..len);
            self.advance(len);
            return bytes;
        }
        let mut gathered = bytes::BytesMut::with_capacity(len);
        bytes::BufMut::put(&mut gathered, self.take(len));
        gathered.freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(index: u64, payload: Vec<u8>) -> v1::KvFrame {
        v1::KvFrame { index, payload: payload.into(), crc32c: 7, ..v1::KvFrame::default() }
    }

    fn on_the_wire(messages: &[v1::KvFrame]) -> Vec<u8> {
        let mut all = Vec::new();
        for message in messages {
            let bytes = message.encode_to_vec();
            all.push(0);
            all.extend((bytes.len() as u32).to_be_bytes());
            all.extend(bytes);
        }
        all
    }

    fn incoming() -> Incoming {
        Incoming::new(Body::empty())
    }

    #[test]
    fn messages_are_the_same_however_the_stream_was_cut() {
        let messages = [message(1, vec![1; 300]), message(2, Vec::new()), message(3, (0..=255).collect())];
        let wire = on_the_wire(&messages);
        for size in 1..wire.len() {
            let mut incoming = incoming();
            let mut found = Vec::new();
            for part in wire.chunks(size) {
                incoming.chunks.push(Bytes::copy_from_slice(part));
                while let Some(message) = incoming.decode().unwrap() {
                    found.push(message);
                }
            }
            assert_eq!(found, messages, "parts of {size} bytes");
            assert_eq!((incoming.chunks.len, incoming.chunks.parts.len()), (0, 0));
        }
    }

    #[test]
    fn a_payload_that_came_in_one_piece_is_not_copied() {
        let wire = Bytes::from(on_the_wire(&[message(1, vec![9; 5000])]));
        let (start, end) = (wire.as_ptr() as usize, wire.as_ptr() as usize + wire.len());
        let mut incoming = incoming();
        incoming.chunks.push(wire);
        let payload = incoming.decode().unwrap().unwrap().payload;
        assert_eq!(payload, vec![9; 5000]);
        assert!((start..end).contains(&(payload.as_ptr() as usize)));
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for (wire, text) in [
            (vec![1, 0, 0, 0, 1, 0], "compressed"),
            (vec![0, 0xFF, 0, 0, 0, 0], "at most"),
            (vec![0, 0, 0, 0, 1, 0xFF], "a message that is none"),
        ] {
            let mut incoming = incoming();
            incoming.chunks.push(wire.into());
            let status = incoming.decode().unwrap_err();
            assert!(status.message().contains(text), "{status}");
        }
    }

    #[tokio::test]
    async fn an_end_within_a_message_is_no_good_end() {
        assert_eq!(incoming().message().await.unwrap(), None);
        let mut cut = incoming();
        cut.chunks.push(vec![0, 0, 0].into());
        assert!(cut.message().await.is_err());
    }
}
