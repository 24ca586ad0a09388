//! From a model folder's `config.json` to a checked configuration.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::family::Family;
use crate::folder::{CONFIG_FILE, Folder, GENERATION_FILE};
use crate::hf_rope::RopeParameters;
use crate::hf_tokens::HfTokens;
use crate::{ModelConfig, ModelError, RopeStyle, checks};

#[derive(Deserialize)]
struct Named {
    model_type: Option<String>,
}

/// `config.json`, as far as the families here use it. Both ways of writing the rotary settings are known: beside the
/// other settings (`rope_theta`, `rope_scaling`), and all in `rope_parameters`.
#[derive(Deserialize)]
struct HfConfig {
    architectures: Option<Vec<String>>,
    hidden_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    intermediate_size: u64,
    vocab_size: u64,
    max_position_embeddings: u64,
    rms_norm_eps: Option<f32>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeParameters>,
    rope_parameters: Option<RopeParameters>,
    tie_word_embeddings: Option<bool>,
    bos_token_id: Option<i64>,
    eos_token_id: Option<Ids>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    layer_types: Option<Vec<String>>,
    partial_rotary_factor: Option<f64>,
    quantization_config: Option<Value>,
}

/// `generation_config.json` often lists more end tokens than `config.json`.
#[derive(Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<Ids>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(i64),
    Several(Vec<i64>),
}

impl Ids {
    /// Those that are ids; files write -1 for none.
    fn list(self) -> Vec<u32> {
        let ids = match self {
            Ids::One(id) => vec![id],
            Ids::Several(ids) => ids,
        };
        ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect()
    }
}

/// The numbers of the folder's model. Whether the weights fit them is for the caller to check.
pub(crate) fn read(folder: &Folder, tokens: &HfTokens) -> Result<ModelConfig, ModelError> {
    let path = folder.path().join(CONFIG_FILE);
    let absent = || ModelError::NotFound { path: path.clone() };
    // The architecture comes first: another one's settings may not even parse.
    let Named { model_type } = folder.json(CONFIG_FILE)?.ok_or_else(absent)?;
    let model_type = model_type.ok_or_else(|| ModelError::corrupt(&path, "'model_type' is missing"))?;
    let family = Family::find(&path, &model_type)?;
    let raw: HfConfig = folder.json(CONFIG_FILE)?.ok_or_else(absent)?;
    refuse_variants(&path, &raw, family)?;
    let generation = folder.json::<GenerationConfig>(GENERATION_FILE)?;
    let more_ends = generation.and_then(|config| config.eos_token_id).map_or_else(Vec::new, Ids::list);
    let name = folder.path().file_name().map(|name| name.to_string_lossy().into_owned());
    Reader { path, family, tokens }.config(raw, &more_ends, name)
}

fn refuse_variants(path: &Path, raw: &HfConfig, family: &Family) -> Result<(), ModelError> {
    let refuse = |what: String| Err(ModelError::unsupported(path, format!("{what} is not supported")));
    if let Some(classes) = raw.architectures.as_deref()
        && !classes.is_empty()
        && !classes.iter().any(|class| class == family.class)
    {
        return refuse(format!("architecture '{}' of model type '{}'", classes.join(", "), family.name));
    }
    if let Some(settings) = &raw.quantization_config {
        let method = settings.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
        return refuse(format!("quantization_config of method '{method}'"));
    }
    let flags = [
        // The bias that qwen2 has is no setting; this one adds another to the output projection.
        ("attention_bias", raw.attention_bias),
        ("mlp_bias", raw.mlp_bias),
        ("use_sliding_window", raw.use_sliding_window),
    ];
    if let Some((name, _)) = flags.iter().find(|(_, value)| *value == Some(true)) {
        return refuse(format!("{name} = true"));
    }
    if let Some(act) = raw.hidden_act.as_deref().filter(|act| *act != "silu") {
        return refuse(format!("hidden_act '{act}' (supported: silu)"));
    }
    let kinds = raw.layer_types.as_deref().unwrap_or_default();
    if let Some(kind) = kinds.iter().find(|kind| *kind != "full_attention") {
        return refuse(format!("layer type '{kind}'"));
    }
    match raw.partial_rotary_factor {
        Some(factor) if factor != 1.0 => refuse(format!("partial_rotary_factor = {factor}")),
        _ => Ok(()),
    }
}

