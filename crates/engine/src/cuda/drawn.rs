//! Drawn tokens on their way back.

use std::ops::Range;
use std::sync::Arc;

use super::driver::{Device, DeviceError, Memory, Pinned, Span, Stream};

/// Room for the tokens of one step, and after them their log-probabilities.
pub(super) struct Drawn {
    memory: Memory,
    host: Pinned,
    room: usize,
}

/// One token.
pub(super) struct DrawnToken {
    pub(super) token: u32,
    pub(super) logprob: f32,
}

impl Drawn {
    pub(super) fn new(device: &Arc<Device>, room: usize) -> Result<Drawn, DeviceError> {
        Ok(Drawn { memory: Memory::new(device, 8 * room)?, host: Pinned::new(device, 8 * room)?, room })
    }

    /// Tokens that there is room for.
    pub(super) const fn room(&self) -> usize {
        self.room
    }

    /// Where some of a step's `num` tokens go, and where their log-probabilities go.
    pub(super) fn places(&self, some: Range<usize>, num: usize) -> (Span, Span) {
        let at = |before: usize| self.memory.at(4 * (before + some.start), 4 * some.len());
        (at(0), at(num))
    }

    /// Queues the way back of all `num`.
    pub(super) fn download(&self, stream: &Stream, num: usize) -> Result<(), DeviceError> {
        if num == 0 {
            return Ok(());
        }
        // SAFETY: nobody looks at the host's side before the stream is finished.
        unsafe { stream.download(self.memory.at(0, 8 * num), self.host.get_mut(0, 8 * num)) }
    }

    /// All `num` that were downloaded.
    ///
    /// # Safety
    /// The stream is finished.
    pub(super) unsafe fn tokens(&self, num: usize) -> impl Iterator<Item = DrawnToken> {
        // SAFETY: the caller's.
        let (words, _) = unsafe { self.host.get(0, 8 * num) }.as_chunks::<4>();
        let (tokens, logprobs) = words.split_at(num);
        tokens.iter().zip(logprobs).map(|(token, logprob)| DrawnToken {
            token: u32::from_le_bytes(*token),
            logprob: f32::from_le_bytes(*logprob),
        })
    }
}
