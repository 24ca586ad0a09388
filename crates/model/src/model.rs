//! An opened model.

use std::fmt;
use std::path::Path;

use crate::gguf::GgufFile;
use crate::tiny::TinyWeights;
use crate::{ModelConfig, ModelError, ModelSource, Tensor, TokenizerSource, digest, shapes, tiny};

/// A model that can be run: what it is, its weights, and what its tokenizer is made from.
///
/// Weights are mapped, not read: opening costs milliseconds, and several processes share the same memory.
pub struct Model {
    /// The checked configuration.
    pub config: ModelConfig,
    /// Tells models apart: equal digests mean that KV computed by one side can be used by the other. For a GGUF file
    /// SHA-256 over its header, its length and samples of each tensor; for the built-in model over all its weights.
    pub digest: [u8; 32],
    /// What the tokenizer is made from.
    pub tokenizer: TokenizerSource,
    /// The chat template (Jinja), if the model has one.
    pub chat_template: Option<String>,
    weights: Weights,
}

enum Weights {
    Gguf(GgufFile),
    Tiny(TinyWeights),
}

impl Model {
    /// Opens a model; the file is checked so far that every tensor the configuration calls for can be had.
    ///
    /// The file stays mapped while the model lives: it may be renamed, removed or replaced by another file of its
    /// name, but not written to or cut short in place.
    ///
    /// # Errors
    /// [`ModelError::NotFound`], [`ModelError::Corrupt`] (damaged or truncated), [`ModelError::Unsupported`] (the
    /// architecture, a tensor or its type by name), [`ModelError::TooLarge`], [`ModelError::Io`].
    pub fn open(source: &ModelSource) -> Result<Model, ModelError> {
        match source {
            ModelSource::Tiny => Ok(Model::tiny()),
            ModelSource::File(path) => Model::open_gguf(path),
        }
    }

    /// The built-in model, see [`tiny`].
    pub fn tiny() -> Model {
        let (config, specials) = tiny::config();
        let weights = TinyWeights::generate(&config);
        Model {
            digest: digest::of_bytes("baton builtin:tiny 1", weights.parts()),
            tokenizer: TokenizerSource::Bytes(specials),
            chat_template: None,
            config,
            weights: Weights::Tiny(weights),
        }
    }

    fn open_gguf(path: &Path) -> Result<Model, ModelError> {
        let (file, mut metadata) = GgufFile::open(path)?;
        let gguf_tokenizer = shapes::read_tokenizer(&mut metadata)?;
        let config = shapes::read_config(&file, &metadata, &gguf_tokenizer)?;
        // A file without a byte-level vocabulary of its own can bring a tokenizer.json in the same folder.
        let beside = path.with_file_name("tokenizer.json");
        let tokenizer = if gguf_tokenizer.model != "gpt2" && beside.is_file() {
            TokenizerSource::Json(beside)
        } else {
            TokenizerSource::Gguf(Box::new(gguf_tokenizer))
        };
        Ok(Model {
            digest: digest::of_gguf(&file)?,
            tokenizer,
            chat_template: metadata.text("tokenizer.chat_template")?.map(str::to_owned),
            config,
            weights: Weights::Gguf(file),
        })
    }

    /// The tensor of this name. Names are GGUF's: `token_embd.weight`, `output.weight` (absent when the embedding is
    /// tied), `output_norm.weight`, and for each layer `N` `blk.N.{attn_norm, attn_q, attn_k, attn_v, attn_output,
    /// ffn_norm, ffn_gate, ffn_up, ffn_down}.weight`.
    ///
    /// # Errors
    /// [`ModelError::Corrupt`] if there is none.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        match &self.weights {
            Weights::Gguf(file) => file.tensor(name),
            Weights::Tiny(weights) => weights.tensor(name),
        }
    }

    /// Whether there is a tensor of this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        match &self.weights {
            Weights::Gguf(file) => file.entry(name).is_some(),
            Weights::Tiny(weights) => weights.tensor(name).is_ok(),
        }
    }

    /// Bytes of all tensors as they are stored.
    pub fn weights_bytes(&self) -> u64 {
        match &self.weights {
            Weights::Gguf(file) => file.tensor_bytes(),
            Weights::Tiny(weights) => weights.parts().map(|part| part.len() as u64).sum(),
        }
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("config", &self.config)
            .field("digest", &digest::hex(&self.digest))
            .field("weights_bytes", &self.weights_bytes())
            .finish_non_exhaustive()
    }
}
