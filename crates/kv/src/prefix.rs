//! The prefix cache: full blocks found again by what was computed into them.
//!
//! A block's hash covers its tokens and the hash of the block before it, so equal hashes mean equal prompts from the
//! first token on; the first link covers the model, the numerics id and a salt. Blocks form a radix tree at block granularity.
//! A sequence that uses a block uses all blocks before it, so an idle block's descendants are idle too, and
//! evicting idle leaves, least recently used first, can reach every idle block.

use std::collections::HashMap;
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

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Node {
    hash: BlockHash,
    /// Index of the node before it; `NONE` for a first block.
    parent: u32,
    num_children: u32,
    block: u32,
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
}

impl PrefixCache {
    /// An empty cache over a pool. `salt` names everything besides tokens that KV depends on: model digest and numerics id.
    pub fn new(pool: &BlockPool, salt: &[u8]) -> Self {
        Self {
            by_block: vec![NONE; pool.counts().total],
            pool: Arc::clone(pool.shared()),
            root: BlockHash::root(salt),
            nodes: Vec::new(),
            unused: Vec::new(),
            by_hash: HashMap::new(),
            oldest: NONE,
            newest: NONE,
            idle: Vec::new(),
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
        let mut blocks = Vec::new();
        for hash in hashes {
            let Some(&node) = self.by_hash.get(hash) else { break };
            self.unlist(node);
            blocks.push(SharedBlock::of_cached(self.nodes[node as usize].block, &self.pool));
        }
        blocks
    }

    /// How many blocks [`PrefixCache::lookup`] would find; touches nothing.
    pub fn peek(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.by_hash.contains_key(hash)).count()
    }

    /// Of the run that [`PrefixCache::lookup`] would find: its blocks, and how many of them nobody uses now, so that they stop being
    /// evictable once looked up. Touches nothing.
    pub fn peek_idle(&self, hashes: &[BlockHash]) -> (usize, usize) {
        let known = hashes.iter().map_while(|hash| self.by_hash.get(hash));
        known.fold((0, 0), |(hits, idle), &node| {
            let is_idle = self.pool.is_idle(self.nodes[node as usize].block);
            (hits + 1, idle + usize::from(is_idle))
        })
    }

    /// Takes note of a full block that the caller holds: `hash` is its hash, `parent` that of the block before it. Of the blocks before it the
    /// caller must hold the ones that the cache knows.
    pub fn insert(&mut self, parent: BlockHash, hash: BlockHash, block: &SharedBlock) -> Inserted {
        self.settle();
        if let Some(&node) = self.by_hash.get(&hash) {
            self.unlist(node);
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
            num_evicted += 1;
            if node.parent != NONE {
                let parent = &mut self.nodes[node.parent as usize];
                parent.num_children -= 1;
                if parent.num_children == 0 && self.pool.is_idle(parent.block) {
                    self.list(node.parent);
                }
            }
        }
        num_evicted
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
