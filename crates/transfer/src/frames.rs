//! Cutting a handoff's KV into frames: which bytes have which place in the stream.
//!
//! A prompt's tokens from `skip_tokens` on are sent chunk by chunk, within a chunk layer by layer, within a layer block by block.
//! The last block of a prompt, when partly filled, makes a frame of its own with only its tokens.
//! Chunks here are the sender's: cut where computing had arrived when the sender looked.

use baton_kv::{BlockOrder, BlockRun, KvLayout};

use crate::TransferError;

/// Largest payload of one frame, in bytes; a (layer, block) larger than that can't be sent.
pub const MAX_FRAME_BYTES: usize = 4 * 1024 * 1024;

/// One frame: some blocks of one layer, or the filled part of the last block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Position among the handoff's frames, from 0.
    pub index: u64,
    /// Position of the first payload byte in the handoff's byte stream.
    pub offset: u64,
    /// Layer.
    pub layer: u32,
    /// First block, counted in the sequence's whole block table, skipped blocks included.
    pub first_block: u32,
    /// Blocks; 1 when `tail_tokens` is set.
    pub num_blocks: u32,
    /// 0 for whole raw blocks; the block size for whole blocks in canonical order; otherwise the filled tokens of the prompt's last block.
    pub tail_tokens: u32,
    /// Payload bytes.
    pub len: u32,
}

impl Frame {
    /// Offset of the byte after the payload's last one.
    pub const fn end(&self) -> u64 {
        self.offset + self.len as u64
    }

    /// Its blocks.
    pub(crate) const fn run(&self) -> BlockRun {
        BlockRun {
            layer: self.layer as usize,
            first: self.first_block as usize,
            num_blocks: self.num_blocks as usize,
        }
    }
}

/// The tokens that a handoff moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSpan {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Leading tokens that are not sent; a multiple of the block size.
    pub skip_tokens: usize,
}

impl TokenSpan {
    /// Bytes that the span takes over all layers, without padding of the last block.
    pub const fn bytes(&self, layout: &KvLayout) -> u64 {
        (self.prompt_tokens - self.skip_tokens) as u64 * layout.token_bytes() as u64
    }

    /// # Errors
    /// [`TransferError::Protocol`] when the span is not one of `layout`, or too long to be numbered.
    pub fn check(&self, layout: &KvLayout) -> Result<(), TransferError> {
        let Self { prompt_tokens, skip_tokens } = *self;
        if skip_tokens > prompt_tokens || !skip_tokens.is_multiple_of(layout.block_size) {
            return Err(TransferError::Protocol(format!(
                "skip_tokens is {skip_tokens}: a multiple of the block size {} up to prompt_tokens {prompt_tokens} is needed",
                layout.block_size
            )));
        }
        if prompt_tokens > crate::progress::MAX_TOKENS {
            return Err(TransferError::Protocol(format!(
                "prompt_tokens is {prompt_tokens}; the limit is {}",
                crate::progress::MAX_TOKENS
            )));
        }
        Ok(())
    }
}

/// Some tokens of the span, complete or being computed.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    end_token: usize,
    first_block: usize,
    full_blocks: usize,
    tail_tokens: usize,
    first_frame: u64,
    offset: u64,
}

/// Every frame of a handoff, computed from the chunks seen so far; grows with the prompt's chunks, not with its frames.
#[derive(Clone, Debug)]
pub struct FramePlan {
    span: TokenSpan,
    num_layers: usize,
    block_size: usize,
    /// Bytes of one token in one layer.
    slot_bytes: usize,
    blocks_per_frame: usize,
    /// Of whole blocks.
    order: BlockOrder,
    chunks: Vec<Chunk>,
}

impl FramePlan {
    /// A plan without chunks. Frames hold as many whole blocks as fit into `frame_bytes`, and at least one.
    ///
    /// # Errors
    /// [`TransferError::Protocol`] when the span does not fit the layout.
    pub fn new(layout: &KvLayout, span: TokenSpan, frame_bytes: usize) -> Result<Self, TransferError> {
        span.check(layout)?;
        let block_bytes = layout.block_layer_bytes();
        if block_bytes > MAX_FRAME_BYTES {
            return Err(TransferError::Layout(format!(
                "one block of one layer takes {block_bytes} bytes; a frame holds at most {MAX_FRAME_BYTES}"
            )));
        }
        Ok(Self {
            span,
            num_layers: layout.num_layers,
            block_size: layout.block_size,
            slot_bytes: block_bytes / layout.block_size,
            blocks_per_frame: (frame_bytes.min(MAX_FRAME_BYTES) / block_bytes).max(1),
            order: BlockOrder::Own,
            chunks: Vec::new(),
        })
    }

    /// The same frames, with whole blocks in another order.
    #[must_use]
    pub const fn in_order(mut self, order: BlockOrder) -> Self {
        self.order = order;
        self
    }

    /// Adds the chunk from the last one's end to `end_token`. Ends inside a block are rounded down unless they
    /// are the prompt's end; an end that adds nothing is ignored.
    pub fn extend_to(&mut self, end_token: usize) {
        let end = if end_token >= self.span.prompt_tokens {
            self.span.prompt_tokens
        } else {
            end_token - end_token % self.block_size
        };
        let start = self.end_token();
        if end <= start {
            return;
        }
        let first_block = start / self.block_size;
        self.chunks.push(Chunk {
            end_token: end,
            first_block,
            full_blocks: end / self.block_size - first_block,
            tail_tokens: end % self.block_size,
            first_frame: self.num_frames(),
            offset: self.end_offset(),
        });
    }

