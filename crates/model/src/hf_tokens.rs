//! Special tokens and the chat template of a model folder.

use serde::Deserialize;

use crate::ModelError;
use crate::family::END_TEXTS;
use crate::folder::{Folder, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};

/// What a folder's tokenizer files say beyond how text is cut.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct HfTokens {
    /// Whether there is a `tokenizer_config.json` to ask.
    pub(crate) is_configured: bool,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    /// Special tokens that end a turn by their text.
    pub(crate) ends: Vec<u32>,
    pub(crate) add_bos: bool,
    pub(crate) chat_template: Option<String>,
}

#[derive(Deserialize, Default)]
struct TokenizerConfig {
    bos_token: Option<TokenText>,
    eos_token: Option<TokenText>,
    add_bos_token: Option<bool>,
    chat_template: Option<Template>,
}

/// A token's text, alone or with how it is matched.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenText {
    Plain(String),
    Detailed { content: String },
}

/// The template, or several by name.
#[derive(Deserialize)]
#[serde(untagged)]
enum Template {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// The part of a `tokenizer.json` that lists the tokens matched in text as they stand.
#[derive(Deserialize, Default)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

impl HfTokens {
    pub(crate) fn read(folder: &Folder) -> Result<HfTokens, ModelError> {
        let config: Option<TokenizerConfig> = folder.json(TOKENIZER_CONFIG_FILE)?;
        let is_configured = config.is_some();
        let config = config.unwrap_or_default();
        let added = folder.json::<TokenizerJson>(TOKENIZER_FILE)?.unwrap_or_default().added_tokens;
        let id_of = |token: Option<TokenText>| {
            let (TokenText::Plain(text) | TokenText::Detailed { content: text }) = token?;
            added.iter().find(|added| added.content == text).map(|added| added.id)
        };
        let ends = added.iter().filter(|token| token.special && END_TEXTS.contains(&token.content.as_str()));
        // A template in a file of its own is the newer way, and wins.
        let chat_template = match folder.text(TEMPLATE_FILE)? {
            Some(text) => Some(text),
            None => config.chat_template.and_then(Template::default),
        };
        Ok(HfTokens {
            is_configured,
            ends: ends.map(|token| token.id).collect(),
            bos: id_of(config.bos_token),
            eos: id_of(config.eos_token),
            add_bos: config.add_bos_token.unwrap_or(false),
            chat_template,
        })
    }
}

impl Template {
    fn default(self) -> Option<String> {
        match self {
            Template::One(text) => Some(text),
            Template::Named(list) => {
                list.into_iter().find(|named| named.name == "default").map(|named| named.template)
            }
        }
    }
}
