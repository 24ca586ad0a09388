//! Moves slices of blocks between the arena and a ring in device memory on a stream of its own, and sums what it moves: what an end
//! says of a payload is what its own device has read and written.

use std::sync::Arc;

use super::driver::{
    Arg, Device, DeviceError, Event, Geometry, Kernel, Memory, Module, Pinned, Span, Stream,
};

/// Machine code for sm_80 and sm_90, and PTX for later cards.
static IMAGE: &Aligned<[u8]> = &Aligned(*include_bytes!("../../cuda/built/peer/peer.fatbin"));

/// The driver reads words of the image where they lie.
#[repr(C, align(64))]
struct Aligned<B: ?Sized>(B);

/// Slices of one launch, at most.
const MAX_SLICES: usize = 1024;
/// Words of a slice, see `cuda/ABI.md`.
const SLICE_WORDS: usize = 3;
/// Threads, and bytes of shared memory, of a block of threads.
const THREADS: u32 = 128;
const SHARED_BYTES: u32 = 64;
/// In which places in a ring are counted.
pub(super) const UNIT: usize = 16;

/// The first tokens of one block, and the place of their bytes in the payload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slice {
    /// Its number in the arena.
    pub(super) block: u32,
    /// Bytes before it in the payload, a multiple of [`UNIT`].
    pub(super) offset: usize,
}

/// What a launch is told of the blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) num_kv_heads: u32,
    pub(super) block_size: u32,
    pub(super) row_bytes: u32,
    /// Of each slice.
    pub(super) num_tokens: u32,
}

/// Where to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToRing,
    ToArena,
}

/// Tables, sums and the stream of one end's copies; one copy at a time.
pub(super) struct Mover {
    // First: finished before what it uses is given back.
    stream: Stream,
    done: Event,
    slices_host: Pinned,
    slices: Memory,
    sums_host: Pinned,
    sums: Memory,
    gather: Kernel,
    scatter: Kernel,
    // Last: the kernels lie in it.
    _module: Module,
}

impl Mover {
    /// Loads the kernels and takes memory for tables, for blocks of `num_kv_heads`.
    pub(super) fn new(device: &Arc<Device>, num_kv_heads: usize) -> Result<Mover, DeviceError> {
        let module = Module::load(device, &IMAGE.0)?;
        let (slice_bytes, sum_bytes) = (MAX_SLICES * SLICE_WORDS * 4, MAX_SLICES * 2 * num_kv_heads * 8);
        Ok(Mover {
            stream: Stream::new(device)?,
            done: Event::sleeping(device)?,
            slices_host: Pinned::new(device, slice_bytes)?,
            slices: Memory::new(device, slice_bytes)?,
            sums_host: Pinned::new(device, sum_bytes)?,
            sums: Memory::new(device, sum_bytes)?,
            gather: module.kernel("gather_summed", SHARED_BYTES)?,
            scatter: module.kernel("scatter_summed", SHARED_BYTES)?,
            _module: module,
        })
    }

    /// What is moved from now on follows what `event` stands for.
    pub(super) fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        self.stream.wait(event)
    }

    /// Moves the slices' bytes between a layer and the ring from `ring` on, waits for it, and returns their sum.
    ///
    /// # Safety
    /// The slices' blocks lie in `layer`, their bytes in `ring`; nobody else writes what is read or touches what is written
    /// before this returns. Another process that breaks this in the ring spoils the sum and nothing else.
    pub(super) unsafe fn run(
        &mut self,
        direction: Direction,
        layer: Span,
        ring: Span,
        rows: Rows,
        slices: &[Slice],
    ) -> Result<u64, DeviceError> {
        let mut sum = 0u64;
        for part in slices.chunks(MAX_SLICES) {
            // SAFETY: the caller's, for a part of the slices.
            unsafe { self.queue(direction, layer, ring, rows, part) }?;
            self.stream.record(&self.done)?;
            self.done.synchronize()?;
            let len = part.len() * 2 * rows.num_kv_heads as usize * 8;
            // SAFETY: the copy into it is done.
            let (sums, _) = unsafe { self.sums_host.get(0, len) }.as_chunks::<8>();
            sum = sums.iter().fold(sum, |sum, part| sum.wrapping_add(u64::from_le_bytes(*part)));
        }
        Ok(sum)
    }

    /// # Safety
    /// As [`Self::run`]; and what was queued before is done.
    unsafe fn queue(
        &mut self,
        direction: Direction,
        layer: Span,
        ring: Span,
        rows: Rows,
        slices: &[Slice],
    ) -> Result<(), DeviceError> {
        let table_bytes = slices.len() * SLICE_WORDS * 4;
        // SAFETY: what was queued before has read it; the mover is ours alone.
        let table = unsafe { self.slices_host.get_mut(0, table_bytes) };
        let (words, _) = table.as_chunks_mut::<4>();
        let told =
            slices.iter().flat_map(|slice| [slice.block, rows.num_tokens, (slice.offset / UNIT) as u32]);
        for (word, told) in words.iter_mut().zip(told) {
            *word = told.to_le_bytes();
        }
        let grid = [slices.len() as u32, 2 * rows.num_kv_heads, 1];
        let sum_bytes = slices.len() * grid[1] as usize * 8;
        let sums = self.sums.at(0, sum_bytes);
        let (kernel, to, from) = match direction {
            Direction::ToRing => (self.gather, ring, layer),
            Direction::ToArena => (self.scatter, layer, ring),
        };
        let args: &[Arg] = &[
            to.into(),
            sums.into(),
            from.into(),
            self.slices.at(0, table_bytes).into(),
            rows.num_kv_heads.into(),
            rows.block_size.into(),
            rows.row_bytes.into(),
        ];
        let geometry = Geometry { grid, block: [THREADS, 1, 1], shared_bytes: SHARED_BYTES };
        // SAFETY: arguments stand as ABI.md has them; the rest is the caller's. Host memory is looked at after the stream is past this.
        unsafe {
            self.stream.upload(table, self.slices.at(0, table_bytes))?;
            self.stream.launch(kernel, geometry, args)?;
            self.stream.download(sums, self.sums_host.get_mut(0, sum_bytes))
        }
    }

    /// Writes a few bytes to `to`, and waits.
    ///
    /// # Safety
    /// Nobody else touches `to` before this returns.
    pub(super) unsafe fn put(&mut self, bytes: &[u8], to: Span) -> Result<(), DeviceError> {
        // SAFETY: nothing queued uses the table; the rest is the caller's.
        unsafe {
            let host = self.slices_host.get_mut(0, bytes.len());
            host.copy_from_slice(bytes);
            self.stream.upload(host, to)?;
        }
        self.stream.record(&self.done)?;
        self.done.synchronize()
    }

    /// Reads a few bytes from `from`, and waits.
    pub(super) fn peek(&mut self, from: Span, bytes: &mut [u8]) -> Result<(), DeviceError> {
        // SAFETY: nothing queued uses the table, and the copy is waited for before it is looked at.
        unsafe { self.stream.download(from, self.slices_host.get_mut(0, bytes.len())) }?;
        self.stream.record(&self.done)?;
        self.done.synchronize()?;
        // SAFETY: the copy into it is done.
        bytes.copy_from_slice(unsafe { self.slices_host.get(0, bytes.len()) });
        Ok(())
    }
}
