//! Checks a frame, verifies its bytes and writes them into the blocks of one granted handoff.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_handoff::HandoffKey;
use baton_kv::{BlockMemory, BlockSlice, MemoryError, WriteLease};
use baton_proto::v1;

use crate::checksum;
use crate::coverage::{Coverage, Covered, TooManyGaps};
use crate::device::{DeviceView, Place};
use crate::frames::{Frame, MAX_FRAME_BYTES, TokenSpan};
use crate::outgoing::header_crc;
use crate::payload::Payload;
use crate::receiver::ReceiveReport;
use crate::view::View;

/// Bytes that are verified and copied before others on this thread get their turn; a turn costs a look at the sockets.
const SLICE_BYTES: usize = 256 * 1024;

pub(crate) struct Writer {
    key: HandoffKey,
    memory: Arc<dyn BlockMemory>,
    lease: WriteLease,
    span: TokenSpan,
    coverage: Coverage,
    pub(crate) report: ReceiveReport,
    /// When the frame before was done with.
    mark: Option<Instant>,
    /// Bytes since others had their turn.
    unyielded: usize,
    /// Where the bytes of a shared tail are copied to, summed, and copied on.
    scratch: Vec<u8>,
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Verified,
    Duplicate,
    Corrupt { frame: u64 },
}

/// Why a frame can't be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Fenced,
    Protocol(String),
    /// This worker's own memory failed.
    Memory(String),
}

impl Writer {
    /// Span and lease were checked against each other.
    pub(crate) fn new(
        key: HandoffKey,
        span: TokenSpan,
        memory: Arc<dyn BlockMemory>,
        lease: WriteLease,
    ) -> Self {
        let layout = memory.layout();
        let num_blocks = layout.blocks_for(span.prompt_tokens) - span.skip_tokens / layout.block_size;
        let coverage = Coverage::new(layout.num_layers, num_blocks);
        let report = ReceiveReport::default();
        Self { key, memory, lease, span, coverage, report, mark: None, unyielded: 0, scratch: Vec::new() }
    }

