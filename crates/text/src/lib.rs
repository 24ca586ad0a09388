//! Tokens to text and back: tokenizer, chat template, incremental detokenizer, stop strings.
//!
//! Owns: [`TextModel`] (a model's tokenizer and chat template), [`Detokenizer`] (tokens of a running generation to
//! text that is final), [`StopStrings`] (where generated text must end).
//!
//! Must never know: weights, KV, workers, the wire, or who asks. It does no IO beyond reading a `tokenizer.json`, and
//! everything here is plain values that a caller steps.

mod byte_tokenizer;
mod chat;
mod detokenizer;
mod error;
mod gguf_tokenizer;
mod json_tokenizer;
mod python_json;
mod stop;
mod strftime;
mod text_model;
mod token_table;

pub use chat::Message;
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use stop::{StopMatch, StopStep, StopStrings};
pub use text_model::TextModel;
