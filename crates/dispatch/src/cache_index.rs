//! Which worker has which block cached, as far as the workers told.
//!
//! Memory: 33 bytes a bucket (16 of the hash, 16 of its holders, 1 of the table), and a table is between 7/16 and 7/8 full: 38 to 75 bytes for
//! each distinct block, 69 MB for 1,000,000 of them. A block that more than six workers hold takes 256 bytes besides.
//! Nothing here is bounded by itself: there are as many entries as blocks in the workers' pools.
//!
//! Time: whoever asks holds a lock that requests wait for, so no call looks at everything. Blocks lie in 256 shards by the first byte of
//! their hash; a worker that is forgotten is only noted in each, and a shard that it may be in is cleaned when it is
//! changed next, or by [`CacheIndex::tidy`], one at a time.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use baton_kv::BlockHash;

use crate::uniform::Uniform;

/// Block hashes by the workers that have them cached.
///
/// A worker that has a block has all blocks before it, since it evicts the last ones of a prompt first. So the set of workers
/// that have block `i` of a prompt only shrinks with `i`.
#[derive(Clone, Debug)]
pub struct CacheIndex {
    shards: Vec<Shard>,
    /// Shards from this one on were not tidied since a worker was forgotten.
    untidy_from: usize,
}

/// The blocks whose hashes begin with one byte.
#[derive(Clone, Debug, Default)]
struct Shard {
    blocks: HashMap<BlockHash, Holders, Uniform>,
    /// Workers that were forgotten and may still stand in `blocks`.
    forgotten: Option<Box<Bits>>,
}

/// One for each first byte of a hash: of 1,000,000 blocks each has 4,000.
const NUM_SHARDS: usize = 256;

/// Numbers of workers, one bit each.
type Bits = [u64; CacheIndex::MAX_WORKERS / 64];
const NONE: Bits = [0; CacheIndex::MAX_WORKERS / 64];
const ALL: Bits = [u64::MAX; CacheIndex::MAX_WORKERS / 64];

/// Blocks of a prompt from one lookup to the next.
const STRIDE: usize = 16;

const FEW: usize = 6;

/// The workers that have one block.
#[derive(Clone, Debug)]
enum Holders {
    /// The first `num` of `workers`, in no order.
    Few { num: u8, workers: [u16; FEW] },
    /// More than a few of them, or a few that were more.
    Many(Box<Bits>),
}

impl Default for CacheIndex {
    fn default() -> Self {
        Self { shards: (0..NUM_SHARDS).map(|_| Shard::default()).collect(), untidy_from: NUM_SHARDS }
    }
}

impl CacheIndex {
    /// Workers that can be told apart; what one with a higher number has cached is not known here.
    pub const MAX_WORKERS: usize = 2_048;

    /// Takes in changes of a worker's prefix cache: `removed` first, since a worker says neither of a block that came and went.
    pub fn apply(&mut self, worker: usize, stored: &[BlockHash], removed: &[BlockHash]) {
        let Some(worker) = number(worker) else { return };
        for hash in removed {
            if let Entry::Occupied(mut entry) = self.shard(hash).clean().entry(*hash)
                && entry.get_mut().remove(worker)
            {
                entry.remove();
            }
        }
        for hash in stored {
            let blocks = self.shard(hash).clean();
            blocks.entry(*hash).or_insert(Holders::Few { num: 0, workers: [0; FEW] }).insert(worker);
        }
    }

    /// The worker has these blocks and no others.
    pub fn replace(&mut self, worker: usize, snapshot: &[BlockHash]) {
        self.forget(worker);
        self.apply(worker, snapshot, &[]);
    }

    /// The worker has nothing. Its entries are found no more, and are taken out bit by bit: see [`CacheIndex::tidy`].
    pub fn forget(&mut self, worker: usize) {
        let Some(worker) = number(worker) else { return };
        let (word, bit) = place(worker);
        for shard in self.shards.iter_mut().filter(|shard| !shard.blocks.is_empty()) {
            shard.forgotten.get_or_insert_with(|| Box::new(NONE))[word] |= bit;
        }
        self.untidy_from = 0;
    }

    /// Takes out what forgotten workers left in one shard, 1 block in 256. False when nothing is left: then only blocks that a worker has
    /// take memory. For whoever has the time, and can let others have their turn between two calls.
    pub fn tidy(&mut self) -> bool {
        while let Some(shard) = self.shards.get_mut(self.untidy_from) {
            self.untidy_from += 1;
            if shard.forgotten.is_some() {
                shard.clean();
                return true;
            }
        }
        false
    }

    /// Distinct blocks that any worker has, and those that forgotten ones had until they are tidied away.
    pub fn num_blocks(&self) -> usize {
        self.shards.iter().map(|shard| shard.blocks.len()).sum()
    }

    fn shard(&mut self, hash: &BlockHash) -> &mut Shard {
        &mut self.shards[usize::from(hash.0[0])]
    }

    /// Says for each worker that has the first of a prompt's blocks how many leading ones it has, in no order of workers.
    ///
    /// Where the sets at two blocks are equal, so are all between them: only every sixteenth block is looked up, and those
    /// between where the set shrinks.
    pub fn leading_blocks(&self, hashes: &[BlockHash], mut found: impl FnMut(usize, u32)) {
        let Some(end) = hashes.len().checked_sub(1) else { return };
        let mut has = self.holders(&hashes[0], &ALL);
        let mut at = 0;
        while at < end && has != NONE {
            let to = (at + STRIDE).min(end);
            let keeps = self.holders(&hashes[to], &has);
            if keeps != has {
                self.between((at, &hashes[at + 1..to]), (has, &keeps), &mut found);
                has = keeps;
            }
            at = to;
        }
        each_bit(&has, &NONE, |worker| found(worker, end as u32 + 1));
    }