    /// Bytes of the whole stream.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.span.bytes(self.memory.layout())
    }

    /// Verified bytes from offset 0 on.
    pub(crate) const fn verified(&self) -> u64 {
        self.coverage.contiguous()
    }

    pub(crate) const fn is_whole(&self) -> bool {
        self.coverage.is_whole()
    }

    pub(crate) fn is_fenced(&self) -> bool {
        self.lease.is_fenced()
    }

    /// Takes one frame. Bytes are written as they are summed; they count, and so become visible, only if the sum is right.
    /// Verified blocks are never written again. `view` is the memory that the stream named, if it did.
    pub(crate) async fn accept(
        &mut self,
        message: v1::KvFrame,
        view: Option<&View>,
    ) -> Result<Outcome, Fault> {
        let arrived = Instant::now();
        let payload = Payload::find(&message, view)
            .map_err(|what| Fault::Protocol(format!("frame {}: {what}", message.index)))?;
        let frame = self.check(&message, payload.len())?;
        if self.lease.is_fenced() {
            return Err(Fault::Fenced);
        }
        self.report.first_frame_at.get_or_insert(arrived);
        let outcome = match self.coverage.covered(frame.layer as usize, self.wanted(&frame)) {
            Covered::Everything => {
                self.report.duplicate_frames += 1;
                Outcome::Duplicate
            }
            Covered::Part => {
                return Err(Fault::Protocol(format!(
                    "frame {} overlaps blocks that are verified",
                    frame.index
                )));
            }
            Covered::Nothing if self.write(&frame, &payload).await? == message.crc32c => {
                self.verified_frame(&frame)?;
                Outcome::Verified
            }
            Covered::Nothing => {
                self.report.corrupt_frames += 1;
                Outcome::Corrupt { frame: frame.index }
            }
        };
        self.account(arrived, &message);
        Ok(outcome)
    }

    fn verified_frame(&mut self, frame: &Frame) -> Result<(), Fault> {
        let blocks = self.wanted(frame);
        self.coverage
            .cover(frame.layer as usize, blocks, frame.offset..frame.end())
            .map_err(|TooManyGaps| Fault::Protocol("too many frames are missing before this one".into()))?;
        self.report.bytes += u64::from(frame.len);
        self.report.frames += 1;
        self.report.last_verified_at = Some(Instant::now());
        let (verified, total) = (self.verified(), self.total_bytes());
        if self.is_whole() != (verified == total) {
            return Err(Fault::Protocol(format!(
                "frame {}: its offset is not where its blocks belong in the stream",
                frame.index
            )));
        }
        Ok(())
    }

    /// Time with bytes outstanding is what passed since the frame before, less what the source says it had nothing to send.
    fn account(&mut self, arrived: Instant, message: &v1::KvFrame) {
        let now = Instant::now();
        let since = now - self.mark.unwrap_or(arrived);
        let idle = Duration::from_micros(message.idle_us);
        let credit_wait = Duration::from_micros(message.credit_wait_us);
        self.report.wire += since.saturating_sub(idle).saturating_sub(credit_wait);
        self.report.credit_wait = self.report.credit_wait.saturating_add(credit_wait);
        self.mark = Some(now);
    }

    /// The frame's blocks, counted from the first one that is not skipped.
    fn wanted(&self, frame: &Frame) -> Range<usize> {
        let first = frame.first_block as usize - self.span.skip_tokens / self.memory.layout().block_size;
        first..first + frame.num_blocks as usize
    }

    /// Every field against the bounds of the handoff.
    fn check(&self, message: &v1::KvFrame, len: usize) -> Result<Frame, Fault> {
        let layout = self.memory.layout();
        let index = message.index;
        let fault = |what: String| Err(Fault::Protocol(format!("frame {index}: {what}")));
        let (first, num_blocks) = (message.first_block as usize, message.num_blocks as usize);
        let tail = message.tail_tokens as usize;
        let skipped = self.span.skip_tokens / layout.block_size;
        let full_blocks = self.span.prompt_tokens / layout.block_size;
        let max_frames = layout.num_layers as u64 * layout.blocks_for(self.span.prompt_tokens) as u64;
        if message.key.is_some() {
            return fault("a key belongs on the first message only".into());
        }
        if index >= max_frames {
            return fault(format!("its index is out of range: at most {max_frames} frames are possible"));
        }
        if message.layer as usize >= layout.num_layers {
            return fault(format!(
                "layer {} is out of range: there are {}",
                message.layer, layout.num_layers
            ));
        }
        let (end_block, wanted) = if tail == 0 || tail == layout.block_size {
            (full_blocks, num_blocks.saturating_mul(layout.block_layer_bytes()))
        } else {
            let filled = self.span.prompt_tokens % layout.block_size;
            if tail != filled || num_blocks != 1 || first != full_blocks {
                return fault(format!(
                    "{tail} tokens of {num_blocks} blocks from {first}: the last block, {full_blocks}, has {filled}"
                ));
            }
            (full_blocks + 1, tail * layout.block_layer_bytes() / layout.block_size)
        };
        if num_blocks == 0 || first < skipped || first.saturating_add(num_blocks) > end_block {
            return fault(format!(
                "{num_blocks} blocks from {first} are out of range {skipped}..{end_block}"
            ));
        }
        if len != wanted || len > MAX_FRAME_BYTES {
            return fault(format!(
                "its payload has {len} bytes; {wanted} are needed, {MAX_FRAME_BYTES} at most"
            ));
        }
        let total = self.total_bytes();
        if message.offset.checked_add(len as u64).is_none_or(|end| end > total) {
            return fault(format!("offset {} is out of range: the stream has {total} bytes", message.offset));
        }
        Ok(Frame {
            index,
            offset: message.offset,
            layer: message.layer,
            first_block: message.first_block,
            num_blocks: message.num_blocks,
            tail_tokens: message.tail_tokens,
            len: len as u32,
        })
    }

    /// Writes and sums block by block, and returns the sum. What is summed is what is written.
    async fn write(&mut self, frame: &Frame, payload: &Payload<'_>) -> Result<u32, Fault> {
        if let Payload::Device { view, offset, .. } = payload {
            return self.take(frame, view, *offset).await;
        }
        let mut crc = header_crc(&self.key, frame);
        let (layer, first) = (frame.layer as usize, frame.first_block as usize);
        let no_part = || Fault::Protocol(format!("frame {}: its payload is too short", frame.index));
        let (num_tokens, layout) = (frame.tail_tokens as usize, self.memory.layout());
        // Also where a fault ends it: the blocks may be another's then.
        let _in_order = OrderStreamed;
        // A part of the last block, or a whole one.
        let block_bytes = payload.len().min(layout.block_layer_bytes());
        for nth in 0..frame.num_blocks as usize {
            let start = nth * block_bytes;
            if num_tokens == 0 {
                let mut sum = None;
                let mut copy = |block: &mut [u8]| sum = payload.copy(start, block, crc);
                self.memory.fill(&self.lease, layer, first + nth, &mut copy).map_err(fault)?;
                crc = sum.ok_or_else(no_part)?;
            } else {
                let bytes =
                    payload.part(start..start + block_bytes, &mut self.scratch).ok_or_else(no_part)?;
                let at = BlockSlice { layer, nth: first + nth, num_tokens };
                self.memory.scatter(&self.lease, at, bytes).map_err(fault)?;
                crc = checksum::append(crc, bytes);
            }
            self.unyielded += block_bytes;
            if self.unyielded >= SLICE_BYTES {
                self.unyielded = 0;
                // The rest may be written by another thread.
                checksum::order_streamed();
                tokio::task::yield_now().await;
            }
        }
        Ok(crc)
    }

    /// Has the device copy a frame out of the source's ring and sum it. When it returns, the device reads no byte of the frame any more.
    async fn take(&mut self, frame: &Frame, view: &DeviceView, offset: usize) -> Result<u32, Fault> {
        let block_size = self.memory.layout().block_size;
        let place = Place { offset, block_size, header_crc: header_crc(&self.key, frame) };
        let crc = view.take(&self.lease, frame, place).map_err(fault)?;
        // It was a wait for the device, however many bytes it was.
        self.unyielded = 0;
        tokio::task::yield_now().await;
        Ok(crc)
    }
}

