//! What is sent when: requests that arrive, and streams that decode beside them. A plain value, so that clusters, simulated and
//! real ones, can be loaded alike.

mod pace;
mod random;
mod trace;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

pub use pace::{Gaps, MAX_ARRIVALS, Pace, TooMany, UniqueShape, unique_arrivals};
pub use random::Random;
pub use trace::{TRACE_BLOCK_TOKENS, TraceLine, TraceShape, made_trace, reused_tokens};

/// One request that arrives.
#[derive(Debug, Clone, PartialEq)]
pub struct Arrival {
    /// When, from the first moment of arrivals on.
    pub at: Duration,
    /// What it asks about.
    pub prompt: Prompt,
    /// Tokens it asks for; at least 1.
    pub output_tokens: u32,
}

/// A prompt, told shortly: its tokens are made when it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Unlike any other from its first block on.
    Unique {
        /// Which one.
        nth: u64,
        /// Its length; at least 1.
        tokens: u32,
    },
    /// Blocks by name: the same name stands for the same tokens, so that prompts share what their traces say they share.
    Blocks {
        /// Names of the blocks, in order.
        ids: Vec<u64>,
        /// Tokens of a whole block; the last one may be shorter.
        block: u32,
        /// Tokens of all.
        tokens: u32,
    },
}

impl Prompt {
    /// Its length in tokens.
    pub const fn num_tokens(&self) -> u32 {
        match self {
            Self::Unique { tokens, .. } | Self::Blocks { tokens, .. } => *tokens,
        }
    }
}

/// The background: none, or so many streams, each started again when it ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streams {
    /// How many.
    pub num: u32,
    /// Tokens of each one's prompt; at least 1.
    pub prompt_tokens: u32,
    /// Tokens of each; at least 1.
    pub output_tokens: u32,
}

/// Tokens of a stream's `turn`: `whole`, but less in the first turn, so that of `num` streams one ends after the other. If all began and ended together,
/// steps would grow with all their contexts at once, and their prompts would meet.
pub const fn turn_tokens(whole: u32, (stream, num): (u32, u32), turn: u64) -> u32 {
    if turn > 0 || num == 0 {
        return whole;
    }
    let share = (whole as u64 * (stream as u64 + 1)).div_ceil(num as u64);
    share as u32
}

/// Everything that one run sends.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Workload {
    /// Streams that decode all the time until the last arrival is answered.
    pub streams: Streams,
    /// Time that the streams run alone first, once each has its first token.
    pub quiet: Duration,
    /// Requests that arrive, by time.
    pub arrivals: Vec<Arrival>,
}

impl Workload {
    /// Tokens of the longest prompt and answer together; 0 without any.
    pub fn longest(&self) -> usize {
        let of = |arrival: &Arrival| arrival.prompt.num_tokens() as usize + arrival.output_tokens as usize;
        let stream = self.streams.prompt_tokens as usize + self.streams.output_tokens as usize;
        let streams = if self.streams.num > 0 { stream } else { 0 };
        self.arrivals.iter().map(of).max().unwrap_or(0).max(streams)
    }
}

/// A length in tokens, or a range of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// Smallest; at least 1.
    pub low: u32,
    /// Largest; equal to `low` for a fixed length.
    pub high: u32,
}

impl Lengths {
    /// Always the same.
    pub const fn exactly(tokens: u32) -> Self {
        Self { low: tokens, high: tokens }
    }
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        match (low.trim().parse(), high.trim().parse()) {
            (Ok(low), Ok(high)) if 1 <= low && low <= high => Ok(Self { low, high }),
            _ => Err("a number of tokens from 1 up, or LOW-HIGH".to_owned()),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.low == self.high {
            write!(f, "{}", self.low)
        } else {
            write!(f, "{}-{}", self.low, self.high)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_a_number_or_a_range() {
        assert_eq!("7".parse(), Ok(Lengths { low: 7, high: 7 }));
        assert_eq!("7-9".parse(), Ok(Lengths { low: 7, high: 9 }));
        for text in ["", "0", "9-7", "-3", "3-", "x"] {
            assert!(text.parse::<Lengths>().is_err(), "{text}");
        }
        assert_eq!(
            (Lengths::exactly(3).to_string(), Lengths { low: 3, high: 4 }.to_string()),
            ("3".into(), "3-4".into())
        );
    }
}
