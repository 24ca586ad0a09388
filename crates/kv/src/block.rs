//! Handles to blocks: writable with one holder, or read-only and counted. Ownership is by construction: a handle is
//! the only way to a block, and dropping the last one returns it.

use std::fmt;
use std::sync::Arc;

use crate::pool::Shared;

/// One unit of a block's holder count.
pub(crate) struct Handle {
    pub(crate) id: u32,
    pub(crate) shared: Arc<Shared>,
}

/// The index of a handle whose unit was given back already.
const GIVEN_BACK: u32 = u32::MAX;

impl Handle {
    /// Ends the handle and leaves its unit to the caller, who gives back those of many blocks at once.
    fn leave(mut self) {
        self.id = GIVEN_BACK;
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.id != GIVEN_BACK {
            self.shared.release(self.id);
        }
    }
}

/// One writable block with exactly one holder: not `Clone`; dropping it returns the block.
pub struct Block(pub(crate) Handle);

impl Block {
    /// Its index in the arena.
    pub const fn id(&self) -> u32 {
        self.0.id
    }

    /// Ends the handle; the caller calls [`Shared::release_all`] with its index.
    pub(crate) fn leave(self) {
        self.0.leave();
    }

    /// Gives up the right to write: from here on the block is read-only and counted.
    pub fn share(self) -> SharedBlock {
        SharedBlock(self.0)
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({})", self.0.id)
    }
}

/// A read-only block with any number of holders; the last one to be dropped returns it.
pub struct SharedBlock(Handle);

impl SharedBlock {
    /// A handle to a block that the prefix cache knows.
    pub(crate) fn of_cached(id: u32, shared: &Arc<Shared>) -> Self {
        shared.hold(id);
        Self(Handle { id, shared: Arc::clone(shared) })
    }

    /// Its index in the arena.
    pub const fn id(&self) -> u32 {
        self.0.id
    }

    pub(crate) const fn pool(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    /// As [`Block::leave`].
    pub(crate) fn leave(self) {
        self.0.leave();
    }

    /// The right to write again, for the only user of the block.
    ///
    /// # Errors
    /// The handle itself, while another holder, a lease or the prefix cache uses the block.
    pub fn try_own(self) -> Result<Block, Self> {
        if self.0.shared.is_sole_user(self.0.id) { Ok(Block(self.0)) } else { Err(self) }
    }
}

impl Clone for SharedBlock {
    fn clone(&self) -> Self {
        Self::of_cached(self.0.id, &self.0.shared)
    }
}

impl fmt::Debug for SharedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBlock({})", self.0.id)
    }
}