    /// Token up to which chunks were added.
    pub fn end_token(&self) -> usize {
        self.chunks.last().map_or(self.span.skip_tokens, |chunk| chunk.end_token)
    }

    /// Whether every token of the span is in a chunk.
    pub fn is_complete(&self) -> bool {
        self.end_token() == self.span.prompt_tokens
    }

    /// Frames of the chunks added.
    pub fn num_frames(&self) -> u64 {
        self.chunks
            .last()
            .map_or(0, |chunk| chunk.first_frame + (self.frames_per_layer(chunk) * self.num_layers) as u64)
    }

    /// Bytes of the chunks added.
    pub fn end_offset(&self) -> u64 {
        self.chunks.last().map_or(0, |chunk| chunk.offset + self.layer_bytes(chunk) * self.num_layers as u64)
    }

    /// Bytes of the whole span.
    pub fn total_bytes(&self) -> u64 {
        (self.span.prompt_tokens - self.span.skip_tokens) as u64 * (self.slot_bytes * self.num_layers) as u64
    }

    /// Takes in where computing is and returns the offset up to which bytes are computed; never goes back.
    pub(crate) fn advance(&mut self, at: crate::progress::Computed, before: u64) -> u64 {
        if self.end_token() < at.tokens {
            self.extend_to(at.tokens);
        }
        if at.chunk_layers > 0 && self.end_token() <= at.tokens.max(self.span.skip_tokens) {
            self.extend_to(at.chunk_end);
        }
        let Some(open) = self.chunks.last() else { return before };
        let computed = if open.end_token <= at.tokens {
            self.end_offset()
        } else if at.chunk_end >= open.end_token {
            open.offset + self.layer_bytes(open) * at.chunk_layers as u64
        } else {
            open.offset
        };
        computed.max(before)
    }

    /// The frame at `index`; `None` beyond the chunks added.
    pub fn frame(&self, index: u64) -> Option<Frame> {
        let after = self.chunks.partition_point(|chunk| chunk.first_frame <= index);
        let chunk = self.chunks.get(after.checked_sub(1)?)?;
        let within = usize::try_from(index - chunk.first_frame).ok()?;
        let (layer, nth) = (within / self.frames_per_layer(chunk), within % self.frames_per_layer(chunk));
        if layer >= self.num_layers {
            return None;
        }
        let done_blocks = nth * self.blocks_per_frame;
        let is_tail = done_blocks >= chunk.full_blocks;
        let (skipped, num_blocks, tokens) = if is_tail {
            (chunk.full_blocks, 1, chunk.tail_tokens)
        } else {
            let num_blocks = self.blocks_per_frame.min(chunk.full_blocks - done_blocks);
            (done_blocks, num_blocks, num_blocks * self.block_size)
        };
        let offset = chunk.offset
            + self.layer_bytes(chunk) * layer as u64
            + (skipped * self.block_size * self.slot_bytes) as u64;
        Some(Frame {
            index,
            offset,
            layer: layer as u32,
            first_block: (chunk.first_block + skipped) as u32,
            num_blocks: num_blocks as u32,
            tail_tokens: match (is_tail, self.order) {
                (true, _) => tokens as u32,
                (false, BlockOrder::Own) => 0,
                (false, BlockOrder::Canonical) => self.block_size as u32,
            },
            len: (tokens * self.slot_bytes) as u32,
        })
    }

    /// Index of the frame that holds the byte at `offset`: where to go on when everything before is verified.
    /// The number of frames when `offset` lies at or beyond the end.
    pub fn index_at(&self, offset: u64) -> u64 {
        let after = self.chunks.partition_point(|chunk| chunk.offset <= offset);
        let Some(chunk) = after.checked_sub(1).and_then(|i| self.chunks.get(i)) else { return 0 };
        let within = offset - chunk.offset;
        let layer = within / self.layer_bytes(chunk);
        if layer >= self.num_layers as u64 {
            return self.num_frames();
        }
        let frame_bytes = (self.blocks_per_frame * self.block_size * self.slot_bytes) as u64;
        let full_bytes = (chunk.full_blocks * self.block_size * self.slot_bytes) as u64;
        let in_layer = within % self.layer_bytes(chunk);
        let nth = if in_layer >= full_bytes {
            chunk.full_blocks.div_ceil(self.blocks_per_frame) as u64
        } else {
            in_layer / frame_bytes
        };
        chunk.first_frame + layer * self.frames_per_layer(chunk) as u64 + nth
    }

    fn frames_per_layer(&self, chunk: &Chunk) -> usize {
        chunk.full_blocks.div_ceil(self.blocks_per_frame) + usize::from(chunk.tail_tokens > 0)
    }

    fn layer_bytes(&self, chunk: &Chunk) -> u64 {
        ((chunk.full_blocks * self.block_size + chunk.tail_tokens) * self.slot_bytes) as u64
    }
}

#[cfg(test)]
#[path = "frames_tests.rs"]
mod tests;
