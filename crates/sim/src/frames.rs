//! How a prompt's KV is cut into frames: block by block, within a block layer by layer; or, where blocks are empty, some blocks at once.

use std::ops::Range;

use baton_handoff::HandoffKey;
use baton_timing::FingerprintMemory;

/// A piece of KV on the wire.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) key: HandoffKey,
    pub(crate) index: u64,
    pub(crate) checksum: u64,
    pub(crate) payload: Vec<u8>,
}

impl Frame {
    pub(crate) fn is_whole(&self) -> bool {
        self.checksum == checksum(&self.payload)
    }
}

/// FNV-1a, in place of the CRC-32C of the real wire.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Where a frame's bytes lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) layer: usize,
    /// In the sequence's block table.
    pub(crate) block: usize,
    pub(crate) num_tokens: usize,
}

/// The frames of one handoff; both sides derive the same from what they know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) prompt_tokens: usize,
    pub(crate) skip_tokens: usize,
    pub(crate) block_size: usize,
    pub(crate) num_layers: usize,
    /// Blocks of a frame; 1 unless they are empty.
    pub(crate) frame_blocks: usize,
    /// Frames have no payload.
    pub(crate) empty: bool,
}

impl Cut {
    fn token_bytes(&self) -> u64 {
        (FingerprintMemory::TOKEN_BYTES * self.num_layers) as u64
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.prompt_tokens.saturating_sub(self.skip_tokens)) as u64 * self.token_bytes()
    }

    pub(crate) fn num_frames(&self) -> u64 {
        let tokens = self.prompt_tokens.saturating_sub(self.skip_tokens);
        (tokens.div_ceil(self.frame_tokens()) * self.num_layers) as u64
    }

    const fn frame_tokens(&self) -> usize {
        self.block_size * self.frame_blocks
    }

    /// Bytes that can be sent once `num_tokens` are computed.
    pub(crate) fn encoded(&self, num_tokens: usize) -> u64 {
        num_tokens.min(self.prompt_tokens).saturating_sub(self.skip_tokens) as u64 * self.token_bytes()
    }

    pub(crate) fn place(&self, index: u64) -> Option<Place> {
        if index >= self.num_frames() {
            return None;
        }
        let nth = index as usize;
        let block = self.skip_tokens / self.block_size + nth / self.num_layers * self.frame_blocks;
        let num_tokens = (self.prompt_tokens - block * self.block_size).min(self.frame_tokens());
        Some(Place { layer: nth % self.num_layers, block, num_tokens })
    }

    /// The bytes of a frame in the handoff's byte stream.
    pub(crate) fn range(&self, index: u64) -> Option<Range<u64>> {
        let place = self.place(index)?;
        let before = (place.block * self.block_size - self.skip_tokens) as u64 * self.token_bytes();
        let bytes = (place.num_tokens * FingerprintMemory::TOKEN_BYTES) as u64;
        let start = before + place.layer as u64 * bytes;
        Some(start..start + bytes)
    }

    /// The frame that holds this offset.
    pub(crate) fn frame_at(&self, offset: u64) -> u64 {
        (0..self.num_frames())
            .find(|index| self.range(*index).is_some_and(|range| range.end > offset))
            .unwrap_or(self.num_frames())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_tile_the_byte_stream() {
        let lengths = [(1, 0), (4, 0), (11, 0), (11, 4), (11, 8), (12, 4)];
        let cuts = lengths.map(|(prompt_tokens, skip_tokens)| {
            let whole = Cut {
                prompt_tokens,
                skip_tokens,
                block_size: 4,
                num_layers: 3,
                frame_blocks: 1,
                empty: false,
            };
            [whole, Cut { num_layers: 1, frame_blocks: 2, empty: true, ..whole }]
        });
        for cut in cuts.into_iter().flatten() {
            let prompt_tokens = cut.prompt_tokens;
            let mut offset = 0;
            for index in 0..cut.num_frames() {
                let range = cut.range(index).unwrap();
                assert_eq!(range.start, offset);
                assert_eq!((cut.frame_at(range.start), cut.frame_at(range.end - 1)), (index, index));
                offset = range.end;
            }
            assert_eq!((offset, cut.encoded(prompt_tokens)), (cut.bytes(), cut.bytes()));
            assert!(cut.place(cut.num_frames()).is_none());
        }
    }
}
