//! Names of tensors in Hugging Face checkpoints and the GGUF names they have here.

/// Tensors outside the layers.
const WHOLE: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Modules of `model.layers.N.` and their names in `blk.N.`; `.weight` or `.bias` follows.
const MODULES: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// The GGUF name of a checkpoint's tensor; a name that has none stays as it is.
pub(crate) fn to_gguf(name: &str) -> String {
    if let Some((_, gguf)) = WHOLE.iter().find(|(hf, _)| *hf == name) {
        return (*gguf).to_owned();
    }
    translate_layer(name, "model.layers.", "blk.", |(from, to)| (from, to)).unwrap_or_else(|| name.to_owned())
}

/// The checkpoint's name of a tensor; the inverse of [`to_gguf`].
pub(crate) fn from_gguf(name: &str) -> String {
    if let Some((hf, _)) = WHOLE.iter().find(|(_, gguf)| *gguf == name) {
        return (*hf).to_owned();
    }
    translate_layer(name, "blk.", "model.layers.", |(to, from)| (from, to)).unwrap_or_else(|| name.to_owned())
}

/// Whether the tensor is a table that follows from the configuration; old checkpoints carry one a layer.
pub(crate) fn is_derived(name: &str) -> bool {
    name.starts_with("model.") && name.ends_with("rotary_emb.inv_freq")
}

fn translate_layer(
    name: &str,
    prefix: &str,
    new_prefix: &str,
    direction: impl Fn((&'static str, &'static str)) -> (&'static str, &'static str),
) -> Option<String> {
    let (index, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    // One way to write each number, so that two names can't become one.
    let number: u32 = index.parse().ok()?;
    let (module, kind) = rest.rsplit_once('.')?;
    if number.to_string() != index || !matches!(kind, "weight" | "bias") {
        return None;
    }
    let (_, new) = MODULES.into_iter().map(direction).find(|(from, _)| *from == module)?;
    Some(format!("{new_prefix}{number}.{new}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_translate_both_ways() {
        for (hf, gguf) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"),
            ("model.layers.31.self_attn.k_norm.weight", "blk.31.attn_k_norm.weight"),
            ("model.layers.7.post_attention_layernorm.weight", "blk.7.ffn_norm.weight"),
        ] {
            assert_eq!(to_gguf(hf), gguf);
            assert_eq!(from_gguf(gguf), hf);
        }
    }

    #[test]
    fn unknown_names_stay_as_they_are() {
        for name in [
            "model.layers.01.mlp.up_proj.weight",
            "model.layers.+1.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.qweight",
            "model.layers.0.mlp.experts.3.up_proj.weight",
            "model.layers.99999999999.mlp.up_proj.weight",
            "score.weight",
            "",
        ] {
            assert_eq!(to_gguf(name), name);
        }
    }
}
