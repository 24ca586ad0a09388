//! A tokenizer from a GGUF file's metadata: byte-level BPE.

use baton_model::{GgufTokenizer, TokenType};
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

use crate::TextError;
use crate::token_table::{TokenKind, TokenTable, byte_level_bytes};

/// Llama 3's split, as published in its `tokenizer.json`.
const LLAMA_3_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen 2's (and 3's): digits stand alone.
const QWEN_2_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What is done to text before BPE.
struct Preparation {
    cuts: PreTokenizerWrapper,
    /// Composes characters first (Unicode NFC).
    composes: bool,
    /// A piece that is a token as a whole is taken as it is, whatever the merges say.
    whole_tokens_first: bool,
}

/// Builds the tokenizer and the table of its tokens' bytes.
pub(crate) fn build(source: &GgufTokenizer) -> Result<(Tokenizer, TokenTable), TextError> {
    if source.model != "gpt2" {
        let found = if source.model.is_empty() { "none" } else { &source.model };
        return Err(TextError::Unsupported {
            what: format!(
                "tokenizer '{found}' of this GGUF file is not supported; supported: gpt2, or a tokenizer.json beside the file"
            ),
        });
    }
    let table = table(source)?;
    let preparation = preparation(&source.pre)?;
    let mut tokenizer = Tokenizer::new(bpe(source, preparation.whole_tokens_first)?);
    if preparation.composes {
        tokenizer.with_normalizer(Some(NFC)).map_err(corrupt)?;
    }
    tokenizer.with_pre_tokenizer(Some(preparation.cuts));
    tokenizer.with_decoder(Some(byte_level(true)));
    tokenizer.add_special_tokens(added(source, TokenType::Control)).map_err(corrupt)?;
    tokenizer.add_tokens(added(source, TokenType::UserDefined)).map_err(corrupt)?;
    Ok((tokenizer, table))
}

fn corrupt(error: impl std::fmt::Display) -> TextError {
    TextError::Corrupt { reason: error.to_string() }
}

fn byte_level(use_regex: bool) -> ByteLevel {
    ByteLevel::new(false, true, use_regex)
}

/// By the name in `tokenizer.ggml.pre`.
fn preparation(name: &str) -> Result<Preparation, TextError> {
    let plain = |cuts| Preparation { cuts, composes: false, whole_tokens_first: false };
    match name {
        "smollm" => {
            let parts = vec![Digits::new(true).into(), byte_level(true).into()];
            Ok(plain(Sequence::new(parts).into()))
        }
        "gpt-2" | "default" | "" => Ok(plain(byte_level(true).into())),
        "llama-bpe" | "llama3" | "llama-v3" => {
            Ok(Preparation { whole_tokens_first: true, ..plain(split(LLAMA_3_SPLIT)?) })
        }
        "qwen2" => Ok(Preparation { composes: true, ..plain(split(QWEN_2_SPLIT)?) }),
        other => Err(TextError::Unsupported {
            what: format!(
                "pre-tokenizer '{other}' of this GGUF file is not supported; supported: smollm, gpt-2, default, llama-bpe, qwen2"
            ),
        }),
    }
}

