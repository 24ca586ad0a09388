//! What can go wrong between tokens and text, named for whose error it is.

/// Why text can't be made or read.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The model's tokenizer is of a kind that is not built here; the operator picks another model.
    #[error("{what}")]
    Unsupported {
        /// The kind by name, and what is supported.
        what: String,
    },
    /// The model's tokenizer contradicts itself; the operator fetches the model anew.
    #[error("the model's tokenizer is damaged: {reason}")]
    Corrupt {
        /// What is wrong.
        reason: String,
    },
    /// The model has no chat template: the client sends a plain prompt instead.
    #[error("this model has no chat template: use a plain prompt (completions)")]
    NoChatTemplate,
    /// The model's own chat template can't be compiled; plain prompts still work.
    #[error("this model's chat template is not valid: {reason}")]
    BadChatTemplate {
        /// The template engine's message.
        reason: String,
    },
    /// The template refused these messages; the client's error.
    #[error("the chat template does not accept these messages: {reason}")]
    Template {
        /// What the template said, or the engine's message.
        reason: String,
    },
    /// Text could not be tokenized.
    #[error("can't tokenize: {reason}")]
    Encode {
        /// The tokenizer's message.
        reason: String,
    },
    /// A stop string that would match everywhere; the client's error.
    #[error("stop strings can't be empty")]
    EmptyStop,
}
