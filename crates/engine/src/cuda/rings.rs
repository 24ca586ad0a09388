//! Rings in device memory: KV from this device to another one of the host without a copy through the host's memory.
//!
//! A copy is queued on the mover's stream and waited for on the thread that asked, which sleeps meanwhile: so a source announces no byte before
//! it lies in the ring, and a destination gives no place in a ring back before it has read it.

use std::sync::Arc;

use baton_kv::{BlockSlice, MemoryError, PeerCopy, PeerMemory, PeerRing, PeerView, ReadLease, WriteLease};

use super::arena::{Blocks, CudaArena, failed, lock};
use super::driver::{DeviceError, Memory, Span};
use super::ipc::{GRANULE, HANDLE_BYTES, Opened};
use super::mover::{Direction, Mover, Rows, Slice, UNIT};

/// This process's ring.
struct Ring {
    memory: Memory,
    handle: [u8; HANDLE_BYTES],
    blocks: Arc<Blocks>,
}

/// Another process's.
struct View {
    opened: Opened,
    blocks: Arc<Blocks>,
}

impl PeerMemory for CudaArena {
    fn make_ring(&self, len: usize) -> Result<Box<dyn PeerRing>, MemoryError> {
        let blocks = Arc::clone(self.blocks());
        blocks.with_mover(|_| Ok(()))?;
        let memory = Memory::new(&blocks.device, len.next_multiple_of(GRANULE)).map_err(failed)?;
        let handle = memory.export(&blocks.device).map_err(failed)?;
        Ok(Box::new(Ring { memory, handle, blocks }))
    }

    fn open_ring(&self, handle: &[u8], len: usize) -> Result<Box<dyn PeerView>, MemoryError> {
        let handle = handle.try_into().map_err(|_| {
            MemoryError::Device(format!("a handle has {HANDLE_BYTES} bytes, this one {}", handle.len()))
        })?;
        let blocks = Arc::clone(self.blocks());
        blocks.with_mover(|_| Ok(()))?;
        let opened = Opened::open(&blocks.device, handle, len).map_err(failed)?;
        Ok(Box::new(View { opened, blocks }))
    }
}

impl Blocks {
    /// Lends the mover, which is made when it is first asked for.
    fn with_mover<T>(
        &self,
        work: impl FnOnce(&mut Mover) -> Result<T, DeviceError>,
    ) -> Result<T, MemoryError> {
        self.device.bind().map_err(failed)?;
        let mut mover = lock(&self.mover);
        let mover = match &mut *mover {
            Some(mover) => mover,
            none => none.insert(Mover::new(&self.device, self.layout.num_kv_heads).map_err(failed)?),
        };
        work(mover).map_err(failed)
    }

    /// The slices of a copy, after everything about it was checked; `block` says which block the lease's nth one is.
    fn slices(
        &self,
        copy: PeerCopy,
        num_blocks: usize,
        block: impl Fn(usize) -> Option<u32>,
    ) -> Result<Vec<Slice>, MemoryError> {
        let PeerCopy { run, num_tokens, offset } = copy;
        let out_of_range = |nth| MemoryError::OutOfRange { layer: run.layer, nth, num_blocks };
        let end = run.first.checked_add(run.num_blocks).ok_or(out_of_range(run.first))?;
        if num_tokens == 0 || !offset.is_multiple_of(UNIT) {
            return Err(out_of_range(run.first));
        }
        let slice_bytes =
            PeerCopy { run: baton_kv::BlockRun { num_blocks: 1, ..run }, ..copy }.num_bytes(&self.layout);
        let slice = |nth| {
            let at = BlockSlice { layer: run.layer, nth, num_tokens };
            let found = block(nth);
            self.place(at, found, num_blocks)?;
            let block = found.ok_or(out_of_range(nth))?;
            Ok(Slice { block, offset: (nth - run.first) * slice_bytes })
        };
        (run.first..end).map(slice).collect()
    }

    fn move_rows(&self, num_tokens: usize) -> Rows {
        Rows {
            num_kv_heads: self.layout.num_kv_heads as u32,
            block_size: self.layout.block_size as u32,
            row_bytes: self.layout.dtype.row_bytes(self.layout.head_dim) as u32,
            num_tokens: num_tokens as u32,
        }
    }
}

/// The bytes of a copy in a ring; an error when they do not lie within.
fn place_in_ring(
    blocks: &Blocks,
    copy: PeerCopy,
    ring: impl FnOnce(usize, usize) -> Option<Span>,
) -> Result<Span, MemoryError> {
    let len = copy.num_bytes(&blocks.layout);
    ring(copy.offset, len).ok_or_else(|| {
        MemoryError::Device(format!("{len} bytes at {} of a ring are beyond its end", copy.offset))
    })
}

impl PeerRing for Ring {
    fn handle(&self) -> &[u8] {
        &self.handle
    }

    fn mark(&self, bytes: &[u8]) -> Result<(), MemoryError> {
        let place = self.memory.at(0, bytes.len());
        // SAFETY: no copy into the ring is under way, for every one was waited for.
        self.blocks.with_mover(|mover| unsafe { mover.put(bytes, place) })
    }

    fn put(&self, lease: &ReadLease, copy: PeerCopy) -> Result<u64, MemoryError> {
        let slices = self.blocks.slices(copy, lease.len(), |nth| lease.block(nth))?;
        let within = |offset: usize, len| {
            let end = offset.checked_add(len)?;
            (end <= self.memory.len()).then(|| self.memory.at(offset, len))
        };
        let ring = place_in_ring(&self.blocks, copy, within)?;
        let (layer, rows) = (self.blocks.layer(copy.run.layer), self.blocks.move_rows(copy.num_tokens));
        self.blocks.with_mover(|mover| {
            mover.wait(&self.blocks.written)?;
            // SAFETY: slices and place were checked; the lease pins the blocks, which are complete, so nobody writes what is read of them; the
            // place is the caller's until the destination has said that it read it.
            unsafe { mover.run(Direction::ToRing, layer, ring, rows, &slices) }
        })
    }
}

impl PeerView for View {
    fn num_bytes(&self) -> usize {
        self.opened.len()
    }

    fn peek(&self, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let Some(place) = self.opened.at(0, bytes.len()) else {
            return Err(MemoryError::Device("the ring is too short to be looked at".to_owned()));
        };
        self.blocks.with_mover(|mover| mover.peek(place, bytes))
    }

    fn take(&self, lease: &WriteLease, copy: PeerCopy) -> Result<u64, MemoryError> {
        let slices = self.blocks.slices(copy, lease.len(), |nth| lease.block(nth))?;
        let ring = place_in_ring(&self.blocks, copy, |offset, len| self.opened.at(offset, len))?;
        if lease.is_fenced() {
            return Err(MemoryError::Fenced);
        }
        let (layer, rows) = (self.blocks.layer(copy.run.layer), self.blocks.move_rows(copy.num_tokens));
        self.blocks.with_mover(|mover| {
            // What was written to these blocks by others before lies behind this.
            mover.wait(&self.blocks.written)?;
            // SAFETY: slices and place were checked; the lease is the blocks' only writer, and lives until this returns, when the copy is done.
            unsafe { mover.run(Direction::ToArena, layer, ring, rows, &slices) }
        })
    }
}
