//! What can go wrong before and while a worker runs, named for what the caller does next.

use std::net::SocketAddr;
use std::path::PathBuf;

use baton_engine::EngineBuildError;
use baton_model::ModelError;

/// Why a worker could not start or had to stop. Every message is one line for a user.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// An option's value can't be used: the user changes it.
    #[error("{option}: {reason}")]
    Config {
        /// The option as it is typed.
        option: &'static str,
        /// What is wrong, with the limit.
        reason: String,
    },
    /// The listen address can't be had: the user picks another or stops who has it.
    #[error("can't listen on {address}: {source}; change it with {option}")]
    Bind {
        /// What was asked for.
        address: SocketAddr,
        /// The option that changes it.
        option: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The model can't be had or used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model is sound and the engine can't run it, or not as asked: the user chooses another.
    #[error("{0}")]
    Unsupported(String),
    /// There is too little memory: the user lowers what is asked for.
    #[error("{0}")]
    Memory(String),
    /// The model executor refused to start, or failed while it ran.
    #[error("engine: {0}")]
    Engine(String),
    /// A file or a thread could not be made: the user looks at the system.
    #[error("can't {action}: {source}")]
    System {
        /// What was tried, with its object.
        action: String,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl WorkerError {
    pub(crate) fn config(option: &'static str, reason: impl Into<String>) -> Self {
        Self::Config { option, reason: reason.into() }
    }

    /// For `map_err`: wraps the system's reason with what was tried.
    pub(crate) fn system(action: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let action = action.into();
        move |source| Self::System { action, source }
    }

    pub(crate) fn file(verb: &str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path: PathBuf = path.to_owned();
        Self::system(format!("{verb} {}", path.display()))
    }
}

impl From<EngineBuildError> for WorkerError {
    fn from(error: EngineBuildError) -> Self {
        let line = error.to_string();
        match error {
            EngineBuildError::Model(error) => Self::Model(error),
            EngineBuildError::OutOfMemory { .. } => Self::Memory(line),
            EngineBuildError::IsaUnavailable { .. } => Self::config("--isa", line),
            EngineBuildError::Device(_) => Self::config("--device", line),
            EngineBuildError::UnsupportedModel { .. } | EngineBuildError::BadTensor { .. } => {
                Self::Unsupported(line)
            }
            EngineBuildError::InvalidConfig { .. } | EngineBuildError::Threads(_) => Self::Engine(line),
        }
    }
}
