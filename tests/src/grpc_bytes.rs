//! Where the insides of large gRPC messages lie in the bytes of one direction of an HTTP/2 connection (RFC 9113, section 4.1, and gRPC's
//! length-prefixed messages), so that a fault can strike what a message carries and nothing around it.

use std::collections::HashMap;
use std::ops::Range;

const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
const FRAME_HEAD: usize = 9;
const MESSAGE_HEAD: usize = 5;
const DATA: u8 = 0;
const END_STREAM: u8 = 1;
/// Bytes at either end of a message that may be its small fields.
const FIELDS: usize = 128;

/// Follows a client's bytes from the connection's first one on. Frames may not be padded, which the `h2` crate never does.
#[derive(Debug, Default)]
pub(crate) struct GrpcBytes {
    /// Of the preface.
    passed: usize,
    head: Vec<u8>,
    /// The frame under way: its stream if it is data, and bytes to come.
    frame: (Option<u32>, usize),
    ends_stream: bool,
    messages: HashMap<u32, Message>,
}

/// A stream's message under way.
#[derive(Debug, Default)]
struct Message {
    head: Vec<u8>,
    at: usize,
    len: usize,
}

impl GrpcBytes {
    /// Takes in the next bytes of the connection and says which of them lie inside large messages.
    pub(crate) fn follow(&mut self, piece: &[u8]) -> Vec<Range<usize>> {
        let mut inside = Vec::new();
        let mut at = 0;
        while at < piece.len() {
            let left = piece.len() - at;
            if self.passed < PREFACE {
                let num = left.min(PREFACE - self.passed);
                self.passed += num;
                at += num;
            } else if self.frame.1 > 0 {
                let num = left.min(self.frame.1);
                if let Some(stream) = self.frame.0 {
                    let message = self.messages.entry(stream).or_default();
                    message.follow(at, &piece[at..at + num], &mut inside);
                }
                self.frame.1 -= num;
                at += num;
                self.end_frame();
            } else {
                let num = left.min(FRAME_HEAD - self.head.len());
                self.head.extend_from_slice(&piece[at..at + num]);
                at += num;
                self.begin_frame();
            }
        }
        inside
    }

    fn begin_frame(&mut self) {
        if let [a, b, c, kind, flags, s, t, u, v] = self.head[..] {
            let stream = (kind == DATA).then_some(u32::from_be_bytes([s, t, u, v]));
            self.frame = (stream, u32::from_be_bytes([0, a, b, c]) as usize);
            self.ends_stream = flags & END_STREAM != 0;
            self.head.clear();
            self.end_frame();
        }
    }

    fn end_frame(&mut self) {
        if let (Some(stream), 0) = self.frame
            && self.ends_stream
        {
            self.messages.remove(&stream);
        }
    }
}

impl Message {
    /// `from`: where `data` begins in what was read.
    fn follow(&mut self, from: usize, data: &[u8], inside: &mut Vec<Range<usize>>) {
        let mut at = 0;
        while at < data.len() {
            if self.head.len() < MESSAGE_HEAD {
                let num = (MESSAGE_HEAD - self.head.len()).min(data.len() - at);
                self.head.extend_from_slice(&data[at..at + num]);
                at += num;
                if let [_compressed, a, b, c, d] = self.head[..] {
                    (self.at, self.len) = (0, u32::from_be_bytes([a, b, c, d]) as usize);
                }
            } else {
                let num = (self.len - self.at).min(data.len() - at);
                let end = self.len.saturating_sub(FIELDS).min(self.at + num);
                let begin = self.at.max(FIELDS);
                if begin < end {
                    let before = from + at;
                    inside.push(before + begin - self.at..before + end - self.at);
                }
                self.at += num;
                at += num;
            }
            if self.head.len() == MESSAGE_HEAD && self.at == self.len {
                *self = Message::default();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Vec<u8> {
        let len = (body.len() as u32).to_be_bytes();
        [&len[1..], &[kind, flags], &stream.to_be_bytes(), body].concat()
    }

    fn message(len: usize) -> Vec<u8> {
        // The insides are 7s.
        let body: Vec<u8> = (0..len).map(|i| if i >= FIELDS && i + FIELDS < len { 7 } else { 1 }).collect();
        [&[0], &(len as u32).to_be_bytes()[..], &body].concat()
    }

    #[test]
    fn what_is_found_is_the_inside_of_messages_however_the_bytes_come() {
        let long = message(20_000);
        let mut bytes = vec![0; PREFACE];
        bytes.extend(frame(4, 0, 0, &[7; 12]));
        bytes.extend(frame(1, 0, 1, &[7; 300]));
        // A long message over two frames, between them two of another stream in one frame, the second whole there.
        bytes.extend(frame(DATA, 0, 1, &long[..9_000]));
        bytes.extend(frame(DATA, 0, 3, &[message(10), message(1_000)].concat()));
        bytes.extend(frame(DATA, END_STREAM, 1, &long[9_000..]));
        bytes.extend(frame(DATA, 0, 3, &message(0)));
        bytes.extend(frame(DATA, 0, 3, &[]));
        bytes.extend(frame(DATA, 0, 1, &message(257)));
        let headers = 12 + 300;
        for step in [1, 2, 5, 9, 100, 4_096, bytes.len()] {
            let mut follower = GrpcBytes::default();
            let mut num = 0;
            for piece in bytes.chunks(step) {
                for range in follower.follow(piece) {
                    assert!(piece[range.clone()].iter().all(|&byte| byte == 7), "pieces of {step}");
                    num += range.len();
                }
            }
            assert_eq!(num, bytes.iter().filter(|&&byte| byte == 7).count() - headers, "pieces of {step}");
        }
    }
}
