//! From a GGUF's metadata and tensor table to a checked configuration.

use std::path::Path;

use crate::gguf::GgufFile;
use crate::metadata::Metadata;
use crate::{GgufTokenizer, ModelConfig, ModelError, RopeScaling, RopeStyle, TokenType, WeightType};

/// Largest numbers accepted from a file, far above any model of the family; they keep later sums from overflowing.
const MAX_LAYERS: usize = 1 << 12;
const MAX_WIDTH: usize = 1 << 20;
const MAX_HEADS: usize = 1 << 12;
const MAX_CONTEXT: usize = 1 << 28;
const MAX_VOCAB: usize = 1 << 24;

/// Settings that change the arithmetic and that the llama family here does not have: refused unless absent or zero.
const UNSUPPORTED_NUMBERS: [&str; 3] =
    ["llama.expert_count", "llama.attention.sliding_window", "llama.expert_used_count"];
const UNSUPPORTED_FLOATS: [&str; 6] = [
    "llama.attention.scale",
    "llama.embedding_scale",
    "llama.residual_scale",
    "llama.logit_scale",
    "llama.attention.clamp_kqv",
    "llama.attn_logit_softcapping",
];

/// Texts that end a turn in the models of this family, wherever the file lists them as special tokens; files often
/// name only one of them in their metadata.
const END_TEXTS: [&str; 7] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|end|>", "</s>"];

const FACTORS: &str = "rope_freqs.weight";

/// Reads and checks the configuration of an opened file.
pub(crate) fn read_config(
    file: &GgufFile,
    metadata: &Metadata,
    tokenizer: &GgufTokenizer,
) -> Result<ModelConfig, ModelError> {
    let path = file.path();
    let family = metadata
        .text("general.architecture")?
        .ok_or_else(|| metadata.missing("general.architecture"))?
        .to_owned();
    if family != "llama" {
        return Err(ModelError::unsupported(
            path,
            format!("architecture '{family}' is not supported; supported: llama"),
        ));
    }
    refuse_variants(metadata)?;
    let num_heads = metadata.size("llama.attention.head_count", MAX_HEADS)?;
    let hidden = metadata.size("llama.embedding_length", MAX_WIDTH)?;
    let head_dim = metadata.size_or("llama.attention.key_length", MAX_WIDTH, (hidden / num_heads).max(1))?;
    let config = ModelConfig {
        name: metadata.text("general.name")?.unwrap_or(&family).to_owned(),
        num_layers: metadata.size("llama.block_count", MAX_LAYERS)?,
        hidden,
        num_heads,
        num_kv_heads: metadata.size_or("llama.attention.head_count_kv", MAX_HEADS, num_heads)?,
        head_dim,
        ffn: metadata.size("llama.feed_forward_length", MAX_WIDTH)?,
        vocab: file.entry("token_embd.weight").map_or(0, |entry| entry.rows),
        context: metadata.size("llama.context_length", MAX_CONTEXT)?,
        rope_base: metadata.float("llama.rope.freq_base")?.unwrap_or(10_000.0),
        rope_style: RopeStyle::Interleaved,
        rope_scaling: rope_scaling(file, metadata, head_dim)?,
        rms_eps: metadata
            .float("llama.attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| metadata.missing("llama.attention.layer_norm_rms_epsilon"))?,
        tied_embedding: file.entry("output.weight").is_none(),
        bos: tokenizer.bos,
        eos: end_tokens(metadata, tokenizer)?,
        add_bos: metadata.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos_unasked(&tokenizer.pre))
            && tokenizer.bos.is_some(),
        family,
    };
    check_numbers(path, metadata, &config)?;
    check_tensors(file, &config)?;
    check_tokens(path, &config, tokenizer)?;
    Ok(config)
}

/// Reads the tokenizer's metadata as it stands, moving the long lists out.
pub(crate) fn read_tokenizer(metadata: &mut Metadata) -> Result<GgufTokenizer, ModelError> {
    Ok(GgufTokenizer {
        model: metadata.text("tokenizer.ggml.model")?.unwrap_or_default().to_owned(),
        pre: metadata.text("tokenizer.ggml.pre")?.unwrap_or_default().to_owned(),
        tokens: metadata.take_texts("tokenizer.ggml.tokens")?,
        merges: metadata.take_texts("tokenizer.ggml.merges")?,
        token_types: metadata
            .integers("tokenizer.ggml.token_type")?
            .into_iter()
            .map(TokenType::from)
            .collect(),
        bos: token_id(metadata, "tokenizer.ggml.bos_token_id")?,
        eos: token_id(metadata, "tokenizer.ggml.eos_token_id")?,
        unk: token_id(metadata, "tokenizer.ggml.unknown_token_id")?,
    })
}

