//! What a run is made of.

use std::fmt;
use std::str::FromStr;

use crate::Shape;

/// Which faults are injected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Faults {
    /// None.
    None,
    /// Delays, partitions, lost connections, damaged and repeated messages, lost statuses, cancels; killed, paused and drained
    /// workers; killed routers.
    #[default]
    All,
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::All => "all",
        })
    }
}

impl FromStr for Faults {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "all" => Ok(Self::All),
            _ => Err(format!("unknown faults '{text}': none or all")),
        }
    }
}

/// One run; equal configurations give equal runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SimConfig {
    /// Everything random follows from it.
    pub seed: u64,
    /// Which faults are injected.
    pub faults: Faults,
    /// The cluster; `None`: drawn by the seed.
    pub shape: Option<Shape>,
}

impl SimConfig {
    /// What runs it again, for people.
    pub(crate) fn again(&self) -> String {
        match self.shape {
            None => format!("baton sim --runs 1 --seed {} --faults {}", self.seed, self.faults),
            Some(_) => format!("the same cluster and load with seed {}", self.seed),
        }
    }
}
