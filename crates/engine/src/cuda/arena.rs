//! Memory of all KV blocks on a device, and how bytes get there and back off the step thread.
//!
//! Bytes cross in pinned memory, on two streams of the arena's own, so compute waits for no copy but those into blocks that
//! it may read: a step begins after everything that was written into the arena before it ([`CudaArena::written`]).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_kv::{
    BlockMemory, BlockOrder, BlockRun, BlockSlice, KvLayout, MemoryError, PeerMemory, ReadLease, WriteLease,
};

use super::copies::{HostRows, RowShape, Rows};
use super::driver::{Device, DeviceError, Event, Memory, Pinned, Span, Stream};
use super::mover::Mover;
use crate::error::EngineBuildError;

/// Blocks of one layer on their way to the device at one time.
const INCOMING_SLOTS: usize = 16;
/// Bytes read from the device at a time; at least one block of one layer.
const OUTGOING_BYTES: usize = 4 << 20;

/// One allocation, `[layer][block]` of `layout.block_layer_bytes()` each, a block in canonical order.
///
/// Who may write or read a block when is the same as for the CPU's [`crate::Arena`]: it follows from the pool and from leases.
pub struct CudaArena {
    // First: streams end before the memory they use is given back.
    incoming: Mutex<Incoming>,
    outgoing: Mutex<Outgoing>,
    blocks: Arc<Blocks>,
}

/// The allocation, which rings to other processes use too.
pub(super) struct Blocks {
    /// What moves blocks to rings and from rings, once there is one. First, as above.
    pub(super) mover: Mutex<Option<Mover>>,
    /// Stands for all that was written through leases and not waited for.
    pub(super) written: Event,
    memory: Memory,
    pub(super) layout: KvLayout,
    num_blocks: usize,
    pub(super) device: Arc<Device>,
}

/// A ring of slots, each of one block of one layer.
struct Incoming {
    stream: Stream,
    /// A slot's bytes are on the device.
    taken: Vec<Event>,
    pinned: Pinned,
    next: usize,
}

struct Outgoing {
    stream: Stream,
    pinned: Pinned,
    len: usize,
}

impl CudaArena {
    /// Takes memory for `num_blocks` blocks, of whatever content: kernels read no slot before it is written.
    pub(super) fn new(
        device: &Arc<Device>,
        layout: KvLayout,
        num_blocks: usize,
    ) -> Result<CudaArena, EngineBuildError> {
        let block = layout.block_layer_bytes();
        let Some(bytes) = layout.block_bytes().checked_mul(num_blocks) else {
            return Err(EngineBuildError::invalid("num_blocks", num_blocks, "addressable memory is needed"));
        };
        let memory = Memory::new(device, bytes)?;
        let taken = (0..INCOMING_SLOTS).map(|_| Event::new(device)).collect::<Result<_, _>>()?;
        let incoming = Incoming {
            stream: Stream::new(device)?,
            taken,
            pinned: Pinned::new(device, INCOMING_SLOTS * block)?,
            next: 0,
        };
        let len = OUTGOING_BYTES.max(block) / block * block;
        let outgoing = Outgoing { stream: Stream::new(device)?, pinned: Pinned::new(device, len)?, len };
        Ok(CudaArena {
            incoming: Mutex::new(incoming),
            outgoing: Mutex::new(outgoing),
            blocks: Arc::new(Blocks {
                written: Event::new(device)?,
                memory,
                layout,
                num_blocks,
                device: Arc::clone(device),
                mover: Mutex::new(None),
            }),
        })
    }

    /// Blocks.
    pub fn num_blocks(&self) -> usize {
        self.blocks.num_blocks
    }

    /// Bytes of all blocks.
    pub fn num_bytes(&self) -> usize {
        self.blocks.memory.len()
    }

    /// Stands for all that was written through leases so far: a step waits for it.
    pub(super) fn written(&self) -> &Event {
        &self.blocks.written
    }

    /// All blocks of a layer.
    pub(super) fn layer(&self, layer: usize) -> Span {
        self.blocks.layer(layer)
    }

    /// The whole arena.
    pub(super) fn all(&self) -> Span {
        self.blocks.memory.all()
    }

    /// What rings hold on to.
    pub(super) const fn blocks(&self) -> &Arc<Blocks> {
        &self.blocks
    }

    /// Has `fill` write the first `at.num_tokens` tokens of a block into a slot, and queues its way to the device.
    fn send(
        &self,
        lease: &WriteLease,
        at: BlockSlice,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), MemoryError> {
        let Blocks { layout, device, written, .. } = &*self.blocks;
        let place = self.blocks.place(at, lease.block(at.nth), lease.len())?;
        let (shape, pitch) = self.blocks.rows(at.num_tokens);
        let len = shape.num_rows * shape.row_bytes;
        device.bind().map_err(failed)?;
        let mut ring = lock(&self.incoming);
        let slot = ring.next;
        ring.next = (slot + 1) % INCOMING_SLOTS;
        ring.taken[slot].synchronize().map_err(failed)?;
        if lease.is_fenced() {
            return Err(MemoryError::Fenced);
        }
        // SAFETY: what was copied from the slot before is on the device, and the ring is locked.
        let bytes = unsafe { ring.pinned.get_mut(slot * layout.block_layer_bytes(), len) };
        fill(bytes);
        // SAFETY: the slot is not written again before the event below; the lease is the block's only writer, and whoever
        // gets the block after it reads or writes it on this stream, or in a step, which waits for `written`.
        let copied = unsafe {
            if at.num_tokens == layout.block_size {
                ring.stream.upload(bytes, place)
            } else {
                let host = HostRows { bytes: bytes.as_mut_ptr(), pitch: shape.row_bytes };
                ring.stream.copy_rows(host, Rows { span: place, pitch }, shape, true)
            }
        };
        copied.and_then(|()| ring.stream.record(&ring.taken[slot])).map_err(failed)?;
        ring.stream.record(written).map_err(failed)
    }
}