/// A token id; files write -1 for none.
fn token_id(metadata: &Metadata, key: &str) -> Result<Option<u32>, ModelError> {
    Ok(metadata.number(key)?.and_then(|id| u32::try_from(id).ok()).filter(|&id| id != u32::MAX))
}

/// Llama 3 prompts begin with BOS although its files often leave the flag out.
fn adds_bos_unasked(pre_tokenizer: &str) -> bool {
    matches!(pre_tokenizer, "llama-bpe" | "llama3" | "llama-v3")
}

fn refuse_variants(metadata: &Metadata) -> Result<(), ModelError> {
    for key in UNSUPPORTED_NUMBERS {
        if let Some(value @ 1..) = metadata.number(key)? {
            return Err(ModelError::unsupported(
                metadata.path(),
                format!("{key} = {value} is not supported"),
            ));
        }
    }
    if let Some(num_files @ 2..) = metadata.number("split.count")? {
        let what = format!("the model is split over {num_files} files; merge them into one first");
        return Err(ModelError::unsupported(metadata.path(), what));
    }
    for key in UNSUPPORTED_FLOATS {
        if let Some(value) = metadata.float(key)?
            && value != 0.0
        {
            return Err(ModelError::unsupported(
                metadata.path(),
                format!("{key} = {value} is not supported"),
            ));
        }
    }
    Ok(())
}

fn rope_scaling(file: &GgufFile, metadata: &Metadata, head_dim: usize) -> Result<RopeScaling, ModelError> {
    let path = file.path();
    if file.entry(FACTORS).is_some() {
        let tensor = file.tensor(FACTORS)?;
        if tensor.kind != WeightType::F32 || (tensor.rows, tensor.cols) != (1, head_dim / 2) {
            return Err(ModelError::corrupt(
                path,
                format!("'{FACTORS}' is not {} numbers of type F32", head_dim / 2),
            ));
        }
        let (chunks, _) = tensor.data.as_chunks::<4>();
        let factors: Vec<f32> = chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        if !factors.iter().all(|factor| factor.is_finite() && *factor > 0.0) {
            return Err(ModelError::corrupt(
                path,
                format!("'{FACTORS}' holds a factor that is not positive"),
            ));
        }
        return Ok(RopeScaling::Factors(factors));
    }
    // The two oldest keys of linear scaling have the factor and no type.
    let legacy = metadata.float("llama.rope.scale_linear")?;
    let factor = metadata.float("llama.rope.scaling.factor")?.or(legacy).unwrap_or(0.0);
    let default_kind = if legacy.is_some() { "linear" } else { "none" };
    match metadata.text("llama.rope.scaling.type")?.unwrap_or(default_kind) {
        "none" => Ok(RopeScaling::None),
        "linear" if factor == 0.0 || factor == 1.0 => Ok(RopeScaling::None),
        "linear" if factor > 0.0 => Ok(RopeScaling::Linear(factor)),
        "linear" => Err(ModelError::corrupt(path, format!("rope scaling factor {factor} is not positive"))),
        other => Err(ModelError::unsupported(
            path,
            format!("rope scaling '{other}' is not supported; supported: none, linear, rope_freqs.weight"),
        )),
    }
}

