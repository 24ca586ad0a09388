//! Which tensors a configuration calls for, and whether a file has exactly those.

use std::collections::HashSet;
use std::path::Path;

use crate::{ModelConfig, ModelError, WeightType};

/// Rotary factors of a GGUF file; part of its configuration, not of its weights.
pub(crate) const FACTORS: &str = "rope_freqs.weight";

/// Where a tensor lies in a mapped file; checked when it was made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) kind: WeightType,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Entry {
    /// The tensor's bytes within its file.
    pub(crate) fn bytes<'a>(&self, file: &'a [u8]) -> Option<&'a [u8]> {
        file.get(self.start..self.start.checked_add(self.len)?)
    }
}

/// A table of tensors under GGUF's names.
pub(crate) trait TensorTable {
    /// The file to blame.
    fn path(&self) -> &Path;
    /// Where the tensor of this name lies.
    fn entry(&self, name: &str) -> Option<&Entry>;
    /// Every name there is.
    fn names(&self) -> Vec<&str>;
    /// What the file itself calls the tensor that is `name` here.
    fn own_name(&self, name: &str) -> String;
}

/// Every tensor the configuration calls for is there in its shape, and nothing else is: a tensor that would be
/// ignored (a bias, an expert) would make wrong text without a word.
/// Those in `beside` may be there too.
pub(crate) fn check(
    table: &dyn TensorTable,
    config: &ModelConfig,
    beside: &[&str],
) -> Result<(), ModelError> {
    let mut expected = HashSet::new();
    for (name, rows, cols) in expected_tensors(config) {
        check_one(table, &name, (rows, cols))?;
        expected.insert(name);
    }
    let names = table.names();
    let extra = names.into_iter().filter(|name| !expected.contains(*name) && !beside.contains(name));
    match extra.map(|name| table.own_name(name)).min() {
        None => Ok(()),
        Some(first) => Err(ModelError::unsupported(
            table.path(),
            format!("tensor '{first}' is not part of the supported {} family", config.family),
        )),
    }
}

fn check_one(table: &dyn TensorTable, name: &str, shape: (usize, usize)) -> Result<(), ModelError> {
    let own_name = || table.own_name(name);
    let entry = table
        .entry(name)
        .ok_or_else(|| ModelError::corrupt(table.path(), format!("no tensor '{}'", own_name())))?;
    if (entry.rows, entry.cols) != shape {
        let (rows, cols) = shape;
        return Err(ModelError::corrupt(
            table.path(),
            format!("tensor '{}' is {} x {}, expected {rows} x {cols}", own_name(), entry.rows, entry.cols),
        ));
    }
    if is_vector(name) && !matches!(entry.kind, WeightType::F32 | WeightType::F16 | WeightType::BF16) {
        let what =
            format!("tensor '{}' has type {}; supported there: F32, F16, BF16", own_name(), entry.kind);
        return Err(ModelError::unsupported(table.path(), what));
    }
    Ok(())
}

/// Whether the tensor of this name is a norm or a bias, which are used as F32 whatever they are stored as.
pub(crate) fn is_vector(name: &str) -> bool {
    name.ends_with("norm.weight") || name.ends_with(".bias")
}

/// Name, rows and columns of each tensor of a model.
pub(crate) fn expected_tensors(config: &ModelConfig) -> impl Iterator<Item = (String, usize, usize)> + '_ {
    let hidden = config.hidden;
    let query = config.num_heads * config.head_dim;
    let kv = config.num_kv_heads * config.head_dim;
    let whole = [("token_embd.weight", config.vocab, hidden), ("output_norm.weight", 1, hidden)];
    let output = (!config.tied_embedding).then_some(("output.weight", config.vocab, hidden));
    let layer = [
        ("attn_norm.weight", 1, hidden),
        ("attn_q.weight", query, hidden),
        ("attn_k.weight", kv, hidden),
        ("attn_v.weight", kv, hidden),
        ("attn_output.weight", hidden, query),
        ("ffn_norm.weight", 1, hidden),
        ("ffn_gate.weight", config.ffn, hidden),
        ("ffn_up.weight", config.ffn, hidden),
        ("ffn_down.weight", hidden, config.ffn),
    ];
    let biases = [("attn_q.bias", 1, query), ("attn_k.bias", 1, kv), ("attn_v.bias", 1, kv)];
    let norms = [("attn_q_norm.weight", 1, config.head_dim), ("attn_k_norm.weight", 1, config.head_dim)];
    let layer: Vec<_> = layer
        .into_iter()
        .chain(biases.into_iter().filter(|_| config.attention_bias))
        .chain(norms.into_iter().filter(|_| config.qk_norm))
        .collect();
    let layers = (0..config.num_layers).flat_map(move |index| {
        let layer = layer.clone();
        layer.into_iter().map(move |(name, rows, cols)| (format!("blk.{index}.{name}"), rows, cols))
    });
    whole.into_iter().chain(output).map(|(name, rows, cols)| (name.to_owned(), rows, cols)).chain(layers)
}
