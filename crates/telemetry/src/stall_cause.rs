//! Why a running sequence waited for its token: the words that spans and metrics carry.

/// Why a gap between two tokens was longer than decoding alone explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StallCause {
    /// A prompt of another request was computed in the same step.
    LocalPrefill,
    /// The sequence had given up its blocks itself.
    Preemption,
    /// Another sequence that came back was computed again.
    Resume,
    /// Blocks were copied.
    Copy,
    /// Nothing known.
    SlowStep,
}

impl StallCause {
    /// A stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::LocalPrefill => "local_prefill",
            Self::Preemption => "preemption",
            Self::Resume => "resume",
            Self::Copy => "copy",
            Self::SlowStep => "slow_step",
        }
    }
}
