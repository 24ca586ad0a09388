//! An opened model.

use std::fmt;
use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::folder::{Folder, TOKENIZER_FILE};
use crate::gguf::GgufFile;
use crate::hf_tokens::HfTokens;
use crate::tensors::{TensorTable, is_vector};
use crate::tiny::TinyWeights;
use crate::{
    ModelConfig, ModelError, ModelSource, Tensor, TokenizerSource, digest, gguf_config, hf_config, tensors,
    tiny,
};

/// A model that can be run: what it is, its weights, and what its tokenizer is made from.
///
/// Weights are mapped, not read: opening costs milliseconds, and several processes share the same memory.
pub struct Model {
    /// The checked configuration.
    pub config: ModelConfig,
    /// Tells models apart: equal digests mean that KV computed by one side can be used by the other. For a GGUF file
    /// SHA-256 over its header, its length and samples of each tensor; for a model folder the same over each of its
    /// safetensors files, and over its JSON files; for the built-in model over all its weights.
    pub digest: [u8; 32],
    /// What the tokenizer is made from.
    pub tokenizer: TokenizerSource,
    /// The chat template (Jinja), if the model has one.
    pub chat_template: Option<String>,
    weights: Weights,
}

enum Weights {
    Gguf(GgufFile),
    Folder(Checkpoint),
    Tiny(TinyWeights),
}

impl Model {
    /// Opens a model; its files are checked so far that every tensor the configuration calls for can be had. A model
    /// folder opens without its `tokenizer.json`, since a worker needs none.
    ///
    /// Files stay mapped while the model lives: one may be renamed, removed or replaced by another file of its name,
    /// but not written to or cut short in place.
    ///
    /// # Errors
    /// [`ModelError::NotFound`], [`ModelError::Corrupt`] (damaged or truncated), [`ModelError::Unsupported`] (the
    /// architecture, a tensor or its type by name), [`ModelError::TooLarge`], [`ModelError::Io`].
    pub fn open(source: &ModelSource) -> Result<Model, ModelError> {
        match source {
            ModelSource::Tiny => Ok(Model::tiny()),
            ModelSource::File(path) => Model::open_gguf(path),
            ModelSource::Folder(path) => Model::open_folder(path),
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
        let gguf_tokenizer = gguf_config::read_tokenizer(&mut metadata)?;
        let config = gguf_config::read_config(&file, &metadata, &gguf_tokenizer)?;
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

    fn open_folder(path: &Path) -> Result<Model, ModelError> {
        let folder = Folder::read(path)?;
        let tokens = HfTokens::read(&folder)?;
        let config = hf_config::read(&folder, &tokens)?;
        let weights = Checkpoint::open(path, config.tied_embedding)?;
        tensors::check(&weights, &config, &[])?;
        Ok(Model {
            digest: digest::of_folder(&folder, &weights)?,
            tokenizer: TokenizerSource::Json(path.join(TOKENIZER_FILE)),
            chat_template: tokens.chat_template,
            config,
            weights: Weights::Folder(weights),
        })
    }

    /// The tensor of this name. Names are GGUF's, whatever the model was read from: `token_embd.weight`,
    /// `output.weight` (absent when the embedding is tied), `output_norm.weight`, and for each layer `N`
    /// `blk.N.{attn_norm, attn_q, attn_k, attn_v, attn_output, ffn_norm, ffn_gate, ffn_up, ffn_down}.weight`; with
    /// [`ModelConfig::attention_bias`] also `blk.N.{attn_q, attn_k, attn_v}.bias`, with [`ModelConfig::qk_norm`] also
    /// `blk.N.{attn_q_norm, attn_k_norm}.weight`.
    ///
    /// Norms and biases are F32 (one row), whatever they are stored as. Matrices are as stored.
    ///
    /// # Errors
    /// [`ModelError::Corrupt`] if there is none.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let tensor = match &self.weights {
            Weights::Gguf(file) => file.tensor(name)?,
            Weights::Folder(checkpoint) => checkpoint.tensor(name)?,
            Weights::Tiny(weights) => weights.tensor(name)?,
        };
        Ok(if is_vector(name) { tensor.widened() } else { tensor })
    }

    /// A tensor that was copied elsewhere: what of its file is in memory for its sake may go. It can still be read.
    pub fn let_go(&self, name: &str) {
        match &self.weights {
            Weights::Gguf(file) => file.let_go(name),
            Weights::Folder(checkpoint) => checkpoint.let_go(name),
            Weights::Tiny(_) => {}
        }
    }

    /// Whether there is a tensor of this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        match &self.weights {
            Weights::Gguf(file) => file.entry(name).is_some(),
            Weights::Folder(checkpoint) => checkpoint.entry(name).is_some(),
            Weights::Tiny(weights) => weights.tensor(name).is_ok(),
        }
    }

    /// Bytes of all tensors as they are stored.
    pub fn weights_bytes(&self) -> u64 {
        match &self.weights {
            Weights::Gguf(file) => file.tensor_bytes(),
            Weights::Folder(checkpoint) => checkpoint.tensor_bytes(),
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
