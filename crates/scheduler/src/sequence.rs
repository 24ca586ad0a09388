//! A sequence and the stages it passes. A stage owns its blocks, so a stage change consumes them and a finished
//! sequence can't keep any.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Duration;

use baton_kv::{BlockHash, BlockTable};

use crate::Time;
use crate::plan::{RowSampling, SamplingParams, SequenceId};

/// Where a sequence's KV comes from, and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Decode worker: computes the prompt itself, then decodes.
    Local,
    /// Prefill worker: computes the prompt, samples one token, then holds the blocks until they are handed off.
    Prefill,
    /// Decode worker: the KV arrives from a prefill worker.
    Remote,
}

/// What the shell hands in: one sequence, or a group that shares its prompt.
#[derive(Clone, Debug)]
pub struct NewSequence {
    /// Unique among live sequences. Until the prompt is computed, or committed, the whole group goes by it.
    pub id: SequenceId,
    /// Ids of the group's other sequences, unique too; empty for a sequence alone. From the fork on each goes by its own.
    pub siblings: Vec<SequenceId>,
    /// Where its KV comes from.
    pub origin: Origin,
    /// Prompt tokens, followed by tokens generated earlier when a stream is resumed.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Which of the request's sequences this is; siblings count on from it.
    pub sequence: u32,
    /// How many tokens at the end of `prompt` were generated before.
    pub num_generated: u32,
    /// Tokens still to generate, the first one included; at least 1.
    pub max_new_tokens: u32,
    /// Tokens that end the sequence.
    pub stop_tokens: Vec<u32>,
    /// Whether its blocks are looked up in, and added to, the prefix cache.
    pub cache: bool,
    /// Since the request was accepted, wherever that was.
    pub age: Duration,
    /// Lower is served earlier: a step of one counts as five seconds of age.
    pub priority: i32,
    /// It gave up its blocks somewhere and comes back.
    pub preempted: bool,
}

/// Why a sequence is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token was sampled.
    Stop,
    /// The token limit or the context was reached.
    Length,
}

/// The token that a prefill worker sampled, as the decode worker takes it over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FirstToken {
    /// Token id.
    pub token: u32,
    /// It already ended the sequence.
    pub finished: bool,
}

/// Who goes first: the smallest is served first, the largest gives up its blocks first. No two are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// When the request was accepted, on this scheduler's clock, moved by its priority; microseconds.
    pub(crate) us: i64,
    /// Order of submission here.
    pub(crate) order: u64,
    /// Siblings, by number.
    pub(crate) sequence: u32,
}

impl Rank {
    const PRIORITY_US: i64 = 5_000_000;

    pub(crate) fn new(new: &NewSequence, order: u64, now: Time) -> Self {
        let us = |time: Time| i64::try_from(time.as_micros()).unwrap_or(i64::MAX / 4);
        let us = us(now) - us(new.age) + i64::from(new.priority) * Self::PRIORITY_US;
        Self { us, order, sequence: new.sequence }
    }
}

/// One of a group's other sequences, before the fork.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sibling {
    pub(crate) id: SequenceId,
    /// Which of the request's sequences it is.
    pub(crate) sequence: u32,
}

/// A sequence without blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Local: in line for admission. Prefill: in line to be offered.
    Queued,
    /// Prefill: offered, the destination has not answered.
    Offered,
    /// Prefill: the destination has room; may be opened.
    Granted,
    /// Remote: no offer has come yet.
    AwaitingOffer,
    /// Remote: offered; in line for admission.
    Reserving,
}

#[derive(Debug)]
pub(crate) enum Stage {
    Waiting(Wait),
    /// `computed` tokens are in the blocks.
    Prefilling {
        table: BlockTable,
        computed: usize,
    },
    /// Prompt computed, waiting for the destination.
    Held {
        table: BlockTable,
    },
    Receiving {
        table: BlockTable,
    },
    /// All tokens but the last are in the blocks, and the first so many layers of the last one where it is computed in parts.
    Running {
        table: BlockTable,
        layers_done: usize,
    },
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) origin: Origin,
    /// Prompt and everything generated so far.
    pub(crate) tokens: Vec<u32>,
    /// Length of the prompt as the client gave it.
    pub(crate) prompt_len: usize,
    pub(crate) sampling: SamplingParams,
    pub(crate) sequence: u32,
    /// The rest of its group; empty from the fork on.
    pub(crate) siblings: Vec<Sibling>,
    /// Length at which the sequence ends.
    pub(crate) max_len: usize,
    pub(crate) stop_tokens: Vec<u32>,
    pub(crate) use_cache: bool,
    /// Hashes of its full blocks, as far as they are known; empty without the cache.
    pub(crate) hashes: Vec<BlockHash>,
    /// Leading blocks that the prefix cache knows.
    pub(crate) num_cached: usize,
    /// Leading blocks that were found there when the sequence was last given blocks.
    pub(crate) num_hits: usize,
    pub(crate) rank: Rank,
    /// It gave up its blocks, here or elsewhere, and has none yet.
    pub(crate) preempted: bool,
    /// Below this length only the oldest may take its blocks: it came back from preemption.
    pub(crate) kept_until: usize,
    /// Below this length its tokens may be computed in parts.
    pub(crate) eased_until: usize,
    /// When it first stood at the head of the line.
    pub(crate) head_since: Option<Time>,
    /// Sequences that were admitted while it stood there.
    pub(crate) num_passed: u32,
    pub(crate) started: bool,
    pub(crate) stage: Stage,
}

