//! The demonstrations by name, in the order in which they build on one another.

use std::str::FromStr;

use crate::{LabError, Report, batching, block_table, breaking, cow, deadlock, memory, prefix, stall, users};

/// One idea, shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demonstration {
    /// Batches that wait for their slowest member, against a batch that is made anew each step.
    Batching,
    /// Three ways to hand out KV memory.
    Memory,
    /// From a token to its block.
    BlockTable,
    /// Several answers over one prompt's blocks.
    Cow,
    /// Prompts that begin alike.
    Prefix,
    /// What a long prompt does to replies under way.
    Stall,
    /// Everyone holds blocks and wants one more.
    Deadlock,
    /// A hundred users on one device, four ways.
    Users,
    /// Each mechanism taken away in turn.
    Break,
}

impl Demonstration {
    /// Every one, in the order in which a newcomer meets them.
    pub const ALL: [Self; 9] = [
        Self::Batching,
        Self::Memory,
        Self::BlockTable,
        Self::Cow,
        Self::Prefix,
        Self::Stall,
        Self::Deadlock,
        Self::Users,
        Self::Break,
    ];

    /// As it is typed.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Batching => "batching",
            Self::Memory => "memory",
            Self::BlockTable => "blocktable",
            Self::Cow => "cow",
            Self::Prefix => "prefix",
            Self::Stall => "stall",
            Self::Deadlock => "deadlock",
            Self::Users => "users",
            Self::Break => "break",
        }
    }

    /// What it shows, in one line.
    pub const fn summary(self) -> &'static str {
        match self {
            Self::Batching => {
                "a batch that waits for its slowest reply, against one that is made anew each step"
            }
            Self::Memory => "reserving the longest reply, reserving what was asked for, and paging",
            Self::BlockTable => "how a token finds its block, and what the last block wastes",
            Self::Cow => "five answers over one prompt's blocks, copied only where they part",
            Self::Prefix => "prompts that begin alike are computed once, by whole blocks",
            Self::Stall => "what a long prompt does to replies under way, and what moving it elsewhere costs",
            Self::Deadlock => "everyone holds blocks and wants one more: standstill, preemption, admission",
            Self::Users => "a hundred users on one device: static or continuous, contiguous or paged",
            Self::Break => "each mechanism taken away in turn, and what follows",
        }
    }

    /// Runs it.
    ///
    /// # Errors
    /// [`LabError`], for a bug in it or in what it shows.
    pub fn run(self) -> Result<Report, LabError> {
        match self {
            Self::Batching => batching::report(),
            Self::Memory => memory::report(),
            Self::BlockTable => block_table::report(),
            Self::Cow => cow::report(),
            Self::Prefix => prefix::report(),
            Self::Stall => stall::report(),
            Self::Deadlock => deadlock::report(),
            Self::Users => users::report(),
            Self::Break => breaking::report(),
        }
    }
}

impl FromStr for Demonstration {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|one| one.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("unknown demonstration '{text}': {names}")
        })
    }
}
