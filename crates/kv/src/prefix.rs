//! The prefix cache: full blocks found again by what was computed into them.
//!
//! A block's hash covers its tokens and the hash of the block before it, so equal hashes mean equal prompts from the
//! first token on; the first link covers the model, the numerics id and a salt. Blocks form a radix tree at block granularity.
//! A sequence that uses a block uses all blocks before it, so an idle block's descendants are idle too, and
//! evicting idle leaves, least recently used first, can reach every idle block.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::block::SharedBlock;
use crate::pool::{BlockPool, Shared};

/// SHA-256, cut to 128 bits, of a block's tokens and everything before them. Collision resistant, so that no prompt can be made that finds
/// another one's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// The hash before the first block; `salt` names everything besides tokens that KV depends on.
    pub fn root(salt: &[u8]) -> Self {
        Self::cut(Sha256::new_with_prefix(b"baton block hash 1").chain_update(salt))
    }

    /// The hash of a full block that follows `self`.
    pub fn next(self, tokens: &[u32]) -> Self {
        let mut hasher = Sha256::new_with_prefix(self.0);
        for &token in tokens {
            hasher.update(token.to_le_bytes());
        }
        Self::cut(hasher)
    }

    fn cut(hasher: Sha256) -> Self {
        let mut out = [0; 16];
        out.copy_from_slice(&hasher.finalize()[..16]);
        Self(out)
    }
}

/// What became of an inserted block.
#[derive(Debug)]
pub enum Inserted {
    /// The cache knows it now.
    New,
    /// The cache had an equal block; the caller uses that one and gives up its own.
    Existing(SharedBlock),
    /// The block before it is not in the cache any more: nothing was inserted.
    Orphan,
}

/// What a prefix cache learned and forgot since it was asked last, for a reader elsewhere that keeps an index of it. A hash that came
/// and went meanwhile is in neither list; both are sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheChanges {
    /// Blocks known now that were not.
    pub stored: Vec<BlockHash>,
    /// Blocks evicted.
    pub removed: Vec<BlockHash>,
    /// More happened than is kept: the lists say nothing, take a snapshot ([`PrefixCache::known`]).
    pub overflowed: bool,
}

/// Changes kept for a reader, at most.
const MAX_PENDING: usize = 65_536;

/// Changes since a reader asked last: true for stored, false for removed.
#[derive(Default)]
struct Pending {
    changes: BTreeMap<BlockHash, bool>,
    overflowed: bool,
}

impl Pending {
    fn note(&mut self, hash: BlockHash, stored: bool) {
        // A change and its reverse leave nothing to tell.
        if self.overflowed || self.changes.remove(&hash).is_some() {
            return;
        }
        if self.changes.len() >= MAX_PENDING {
            self.changes.clear();
            self.overflowed = true;
            return;
        }
        self.changes.insert(hash, stored);
    }
}

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Node {
    hash: BlockHash,
    /// Index of the node before it; `NONE` for a first block.
    parent: u32,
    num_children: u32,
    block: u32,
    /// When it was last looked up or inserted, in calls.
    used: u64,
    /// Neighbours in the list of idle leaves, older and newer; meaningful while `listed`.
    older: u32,
    newer: u32,
    listed: bool,
}

/// Finds full blocks by content, and gives idle ones back, least recently used leaf first.
pub struct PrefixCache {
    pool: Arc<Shared>,
    root: BlockHash,
    nodes: Vec<Node>,
    unused: Vec<u32>,
    by_hash: HashMap<BlockHash, u32>,
    /// Node of each block of the pool.
    by_block: Vec<u32>,
    oldest: u32,
    newest: u32,
    idle: Vec<u32>,
    /// Lookups and insertions so far.
    now: u64,
    /// `None`: nobody reads.
    pending: Option<Pending>,
}

