//! A sequence and the stages it passes. A stage owns its blocks, so a stage change consumes them and a finished
//! sequence can't keep any.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

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

/// What the shell hands in.
#[derive(Clone, Debug)]
pub struct NewSequence {
    /// Unique among live sequences.
    pub id: SequenceId,
    /// Where its KV comes from.
    pub origin: Origin,
    /// Prompt tokens, followed by tokens generated earlier when a stream is resumed.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Which of the request's sequences this is.
    pub sequence: u32,
    /// How many tokens at the end of `prompt` were generated before.
    pub num_generated: u32,
    /// Tokens still to generate, the first one included; at least 1.
    pub max_new_tokens: u32,
    /// Tokens that end the sequence.
    pub stop_tokens: Vec<u32>,
    /// Whether its blocks are looked up in, and added to, the prefix cache.
    pub cache: bool,
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
    /// All tokens but the last are in the blocks.
    Running {
        table: BlockTable,
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
    /// Order of acceptance: smaller is older.
    pub(crate) age: u64,
    pub(crate) accepted: Time,
    pub(crate) started: bool,
    pub(crate) stage: Stage,
}

impl Sequence {
    pub(crate) fn row_sampling(&self) -> RowSampling {
        RowSampling {
            params: self.sampling,
            sequence: self.sequence,
            position: u32::try_from(self.tokens.len()).unwrap_or(u32::MAX),
        }
    }

    /// Tokens that may still be generated.
    pub(crate) fn tokens_left(&self) -> usize {
        self.max_len.saturating_sub(self.tokens.len())
    }

    /// Appends a token; says whether it ends the sequence.
    pub(crate) fn push(&mut self, token: u32) -> Option<Finish> {
        self.tokens.push(token);
        if self.stop_tokens.contains(&token) {
            Some(Finish::Stop)
        } else if self.tokens.len() >= self.max_len {
            Some(Finish::Length)
        } else {
            None
        }
    }

    /// Index of the newest token among the request's generated ones.
    pub(crate) fn newest_index(&self) -> u32 {
        u32::try_from(self.tokens.len() - self.prompt_len - 1).unwrap_or(u32::MAX)
    }

    /// Tokens whose KV is in the blocks.
    pub(crate) fn num_computed(&self) -> usize {
        match &self.stage {
            Stage::Waiting(_) | Stage::Receiving { .. } => 0,
            Stage::Prefilling { computed, .. } => *computed,
            Stage::Held { .. } | Stage::Running { .. } => self.tokens.len() - 1,
        }
    }

    pub(crate) fn table_mut(&mut self) -> Option<&mut BlockTable> {
        match &mut self.stage {
            Stage::Waiting(_) => None,
            Stage::Prefilling { table, .. }
            | Stage::Held { table }
            | Stage::Receiving { table }
            | Stage::Running { table } => Some(table),
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
        // 2^64 / golden ratio; the table takes its bucket from the low bits and its tag from the high ones.
        self.0 = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}