fn end_tokens(metadata: &Metadata, tokenizer: &GgufTokenizer) -> Result<Vec<u32>, ModelError> {
    let mut ids: Vec<u32> = tokenizer.eos.into_iter().collect();
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ids.extend(token_id(metadata, key)?);
    }
    for (id, text) in (0u32..).zip(&tokenizer.tokens) {
        let special = usize::try_from(id)
            .ok()
            .and_then(|index| tokenizer.token_types.get(index))
            .is_some_and(|kind| matches!(kind, TokenType::Control | TokenType::UserDefined));
        if special && END_TEXTS.contains(&text.as_str()) {
            ids.push(id);
        }
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn check_numbers(path: &Path, metadata: &Metadata, config: &ModelConfig) -> Result<(), ModelError> {
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
    let rotated = metadata.size_or("llama.rope.dimension_count", MAX_WIDTH, config.head_dim)?;
    let value_length = metadata.size_or("llama.attention.value_length", MAX_WIDTH, config.head_dim)?;
    if rotated != config.head_dim || value_length != config.head_dim {
        let what = format!(
            "heads of {} elements with {rotated} rotated and values of {value_length} are not supported",
            config.head_dim
        );
        return Err(ModelError::unsupported(path, what));
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

/// Every tensor the configuration calls for is there in its shape, and nothing else is: a tensor that would be
/// ignored (a bias, an expert) would make wrong text without a word.
fn check_tensors(file: &GgufFile, config: &ModelConfig) -> Result<(), ModelError> {
    let mut num_known = 0;
    for (name, rows, cols) in expected_tensors(config) {
        let entry = file
            .entry(&name)
            .ok_or_else(|| ModelError::corrupt(file.path(), format!("no tensor '{name}'")))?;
        if (entry.rows, entry.cols) != (rows, cols) {
            return Err(ModelError::corrupt(
                file.path(),
                format!("tensor '{name}' is {} x {}, expected {rows} x {cols}", entry.rows, entry.cols),
            ));
        }
        num_known += 1;
    }
    num_known += usize::from(file.entry(FACTORS).is_some());
    if file.names().count() == num_known {
        return Ok(());
    }
    let expected: std::collections::HashSet<String> =
        expected_tensors(config).map(|(name, ..)| name).collect();
    let mut extra: Vec<&str> =
        file.names().filter(|name| !expected.contains(*name) && *name != FACTORS).collect();
    extra.sort_unstable();
    let first = extra.first().copied().unwrap_or_default();
    Err(ModelError::unsupported(
        file.path(),
        format!("tensor '{first}' is not part of the supported llama family"),
    ))
}

/// Name, rows and columns of each tensor of a llama model.
pub(crate) fn expected_tensors(config: &ModelConfig) -> impl Iterator<Item = (String, usize, usize)> + '_ {
    let hidden = config.hidden;
    let query = config.num_heads * config.head_dim;
    let kv = config.num_kv_heads * config.head_dim;
    let whole = [("token_embd", config.vocab, hidden), ("output_norm", 1, hidden)];
    let output = (!config.tied_embedding).then_some(("output", config.vocab, hidden));
    let layer = [
        ("attn_norm", 1, hidden),
        ("attn_q", query, hidden),
        ("attn_k", kv, hidden),
        ("attn_v", kv, hidden),
        ("attn_output", hidden, query),
        ("ffn_norm", 1, hidden),
        ("ffn_gate", config.ffn, hidden),
        ("ffn_up", config.ffn, hidden),
        ("ffn_down", hidden, config.ffn),
    ];
    let layers = (0..config.num_layers).flat_map(move |index| {
        layer.map(|(name, rows, cols)| (format!("blk.{index}.{name}.weight"), rows, cols))
    });
    whole
        .into_iter()
        .chain(output)
        .map(|(name, rows, cols)| (format!("{name}.weight"), rows, cols))
        .chain(layers)
}

fn check_tokens(path: &Path, config: &ModelConfig, tokenizer: &GgufTokenizer) -> Result<(), ModelError> {
    let vocab = config.vocab;
    if !tokenizer.tokens.is_empty() && tokenizer.tokens.len() != vocab {
        let reason = format!("{} tokens for an embedding of {vocab} rows", tokenizer.tokens.len());
        return Err(ModelError::corrupt(path, reason));
    }
    if !tokenizer.token_types.is_empty() && tokenizer.token_types.len() != tokenizer.tokens.len() {
        let reason =
            format!("{} token types for {} tokens", tokenizer.token_types.len(), tokenizer.tokens.len());
        return Err(ModelError::corrupt(path, reason));
    }
    let ids = config.eos.iter().chain(config.bos.iter()).chain(tokenizer.unk.iter());
    match ids.copied().find(|&id| usize::try_from(id).map_or(true, |id| id >= vocab)) {
        Some(id) => {
            Err(ModelError::corrupt(path, format!("special token {id} is outside the {vocab} tokens")))
        }
        None => Ok(()),
    }
}
