//! How block memory is reached off the step thread.

use crate::{KvLayout, PeerMemory, ReadLease, WriteLease};

/// Why block memory could not be reached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The lease was ended: stop writing and drop it.
    #[error("the write lease was fenced")]
    Fenced,
    /// The other side speaks of blocks or layers that this lease does not have.
    #[error("layer {layer}, block {nth} is outside the lease of {num_blocks} blocks")]
    OutOfRange {
        /// Layer asked for.
        layer: usize,
        /// Block asked for, counted within the lease.
        nth: usize,
        /// Blocks of the lease.
        num_blocks: usize,
    },
    /// The bytes given are not one block of one layer.
    #[error("{got} bytes given for a block of {want} bytes in one layer")]
    WrongSize {
        /// Bytes given.
        got: usize,
        /// Bytes of one block in one layer.
        want: usize,
    },
    /// The device that has the memory failed; its worker is about to stop.
    #[error("block memory failed: {0}")]
    Device(String),
}

/// The memory behind a pool, in units of (layer, block): `layout().block_layer_bytes()` contiguous bytes each.
pub trait BlockMemory: Send + Sync {
    /// What a block looks like.
    fn layout(&self) -> &KvLayout;

    /// Gives `take` the bytes of whole blocks, one block after another, in pieces of any size. The caller reads only what the
    /// step loop has announced as complete.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`], [`MemoryError::Device`]; `take` may have had some of the bytes then.
    fn read_blocks(
        &self,
        lease: &ReadLease,
        run: BlockRun,
        order: BlockOrder,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<(), MemoryError>;

    /// Fills the lease's `nth` block in `layer`.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing was written then.
    fn write(&self, lease: &WriteLease, layer: usize, nth: usize, bytes: &[u8]) -> Result<(), MemoryError>;

    /// As [`BlockMemory::write`], with bytes that `fill` puts straight into the block. It is given all of the block's bytes, of whatever content,
    /// and overwrites them.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing was written then.
    fn fill(
        &self,
        lease: &WriteLease,
        layer: usize,
        nth: usize,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), MemoryError> {
        let mut bytes = vec![0; self.layout().block_layer_bytes()];
        fill(&mut bytes);
        self.write(lease, layer, nth, &bytes)
    }

    /// Appends the first `num_tokens` tokens of the lease's `nth` block in `layer` to `out`, in the canonical order
    /// `[K|V][kv head][token][dim]`, each row followed by its scale if the element type has one:
    /// `num_tokens * layout().token_bytes() / layout().num_layers` bytes. For the partly filled last block of a
    /// prompt, so that no byte without meaning crosses the wire, and between workers whose arrangements differ.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`], also when `num_tokens` exceeds the block size; `out` is unchanged then.
    fn gather(&self, lease: &ReadLease, at: BlockSlice, out: &mut Vec<u8>) -> Result<(), MemoryError>;

    /// The reverse of [`BlockMemory::gather`]: fills the first `at.num_tokens` tokens of a block, and no other byte.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing was written then.
    fn scatter(&self, lease: &WriteLease, at: BlockSlice, bytes: &[u8]) -> Result<(), MemoryError>;

    /// The same memory for other processes of this host, where it lies on a device that lets them.
    fn peer(&self) -> Option<&dyn PeerMemory> {
        None
    }
}

/// Blocks of one layer, one after another in a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRun {
    /// Layer.
    pub layer: usize,
    /// First block, counted within the lease.
    pub first: usize,
    /// Blocks.
    pub num_blocks: usize,
}

/// How the bytes of a whole block follow each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockOrder {
    /// As they lie in memory: the layout's arrangement.
    #[default]
    Own,
    /// As [`BlockMemory::gather`] gives them, for a memory of another arrangement.
    Canonical,
}

/// The first tokens of one block in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSlice {
    /// Layer.
    pub layer: usize,
    /// Block, counted within the lease.
    pub nth: usize,
    /// Tokens, from the block's first; at most the block size.
    pub num_tokens: usize,
}
