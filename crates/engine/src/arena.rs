//! Memory of all KV blocks.

use baton_kv::{BlockMemory, BlockOrder, BlockRun, BlockSlice, KvLayout, MemoryError, ReadLease, WriteLease};

use crate::error::EngineBuildError;
use crate::region::Region;

/// One allocation, `[layer][block]` of `layout.block_layer_bytes()` each: zeroed, in memory before the first step, on
/// huge pages where the system has them.
///
/// Step threads write blocks of planned rows, network tasks read and write leased blocks, at the same time. The
/// arena itself checks geometry and fences; that a block is written by one and read by none at a time follows from the
/// pool: a writable block has one holder, a [`WriteLease`] covers blocks that no plan holds yet, and a [`ReadLease`] is
/// read only where the step loop announced completion.
pub struct Arena {
    region: Region,
    layout: KvLayout,
    num_blocks: usize,
}

impl Arena {
    /// Takes and touches memory for `num_blocks` blocks.
    ///
    /// # Errors
    /// [`EngineBuildError::OutOfMemory`] if the system refuses, [`EngineBuildError::InvalidConfig`] if the size
    /// overflows or there are more blocks than block ids.
    pub fn new(layout: KvLayout, num_blocks: usize) -> Result<Arena, EngineBuildError> {
        let bytes = layout.block_bytes().checked_mul(num_blocks);
        let (Some(bytes), true) = (bytes, num_blocks > 0 && u32::try_from(num_blocks).is_ok()) else {
            return Err(EngineBuildError::invalid(
                "num_blocks",
                num_blocks,
                "from 1 to 4294967295, and addressable",
            ));
        };
        let region = Region::new(bytes).map_err(EngineBuildError::out_of_memory("the KV arena", bytes))?;
        Ok(Arena { region, layout, num_blocks })
    }

    /// Blocks.
    pub const fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Bytes of all blocks.
    pub const fn num_bytes(&self) -> usize {
        self.region.len()
    }

    /// First byte of block 0 in `layer`; block `b` follows `b * layout.block_layer_bytes()` bytes later.
    pub(crate) fn layer(&self, layer: usize) -> *mut u8 {
        assert!(layer < self.layout.num_layers, "layer {layer} of {}", self.layout.num_layers);
        // SAFETY: the region holds all layers, and this one is among them.
        unsafe { self.region.base().add(layer * self.num_blocks * self.layout.block_layer_bytes()) }
    }

    /// Copies a block in all layers. Both must be below `num_blocks`.
    ///
    /// # Safety
    /// Nobody reads or writes `to`, or writes `from`, meanwhile.
    pub(crate) unsafe fn copy_block(&self, from: usize, to: usize) {
        assert!(from < self.num_blocks && to < self.num_blocks, "copy of block {from} to {to}");
        let len = self.layout.block_layer_bytes();
        for layer in 0..self.layout.num_layers {
            // SAFETY: both blocks lie within the layer; `copy` allows them to be the same.
            unsafe {
                let base = self.layer(layer);
                std::ptr::copy(base.add(from * len), base.add(to * len), len);
            }
        }
    }

    /// The lease's `nth` block in `layer`, after its geometry was checked.
    fn place(
        &self,
        layer: usize,
        nth: usize,
        block: Option<u32>,
        num_blocks: usize,
    ) -> Result<*mut u8, MemoryError> {
        match block {
            Some(block) if layer < self.layout.num_layers && (block as usize) < self.num_blocks => {
                // SAFETY: layer and block were just checked.
                Ok(unsafe { self.layer(layer).add(block as usize * self.layout.block_layer_bytes()) })
            }
            _ => Err(MemoryError::OutOfRange { layer, nth, num_blocks }),
        }
    }

