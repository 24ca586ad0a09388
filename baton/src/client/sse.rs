//! Server-sent events: bytes in, one JSON text per event out.

use std::collections::VecDeque;

use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::{Chunk, ClientError};

/// Longest event that is read, in bytes.
const MAX_EVENT_BYTES: usize = 4 << 20;
/// What ends a stream.
const DONE: &[u8] = b"[DONE]";

/// The events of one answer. Dropping it closes the stream, which cancels the request.
pub(crate) struct EventStream {
    body: Incoming,
    decoder: Decoder,
}

impl EventStream {
    pub(super) fn new(body: Incoming) -> Self {
        Self { body, decoder: Decoder::default() }
    }

    /// The next event; `None` after the last one.
    ///
    /// # Errors
    /// [`ClientError::Broken`]: the stream failed, or ended without saying that it was complete.
    pub(crate) async fn next(&mut self) -> Result<Option<Chunk>, ClientError> {
        let broken = |reason: String| Err(ClientError::Broken(reason));
        loop {
            if let Some(event) = self.decoder.events.pop_front() {
                if event == DONE {
                    return Ok(None);
                }
                let chunk: Chunk = match serde_json::from_slice(&event) {
                    Ok(chunk) => chunk,
                    Err(error) => return broken(format!("an event is not what was expected: {error}")),
                };
                return match chunk.error {
                    Some(error) => broken(error.message),
                    None => Ok(Some(chunk)),
                };
            }
            match self.body.frame().await {
                None => return broken("the connection closed before the end".to_owned()),
                Some(Err(error)) => return broken(error.to_string()),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.decoder.feed(&data)?;
                    }
                }
            }
        }
    }
}

/// Splits bytes into the `data` of events, however the bytes were cut on the way.
#[derive(Debug, Default)]
struct Decoder {
    line: Vec<u8>,
    data: Vec<u8>,
    events: VecDeque<Vec<u8>>,
}

impl Decoder {
    fn feed(&mut self, bytes: &[u8]) -> Result<(), ClientError> {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(piece);
            if self.line.len() + self.data.len() > MAX_EVENT_BYTES {
                return Err(ClientError::Broken(format!("an event is longer than {MAX_EVENT_BYTES} bytes")));
            }
            if piece.ends_with(b"\n") {
                self.end_line();
            }
        }
        Ok(())
    }

    fn end_line(&mut self) {
        let mut line = std::mem::take(&mut self.line);
        while line.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
            line.pop();
        }
        if line.is_empty() {
            if !self.data.is_empty() {
                self.events.push_back(std::mem::take(&mut self.data));
            }
        } else if let Some(value) = line.strip_prefix(b"data:") {
            let value = value.strip_prefix(b" ").unwrap_or(value);
            if !self.data.is_empty() {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value);
        }
        // Comments (keep-alive) and other fields say nothing here.
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(pieces: &[&[u8]]) -> Vec<String> {
        let mut decoder = Decoder::default();
        for piece in pieces {
            decoder.feed(piece).unwrap();
        }
        decoder.events.iter().map(|event| String::from_utf8(event.clone()).unwrap()).collect()
    }

    #[test]
    fn events_survive_every_way_of_cutting() {
        let text =
            "data: {\"a\":\"é\"}\n\n: keep-alive\n\nevent: x\r\ndata: b\r\ndata: c\r\n\r\ndata: [DONE]\n\n"
                .as_bytes();
        let whole = decode(&[text]);
        assert_eq!(whole, ["{\"a\":\"é\"}", "b\nc", "[DONE]"]);
        for cut in 0..=text.len() {
            let (left, right) = text.split_at(cut);
            assert_eq!(decode(&[left, right]), whole, "cut at {cut}");
        }
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(decode(&bytes), whole);
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut decoder = Decoder::default();
        let piece = vec![b'x'; 1 << 20];
        let fed: Vec<_> = (0..5).map(|_| decoder.feed(&piece)).collect();
        assert!(fed.last().unwrap().is_err());
    }
}