    /// Between two looked-up blocks, the first of which is number `at`: says of each worker that has the first and not the
    /// second how many leading blocks it has.
    fn between(
        &self,
        (at, hashes): (usize, &[BlockHash]),
        (mut has, keeps): (Bits, &Bits),
        found: &mut impl FnMut(usize, u32),
    ) {
        for (num, hash) in (at as u32 + 1..).zip(hashes) {
            let mut set = self.holders(hash, &has);
            // While a snapshot comes in, later blocks can be known before earlier ones.
            for (word, keeps) in set.iter_mut().zip(keeps) {
                *word |= keeps;
            }
            if set != has {
                each_bit(&has, &set, |worker| found(worker, num));
                has = set;
            }
            if has == *keeps {
                return;
            }
        }
        each_bit(&has, keeps, |worker| found(worker, (at + 1 + hashes.len()) as u32));
    }

    /// The workers of `within` that have a block.
    fn holders(&self, hash: &BlockHash, within: &Bits) -> Bits {
        let shard = &self.shards[usize::from(hash.0[0])];
        let Some(holders) = shard.blocks.get(hash) else { return NONE };
        let found = holders.within(within);
        match &shard.forgotten {
            Some(forgotten) => std::array::from_fn(|nth| found[nth] & !forgotten[nth]),
            None => found,
        }
    }
}

impl Shard {
    /// Its blocks, without what forgotten workers had.
    fn clean(&mut self) -> &mut HashMap<BlockHash, Holders, Uniform> {
        if let Some(forgotten) = self.forgotten.take() {
            self.blocks.retain(|_, holders| !holders.remove_all(&forgotten));
        }
        &mut self.blocks
    }
}

fn number(worker: usize) -> Option<u16> {
    u16::try_from(worker).ok().filter(|_| worker < CacheIndex::MAX_WORKERS)
}

const fn place(worker: u16) -> (usize, u64) {
    ((worker / 64) as usize, 1 << (worker % 64))
}

/// Every worker of `set` that is not in `without`.
fn each_bit(set: &Bits, without: &Bits, mut each: impl FnMut(usize)) {
    for (nth, (word, without)) in set.iter().zip(without).enumerate() {
        let mut word = word & !without;
        while word != 0 {
            each(nth * 64 + word.trailing_zeros() as usize);
            word &= word - 1;
        }
    }
}

impl Holders {
    fn few(&self) -> &[u16] {
        match self {
            Self::Few { num, workers } => &workers[..usize::from(*num)],
            Self::Many(_) => &[],
        }
    }

    fn bits(&self) -> Bits {
        self.within(&ALL)
    }

    /// Those that are in `set` too.
    fn within(&self, set: &Bits) -> Bits {
        match self {
            Self::Few { .. } => {
                let mut kept = NONE;
                for worker in self.few() {
                    let (word, bit) = place(*worker);
                    kept[word] |= set[word] & bit;
                }
                kept
            }
            Self::Many(bits) => std::array::from_fn(|nth| bits[nth] & set[nth]),
        }
    }

    fn insert(&mut self, worker: u16) {
        if self.few().contains(&worker) {
            return;
        }
        if let Self::Few { num, .. } = self
            && usize::from(*num) == FEW
        {
            *self = Self::Many(Box::new(self.bits()));
        }
        match self {
            Self::Few { num, workers } => {
                workers[usize::from(*num)] = worker;
                *num += 1;
            }
            Self::Many(bits) => {
                let (word, bit) = place(worker);
                bits[word] |= bit;
            }
        }
    }

    /// `true`: nobody has it any more.
    fn remove_all(&mut self, gone: &Bits) -> bool {
        match self {
            Self::Few { num, workers } => {
                let mut nth = 0;
                while nth < usize::from(*num) {
                    let (word, bit) = place(workers[nth]);
                    if gone[word] & bit == 0 {
                        nth += 1;
                    } else {
                        *num -= 1;
                        workers[nth] = workers[usize::from(*num)];
                    }
                }
                *num == 0
            }
            Self::Many(bits) => {
                bits.iter_mut().zip(gone).for_each(|(word, gone)| *word &= !gone);
                self.settle()
            }
        }
    }

    /// `true`: nobody has it any more.
    fn remove(&mut self, worker: u16) -> bool {
        match self {
            Self::Few { num, workers } => {
                let known = &workers[..usize::from(*num)];
                if let Some(nth) = known.iter().position(|known| *known == worker) {
                    *num -= 1;
                    workers[nth] = workers[usize::from(*num)];
                }
                *num == 0
            }
            Self::Many(bits) => {
                let (word, bit) = place(worker);
                bits[word] &= !bit;
                self.settle()
            }
        }
    }

    /// After some were taken out of many: many that have become few are kept as such. `true`: nobody has it any more.
    fn settle(&mut self) -> bool {
        let Self::Many(bits) = self else { return false };
        let num = bits.iter().map(|word| word.count_ones()).sum::<u32>();
        // Half of a few, so that one worker that comes and goes does not move the entry each time.
        if num as usize <= FEW / 2 {
            let (mut few, mut num) = ([0; FEW], 0);
            each_bit(bits, &NONE, |worker| {
                few[num] = worker as u16;
                num += 1;
            });
            *self = Self::Few { num: num as u8, workers: few };
        }
        num == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_as_small_as_the_page_says() {
        assert_eq!(size_of::<(BlockHash, Holders)>(), 32);
        assert_eq!(size_of::<Bits>(), 256);
    }
}
