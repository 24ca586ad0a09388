//! The block pool: who holds which block, and when it is free again.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::block::{Block, Handle};

/// Called after blocks became free, from the thread that freed them; must not block.
pub type FreeHook = Box<dyn Fn() + Send + Sync>;

/// Blocks by state; always `free + cached + held + draining = total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PoolCounts {
    /// Allocatable now.
    pub free: usize,
    /// Only in the prefix cache: allocatable after eviction.
    pub cached: usize,
    /// With a holder.
    pub held: usize,
    /// Without a holder, still pinned by a lease.
    pub draining: usize,
    /// All blocks.
    pub total: usize,
}

/// Hands out blocks of an arena and takes them back when the last holder and the last lease are gone.
#[derive(Clone)]
pub struct BlockPool {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    state: Mutex<State>,
    on_free: OnceLock<FreeHook>,
}

struct State {
    total: u32,
    /// Blocks from 0 up to this one were never given out. They lie below `free` in one stack with it, the highest on top; so of a pool that is larger than its
    /// use only what is used takes memory that is really there.
    untouched: u32,
    free: Vec<u32>,
    /// Of the others, the last block first.
    slots: Vec<Slot>,
    held: usize,
    cached: usize,
    /// Cached blocks that lost their last user since the prefix cache looked.
    idle: Vec<u32>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    holders: u32,
    pins: u32,
    /// The prefix cache knows this block; it is not freed when its last user is gone.
    cached: bool,
}

impl Slot {
    const fn in_use(self) -> bool {
        self.holders > 0 || self.pins > 0
    }
}

impl State {
    const fn at(&self, id: u32) -> usize {
        (self.total - 1 - id) as usize
    }

    fn slot(&mut self, id: u32) -> &mut Slot {
        let at = self.at(id);
        &mut self.slots[at]
    }

    const fn num_free(&self) -> usize {
        self.untouched as usize + self.free.len()
    }

    /// The highest of the untouched blocks are given out.
    fn touch(&mut self, count: u32) {
        self.untouched -= count;
        // Within its capacity.
        self.slots.resize((self.total - self.untouched) as usize, Slot::default());
    }

