//! What can go wrong while an engine is built.

use baton_model::ModelError;

use crate::kernels::Isa;

/// Why an engine can't be built. Every message is one line that a user can act on.
#[derive(Debug, thiserror::Error)]
pub enum EngineBuildError {
    /// A setting is outside its bounds; the user corrects it.
    #[error("{field} is {value}: {limit}")]
    InvalidConfig {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        limit: String,
    },
    /// This CPU lacks the instruction set asked for; the user asks for another.
    #[error("this CPU has no {wanted}; it has: {available}")]
    IsaUnavailable {
        /// What was asked for.
        wanted: &'static str,
        /// What there is.
        available: String,
    },
    /// The model is sound, but this engine can't run it.
    #[error("the engine can't run this model: {what}")]
    UnsupportedModel {
        /// The feature, its value and what is supported.
        what: String,
    },
    /// A tensor is not what the configuration calls for; the user gets another file.
    #[error("tensor '{tensor}': {reason}")]
    BadTensor {
        /// Its name.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// The model's file could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// There is no room; the user asks for fewer blocks or a smaller model.
    #[error("{what} takes {num_bytes} bytes, which the system does not give: {source}")]
    OutOfMemory {
        /// What the memory is for.
        what: &'static str,
        /// How much.
        num_bytes: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The CUDA device is not there, or refused something; the user asks for another device.
    #[error("{0}")]
    Device(String),
    /// A step thread could not be started or pinned.
    #[error("step threads: {0}")]
    Threads(std::io::Error),
}

impl EngineBuildError {
    pub(crate) fn isa_unavailable(wanted: Isa) -> Self {
        let available: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
        Self::IsaUnavailable { wanted: wanted.name(), available: available.join(", ") }
    }

    pub(crate) fn invalid(field: &'static str, value: impl ToString, limit: impl Into<String>) -> Self {
        Self::InvalidConfig { field, value: value.to_string(), limit: limit.into() }
    }

    pub(crate) fn tensor(tensor: &str, reason: impl Into<String>) -> Self {
        Self::BadTensor { tensor: tensor.to_owned(), reason: reason.into() }
    }

    pub(crate) fn out_of_memory(what: &'static str, num_bytes: usize) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::OutOfMemory { what, num_bytes, source }
    }
}
