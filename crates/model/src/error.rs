//! What can go wrong with a model, named for what the caller does next.

use std::path::{Path, PathBuf};

/// Why a model can't be named, fetched or opened. Every message is one line that a user can act on.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The text given as a model name means nothing; the user types another.
    #[error("model '{name}': {reason}")]
    InvalidName {
        /// What was typed.
        name: String,
        /// What is wrong with it, and what is accepted.
        reason: String,
    },
    /// Nothing lies at this path; the user corrects the path.
    #[error("no model file at {}", path.display())]
    NotFound {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// A program needed for the download is not installed.
    #[error("{tool} is needed to fetch the default model: install it, or pass --model PATH with a GGUF file")]
    MissingTool {
        /// The program, as a package manager would know it.
        tool: String,
    },
    /// The model is not in the cache and fetching is not allowed.
    #[error("model '{name}' is not in {} and fetching is off", cache_dir.display())]
    Offline {
        /// The model's name.
        name: String,
        /// The folder that was searched.
        cache_dir: PathBuf,
    },
    /// Fetching failed; trying again may help. What was fetched so far is kept where it can be resumed.
    #[error("fetching {what}: {reason}")]
    Download {
        /// What was being fetched.
        what: String,
        /// The cause, in one line.
        reason: String,
    },
    /// Several files fit the name; the user picks one.
    #[error("'{what}' holds {} GGUF files, name one: {}", files.len(), files.join(", "))]
    Ambiguous {
        /// The repository or folder.
        what: String,
        /// The files that fit.
        files: Vec<String>,
    },
    /// The file is damaged or is not what it claims to be; fetching it anew may help.
    #[error("{}: {reason}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        reason: String,
    },
    /// The file is sound, but this program can't run it.
    #[error("{}: {what}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The feature by name, and what is supported.
        what: String,
    },
    /// A number in the file is beyond what this program accepts.
    #[error("{}: {field} is {value}, the limit is {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The field that is too large.
        field: String,
        /// Its value.
        value: u64,
        /// The largest value accepted.
        limit: u64,
    },
    /// The operating system refused.
    #[error("can't {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb: "open", "create", ...
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl ModelError {
    pub(crate) fn corrupt(path: &Path, reason: impl Into<String>) -> ModelError {
        ModelError::Corrupt { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn unsupported(path: &Path, what: impl Into<String>) -> ModelError {
        ModelError::Unsupported { path: path.to_owned(), what: what.into() }
    }

    pub(crate) fn download(what: impl Into<String>, reason: impl Into<String>) -> ModelError {
        ModelError::Download { what: what.into(), reason: reason.into() }
    }

    /// For `map_err`: wraps the system's reason with what was tried on which path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> ModelError {
        let path = path.to_owned();
        move |source| ModelError::Io { action, path, source }
    }
}
