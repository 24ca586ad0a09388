//! What a client asks for, checked, whichever face it came through.

mod chat;
mod checks;
mod completion;
mod fields;
mod grpc;
mod neutral;
mod options;

use baton_text::Message;

pub(crate) use chat::read as read_chat;
pub(crate) use completion::read as read_completion;
pub(crate) use grpc::{read_generate, read_messages};

/// Bounds on what one request may hold; from the router's options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) max_messages: usize,
    pub(crate) max_stop_strings: usize,
    pub(crate) max_stop_bytes: usize,
    /// Answers to one prompt.
    pub(crate) max_n: u32,
}

/// What to continue.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Input {
    Text(String),
    TokenIds(Vec<u32>),
    Chat(Vec<Message>),
}

/// How many tokens the client wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MaxTokens {
    /// Asked for by this field: more than the context leaves is the client's error.
    Exactly { num: u32, field: &'static str },
    /// By default: clipped to what the context leaves.
    AtMost(u32),
}

/// A checked request. What it leaves open (the seed) is `None`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ask {
    pub(crate) model: Option<String>,
    pub(crate) input: Input,
    /// The field that the input came in, for messages.
    pub(crate) input_field: &'static str,
    pub(crate) max_tokens: MaxTokens,
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    pub(crate) seed: Option<u64>,
    pub(crate) stop: Vec<String>,
    pub(crate) ignore_eos: bool,
    /// Answers to generate; at least 1.
    pub(crate) n: u32,
    /// Lower is served earlier.
    pub(crate) priority: i32,
    /// Neither use nor fill the prefix cache.
    pub(crate) no_prefix_cache: bool,
}

/// What concerns the answer's form on the HTTP face.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Form {
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) return_token_ids: bool,
}

/// Completions ask for 16 tokens unless they say otherwise, as OpenAI's do.
const COMPLETION_TOKENS: u32 = 16;
