//! Model folders: their configuration, tokens, templates and digests.

#[path = "support/folder.rs"]
mod folder;

use baton_model::{Model, ModelError, ModelSource, RopeScaling, RopeStyle, TokenizerSource};
use folder::Folder;
use serde_json::json;

fn open(spec: &Folder) -> Result<Model, ModelError> {
    let temporary = tempfile::tempdir().unwrap();
    spec.write(temporary.path());
    Model::open(&ModelSource::Folder(temporary.path().to_owned()))
}

fn changed(change: impl FnOnce(&mut Folder)) -> Folder {
    let mut folder = Folder::llama();
    change(&mut folder);
    folder
}

const TOKENIZER: &str = r#"{"model":{"vocab":{"a":3}},"added_tokens":[
    {"id":0,"content":"<|endoftext|>","special":true},{"id":1,"content":"<s>","special":true},
    {"id":2,"content":"<|im_end|>","special":true},{"id":5,"content":"</s>","special":false}]}"#;

#[test]
fn a_sound_folder_gives_its_configuration() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("Some-Model-0.1B");
    std::fs::create_dir(&path).unwrap();
    Folder::llama().write(&path);
    let model = Model::open(&ModelSource::Folder(path.clone())).unwrap();
    let config = &model.config;
    assert_eq!((config.family.as_str(), config.name.as_str()), ("llama", "Some-Model-0.1B"));
    assert_eq!((config.num_layers, config.hidden, config.ffn), (1, 32, 64));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (2, 1, 16));
    assert_eq!((config.vocab, config.context), (6, 128));
    assert_eq!((config.rope_base, config.rope_style), (10_000.0, RopeStyle::HalfSplit));
    assert_eq!((&config.rope_scaling, config.rms_eps), (&RopeScaling::None, 1e-5));
    assert!(config.tied_embedding && !config.add_bos && !config.attention_bias && !config.qk_norm);
    assert_eq!((config.bos, config.eos.as_slice(), config.turn_end), (None, [].as_slice(), None));
    // Opens without its tokenizer: whoever needs that is told where it should be.
    assert_eq!(model.tokenizer, TokenizerSource::Json(path.join("tokenizer.json")));
    assert_eq!(model.chat_template, None);
}

#[test]
fn tokens_come_from_all_files_that_name_them() {
    let spec = changed(|folder| {
        folder.set("bos_token_id", json!(3));
        folder.set("eos_token_id", json!([4, -1]));
        folder.files = vec![
            ("generation_config.json", r#"{"eos_token_id":[3,4]}"#.to_owned()),
            ("tokenizer.json", TOKENIZER.to_owned()),
            (
                "tokenizer_config.json",
                r#"{"bos_token":{"content":"<s>","lstrip":false},"eos_token":"<|im_end|>","add_bos_token":true,
                "chat_template":"from the settings"}"#
                    .to_owned(),
            ),
        ];
    });
    let model = open(&spec).unwrap();
    // Id 5 is text that looks like an end token.
    assert_eq!((model.config.bos, model.config.eos.as_slice()), (Some(1), [0, 2, 3, 4].as_slice()));
    assert_eq!((model.config.turn_end, model.config.add_bos), (Some(2), true));
    assert_eq!(model.chat_template.as_deref(), Some("from the settings"));

    let mut newer = spec.clone();
    newer.files.push(("chat_template.jinja", "from its own file".to_owned()));
    assert_eq!(open(&newer).unwrap().chat_template.as_deref(), Some("from its own file"));

    let mut named = spec.clone();
    named.files[2].1 = r#"{"bos_token":null,"chat_template":[{"name":"tool_use","template":"t"},
        {"name":"default","template":"d"}]}"#
        .to_owned();
    let model = open(&named).unwrap();
    assert_eq!(model.chat_template.as_deref(), Some("d"));
    // The tokenizer says there is none, whatever the other file says.
    assert_eq!((model.config.bos, model.config.turn_end), (None, Some(4)));

    let outside = changed(|folder| folder.set("eos_token_id", json!(6)));
    assert!(open(&outside).unwrap_err().to_string().contains("special token 6 is outside the 6 tokens"));
}

#[test]
fn rotary_settings_are_read_in_both_writings() {
    let old = changed(|folder| {
        folder.set("rope_theta", json!(500_000));
        folder.set("rope_scaling", json!({"type": "linear", "factor": 2.0}));
    });
    let new = changed(|folder| {
        folder.set("rope_parameters", json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000.0}));
    });
    for spec in [old, new] {
        let config = open(&spec).unwrap().config;
        assert_eq!((config.rope_base, config.rope_scaling), (500_000.0, RopeScaling::Linear(2.0)));
    }
    let llama_3 = changed(|folder| {
        folder.set("rope_theta", json!(500_000.0));
        let settings = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192});
        folder.set("rope_scaling", settings);
    });
    let RopeScaling::Factors(factors) = open(&llama_3).unwrap().config.rope_scaling else {
        panic!("no factors")
    };
    assert_eq!((factors.len(), factors[0], factors[7]), (8, 1.0, 32.0));
}