    /// A user of block `id` is gone. True when the block became allocatable, at once or by eviction.
    fn settle(&mut self, id: u32) -> bool {
        let slot = *self.slot(id);
        if slot.in_use() {
            return false;
        }
        if slot.cached {
            self.cached += 1;
            self.idle.push(id);
        } else {
            self.free.push(id);
        }
        true
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock is held leaves counts that are still whole: every update is a few integer writes.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn pin(&self, ids: &[u32]) {
        let mut state = self.state();
        for &id in ids {
            state.slot(id).pins += 1;
        }
    }

    pub(crate) fn unpin(&self, ids: &[u32]) {
        let mut freed = false;
        {
            let mut state = self.state();
            for &id in ids {
                state.slot(id).pins -= 1;
                freed |= state.settle(id);
            }
        }
        if freed {
            self.freed();
        }
    }

    /// One more holder of a block that the caller holds or the prefix cache knows.
    pub(crate) fn hold(&self, id: u32) {
        let mut state = self.state();
        let slot = state.slot(id);
        let idle = !slot.in_use();
        slot.holders += 1;
        if slot.holders == 1 {
            state.held += 1;
        }
        if idle {
            state.cached -= 1;
        }
    }

    pub(crate) fn release(&self, id: u32) {
        self.release_all(&[id]);
    }

    /// One holder of each of these blocks is gone. One lock and one call of the hook, however many they are.
    pub(crate) fn release_all(&self, ids: &[u32]) {
        let mut freed = false;
        {
            let mut state = self.state();
            for &id in ids {
                let slot = state.slot(id);
                slot.holders -= 1;
                if slot.holders == 0 {
                    state.held -= 1;
                }
                freed |= state.settle(id);
            }
        }
        if freed {
            self.freed();
        }
    }

    /// Whether the caller, a holder, is the block's only user, so that it may write.
    pub(crate) fn is_sole_user(&self, id: u32) -> bool {
        let slot = *self.state().slot(id);
        slot.holders == 1 && slot.pins == 0 && !slot.cached
    }

    /// Whether one of these blocks, all of them the caller's, has no other holder: it would become allocatable once the caller
    /// and the leases are gone.
    pub(crate) fn any_sole_holder(&self, ids: &[u32]) -> bool {
        let state = self.state();
        ids.iter().any(|&id| state.slots[state.at(id)].holders == 1)
    }

    /// The prefix cache takes note of a block that somebody holds.
    pub(crate) fn set_cached(&self, id: u32) {
        self.state().slot(id).cached = true;
    }

    /// The prefix cache forgets a block. False when the block is in use, and then it stays known.
    pub(crate) fn evict(&self, id: u32) -> bool {
        let mut state = self.state();
        let slot = state.slot(id);
        if slot.in_use() || !slot.cached {
            return false;
        }
        slot.cached = false;
        state.cached -= 1;
        state.free.push(id);
        true
    }

    pub(crate) fn take_idle(&self, into: &mut Vec<u32>) {
        into.append(&mut self.state().idle);
    }

    pub(crate) fn is_idle(&self, id: u32) -> bool {
        !self.state().slot(id).in_use()
    }

    fn freed(&self) {
        if let Some(hook) = self.on_free.get() {
            hook();
        }
    }
}

impl BlockPool {
    /// A pool over blocks `0..total`.
    pub fn new(total: usize) -> Self {
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        // Memory for all of them is asked for at once, so that nobody who allocates a block allocates memory; it is there when it is first written.
        let room = total as usize;
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(State {
                    total,
                    // In this order blocks that are given out together lie one behind the other, and come back so: whoever copies them goes upwards.
                    untouched: total,
                    free: Vec::with_capacity(room),
                    slots: Vec::with_capacity(room),
                    held: 0,
                    cached: 0,
                    idle: Vec::with_capacity(room),
                }),
                on_free: OnceLock::new(),
            }),
        }
    }

    /// Sets what is called after blocks became free. Only the first call has an effect.
    pub fn on_free(&self, hook: FreeHook) {
        let _ = self.shared.on_free.set(hook);
    }

    /// All of `count` blocks or none, each with one holder and writable.
    pub fn allocate(&self, count: usize) -> Option<Vec<Block>> {
        let mut state = self.shared.state();
        let ids = match state.free.len().checked_sub(count) {
            Some(keep) => {
                // Not `split_off`, which from 0 on gives away the memory for all blocks.
                let ids = state.free[keep..].to_vec();
                state.free.truncate(keep);
                ids
            }
            None => {
                let fresh = u32::try_from(count - state.free.len()).ok()?;
                let from = state.untouched.checked_sub(fresh)?;
                let mut ids: Vec<u32> = (from..state.untouched).collect();
                ids.append(&mut state.free);
                state.touch(fresh);
                ids
            }
        };
        for &id in &ids {
            state.slot(id).holders = 1;
        }
        state.held += ids.len();
        drop(state);
        Some(ids.into_iter().map(|id| Block(Handle { id, shared: Arc::clone(&self.shared) })).collect())
    }

    /// One block, writable. Takes no memory of its own.
    pub fn allocate_one(&self) -> Option<Block> {
        let mut state = self.shared.state();
        let id = match state.free.pop() {
            Some(id) => id,
            None => {
                let id = state.untouched.checked_sub(1)?;
                state.touch(1);
                id
            }
        };
        state.slot(id).holders = 1;
        state.held += 1;
        drop(state);
        Some(Block(Handle { id, shared: Arc::clone(&self.shared) }))
    }

    /// Blocks by state, at one instant.
    pub fn counts(&self) -> PoolCounts {
        let state = self.shared.state();
        let (free, cached, held, total) = (state.num_free(), state.cached, state.held, state.total as usize);
        PoolCounts { free, cached, held, draining: total - free - cached - held, total }
    }

    pub(crate) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Recounts every block and compares with the running counts.
    ///
    /// # Errors
    /// What is inconsistent, for a loud log line.
    pub fn check(&self) -> Result<(), String> {
        let state = self.shared.state();
        let count = |of: fn(&Slot) -> bool| state.slots.iter().filter(|s| of(s)).count();
        let held = count(|s| s.holders > 0);
        let draining = count(|s| s.holders == 0 && s.pins > 0);
        let cached = count(|s| s.cached && !s.in_use());
        let (free, total) = (state.num_free(), state.total as usize);
        if (held, cached) != (state.held, state.cached) || free + cached + held + draining != total {
            return Err(format!(
                "free {free} + cached {cached} + held {held} + draining {draining} != total {total} \
                 (counters: cached {}, held {})",
                state.cached, state.held
            ));
        }
        let mut seen = vec![false; state.slots.len()];
        for at in state.free.iter().map(|&id| state.at(id)) {
            let Some(slot) = state.slots.get(at) else {
                return Err("a block that was never given out is in the free list".into());
            };
            if slot.in_use() || slot.cached || std::mem::replace(&mut seen[at], true) {
                let id = total - 1 - at;
                return Err(format!("block {id} is in the free list twice or while in use"));
            }
        }
        Ok(())
    }
}