struct Reader<'a> {
    path: PathBuf,
    family: &'static Family,
    tokens: &'a HfTokens,
}

impl Reader<'_> {
    fn size(&self, field: &str, value: u64, limit: usize) -> Result<usize, ModelError> {
        checks::size(&self.path, field, value, limit)
    }

    fn config(
        &self,
        raw: HfConfig,
        more_ends: &[u32],
        name: Option<String>,
    ) -> Result<ModelConfig, ModelError> {
        let (path, family, tokens) = (&self.path, self.family, self.tokens);
        let num_heads = self.size("num_attention_heads", raw.num_attention_heads, checks::MAX_HEADS)?;
        let num_kv_heads = match raw.num_key_value_heads {
            Some(number) => self.size("num_key_value_heads", number, checks::MAX_HEADS)?,
            None => num_heads,
        };
        let hidden = self.size("hidden_size", raw.hidden_size, checks::MAX_WIDTH)?;
        let head_dim = self.head_dim(raw.head_dim, hidden, num_heads)?;
        let is_newer = raw.rope_parameters.is_some();
        let rope = raw.rope_parameters.or(raw.rope_scaling);
        let theta = match rope.as_ref().and_then(|rope| rope.rope_theta).or(raw.rope_theta) {
            Some(theta) => theta,
            // Other families nest these settings by kind of layer; nothing of that must pass as a default.
            None if is_newer => return Err(ModelError::corrupt(path, "rope_parameters has no rope_theta")),
            None => 10_000.0,
        };
        let rope_scaling = match rope {
            Some(rope) => rope.scaling(path, theta, head_dim)?,
            None => crate::RopeScaling::None,
        };
        let configured = raw.eos_token_id.map_or_else(Vec::new, Ids::list);
        let turn_end = tokens.eos.or(configured.first().copied());
        let mut eos = [configured.as_slice(), more_ends, tokens.ends.as_slice()].concat();
        eos.extend(tokens.eos);
        eos.sort_unstable();
        eos.dedup();
        // The tokenizer has the last word on whether there is a BOS: qwen2 names one in `config.json` and uses none.
        let configured_bos = raw.bos_token_id.and_then(|id| u32::try_from(id).ok());
        let bos = if tokens.is_configured { tokens.bos } else { configured_bos };
        let config = ModelConfig {
            family: family.name.to_owned(),
            name: name.unwrap_or_else(|| family.name.to_owned()),
            num_layers: self.size("num_hidden_layers", raw.num_hidden_layers, checks::MAX_LAYERS)?,
            hidden,
            num_heads,
            num_kv_heads,
            head_dim,
            ffn: self.size("intermediate_size", raw.intermediate_size, checks::MAX_WIDTH)?,
            vocab: self.size("vocab_size", raw.vocab_size, checks::MAX_VOCAB)?,
            context: self.size(
                "max_position_embeddings",
                raw.max_position_embeddings,
                checks::MAX_CONTEXT,
            )?,
            rope_base: theta as f32,
            rope_style: RopeStyle::HalfSplit,
            rope_scaling,
            rms_eps: raw.rms_norm_eps.unwrap_or(1e-6),
            tied_embedding: raw.tie_word_embeddings.unwrap_or(false),
            attention_bias: family.attention_bias,
            qk_norm: family.qk_norm,
            bos,
            eos,
            turn_end,
            add_bos: tokens.add_bos && bos.is_some(),
        };
        checks::numbers(path, &config)?;
        checks::special_tokens(path, &config, &[])?;
        Ok(config)
    }

    fn head_dim(&self, given: Option<u64>, hidden: usize, num_heads: usize) -> Result<usize, ModelError> {
        match (given, self.family.default_head_dim) {
            (Some(number), _) => self.size("head_dim", number, checks::MAX_WIDTH),
            (None, Some(default)) => Ok(default),
            (None, None) if hidden.is_multiple_of(num_heads) => Ok(hidden / num_heads),
            (None, None) => {
                let reason = format!("hidden_size {hidden} is no multiple of {num_heads} heads");
                Err(ModelError::corrupt(&self.path, reason))
            }
        }
    }
}