#[test]
fn families_bring_their_own_tensors() {
    let bias = |folder: &mut Folder| {
        for (name, len) in [("q", 32), ("k", 16), ("v", 16)] {
            folder.weight(&format!("model.layers.0.self_attn.{name}_proj.bias"), &[len]);
        }
    };
    let mut qwen2 = Folder::of_family("qwen2", "Qwen2ForCausalLM");
    let error = open(&qwen2).unwrap_err().to_string();
    assert!(error.contains("no tensor 'model.layers.0.self_attn.q_proj.bias'"), "{error}");
    bias(&mut qwen2);
    let model = open(&qwen2).unwrap();
    assert!(model.config.attention_bias && model.has_tensor("blk.0.attn_v.bias"));

    let mut qwen3 = Folder::of_family("qwen3", "Qwen3ForCausalLM");
    qwen3.set("head_dim", json!(16));
    qwen3.weight("model.layers.0.self_attn.q_norm.weight", &[16]);
    qwen3.weight("model.layers.0.self_attn.k_norm.weight", &[16]);
    let model = open(&qwen3).unwrap();
    assert!(model.config.qk_norm && model.has_tensor("blk.0.attn_k_norm.weight"));
    // Without the setting a head has 128 elements.
    qwen3.config.as_object_mut().unwrap().remove("head_dim");
    let error = open(&qwen3).unwrap_err().to_string();
    assert!(error.contains("q_proj.weight' is 32 x 32, expected 256 x 32"), "{error}");
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (key, value, part) in [
        (
            "model_type",
            json!("mixtral"),
            "architecture 'mixtral' is not supported; supported: llama, qwen2, qwen3",
        ),
        (
            "architectures",
            json!(["LlamaForSequenceClassification"]),
            "'LlamaForSequenceClassification' of model type",
        ),
        ("quantization_config", json!({"quant_method": "gptq"}), "quantization_config of method 'gptq'"),
        ("hidden_act", json!("gelu"), "hidden_act 'gelu' (supported: silu)"),
        ("attention_bias", json!(true), "attention_bias = true"),
        ("mlp_bias", json!(true), "mlp_bias = true"),
        ("use_sliding_window", json!(true), "use_sliding_window = true"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "layer type 'sliding_attention'"),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor = 0.5"),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0}), "rope scaling 'yarn'"),
    ] {
        let error = open(&changed(|folder| folder.set(key, value))).unwrap_err();
        assert!(matches!(error, ModelError::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains(part) && error.to_string().contains("config.json"), "{error}");
    }
}

#[test]
fn contradictions_are_corruption() {
    for (key, value, part) in [
        ("model_type", json!(null), "'model_type' is missing"),
        ("hidden_size", json!("big"), "expected u64"),
        ("hidden_size", json!(0), "hidden_size is 0"),
        ("hidden_size", json!(33), "hidden_size 33 is no multiple of 2 heads"),
        ("num_key_value_heads", json!(3), "no multiple of 3"),
        ("rms_norm_eps", json!(0.0), "RMS epsilon 0"),
        ("vocab_size", json!(7), "tensor 'model.embed_tokens.weight' is 6 x 32, expected 7 x 32"),
        ("num_hidden_layers", json!(2), "no tensor 'model.layers.1.input_layernorm.weight'"),
        ("tie_word_embeddings", json!(false), "no tensor 'lm_head.weight'"),
        ("rope_scaling", json!({"rope_type": "llama3"}), "rope scaling has no factor"),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_theta": 1e6}}),
            "rope_parameters has no rope_theta",
        ),
    ] {
        let error = open(&changed(|folder| folder.set(key, value))).unwrap_err();
        assert!(matches!(error, ModelError::Corrupt { .. }), "{error:?}");
        assert!(error.to_string().contains(part), "'{error}' does not say '{part}'");
        assert!(!error.to_string().contains('\n'), "{error}");
    }
    let error = open(&changed(|folder| folder.set("num_hidden_layers", json!(1u64 << 40)))).unwrap_err();
    assert!(matches!(&error, ModelError::TooLarge { limit: 4096, .. }), "{error:?}");
    for (name, content) in [
        ("tokenizer_config.json", "{"),
        ("tokenizer.json", "[1]"),
        ("generation_config.json", r#"{"eos_token_id":"x"}"#),
    ] {
        let error = open(&changed(|folder| folder.files = vec![(name, content.to_owned())])).unwrap_err();
        assert!(matches!(error, ModelError::Corrupt { .. }) && error.to_string().contains(name), "{error}");
    }
}

#[test]
fn what_is_missing_is_named() {
    let temporary = tempfile::tempdir().unwrap();
    let missing = |path: &std::path::Path| match Model::open(&ModelSource::Folder(path.to_owned())) {
        Err(ModelError::NotFound { path }) => path,
        other => panic!("{other:?}"),
    };
    assert_eq!(missing(&temporary.path().join("none")), temporary.path().join("none"));
    assert_eq!(missing(temporary.path()), temporary.path().join("config.json"));
    Folder::llama().write_documents(temporary.path());
    assert_eq!(missing(temporary.path()), temporary.path().join("model.safetensors"));
    std::fs::write(temporary.path().join("config.json"), vec![b' '; (4 << 20) + 1]).unwrap();
    let error = Model::open(&ModelSource::Folder(temporary.path().to_owned())).unwrap_err();
    assert!(
        error.to_string().contains("config.json: size in bytes is 4194305, the limit is 4194304"),
        "{error}"
    );
}

#[test]
fn the_digest_tells_folders_apart() {
    let digest = |spec: &Folder| open(spec).unwrap().digest;
    let base = digest(&Folder::llama());
    assert_eq!(base, digest(&Folder::llama()));
    let others = [
        changed(|folder| folder.set("rope_theta", json!(20_000.0))),
        changed(|folder| folder.files.push(("chat_template.jinja", "other".to_owned()))),
        changed(|folder| folder.files.push(("tokenizer.json", "{}".to_owned()))),
        changed(|folder| folder.find("model.layers.0.mlp.down_proj.weight").data[5] ^= 1),
        changed(|folder| folder.weights.swap(3, 4)),
    ];
    let mut digests: Vec<_> = others.iter().map(digest).collect();
    digests.push(base);
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 6);
    // The folder's own name does not count: workers may keep the model under different ones.
}
