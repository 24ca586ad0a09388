//! The families of decoders that can be run: one decoder, a description each.

use std::path::Path;

use crate::{ModelError, RopeStyle};

/// What sets a family apart from the others.
pub(crate) struct Family {
    /// `general.architecture` of a GGUF file, which also begins its keys, and `model_type` of a `config.json`.
    pub(crate) name: &'static str,
    /// What `architectures` of a `config.json` must list, if it lists anything.
    pub(crate) class: &'static str,
    /// The query, key and value projections add a bias.
    pub(crate) attention_bias: bool,
    /// Each query and key head is normalised before it is rotated.
    pub(crate) qk_norm: bool,
    /// How a GGUF file's rows are ordered for the rotary embedding. Weights of a `config.json` are never reordered:
    /// half-split.
    pub(crate) gguf_rope: RopeStyle,
    /// Elements of a head where a `config.json` does not say; `None` is the width divided by the heads.
    pub(crate) default_head_dim: Option<usize>,
}

/// SmolLM2 is of the llama family.
const FAMILIES: [Family; 3] = [
    Family {
        name: "llama",
        class: "LlamaForCausalLM",
        attention_bias: false,
        qk_norm: false,
        gguf_rope: RopeStyle::Interleaved,
        default_head_dim: None,
    },
    Family {
        name: "qwen2",
        class: "Qwen2ForCausalLM",
        attention_bias: true,
        qk_norm: false,
        gguf_rope: RopeStyle::HalfSplit,
        default_head_dim: None,
    },
    Family {
        name: "qwen3",
        class: "Qwen3ForCausalLM",
        attention_bias: false,
        qk_norm: true,
        gguf_rope: RopeStyle::HalfSplit,
        default_head_dim: Some(128),
    },
];

impl Family {
    /// The family of this name; `path` is the file that names it.
    pub(crate) fn find(path: &Path, name: &str) -> Result<&'static Family, ModelError> {
        FAMILIES.iter().find(|family| family.name == name).ok_or_else(|| {
            let supported = FAMILIES.iter().map(|family| family.name).collect::<Vec<_>>().join(", ");
            ModelError::unsupported(
                path,
                format!("architecture '{name}' is not supported; supported: {supported}"),
            )
        })
    }

    /// A key of a GGUF file that belongs to the architecture, such as `llama.block_count`.
    pub(crate) fn key(&self, rest: &str) -> String {
        format!("{}.{rest}", self.name)
    }
}

/// Texts that end a turn in the models of these families, wherever a file lists them as special tokens; files often
/// name only one of them in their settings.
pub(crate) const END_TEXTS: [&str; 7] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|end|>", "</s>"];