impl PrefixCache {
    /// An empty cache over a pool. `salt` names everything besides tokens that KV depends on: model digest and numerics id.
    pub fn new(pool: &BlockPool, salt: &[u8]) -> Self {
        // Memory for the case that every block is known: steps then allocate none.
        let total = pool.counts().total;
        Self {
            by_block: vec![NONE; total],
            pool: Arc::clone(pool.shared()),
            root: BlockHash::root(salt),
            nodes: Vec::with_capacity(total),
            unused: Vec::with_capacity(total),
            by_hash: HashMap::with_capacity(total),
            oldest: NONE,
            newest: NONE,
            idle: Vec::with_capacity(total),
            now: 0,
            pending: None,
        }
    }

    /// Whether changes are collected for [`PrefixCache::drain_changes`]. A reader takes a snapshot after turning this on.
    pub fn set_report(&mut self, on: bool) {
        self.pending = on.then(|| self.pending.take().unwrap_or_default());
    }

    /// Appends what changed since the last call to `into`.
    pub fn drain_changes(&mut self, into: &mut CacheChanges) {
        let Some(pending) = self.pending.as_mut().map(std::mem::take) else { return };
        into.overflowed |= pending.overflowed;
        for (hash, stored) in pending.changes {
            if stored { &mut into.stored } else { &mut into.removed }.push(hash);
        }
    }

    /// Hashes of all blocks known, sorted: the snapshot that [`CacheChanges`] continue.
    pub fn known(&self) -> Vec<BlockHash> {
        let mut known: Vec<_> = self.by_hash.keys().copied().collect();
        known.sort_unstable();
        known
    }

    fn note(&mut self, hash: BlockHash, stored: bool) {
        if let Some(pending) = &mut self.pending {
            pending.note(hash, stored);
        }
    }

    /// The hash before every first block.
    pub const fn root(&self) -> BlockHash {
        self.root
    }

    /// Blocks known, in use or idle.
    pub fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// Whether no block is known.
    pub fn is_empty(&self) -> bool {
        self.by_hash.is_empty()
    }

    /// Hashes of the full blocks of `tokens`, in order: computed once a sequence.
    pub fn hashes(&self, tokens: &[u32], block_size: usize) -> Vec<BlockHash> {
        let mut hash = self.root;
        let next = |chunk| {
            hash = hash.next(chunk);
            hash
        };
        tokens.chunks_exact(block_size).map(next).collect()
    }

    /// The longest run of known blocks from the first hash on, in order, held for the caller.
    pub fn lookup(&mut self, hashes: &[BlockHash]) -> Vec<SharedBlock> {
        self.settle();
        self.now += 1;
        let mut blocks = Vec::with_capacity(self.peek(hashes));
        for hash in hashes {
            let Some(&node) = self.by_hash.get(hash) else { break };
            self.unlist(node);
            self.nodes[node as usize].used = self.now;
            blocks.push(SharedBlock::of_cached(self.nodes[node as usize].block, &self.pool));
        }
        blocks
    }

    /// How many blocks [`PrefixCache::lookup`] would find; touches nothing. Logarithmic: a known block's ancestors are known.
    pub fn peek(&self, hashes: &[BlockHash]) -> usize {
        let is_known = |hash: &BlockHash| self.by_hash.contains_key(hash);
        // Most waiting prompts share nothing: one look instead of a search.
        if hashes.first().is_some_and(is_known) { hashes.partition_point(is_known) } else { 0 }
    }

    /// Of the run that [`PrefixCache::lookup`] would find: its blocks, and how many of them nobody uses now, so that they stop being
    /// evictable once looked up. Touches nothing. Logarithmic: an idle block's descendants are idle.
    pub fn peek_idle(&self, hashes: &[BlockHash]) -> (usize, usize) {
        let num_hits = self.peek(hashes);
        let in_use = |hash: &BlockHash| {
            let node = self.by_hash.get(hash);
            node.is_some_and(|&node| !self.pool.is_idle(self.nodes[node as usize].block))
        };
        (num_hits, num_hits - hashes[..num_hits].partition_point(in_use))
    }