    /// The bytes of the lease's `nth` block in `layer`, as they lie. The caller reads only what the step loop has announced as complete.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn read<'a>(
        &'a self,
        lease: &'a ReadLease,
        layer: usize,
        nth: usize,
    ) -> Result<&'a [u8], MemoryError> {
        let place = self.place(layer, nth, lease.block(nth), lease.len())?;
        // SAFETY: the block lies in the region and was zeroed or written; the lease keeps it from being given to
        // another while the slice lives, and by contract the caller reads complete blocks only.
        Ok(unsafe { std::slice::from_raw_parts(place, self.layout.block_layer_bytes()) })
    }

    fn check_tokens(&self, at: BlockSlice, num_blocks: usize) -> Result<(), MemoryError> {
        if at.num_tokens > self.layout.block_size {
            return Err(MemoryError::OutOfRange { layer: at.layer, nth: at.nth, num_blocks });
        }
        Ok(())
    }

    /// Bytes of a slice in canonical order.
    const fn slice_bytes(&self, at: BlockSlice) -> usize {
        at.num_tokens * self.layout.block_layer_bytes() / self.layout.block_size
    }

    /// Calls `copy(offset in the block, offset in the canonical slice, bytes)` for every run of bytes that both orders
    /// keep together: elements of K, rows of V, and scales, each of which ends its row in the slice.
    ///
    /// # Safety
    /// `copy` is sound for offsets within a block and within a slice of `num_tokens` tokens.
    unsafe fn each_run(&self, num_tokens: usize, mut copy: impl FnMut(usize, usize, usize)) {
        let l = &self.layout;
        let (size, scale) = (l.dtype.size(), l.dtype.scale_bytes());
        let (elements, row) = (l.head_dim * size, l.dtype.row_bytes(l.head_dim));
        let v_block = l.block_layer_bytes() / 2;
        let scales = l.num_kv_heads * l.block_size * elements;
        let v_slice = l.num_kv_heads * num_tokens * row;
        for head in 0..l.num_kv_heads {
            for token in 0..num_tokens {
                let to = (head * num_tokens + token) * row;
                let slot = head * l.block_size + token;
                for dim in 0..l.head_dim {
                    copy(((head * l.head_dim + dim) * l.block_size + token) * size, to + dim * size, size);
                }
                copy(v_block + slot * elements, v_slice + to, elements);
                if scale > 0 {
                    copy(scales + slot * scale, to + elements, scale);
                    copy(v_block + scales + slot * scale, v_slice + to + elements, scale);
                }
            }
        }
    }
}

impl BlockMemory for Arena {
    fn layout(&self) -> &KvLayout {
        &self.layout
    }

    fn read_blocks(
        &self,
        lease: &ReadLease,
        run: BlockRun,
        order: BlockOrder,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<(), MemoryError> {
        let BlockRun { layer, first, num_blocks } = run;
        let mut canonical = Vec::new();
        for nth in first..first.saturating_add(num_blocks) {
            match order {
                BlockOrder::Own => take(self.read(lease, layer, nth)?),
                BlockOrder::Canonical => {
                    canonical.clear();
                    let at = BlockSlice { layer, nth, num_tokens: self.layout.block_size };
                    self.gather(lease, at, &mut canonical)?;
                    take(&canonical);
                }
            }
        }
        Ok(())
    }

    fn write(&self, lease: &WriteLease, layer: usize, nth: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        let place = self.place(layer, nth, lease.block(nth), lease.len())?;
        let want = self.layout.block_layer_bytes();
        if bytes.len() != want {
            return Err(MemoryError::WrongSize { got: bytes.len(), want });
        }
        if lease.is_fenced() {
            return Err(MemoryError::Fenced);
        }
        // SAFETY: `place` covers `want` bytes; the lease is the only writer of the block (it is not `Clone`) and
        // pins it even after a fence, and nobody reads a reserved block before it is committed.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, want) };
        Ok(())
    }

    fn fill(
        &self,
        lease: &WriteLease,
        layer: usize,
        nth: usize,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), MemoryError> {
        let place = self.place(layer, nth, lease.block(nth), lease.len())?;
        if lease.is_fenced() {
            return Err(MemoryError::Fenced);
        }
        // SAFETY: as in `write`, and the block was zeroed or written before: its bytes are this call's alone.
        fill(unsafe { std::slice::from_raw_parts_mut(place, self.layout.block_layer_bytes()) });
        Ok(())
    }

    fn gather(&self, lease: &ReadLease, at: BlockSlice, out: &mut Vec<u8>) -> Result<(), MemoryError> {
        let place = self.place(at.layer, at.nth, lease.block(at.nth), lease.len())?;
        self.check_tokens(at, lease.len())?;
        let start = out.len();
        out.resize(start + self.slice_bytes(at), 0);
        let canonical = out[start..].as_mut_ptr();
        // SAFETY: `place` is a block, leased as in `read`, and `canonical` has a slice's bytes. Only bytes of the
        // slice's tokens are touched, so the step loop may write later ones meanwhile.
        unsafe {
            self.each_run(at.num_tokens, |in_block, in_slice, len| {
                std::ptr::copy_nonoverlapping(place.add(in_block), canonical.add(in_slice), len);
            });
        }
        Ok(())
    }

    fn scatter(&self, lease: &WriteLease, at: BlockSlice, bytes: &[u8]) -> Result<(), MemoryError> {
        let place = self.place(at.layer, at.nth, lease.block(at.nth), lease.len())?;
        self.check_tokens(at, lease.len())?;
        let want = self.slice_bytes(at);
        if bytes.len() != want {
            return Err(MemoryError::WrongSize { got: bytes.len(), want });
        }
        if lease.is_fenced() {
            return Err(MemoryError::Fenced);
        }
        // SAFETY: `place` is a block, leased as in `write`, and `bytes` has a slice's bytes.
        unsafe {
            self.each_run(at.num_tokens, |in_block, in_slice, len| {
                std::ptr::copy_nonoverlapping(bytes.as_ptr().add(in_slice), place.add(in_block), len);
            });
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "arena_tests.rs"]
mod tests;
