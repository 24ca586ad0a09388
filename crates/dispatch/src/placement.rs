//! Where a request runs: the question, the answer, and how the answer is found.

use std::fmt;
use std::str::FromStr;

use baton_handoff::InstanceId;
use baton_kv::BlockHash;

/// What a request needs of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Need<'a> {
    /// Tokens of the prompt, forced ones included.
    pub prompt_tokens: u32,
    /// Tokens to generate at most, for each sequence.
    pub max_new_tokens: u32,
    /// Sequences to generate; they share the prompt's blocks.
    pub num_sequences: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// KV of a token, all layers together.
    pub kv_bytes_per_token: u64,
    /// Requests waiting on a worker from which on it gets no more.
    pub max_waiting: u32,
    /// Workers that failed this request.
    pub avoid: &'a [InstanceId],
    /// Of the prompt's full blocks, in order; empty when the request uses no cache.
    pub hashes: &'a [BlockHash],
}

impl Need<'_> {
    pub(crate) fn prompt_blocks(&self) -> u64 {
        u64::from(self.prompt_tokens).div_ceil(self.block_tokens())
    }

    /// The most that it can come to hold: sequences share the prompt's full blocks, and each has the rest to itself.
    pub(crate) fn most_blocks(&self) -> u64 {
        let tokens = u64::from(self.prompt_tokens) + u64::from(self.max_new_tokens);
        let shared = u64::from(self.prompt_tokens) / self.block_tokens();
        let own = tokens.div_ceil(self.block_tokens()) - shared;
        shared + u64::from(self.num_sequences.max(1)) * own
    }

    fn block_tokens(&self) -> u64 {
        u64::from(self.block_size.max(1))
    }
}

/// How the fleet is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Prefill and decode on separate workers.
    Disaggregated,
    /// Decode workers do everything: the baseline.
    Colocated,
}

/// How workers are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// By expected cost: cached blocks, queues, links and load.
    #[default]
    KvAware,
    /// Those with the fewest requests.
    LeastLoaded,
    /// One after the other.
    RoundRobin,
    /// The less loaded of two drawn at random.
    RandomOfTwo,
}

impl Policy {
    /// Every policy, for help texts and comparisons.
    pub const ALL: [Self; 4] = [Self::KvAware, Self::LeastLoaded, Self::RoundRobin, Self::RandomOfTwo];

    /// A stable name for options, metrics and spans.
    pub const fn name(self) -> &'static str {
        match self {
            Self::KvAware => "kv-aware",
            Self::LeastLoaded => "least-loaded",
            Self::RoundRobin => "round-robin",
            Self::RandomOfTwo => "random-of-two",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Choose one of the names that the message lists.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no placement policy: kv-aware, least-loaded, round-robin or random-of-two")]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// How a request runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Prefill and decode on separate workers.
    Disaggregated,
    /// On one worker although the layout is disaggregated.
    Local,
    /// On one worker by layout.
    Colocated,
}

impl Mode {
    /// A stable name for metrics, headers and spans.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disaggregated => "disaggregated",
            Self::Local => "local",
            Self::Colocated => "colocated",
        }
    }
}

/// Where a request runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placement {
    /// `index` of the decode worker.
    pub decode: usize,
    /// `index` of the prefill worker.
    pub prefill: Option<usize>,
    /// How.
    pub mode: Mode,
    /// Why, for people and metrics: "cost" (prefill on another worker is cheapest), "short_prompt" and "slow_link" (local is cheaper),
    /// "no_prefill_worker", "colocated", or "policy" when the policy knows no costs.
    pub reason: &'static str,
    /// Leading tokens of the prompt that the prefill worker has cached; 0 without one.
    pub prefill_hit_tokens: u32,
    /// Leading tokens of the prompt that the decode worker has cached.
    pub decode_hit_tokens: u32,
    /// What it is expected to cost, as [`crate::Placer`] counts: time to the first steps of decoding and what
    /// the request's presence takes.
    pub expected_ms: f64,
}

/// Why a request can't be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum PlaceError {
    /// Wait for one, or fail as unavailable.
    #[error("no decode worker is ready")]
    NoWorker,
    /// Shed.
    #[error("every decode worker has a full queue")]
    Saturated,
    /// Refuse: it can never fit.
    #[error("the request needs more KV blocks than any ready decode worker has")]
    TooLarge,
}