/// Dropped, it orders what was streamed before what follows.
struct OrderStreamed;

impl Drop for OrderStreamed {
    fn drop(&mut self) {
        checksum::order_streamed();
    }
}

fn fault(error: MemoryError) -> Fault {
    match error {
        MemoryError::Fenced => Fault::Fenced,
        MemoryError::OutOfRange { .. } | MemoryError::WrongSize { .. } => Fault::Protocol(error.to_string()),
        MemoryError::Device(_) => Fault::Memory(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use baton_handoff::RequestId;
    use baton_kv::{BlockOrder, BlockPool, BlockRun, BlockTable, KvDtype, KvLayout, ReadLease};

    use super::*;

    /// Takes everything and keeps nothing.
    struct Void(KvLayout);

    impl BlockMemory for Void {
        fn layout(&self) -> &KvLayout {
            &self.0
        }

        fn read_blocks(
            &self,
            _: &ReadLease,
            _: BlockRun,
            _: BlockOrder,
            _: &mut dyn FnMut(&[u8]),
        ) -> Result<(), MemoryError> {
            Ok(())
        }

        fn write(&self, _: &WriteLease, _: usize, _: usize, _: &[u8]) -> Result<(), MemoryError> {
            Ok(())
        }

        fn gather(&self, _: &ReadLease, _: BlockSlice, _: &mut Vec<u8>) -> Result<(), MemoryError> {
            Ok(())
        }

        fn scatter(&self, _: &WriteLease, _: BlockSlice, _: &[u8]) -> Result<(), MemoryError> {
            Ok(())
        }
    }

    #[test]
    fn a_large_frame_is_taken_in_slices_between_which_others_have_their_turn() {
        let layout = KvLayout {
            model_digest: [0; 32],
            num_layers: 1,
            num_kv_heads: 4,
            head_dim: 64,
            block_size: 16,
            dtype: KvDtype::F16,
            arrangement: String::new(),
            numerics_id: String::new(),
        };
        let (num_blocks, block_bytes) = (64, layout.block_layer_bytes());
        let mut table = BlockTable::new();
        table.extend(BlockPool::new(num_blocks).allocate(num_blocks).unwrap());
        let lease = table.write_lease(0).unwrap();
        let key = HandoffKey { request: RequestId([1; 16]), group: 0, attempt: 0 };
        let span = TokenSpan { prompt_tokens: num_blocks * 16, skip_tokens: 0 };
        let mut writer = Writer::new(key, span, Arc::new(Void(layout)), lease);
        let frame = v1::KvFrame {
            num_blocks: num_blocks as u32,
            payload: vec![0; num_blocks * block_bytes].into(),
            ..v1::KvFrame::default()
        };
        let bytes = frame.payload.len();
        let mut taken = pin!(writer.accept(frame, None));
        let mut turns = 1;
        // Outside a runtime a yield wakes at once and is pending once.
        while taken.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            turns += 1;
        }
        assert!(turns > bytes / SLICE_BYTES, "{turns} turns for {bytes} bytes");
    }
}
