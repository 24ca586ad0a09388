//! A model's tokenizer and chat template.

use std::fmt;
use std::sync::Arc;

use baton_model::{Model, TokenizerSource};
use tokenizers::Tokenizer;

use crate::byte_tokenizer::ByteTokenizer;
use crate::chat::ChatTemplate;
use crate::token_table::TokenTable;
use crate::{Detokenizer, Message, TextError, gguf_tokenizer, json_tokenizer};

/// The chat format of the built-in model.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Tokens to text and back for one model. Shareable between threads; opening takes tens of milliseconds, keep it.
///
/// Special tokens that are written out in text, a user's message included, are recognised as such: the rendered chat
/// template is tokenized as a whole, as other servers of these models do. A router that serves hostile users who must
/// not be able to end their own turn has to refuse such text before it gets here.
pub struct TextModel {
    encoder: Encoder,
    table: Arc<TokenTable>,
    template: ChatTemplate,
    /// Prepended to plain text when specials are asked for and the tokenizer does not do it itself.
    bos: Option<u32>,
    drops_first_space: bool,
    vocab: usize,
}

enum Encoder {
    Bytes(ByteTokenizer),
    /// The tokenizer, and whether it adds specials by itself.
    Library {
        tokenizer: Box<Tokenizer>,
        adds_specials: bool,
    },
}

impl TextModel {
    /// Builds the tokenizer of an opened model.
    ///
    /// # Errors
    /// [`TextError::Unsupported`] (kind of tokenizer, pre-tokenizer or decoder by name), [`TextError::Corrupt`].
    pub fn open(model: &Model) -> Result<TextModel, TextError> {
        let vocab = model.config.vocab;
        let mut drops_first_space = false;
        let (encoder, table) = match &model.tokenizer {
            TokenizerSource::Bytes(specials) => {
                let tokenizer = ByteTokenizer::new(*specials);
                let table = tokenizer.table(vocab)?;
                (Encoder::Bytes(tokenizer), table)
            }
            TokenizerSource::Gguf(source) => {
                let (tokenizer, table) = gguf_tokenizer::build(source)?;
                (Encoder::Library { tokenizer: Box::new(tokenizer), adds_specials: false }, table)
            }
            TokenizerSource::Json(path) => {
                let built = json_tokenizer::build(path, vocab)?;
                drops_first_space = built.drops_first_space;
                (Encoder::Library { tokenizer: Box::new(built.tokenizer), adds_specials: true }, built.table)
            }
        };
        let template = match (&model.tokenizer, &model.chat_template) {
            (_, Some(template)) => Some(template.as_str()),
            (TokenizerSource::Bytes(_), None) => Some(CHATML),
            _ => None,
        };
        let text_of =
            |id: Option<u32>| String::from_utf8_lossy(id.map_or(&[], |id| table.bytes(id))).into_owned();
        let template = ChatTemplate::new(template, text_of(model.config.bos), text_of(model.config.turn_end));
        Ok(TextModel {
            encoder,
            table: Arc::new(table),
            template,
            bos: model.config.bos.filter(|_| model.config.add_bos),
            drops_first_space,
            vocab,
        })
    }

    /// The ids of `text`. With `add_special` those that the model wants around a plain prompt (beginning of sequence)
    /// are added; a rendered chat has them already.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let (ids, adds_specials) = match &self.encoder {
            Encoder::Bytes(tokenizer) => (tokenizer.encode(text), false),
            Encoder::Library { tokenizer, adds_specials } => {
                let encoding = tokenizer
                    .encode_fast(text, add_special && *adds_specials)
                    .map_err(|error| TextError::Encode { reason: error.to_string() })?;
                (encoding.get_ids().to_vec(), *adds_specials)
            }
        };
        match self.bos {
            Some(bos) if add_special && !adds_specials && ids.first() != Some(&bos) => {
                Ok(std::iter::once(bos).chain(ids).collect())
            }
            _ => Ok(ids),
        }
    }

    /// The text of a whole sequence. Special tokens and ids that do not exist add nothing; bytes that are no
    /// character become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.table.text_bytes(id)).copied().collect();
        let text = match bytes.strip_prefix(b" ") {
            Some(rest) if self.drops_first_space => rest,
            _ => &bytes,
        };
        String::from_utf8_lossy(text).into_owned()
    }

    /// A detokenizer for one generation.
    pub fn detokenizer(&self) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.table))
    }

    /// The bytes of one token as written, a special token's name included; empty if there is no such id. For
    /// reports on single tokens, such as log-probabilities.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.table.bytes(id)
    }

    /// Whether a token is a mark that never shows in text.
    pub fn is_special(&self, id: u32) -> bool {
        self.table.is_special(id)
    }

    /// Renders a conversation as the prompt the model was trained on; with `add_generation_prompt` it ends where the
    /// assistant's answer begins. Encode it without adding specials.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`], [`TextError::BadChatTemplate`], [`TextError::Template`] when the template
    /// refuses these messages.
    pub fn chat(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, TextError> {
        self.template.render(messages, add_generation_prompt)
    }

    /// Whether [`TextModel::chat`] can work at all.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_usable()
    }

    /// Number of ids: every valid id is below it.
    pub fn vocab_size(&self) -> usize {
        self.vocab.max(self.table.len())
    }
}

impl fmt::Debug for TextModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextModel").field("vocab", &self.vocab).finish_non_exhaustive()
    }
}
