//! From a GGUF's metadata and tensor table to a checked configuration.

use std::path::Path;

use crate::family::{END_TEXTS, Family};
use crate::gguf::GgufFile;
use crate::metadata::Metadata;
use crate::tensors::{FACTORS, TensorTable};
use crate::{GgufTokenizer, ModelConfig, ModelError, RopeScaling, TokenType, WeightType, checks, tensors};

/// Settings that change the arithmetic and that no family here has, after the architecture's name: refused unless
/// absent or zero.
const UNSUPPORTED_NUMBERS: [&str; 3] = ["expert_count", "attention.sliding_window", "expert_used_count"];
const UNSUPPORTED_FLOATS: [&str; 6] = [
    "attention.scale",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
];

/// Reads and checks the configuration of an opened file.
pub(crate) fn read_config(
    file: &GgufFile,
    metadata: &Metadata,
    tokenizer: &GgufTokenizer,
) -> Result<ModelConfig, ModelError> {
    let path = file.path();
    let architecture =
        metadata.text("general.architecture")?.ok_or_else(|| metadata.missing("general.architecture"))?;
    let family = Family::find(path, architecture)?;
    refuse_variants(metadata, family)?;
    let size = |rest: &str, limit| metadata.size(&family.key(rest), limit);
    let size_or = |rest: &str, limit, default| metadata.size_or(&family.key(rest), limit, default);
    let num_heads = size("attention.head_count", checks::MAX_HEADS)?;
    let hidden = size("embedding_length", checks::MAX_WIDTH)?;
    let head_dim = size_or("attention.key_length", checks::MAX_WIDTH, (hidden / num_heads).max(1))?;
    let epsilon = family.key("attention.layer_norm_rms_epsilon");
    let eos = end_tokens(metadata, tokenizer)?;
    let config = ModelConfig {
        name: metadata.text("general.name")?.unwrap_or(architecture).to_owned(),
        num_layers: size("block_count", checks::MAX_LAYERS)?,
        hidden,
        num_heads,
        num_kv_heads: size_or("attention.head_count_kv", checks::MAX_HEADS, num_heads)?,
        head_dim,
        ffn: size("feed_forward_length", checks::MAX_WIDTH)?,
        vocab: file.entry("token_embd.weight").map_or(0, |entry| entry.rows),
        context: size("context_length", checks::MAX_CONTEXT)?,
        rope_base: metadata.float(&family.key("rope.freq_base"))?.unwrap_or(10_000.0),
        rope_style: family.gguf_rope,
        rope_scaling: rope_scaling(file, metadata, family, head_dim)?,
        rms_eps: metadata.float(&epsilon)?.ok_or_else(|| metadata.missing(&epsilon))?,
        tied_embedding: file.entry("output.weight").is_none(),
        attention_bias: family.attention_bias,
        qk_norm: family.qk_norm,
        bos: tokenizer.bos,
        turn_end: tokenizer.eos.or(eos.first().copied()),
        eos,
        add_bos: metadata.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos_unasked(&tokenizer.pre))
            && tokenizer.bos.is_some(),
        family: family.name.to_owned(),
    };
    checks::numbers(path, &config)?;
    check_heads(metadata, family, &config)?;
    tensors::check(file, &config, &[FACTORS])?;
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

fn refuse_variants(metadata: &Metadata, family: &Family) -> Result<(), ModelError> {
    for key in UNSUPPORTED_NUMBERS.map(|rest| family.key(rest)) {
        if let Some(value @ 1..) = metadata.number(&key)? {
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
    for key in UNSUPPORTED_FLOATS.map(|rest| family.key(rest)) {
        if let Some(value) = metadata.float(&key)?
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

fn rope_scaling(
    file: &GgufFile,
    metadata: &Metadata,
    family: &Family,
    head_dim: usize,
) -> Result<RopeScaling, ModelError> {
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
    let legacy = metadata.float(&family.key("rope.scale_linear"))?;
    let factor = metadata.float(&family.key("rope.scaling.factor"))?.or(legacy).unwrap_or(0.0);
    let default_kind = if legacy.is_some() { "linear" } else { "none" };
    match metadata.text(&family.key("rope.scaling.type"))?.unwrap_or(default_kind) {
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

/// Keys and values are of one length, and all of it is rotated.
fn check_heads(metadata: &Metadata, family: &Family, config: &ModelConfig) -> Result<(), ModelError> {
    let length = |rest: &str| metadata.size_or(&family.key(rest), checks::MAX_WIDTH, config.head_dim);
    let (rotated, value_length) = (length("rope.dimension_count")?, length("attention.value_length")?);
    if rotated == config.head_dim && value_length == config.head_dim {
        return Ok(());
    }
    let what = format!(
        "heads of {} elements with {rotated} rotated and values of {value_length} are not supported",
        config.head_dim
    );
    Err(ModelError::unsupported(metadata.path(), what))
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
    let unknown: Vec<u32> = tokenizer.unk.into_iter().collect();
    checks::special_tokens(path, config, &unknown)
}