fn split(pattern: &str) -> Result<PreTokenizerWrapper, TextError> {
    let pattern = SplitPattern::Regex(pattern.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(corrupt)?;
    Ok(Sequence::new(vec![split.into(), byte_level(false).into()]).into())
}

fn bpe(source: &GgufTokenizer, whole_tokens_first: bool) -> Result<BPE, TextError> {
    let vocab: Vocab = source.tokens.iter().cloned().zip(0u32..).collect();
    let merges = source
        .merges
        .iter()
        .map(|merge| {
            let (left, right) = merge
                .split_once(' ')
                .ok_or_else(|| TextError::Corrupt { reason: format!("merge '{merge}' is not two tokens") })?;
            Ok((left.to_owned(), right.to_owned()))
        })
        .collect::<Result<Vec<_>, TextError>>()?;
    BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(whole_tokens_first).build().map_err(corrupt)
}

fn kind_of(source: &GgufTokenizer, index: usize) -> TokenType {
    source.token_types.get(index).copied().unwrap_or(TokenType::Normal)
}

fn added(source: &GgufTokenizer, kind: TokenType) -> Vec<AddedToken> {
    let tokens = source.tokens.iter().enumerate();
    tokens
        .filter(|(index, token)| kind_of(source, *index) == kind && !token.is_empty())
        .map(|(_, token)| AddedToken::from(token.clone(), kind == TokenType::Control))
        .map(|token| token.normalized(false))
        .collect()
}

fn table(source: &GgufTokenizer) -> Result<TokenTable, TextError> {
    let mut table = TokenTable::default();
    for (index, token) in source.tokens.iter().enumerate() {
        match kind_of(source, index) {
            TokenType::Control => table.push(token.as_bytes(), TokenKind::Special)?,
            TokenType::UserDefined => table.push(token.as_bytes(), TokenKind::Text)?,
            // Rows that no text uses may hold any name.
            _ => {
                let bytes = byte_level_bytes(token).unwrap_or_else(|| token.as_bytes().to_vec());
                table.push(&bytes, TokenKind::Text)?;
            }
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All 256 bytes, a few merges, two specials and a user-defined token.
    fn source(pre: &str) -> GgufTokenizer {
        let mut tokens: Vec<String> = (0..=0x143u32)
            .filter_map(char::from_u32)
            .map(String::from)
            .filter(|token| byte_level_bytes(token).is_some())
            .collect();
        let merged = ["ab", "Ġa", "12", "abc", "ca"];
        tokens.extend(merged.map(str::to_owned));
        tokens.extend(["<|im_end|>", "<|x|>", "<tool>"].map(str::to_owned));
        let mut token_types = vec![TokenType::Normal; tokens.len()];
        let specials = token_types.len() - 3;
        token_types[specials..].copy_from_slice(&[
            TokenType::Control,
            TokenType::Control,
            TokenType::UserDefined,
        ]);
        GgufTokenizer {
            model: "gpt2".to_owned(),
            pre: pre.to_owned(),
            tokens,
            merges: ["a b", "Ġ a", "1 2"].map(str::to_owned).to_vec(),
            token_types,
            ..GgufTokenizer::default()
        }
    }

    fn pieces(pre: &str, text: &str) -> Vec<String> {
        let (tokenizer, _) = build(&source(pre)).unwrap();
        tokenizer.encode(text, false).unwrap().get_tokens().to_vec()
    }

    #[test]
    fn each_pre_tokenizer_cuts_in_its_own_way() {
        assert_eq!(pieces("smollm", "12ab ab"), ["1", "2", "ab", "Ġ", "ab"]);
        for pre in ["gpt-2", "default", ""] {
            assert_eq!(pieces(pre, "12ab ab"), ["12", "ab", "Ġ", "ab"]);
        }
        // Whole pieces first: "abc" is a token although no merge makes it.
        assert_eq!(pieces("llama-bpe", "abc 12121"), ["abc", "Ġ", "12", "1", "2", "1"]);
        assert_eq!(pieces("gpt-2", "abc"), ["ab", "c"]);
        assert_eq!(pieces("qwen2", "abc 12121"), ["ab", "c", "Ġ", "1", "2", "1", "2", "1"]);
        // Composed to U+00E9, which is two bytes; decomposed it would be three.
        assert_eq!(pieces("qwen2", "e\u{301}"), ["Ã", "©"]);
    }

    #[test]
    fn specials_and_user_tokens_are_matched_in_text() {
        let (tokenizer, table) = build(&source("smollm")).unwrap();
        let ids = tokenizer.encode("ab<tool><|im_end|>ab", false).unwrap().get_ids().to_vec();
        let text: Vec<&[u8]> = ids.iter().map(|&id| table.text_bytes(id)).collect();
        assert_eq!(text, [b"ab".as_slice(), b"<tool>", b"", b"ab"]);
        assert!(table.is_special(ids[2]) && !table.is_special(ids[1]));
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let spm = GgufTokenizer { model: "llama".to_owned(), ..source("smollm") };
        let error = build(&spm).unwrap_err();
        assert!(error.to_string().contains("'llama'"), "{error}");
        let error = build(&source("deepseek-coder")).unwrap_err();
        assert!(
            matches!(error, TextError::Unsupported { .. }) && error.to_string().contains("'deepseek-coder'"),
            "{error}"
        );
    }

    #[test]
    fn damaged_merges_are_an_error() {
        for merge in ["ab", "a zz"] {
            let damaged = GgufTokenizer { merges: vec![merge.to_owned()], ..source("smollm") };
            assert!(matches!(build(&damaged), Err(TextError::Corrupt { .. })), "{merge}");
        }
    }
}
