//! The clusters that are compared: the same two cores, divided in different ways.

use serde::{Deserialize, Serialize};

/// One way to divide two cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// A prefill worker and a decode worker, a thread each.
    Disaggregated,
    /// Workers that each compute prompts and decode.
    Colocated {
        /// How the cores are divided.
        split: Split,
        /// Prompt tokens beside decoding ones in a step; `None`: a prompt in one piece.
        chunk: Option<u32>,
    },
}

/// How colocated workers divide two cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Split {
    /// Two workers of one thread.
    #[serde(rename = "2x1")]
    TwoByOne,
    /// One worker of two threads.
    #[serde(rename = "1x2")]
    OneByTwo,
}

impl Split {
    /// Both.
    pub(super) const ALL: [Self; 2] = [Self::TwoByOne, Self::OneByTwo];

    /// Workers x threads of each.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::TwoByOne => "2x1",
            Self::OneByTwo => "1x2",
        }
    }
}

/// Room in a step beside a prompt: as many sequences as a worker holds by default, and more.
const OTHER_TOKENS: u32 = 256;
/// Tokens of a step unless a chunk needs more: `up`'s own default.
const STEP_TOKENS: u32 = 512;
/// The most that a step may take where nothing shall be cut, in milliseconds: the option's limit.
const UNBOUNDED_STEP_MS: u32 = 60_000;
/// The most tokens of a step that can be asked for.
const MAX_STEP_TOKENS: u32 = 65_536;

/// How a cluster of this layout is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Start {
    /// Arguments of `up`.
    pub(super) arguments: Vec<String>,
    /// Variables for its children: options that `up` does not have.
    pub(super) environment: Vec<(&'static str, String)>,
}

/// How much of prompts a step of a cluster takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Prompt tokens beside decoding ones; `None`: as by default, since prefill workers see to prompts.
    pub(crate) piece: Option<u32>,
    /// Tokens of a step.
    pub(crate) step_tokens: u32,
    /// Expected milliseconds of a step; `None`: as by default.
    pub(crate) step_ms: Option<u32>,
}

impl Layout {
    /// How its steps are bounded, for prompts of at most `longest` tokens.
    pub(crate) fn limits(self, longest: u32) -> Limits {
        let Self::Colocated { chunk, .. } = self else {
            return Limits { piece: None, step_tokens: STEP_TOKENS, step_ms: None };
        };
        // What is longer than a step can be is cut all the same.
        let piece = chunk.unwrap_or(longest).clamp(16, MAX_STEP_TOKENS - OTHER_TOKENS);
        // So that it is cut by tokens alone.
        let step_ms = Some(UNBOUNDED_STEP_MS);
        Limits { piece: Some(piece), step_tokens: (piece + OTHER_TOKENS).max(STEP_TOKENS), step_ms }
    }

    /// What it is called in tables.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Disaggregated => "disaggregated".to_owned(),
            Self::Colocated { split, chunk: Some(chunk) } => format!("{}, chunks of {chunk}", split.name()),
            Self::Colocated { split, chunk: None } => format!("{}, in one piece", split.name()),
        }
    }

    /// How to start it, for prompts of at most `longest` tokens.
    pub(super) fn start(self, longest: u32) -> Start {
        let mut arguments: Vec<String> = Vec::new();
        let mut environment = Vec::new();
        let (workers, threads) = match self {
            Self::Disaggregated | Self::Colocated { split: Split::TwoByOne, .. } => ([1, 1], 1),
            Self::Colocated { split: Split::OneByTwo, .. } => ([0, 1], 2),
        };
        arguments.push(format!("--prefill-workers={}", workers[0]));
        arguments.push(format!("--decode-workers={}", workers[1]));
        arguments.push(format!("--threads={threads}"));
        let Limits { piece, step_tokens, step_ms } = self.limits(longest);
        if let Some(piece) = piece {
            arguments.push("--colocated".to_owned());
            arguments.push(format!("--max-step-tokens={step_tokens}"));
            arguments.extend(step_ms.map(|ms| format!("--max-step-ms={ms}")));
            environment.push(("BATON_LOCAL_PREFILL_TOKENS", piece.to_string()));
        }
        Start { arguments, environment }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    #[test]
    fn every_layout_is_a_command_line_that_up_takes_and_uses_both_cores() {
        let colocated = Split::ALL.map(|split| [None, Some(128), Some(4096)].map(|chunk| (split, chunk)));
        let colocated = colocated.concat().into_iter();
        let colocated = colocated.map(|(split, chunk)| Layout::Colocated { split, chunk });
        for layout in std::iter::once(Layout::Disaggregated).chain(colocated) {
            let start = layout.start(2048);
            let line = ["baton", "up"].map(OsString::from).into_iter();
            let line: Vec<OsString> = line.chain(start.arguments.iter().map(OsString::from)).collect();
            assert!(crate::cli::parse(&line).is_ok(), "{line:?}");
            let value = |name: &str| -> u32 {
                let found = start.arguments.iter().find_map(|argument| argument.strip_prefix(name));
                found.unwrap().parse().unwrap()
            };
            let workers = value("--prefill-workers=") + value("--decode-workers=");
            assert_eq!(workers * value("--threads="), 2, "{}", layout.name());
        }
    }

    #[test]
    fn a_prompt_in_one_piece_fits_one_step() {
        let start = Layout::Colocated { split: Split::TwoByOne, chunk: None }.start(2048);
        assert_eq!(start.environment, [("BATON_LOCAL_PREFILL_TOKENS", "2048".to_owned())]);
        assert!(start.arguments.contains(&"--max-step-tokens=2304".to_owned()), "{start:?}");
        let chunked = Layout::Colocated { split: Split::OneByTwo, chunk: Some(128) }.start(2048);
        assert_eq!(chunked.environment, [("BATON_LOCAL_PREFILL_TOKENS", "128".to_owned())]);
        assert!(chunked.arguments.contains(&"--max-step-tokens=512".to_owned()), "{chunked:?}");
        let giant = Layout::Colocated { split: Split::TwoByOne, chunk: None }.start(100_000);
        assert!(giant.arguments.contains(&"--max-step-tokens=65536".to_owned()), "{giant:?}");
        assert_eq!(giant.environment, [("BATON_LOCAL_PREFILL_TOKENS", "65280".to_owned())]);
        assert_eq!(Layout::Disaggregated.start(2048).environment, []);
    }
}
