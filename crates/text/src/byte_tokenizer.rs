//! The tokenizer of the built-in tiny model: a byte is a token.

use baton_model::ByteSpecials;

use crate::TextError;
use crate::token_table::{TokenKind, TokenTable};

/// Bytes and four specials, which are recognised in text by their names.
#[derive(Debug)]
pub(crate) struct ByteTokenizer {
    specials: [(&'static str, u32); 4],
}

impl ByteTokenizer {
    pub(crate) fn new(specials: ByteSpecials) -> ByteTokenizer {
        ByteTokenizer {
            specials: [
                ("<|bos|>", specials.bos),
                ("<|eos|>", specials.eos),
                ("<|im_start|>", specials.im_start),
                ("<|im_end|>", specials.im_end),
            ],
        }
    }

    pub(crate) fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = rest.find("<|") {
            let (plain, marked) = rest.split_at(start);
            ids.extend(plain.bytes().map(u32::from));
            let special = self.specials.iter().find(|(name, _)| marked.starts_with(name));
            let taken = match special {
                Some((name, id)) => {
                    ids.push(*id);
                    name.len()
                }
                None => {
                    ids.push(u32::from(b'<'));
                    1
                }
            };
            rest = marked.get(taken..).unwrap_or_default();
        }
        ids.extend(rest.bytes().map(u32::from));
        ids
    }

    /// Ids up to `vocab`; those beyond bytes and specials are special and empty.
    pub(crate) fn table(&self, vocab: usize) -> Result<TokenTable, TextError> {
        let mut table = TokenTable::default();
        for byte in 0..=255u8 {
            table.push(&[byte], TokenKind::Text)?;
        }
        for id in 256..vocab {
            let name = self
                .specials
                .iter()
                .find(|(_, special)| *special as usize == id)
                .map_or("", |(name, _)| name);
            table.push(name.as_bytes(), TokenKind::Special)?;
        }
        Ok(table)
    }
}
