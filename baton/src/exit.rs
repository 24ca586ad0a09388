//! How a command ends: one line for the user and a code for scripts.

use std::process::ExitCode;

use baton_model::ModelError;

/// Why a command failed, named by what whoever started it does next.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// Nothing the user could have typed differently; report it.
    #[error("{0}")]
    Unexpected(String),
    /// An option, the environment or the configuration file is wrong; correct it.
    #[error("{0}")]
    Usage(String),
    /// A port or an address can't be had; choose another or stop who holds it.
    #[error("{0}")]
    Bind(String),
    /// The model does not exist or can't be run; choose another.
    #[error("{0}")]
    Model(String),
    /// A program for the download is missing or the download failed; install it or try again.
    #[error("{0}")]
    Fetch(String),
    /// The machine or container has too little memory; ask for less.
    #[error("{0}")]
    Memory(String),
    /// A worker or the router did not start or kept dying; read its last lines.
    #[error("{0}")]
    Worker(String),
    /// The user asked twice to stop.
    #[error("stopped at once")]
    Interrupted,
    /// A child of `up` ended with one of the codes above; its own line was shown.
    #[error("{line}")]
    Child {
        /// What `up` has to say about it.
        line: String,
        /// The child's code, which `up` ends with too.
        code: u8,
    },
}

impl Failure {
    /// The process exit code; the table users read is [`TABLE`].
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Unexpected(_) => 1,
            Self::Usage(_) => 2,
            Self::Bind(_) => 3,
            Self::Model(_) => 4,
            Self::Fetch(_) => 5,
            Self::Memory(_) => 6,
            Self::Worker(_) => 7,
            Self::Interrupted => 130,
            Self::Child { code, .. } => *code,
        }
    }

    /// Whether a child that ends with this code would end the same way if it were started again.
    pub(crate) fn is_final(code: i32) -> bool {
        matches!(code, 2 | 4 | 5 | 6)
    }

    /// Shows the line on standard error and turns into the process's code.
    pub(crate) fn report(&self) -> ExitCode {
        eprintln!("baton: {self}");
        ExitCode::from(self.code())
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        let line = error.to_string();
        match error {
            ModelError::MissingTool { .. } | ModelError::Download { .. } | ModelError::Offline { .. } => {
                Self::Fetch(line)
            }
            _ => Self::Model(line),
        }
    }
}

/// Exit codes as the help shows them.
pub(crate) const TABLE: &str = "\
Exit codes:
    0  done; for `up` and the roles also: stopped cleanly by Ctrl-C or SIGTERM
    1  unexpected failure
    2  wrong option, environment variable or configuration file
    3  a port is in use or an address can't be bound
    4  the model was not found or can't be run
    5  a tool for the download is missing, or the download failed
    6  not enough memory
    7  a worker or the router failed to start, or kept dying
  130  stopped at once by a second Ctrl-C; a comparison: by the first";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_lists_every_code_once() {
        let failures = [
            Failure::Unexpected(String::new()),
            Failure::Usage(String::new()),
            Failure::Bind(String::new()),
            Failure::Model(String::new()),
            Failure::Fetch(String::new()),
            Failure::Memory(String::new()),
            Failure::Worker(String::new()),
            Failure::Interrupted,
        ];
        for failure in failures {
            let start = format!("{:>5}  ", failure.code());
            assert_eq!(TABLE.lines().filter(|line| line.starts_with(&start)).count(), 1, "{failure:?}");
        }
    }

    #[test]
    fn a_missing_tool_is_not_a_bad_model() {
        let tool = ModelError::MissingTool { tool: "python3".to_owned() };
        assert_eq!(Failure::from(tool).code(), 5);
        let path = ModelError::NotFound { path: "/x.gguf".into() };
        assert_eq!(Failure::from(path).code(), 4);
    }
}
