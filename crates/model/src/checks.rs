//! Bounds on the numbers of a configuration, whatever kind of file they come from.

use std::path::Path;

use crate::{ModelConfig, ModelError};

/// Largest numbers accepted from a file, far above any model of the families; they keep later sums from overflowing.
pub(crate) const MAX_LAYERS: usize = 1 << 12;
pub(crate) const MAX_WIDTH: usize = 1 << 20;
pub(crate) const MAX_HEADS: usize = 1 << 12;
pub(crate) const MAX_CONTEXT: usize = 1 << 28;
pub(crate) const MAX_VOCAB: usize = 1 << 24;

/// A size between 1 and `limit`; `field` names it in the file at `path`.
pub(crate) fn size(path: &Path, field: &str, value: u64, limit: usize) -> Result<usize, ModelError> {
    match usize::try_from(value) {
        Ok(0) => Err(ModelError::corrupt(path, format!("{field} is 0"))),
        Ok(size) if size <= limit => Ok(size),
        _ => Err(ModelError::TooLarge {
            path: path.to_owned(),
            field: field.to_owned(),
            value,
            limit: limit as u64,
        }),
    }
}

/// The numbers of a configuration agree with each other.
pub(crate) fn numbers(path: &Path, config: &ModelConfig) -> Result<(), ModelError> {
    let corrupt = |reason: String| Err(ModelError::corrupt(path, reason));
    if !config.num_heads.is_multiple_of(config.num_kv_heads) {
        return corrupt(format!(
            "{} heads are no multiple of {} KV heads",
            config.num_heads, config.num_kv_heads
        ));
    }
    if !config.head_dim.is_multiple_of(2) {
        return corrupt(format!("a head of {} elements can't be rotated in pairs", config.head_dim));
    }
    if config.rope_base < 1.0 || !(config.rms_eps > 0.0 && config.rms_eps < 1.0) {
        return corrupt(format!(
            "rope base {} or RMS epsilon {} make no sense",
            config.rope_base, config.rms_eps
        ));
    }
    if config.vocab > MAX_VOCAB {
        return Err(ModelError::TooLarge {
            path: path.to_owned(),
            field: "vocabulary".to_owned(),
            value: config.vocab as u64,
            limit: MAX_VOCAB as u64,
        });
    }
    Ok(())
}

/// Every special token of a configuration, and those in `more`, is one of the model's.
pub(crate) fn special_tokens(path: &Path, config: &ModelConfig, more: &[u32]) -> Result<(), ModelError> {
    let vocab = config.vocab;
    let ids = config.eos.iter().chain(config.bos.iter()).chain(config.turn_end.iter()).chain(more);
    match ids.copied().find(|&id| usize::try_from(id).map_or(true, |id| id >= vocab)) {
        Some(id) => {
            Err(ModelError::corrupt(path, format!("special token {id} is outside the {vocab} tokens")))
        }
        None => Ok(()),
    }
}
