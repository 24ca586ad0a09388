//! What keeps a router from starting or running, named for what the caller does next.

use std::net::SocketAddr;
use std::path::Path;

use baton_model::ModelError;
use baton_text::TextError;

/// Why a router could not start or had to stop. Every message is one line for a user.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
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
    /// The model's tokenizer can't be used: the user picks another model.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A file, a task or a socket failed: the user looks at the system.
    #[error("can't {action}: {source}")]
    System {
        /// What was tried, with its object.
        action: String,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl RouterError {
    pub(crate) fn config(option: &'static str, reason: impl Into<String>) -> Self {
        Self::Config { option, reason: reason.into() }
    }

    /// For `map_err`: wraps the system's reason with what was tried.
    pub(crate) fn system(action: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let action = action.into();
        move |source| Self::System { action, source }
    }

    /// For `map_err`: a file that can't be used.
    pub(crate) fn file(verb: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        Self::system(format!("{verb} {}", path.display()))
    }
}