impl Blocks {
    /// All blocks of a layer.
    pub(super) fn layer(&self, layer: usize) -> Span {
        let len = self.num_blocks * self.layout.block_layer_bytes();
        self.memory.at(layer * len, len)
    }

    pub(super) fn place(
        &self,
        at: BlockSlice,
        block: Option<u32>,
        num_blocks: usize,
    ) -> Result<Span, MemoryError> {
        let BlockSlice { layer, nth, num_tokens } = at;
        match block {
            Some(block)
                if layer < self.layout.num_layers
                    && (block as usize) < self.num_blocks
                    && num_tokens <= self.layout.block_size =>
            {
                let bytes = self.layout.block_layer_bytes();
                Ok(self.layer(layer).part(block as usize * bytes, bytes))
            }
            _ => Err(MemoryError::OutOfRange { layer, nth, num_blocks }),
        }
    }

    /// A head's rows of K, and of V, in a block and in a slice of its first tokens.
    pub(super) const fn rows(&self, num_tokens: usize) -> (RowShape, usize) {
        let row = self.layout.dtype.row_bytes(self.layout.head_dim);
        let shape = RowShape { num_rows: 2 * self.layout.num_kv_heads, row_bytes: num_tokens * row };
        (shape, self.layout.block_size * row)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn failed(error: DeviceError) -> MemoryError {
    MemoryError::Device(error.to_string())
}

impl BlockMemory for CudaArena {
    fn layout(&self) -> &KvLayout {
        &self.blocks.layout
    }

    fn read_blocks(
        &self,
        lease: &ReadLease,
        run: BlockRun,
        _: BlockOrder,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<(), MemoryError> {
        let (block, num_tokens) = (self.layout().block_layer_bytes(), self.layout().block_size);
        let mut outgoing = lock(&self.outgoing);
        let Outgoing { stream, pinned, len } = &mut *outgoing;
        self.blocks.device.bind().map_err(failed)?;
        stream.wait(self.written()).map_err(failed)?;
        let end = run.first.saturating_add(run.num_blocks);
        for first in (run.first..end).step_by(*len / block) {
            let num = (*len / block).min(end - first);
            for nth in first..first + num {
                let at = BlockSlice { layer: run.layer, nth, num_tokens };
                let place = self.blocks.place(at, lease.block(nth), lease.len())?;
                // SAFETY: the stream is finished below, and the pinned memory is locked; the lease pins the block, which is
                // complete, so nobody writes it.
                let queued = unsafe { stream.download(place, pinned.get_mut((nth - first) * block, block)) };
                queued.map_err(failed)?;
            }
            stream.synchronize().map_err(failed)?;
            // SAFETY: the copies into it are done.
            take(unsafe { pinned.get(0, num * block) });
        }
        Ok(())
    }

    fn write(&self, lease: &WriteLease, layer: usize, nth: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        let want = self.layout().block_layer_bytes();
        if bytes.len() != want {
            return Err(MemoryError::WrongSize { got: bytes.len(), want });
        }
        self.fill(lease, layer, nth, &mut |block| block.copy_from_slice(bytes))
    }

    fn fill(
        &self,
        lease: &WriteLease,
        layer: usize,
        nth: usize,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), MemoryError> {
        self.send(lease, BlockSlice { layer, nth, num_tokens: self.layout().block_size }, fill)
    }

    fn gather(&self, lease: &ReadLease, at: BlockSlice, out: &mut Vec<u8>) -> Result<(), MemoryError> {
        let place = self.blocks.place(at, lease.block(at.nth), lease.len())?;
        let (shape, pitch) = self.blocks.rows(at.num_tokens);
        let len = shape.num_rows * shape.row_bytes;
        if len == 0 {
            return Ok(());
        }
        let outgoing = lock(&self.outgoing);
        self.blocks.device.bind().map_err(failed)?;
        outgoing.stream.wait(self.written()).map_err(failed)?;
        // SAFETY: the stream is finished below, and the pinned memory is locked. Only bytes of the slice's tokens are read, so the
        // step loop may write later ones meanwhile.
        let queued = unsafe {
            let host =
                HostRows { bytes: outgoing.pinned.get_mut(0, len).as_mut_ptr(), pitch: shape.row_bytes };
            outgoing.stream.copy_rows(host, Rows { span: place, pitch }, shape, false)
        };
        queued.and_then(|()| outgoing.stream.synchronize()).map_err(failed)?;
        // SAFETY: the copy into it is done.
        out.extend_from_slice(unsafe { outgoing.pinned.get(0, len) });
        Ok(())
    }

    fn scatter(&self, lease: &WriteLease, at: BlockSlice, bytes: &[u8]) -> Result<(), MemoryError> {
        self.blocks.place(at, lease.block(at.nth), lease.len())?;
        let (shape, _) = self.blocks.rows(at.num_tokens);
        let want = shape.num_rows * shape.row_bytes;
        if bytes.len() != want {
            return Err(MemoryError::WrongSize { got: bytes.len(), want });
        }
        if want == 0 {
            return Ok(());
        }
        self.send(lease, at, &mut |slice| slice.copy_from_slice(bytes))
    }

    fn peer(&self) -> Option<&dyn PeerMemory> {
        Some(self)
    }
}
