//! Where a model comes from: its name, its download, its file, its configuration and its digest.
//!
//! Owns: [`ModelName`] (what a user types), [`resolve`] (name to a file or folder on this machine, fetching it once
//! into the user's cache folder), [`Model`] (an opened model: configuration, weights as raw blocks, the source of its
//! tokenizer, its chat template, its digest) and the built-in [tiny model](tiny).
//!
//! Must never know: what a token means as text, how a chat template renders, or how weights are multiplied. Weights
//! leave this crate as the bytes they are stored in.

mod cache;
mod checkpoint;
mod checks;
mod config;
mod default_model;
mod digest;
mod download;
mod error;
mod family;
mod folder;
mod gguf;
mod gguf_config;
mod gguf_header;
mod hf_config;
mod hf_names;
mod hf_rope;
mod hf_tokens;
mod hub;
mod mapped;
mod metadata;
mod model;
mod name;
mod progress;
mod resolve;
mod safetensors;
mod tensors;
pub mod testing;
pub mod tiny;
mod tokenizer_source;
mod weights;

pub use cache::default_cache_dir;
pub use config::{ModelConfig, RopeScaling, RopeStyle};
pub use default_model::{DEFAULT_MODEL_BYTES, DEFAULT_MODEL_FILE, DEFAULT_MODEL_SHA256};
pub use error::ModelError;
pub use hub::HubOptions;
pub use model::Model;
pub use name::ModelName;
pub use progress::{NoProgress, Progress};
pub use resolve::{ModelSource, ResolveOptions, resolve};
pub use tokenizer_source::{ByteSpecials, GgufTokenizer, TokenType, TokenizerSource};
pub use weights::{Tensor, WeightType};
