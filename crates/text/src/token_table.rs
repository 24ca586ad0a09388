//! The bytes each token stands for. Decoding is a look-up: no tokenizer runs while text streams.

use crate::TextError;

/// Id to bytes, packed.
#[derive(Debug, Default)]
pub(crate) struct TokenTable {
    bytes: Vec<u8>,
    /// `ends[id]` is where the bytes of `id` end; they start where those before it end.
    ends: Vec<u32>,
    special: Vec<bool>,
}

/// Whether a token is text or a mark that is left out of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    Text,
    Special,
}

impl TokenTable {
    /// Adds the next id.
    pub(crate) fn push(&mut self, bytes: &[u8], kind: TokenKind) -> Result<(), TextError> {
        self.bytes.extend_from_slice(bytes);
        let end = u32::try_from(self.bytes.len()).map_err(|_| TextError::Corrupt {
            reason: "its tokens are longer than 4 GiB together".to_owned(),
        })?;
        self.ends.push(end);
        self.special.push(kind == TokenKind::Special);
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a token; none for an id that does not exist.
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = index.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        self.bytes.get(start as usize..end as usize).unwrap_or_default()
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The bytes a token adds to text: none if it is special.
    pub(crate) fn text_bytes(&self, id: u32) -> &[u8] {
        if self.is_special(id) { &[] } else { self.bytes(id) }
    }
}

/// Byte-level BPE writes each byte as one printable character: printable Latin-1 stands for itself, the other bytes,
/// ascending, are written from U+0100 on (the GPT-2 encoding). Returns the bytes of `token`, or `None` if a character
/// is outside that alphabet.
pub(crate) fn byte_level_bytes(token: &str) -> Option<Vec<u8>> {
    token.chars().map(byte_level_byte).collect()
}

fn byte_level_byte(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u8::try_from(code).ok(),
        // In order: 0x00..=0x20, then 0x7f..=0xa0, then 0xad.
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_covers_every_byte_once() {
        let mut bytes: Vec<u8> = (0..=0x143).filter_map(char::from_u32).filter_map(byte_level_byte).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_level_bytes("Ġhi").as_deref(), Some(b" hi".as_slice()));
        assert_eq!(byte_level_bytes("Ċ").as_deref(), Some(b"\n".as_slice()));
        assert_eq!(byte_level_bytes("é").as_deref(), Some([0xe9].as_slice()));
        assert_eq!(byte_level_bytes("東"), None);
    }

    #[test]
    fn an_unknown_id_has_no_bytes() {
        let mut table = TokenTable::default();
        table.push(b"ab", TokenKind::Text).unwrap();
        table.push(b"<s>", TokenKind::Special).unwrap();
        table.push(b"", TokenKind::Text).unwrap();
        table.push(b"c", TokenKind::Text).unwrap();
        assert_eq!(
            [0, 1, 2, 3, 4, u32::MAX].map(|id| table.bytes(id)),
            [b"ab".as_slice(), b"<s>", b"", b"c", b"", b""]
        );
        assert_eq!(table.text_bytes(1), b"");
    }
}
