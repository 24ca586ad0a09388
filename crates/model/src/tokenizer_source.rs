//! What the text side needs to build a tokenizer; this crate does not interpret it.

use std::path::PathBuf;

/// Where a model's tokenizer comes from.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenizerSource {
    /// From the metadata of a GGUF file.
    Gguf(Box<GgufTokenizer>),
    /// A `tokenizer.json`.
    Json(PathBuf),
    /// Ids 0 to 255 are bytes; the specials follow. The built-in tiny model's.
    Bytes(ByteSpecials),
}

/// The `tokenizer.ggml.*` metadata of a GGUF file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GgufTokenizer {
    /// Kind of tokenizer: `gpt2` is byte-level BPE, `llama` is SentencePiece.
    pub model: String,
    /// Kind of pre-tokenizer, such as `smollm` or `llama-bpe`; empty if the file names none.
    pub pre: String,
    /// Token texts; the index is the id.
    pub tokens: Vec<String>,
    /// Merges, best first, each two tokens with a space between.
    pub merges: Vec<String>,
    /// One type a token; empty if the file gives none.
    pub token_types: Vec<TokenType>,
    /// Beginning-of-sequence token.
    pub bos: Option<u32>,
    /// End-of-sequence token.
    pub eos: Option<u32>,
    /// Unknown token.
    pub unk: Option<u32>,
}

/// GGML's token types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    /// 1: text.
    Normal,
    /// 2: stands for text that has no token.
    Unknown,
    /// 3: a special token, never made from text.
    Control,
    /// 4: added by a user; matched in text before anything else.
    UserDefined,
    /// 5: a row that no text uses.
    Unused,
    /// 6: one raw byte.
    Byte,
    /// Any other number, as it stands.
    Other(i64),
}

impl From<i64> for TokenType {
    fn from(value: i64) -> TokenType {
        match value {
            1 => TokenType::Normal,
            2 => TokenType::Unknown,
            3 => TokenType::Control,
            4 => TokenType::UserDefined,
            5 => TokenType::Unused,
            6 => TokenType::Byte,
            other => TokenType::Other(other),
        }
    }
}

/// Special ids of the byte-level tokenizer. They follow the 256 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSpecials {
    /// Beginning of sequence.
    pub bos: u32,
    /// End of sequence.
    pub eos: u32,
    /// Start of a chat message, `<|im_start|>`.
    pub im_start: u32,
    /// End of a chat message, `<|im_end|>`.
    pub im_end: u32,
}