/// Memory for this many more tokens is taken at once, so that steps allocate none; beyond it grows as vectors do.
const RESERVED_TOKENS: usize = 8192;

impl Sequence {
    /// How the next token is drawn for one of the request's sequences.
    pub(crate) fn row_sampling(&self, sequence: u32) -> RowSampling {
        let position = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
        RowSampling { params: self.sampling, sequence, position }
    }

    /// How it is drawn for this sequence and for each sibling.
    pub(crate) fn samplings(&self) -> impl Iterator<Item = RowSampling> {
        let numbers = std::iter::once(self.sequence).chain(self.siblings.iter().map(|s| s.sequence));
        numbers.map(|sequence| self.row_sampling(sequence))
    }

    /// Sequences that go by this one's id.
    pub(crate) const fn num_sequences(&self) -> usize {
        1 + self.siblings.len()
    }

    /// Tokens it will add, for which memory is taken at once.
    pub(crate) fn reserved_tokens(&self) -> usize {
        self.tokens_left().min(RESERVED_TOKENS)
    }

    /// Another sequence over the same blocks, which are shared from here on, as far as `table` reaches.
    pub(crate) fn fork(&self, sibling: Sibling, table: BlockTable) -> Self {
        let mut tokens = Vec::with_capacity(self.tokens.len() + self.reserved_tokens());
        tokens.extend_from_slice(&self.tokens);
        let mut hashes = Vec::with_capacity(self.hashes.capacity());
        hashes.extend_from_slice(&self.hashes);
        Self {
            id: sibling.id,
            origin: self.origin,
            tokens,
            prompt_len: self.prompt_len,
            sampling: self.sampling,
            sequence: sibling.sequence,
            siblings: Vec::new(),
            max_len: self.max_len,
            stop_tokens: self.stop_tokens.clone(),
            use_cache: self.use_cache,
            hashes,
            num_cached: self.num_cached,
            num_hits: self.num_hits,
            rank: Rank { sequence: sibling.sequence, ..self.rank },
            preempted: false,
            kept_until: self.kept_until,
            eased_until: self.eased_until,
            head_since: None,
            num_passed: 0,
            started: true,
            stage: Stage::Running { table, layers_done: 0 },
        }
    }

    /// Tokens that may still be generated.
    pub(crate) fn tokens_left(&self) -> usize {
        self.max_len.saturating_sub(self.tokens.len())
    }

    /// Appends a token; says whether it ends the sequence.
    pub(crate) fn push(&mut self, token: u32) -> Option<Finish> {
        let finish = self.would_end(token);
        self.tokens.push(token);
        finish
    }

    /// Whether `token` as the next one ends the sequence.
    pub(crate) fn would_end(&self, token: u32) -> Option<Finish> {
        if self.stop_tokens.contains(&token) {
            Some(Finish::Stop)
        } else if self.tokens.len() + 1 >= self.max_len {
            Some(Finish::Length)
        } else {
            None
        }
    }

    /// Index of the next token among the request's generated ones.
    pub(crate) fn next_index(&self) -> u32 {
        u32::try_from(self.tokens.len() - self.prompt_len).unwrap_or(u32::MAX)
    }

    /// Tokens whose KV is in the blocks.
    pub(crate) fn num_computed(&self) -> usize {
        match &self.stage {
            Stage::Waiting(_) | Stage::Receiving { .. } => 0,
            Stage::Prefilling { computed, .. } => *computed,
            Stage::Held { .. } => self.tokens.len(),
            Stage::Running { .. } => self.tokens.len() - 1,
        }
    }

    pub(crate) fn table(&self) -> Option<&BlockTable> {
        match &self.stage {
            Stage::Waiting(_) => None,
            Stage::Prefilling { table, .. }
            | Stage::Held { table }
            | Stage::Receiving { table }
            | Stage::Running { table, .. } => Some(table),
        }
    }

    pub(crate) fn table_mut(&mut self) -> Option<&mut BlockTable> {
        match &mut self.stage {
            Stage::Waiting(_) => None,
            Stage::Prefilling { table, .. }
            | Stage::Held { table }
            | Stage::Receiving { table }
            | Stage::Running { table, .. } => Some(table),
        }
    }

    pub(crate) fn holds_blocks(&self) -> bool {
        !matches!(self.stage, Stage::Waiting(_))
    }
}

/// Live sequences by id.
pub(crate) type Sequences = HashMap<SequenceId, Sequence, BuildHasherDefault<IdHasher>>;

/// Ids are counters of the shell, not chosen by clients, so one multiplication spreads them well enough; a step looks
/// each sequence up several times.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, id: u64) {
        #[cfg(test)]
        tests::NUM_LOOKUPS.with(|num| num.update(|num| num + 1));
        // 2^64 / golden ratio; the table takes its bucket from the low bits and its tag from the high ones.
        self.0 = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    thread_local! {
        /// How often this thread looked for a sequence by its id: what work with sequences costs, without a clock.
        pub(crate) static NUM_LOOKUPS: Cell<usize> = const { Cell::new(0) };
    }
}
