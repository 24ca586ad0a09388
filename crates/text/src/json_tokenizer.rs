//! A tokenizer from a `tokenizer.json`, and the bytes of its tokens read off its decoder.

use std::path::Path;

use serde_json::Value;
use tokenizers::Tokenizer;

use crate::TextError;
use crate::token_table::{TokenKind, TokenTable, byte_level_bytes};

/// How a tokenizer writes bytes in its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writing {
    /// One printable character a byte (GPT-2 and its kin).
    ByteLevel,
    /// Text, with U+2581 for a space and `<0xNN>` for a byte (SentencePiece and its kin).
    SentencePiece,
}

/// A tokenizer read from a file.
#[derive(Debug)]
pub(crate) struct JsonTokenizer {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) table: TokenTable,
    /// A whole text's first space is an artefact of encoding and is dropped when a whole text is decoded.
    pub(crate) drops_first_space: bool,
}

/// Reads `path`; `vocab` is the number of ids the model knows.
pub(crate) fn build(path: &Path, vocab: usize) -> Result<JsonTokenizer, TextError> {
    let bytes = std::fs::read(path)
        .map_err(|error| TextError::Corrupt { reason: format!("can't read {}: {error}", path.display()) })?;
    let corrupt =
        |error: tokenizers::Error| TextError::Corrupt { reason: format!("{}: {error}", path.display()) };
    let mut tokenizer = Tokenizer::from_bytes(&bytes).map_err(corrupt)?;
    // Some files carry the settings of a training run, which would cut or pad every prompt.
    tokenizer.with_truncation(None).map_err(corrupt)?;
    tokenizer.with_padding(None);
    let num_tokens = tokenizer.get_vocab_size(true);
    if num_tokens > vocab {
        let reason = format!("{} has {num_tokens} tokens, the model {vocab}", path.display());
        return Err(TextError::Corrupt { reason });
    }
    let decoder = serde_json::to_value(tokenizer.get_decoder())
        .map_err(|error| TextError::Corrupt { reason: error.to_string() })?;
    let writing = writing(&decoder)?;
    Ok(JsonTokenizer {
        table: table(&tokenizer, writing, vocab)?,
        drops_first_space: writing == Writing::SentencePiece,
        tokenizer,
    })
}

fn writing(decoder: &Value) -> Result<Writing, TextError> {
    let mut kinds = Vec::new();
    collect_kinds(decoder, &mut kinds);
    let has = |kind| kinds.contains(&kind);
    if has("ByteLevel") {
        Ok(Writing::ByteLevel)
    } else if has("Metaspace") || has("ByteFallback") {
        Ok(Writing::SentencePiece)
    } else {
        let found = if kinds.is_empty() { "none".to_owned() } else { kinds.join(", ") };
        Err(TextError::Unsupported {
            what: format!(
                "decoder '{found}' of this tokenizer.json is not supported; supported: ByteLevel, Metaspace, ByteFallback"
            ),
        })
    }
}

/// The decoder's kind, and those of its parts if it is a sequence.
fn collect_kinds<'a>(decoder: &'a Value, kinds: &mut Vec<&'a str>) {
    if let Some(parts) = decoder.get("decoders").and_then(Value::as_array) {
        for part in parts {
            collect_kinds(part, kinds);
        }
    } else if let Some(kind) = decoder.get("type").and_then(Value::as_str) {
        kinds.push(kind);
    }
}

fn table(tokenizer: &Tokenizer, writing: Writing, vocab: usize) -> Result<TokenTable, TextError> {
    let added = tokenizer.get_added_tokens_decoder();
    let mut table = TokenTable::default();
    let num_ids = u32::try_from(vocab).unwrap_or(u32::MAX);
    for id in 0..num_ids {
        if let Some(token) = added.get(&id) {
            let kind = if token.special { TokenKind::Special } else { TokenKind::Text };
            table.push(token.content.as_bytes(), kind)?;
            continue;
        }
        // Embeddings are often padded with rows that no token uses.
        let token = tokenizer.id_to_token(id).unwrap_or_default();
        let bytes = match writing {
            Writing::ByteLevel => byte_level_bytes(&token).unwrap_or_else(|| token.as_bytes().to_vec()),
            Writing::SentencePiece => sentence_piece_bytes(&token),
        };
        table.push(&bytes, TokenKind::Text)?;
    }
    Ok(table)
}

fn sentence_piece_bytes(token: &str) -> Vec<u8> {
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match byte.filter(|digits| digits.len() == 2).and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('\u{2581}', " ").into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Detokenizer;
    use std::sync::Arc;

    fn write(decoder: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let json = format!(
            r#"{{"version":"1.0","truncation":null,"padding":null,"normalizer":null,"pre_tokenizer":null,
            "post_processor":null,"decoder":{decoder},
            "added_tokens":[{{"id":0,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,
            "normalized":false,"special":true}}],
            "model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,
            "end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":true,"ignore_merges":false,
            "vocab":{{"<s>":0,"▁hi":1,"<0xEA>":2,"<0xB0>":3,"<0x80>":4,"Ġ":5}},"merges":[]}}}}"#
        );
        std::fs::write(file.path(), json).unwrap();
        file
    }

    const SENTENCE_PIECE: &str = r#"{"type":"Sequence","decoders":[
        {"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},
        {"type":"Strip","content":" ","start":1,"stop":0}]}"#;

    #[test]
    fn byte_fallback_tokens_stream_as_characters() {
        let built = build(write(SENTENCE_PIECE).path(), 8).unwrap();
        assert!(built.drops_first_space);
        let mut detokenizer = Detokenizer::new(Arc::new(built.table));
        let pieces: Vec<_> = [0, 1, 2, 3, 4, 1, 7].map(|id| detokenizer.push(id)).into_iter().collect();
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(pieces, [None, some(" hi"), None, None, some("가"), some(" hi"), None]);
    }

    #[test]
    fn the_way_of_writing_is_read_off_the_decoder() {
        let byte_level =
            r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#;
        let built = build(write(byte_level).path(), 6).unwrap();
        assert_eq!((built.table.bytes(5), built.drops_first_space), (b" ".as_slice(), false));
        for decoder in ["null", r###"{"type":"WordPiece","prefix":"##","cleanup":true}"###] {
            let error = build(write(decoder).path(), 6).unwrap_err();
            assert!(matches!(error, TextError::Unsupported { .. }), "{error:?}");
        }
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_left_out() {
        let file = write(SENTENCE_PIECE);
        let json = std::fs::read_to_string(file.path()).unwrap();
        let limits = r#""truncation":{"max_length":2,"strategy":"LongestFirst","stride":0,"direction":"Right"},
            "padding":{"strategy":{"Fixed":9},"direction":"Right","pad_to_multiple_of":null,"pad_id":0,"pad_type_id":0,
            "pad_token":"<s>"}"#;
        let json = json.replace(r#""truncation":null,"padding":null"#, limits);
        assert!(json.contains("max_length"));
        std::fs::write(file.path(), json).unwrap();
        let built = build(file.path(), 8).unwrap();
        assert_eq!(built.tokenizer.encode("가<s>", false).unwrap().get_ids(), [2, 3, 4, 0]);
    }

    #[test]
    fn a_tokenizer_larger_than_the_model_is_refused() {
        let error = build(write(SENTENCE_PIECE).path(), 5).unwrap_err();
        assert!(error.to_string().contains("6 tokens, the model 5"), "{error}");
        assert!(matches!(build(Path::new("/no/such/file"), 5), Err(TextError::Corrupt { .. })));
    }
}
