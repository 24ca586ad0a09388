//! Why a demonstration could not be shown.

use baton_scheduler::{EngineError, Refusal};

/// Each of these is a bug, of the demonstration or of what it demonstrates: nothing here comes from a user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabError {
    /// The scheduler did not accept a sequence.
    #[error("sequence {id} was refused: {refusal}")]
    Refused {
        /// The sequence.
        id: u64,
        /// Why.
        refusal: Refusal,
    },
    /// The engine did not take a plan.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Sequences are left and none goes on, where all must end.
    #[error("{what}: no step can be planned, but {num_left} sequences are left")]
    Standstill {
        /// What was being shown.
        what: &'static str,
        /// Sequences that are not over.
        num_left: usize,
    },
    /// Blocks don't add up, or a token is not the one that an undisturbed run gives.
    #[error("{what}: {why}")]
    Broken {
        /// What was being shown.
        what: &'static str,
        /// What does not hold.
        why: String,
    },
}