    /// Takes note of a full block that the caller holds: `hash` is its hash, `parent` that of the block before it. Of the blocks before it the
    /// caller must hold the ones that the cache knows.
    pub fn insert(&mut self, parent: BlockHash, hash: BlockHash, block: &SharedBlock) -> Inserted {
        self.settle();
        self.now += 1;
        if let Some(&node) = self.by_hash.get(&hash) {
            self.unlist(node);
            self.nodes[node as usize].used = self.now;
            return Inserted::Existing(SharedBlock::of_cached(self.nodes[node as usize].block, &self.pool));
        }
        let parent = match self.by_hash.get(&parent) {
            Some(&node) => node,
            None if parent == self.root => NONE,
            None => return Inserted::Orphan,
        };
        let node = Node {
            hash,
            parent,
            num_children: 0,
            block: block.id(),
            used: self.now,
            older: NONE,
            newer: NONE,
            listed: false,
        };
        let index = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(node);
            u32::try_from(self.nodes.len() - 1).unwrap_or(NONE)
        });
        self.nodes[index as usize] = node;
        if parent != NONE {
            self.nodes[parent as usize].num_children += 1;
            self.unlist(parent);
        }
        self.by_hash.insert(hash, index);
        self.by_block[block.id() as usize] = index;
        self.pool.set_cached(block.id());
        self.note(hash, true);
        Inserted::New
    }

    /// Gives up to `count` idle blocks back to the pool, least recently used leaves first. Returns how many.
    pub fn evict(&mut self, count: usize) -> usize {
        self.settle();
        let mut num_evicted = 0;
        while num_evicted < count && self.oldest != NONE {
            let index = self.oldest;
            self.unlist(index);
            let node = self.nodes[index as usize];
            // A block taken up again off this thread since it was listed stays; it is listed again when it falls idle.
            if !self.pool.evict(node.block) {
                continue;
            }
            self.by_hash.remove(&node.hash);
            self.by_block[node.block as usize] = NONE;
            self.unused.push(index);
            self.note(node.hash, false);
            num_evicted += 1;
            if node.parent != NONE {
                self.child_evicted(node.parent, node.used);
            }
        }
        num_evicted
    }

    /// A block may have become a leaf. Unless it was used after its child, the child's turn is its turn: it goes next.
    fn child_evicted(&mut self, index: u32, child_used: u64) {
        let parent = &mut self.nodes[index as usize];
        parent.num_children -= 1;
        let (used, block) = (parent.used, parent.block);
        if parent.num_children > 0 || !self.pool.is_idle(block) {
            return;
        }
        if used > child_used {
            self.list(index);
        } else {
            self.list_oldest(index);
        }
    }

    /// Lists the leaves that fell idle since the last call. A chain falls idle from its first block on, so its
    /// leaf comes last and counts as the most recently used.
    fn settle(&mut self) {
        let mut idle = std::mem::take(&mut self.idle);
        self.pool.take_idle(&mut idle);
        for block in idle.drain(..) {
            let index = self.by_block[block as usize];
            if index != NONE && self.nodes[index as usize].num_children == 0 && self.pool.is_idle(block) {
                self.list(index);
            }
        }
        self.idle = idle;
    }

    fn list(&mut self, index: u32) {
        self.unlist(index);
        let newest = self.newest;
        let node = &mut self.nodes[index as usize];
        (node.older, node.newer, node.listed) = (newest, NONE, true);
        match newest {
            NONE => self.oldest = index,
            _ => self.nodes[newest as usize].newer = index,
        }
        self.newest = index;
    }

    fn list_oldest(&mut self, index: u32) {
        self.unlist(index);
        let oldest = self.oldest;
        let node = &mut self.nodes[index as usize];
        (node.older, node.newer, node.listed) = (NONE, oldest, true);
        match oldest {
            NONE => self.newest = index,
            _ => self.nodes[oldest as usize].older = index,
        }
        self.oldest = index;
    }

    fn unlist(&mut self, index: u32) {
        let Node { older, newer, listed, .. } = self.nodes[index as usize];
        if !listed {
            return;
        }
        match older {
            NONE => self.oldest = newer,
            _ => self.nodes[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.nodes[newer as usize].older = older,
        }
        self.nodes[index as usize].listed = false;
    }
}
