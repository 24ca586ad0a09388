//! Tokens of a running generation to text, piece by piece.

use std::sync::Arc;

use crate::token_table::TokenTable;

/// Turns one generation's tokens into text as they come. Each piece is final: nothing already returned is ever taken
/// back or altered.
///
/// A token's bytes may end inside a character (byte fallback, or an emoji cut in two); those bytes wait for the next
/// token. U+FFFD appears only where bytes can never become a character: at [`Detokenizer::flush`], or when the next
/// byte breaks off the one before. The pieces joined, with the flush, are always the lossy decoding of all bytes. Special tokens
/// add nothing. A call costs time in proportion to the token's own bytes.
#[derive(Debug)]
pub struct Detokenizer {
    table: Arc<TokenTable>,
    /// The start of a character that has not ended: up to three bytes.
    pending: Vec<u8>,
}

impl Detokenizer {
    pub(crate) fn new(table: Arc<TokenTable>) -> Detokenizer {
        Detokenizer { table, pending: Vec::new() }
    }

    /// Takes the next token and returns the text that is final with it, if any.
    pub fn push(&mut self, token: u32) -> Option<String> {
        let bytes = self.table.text_bytes(token);
        if bytes.is_empty() {
            return None;
        }
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let kept = decode_final(&self.pending, &mut text);
        self.pending.drain(..self.pending.len() - kept);
        (!text.is_empty()).then_some(text)
    }

    /// Ends the generation: returns what waited for the rest of a character, as one U+FFFD.
    pub fn flush(&mut self) -> Option<String> {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        (!text.is_empty()).then_some(text)
    }
}

/// Appends what is final in `bytes` and returns how many bytes at the end may still become a character.
fn decode_final(bytes: &[u8], text: &mut String) -> usize {
    let mut chunks = bytes.utf8_chunks().peekable();
    while let Some(chunk) = chunks.next() {
        text.push_str(chunk.valid());
        let invalid = chunk.invalid();
        if invalid.is_empty() {
            continue;
        }
        if chunks.peek().is_none() && is_unfinished(invalid) {
            return invalid.len();
        }
        text.push(char::REPLACEMENT_CHARACTER);
    }
    0
}

/// Whether `bytes`, not valid by themselves, are the start of a character.
fn is_unfinished(bytes: &[u8]) -> bool {
    // `error_len` is absent exactly when the input ended too early.
    matches!(std::str::from_utf8(bytes), Err(error) if error.error_len().is_none())
}
