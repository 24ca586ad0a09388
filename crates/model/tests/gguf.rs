//! Reading GGUF files: sound ones, odd ones, damaged ones.

mod support;

use baton_model::{
    Model, ModelError, ModelSource, RopeScaling, RopeStyle, TokenType, TokenizerSource, WeightType,
};
use support::{Gguf, HIDDEN, Random, VOCAB, Value};

fn open(file: &Gguf) -> Result<Model, ModelError> {
    open_bytes(&file.bytes())
}

fn open_bytes(bytes: &[u8]) -> Result<Model, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Model::open(&ModelSource::File(path))
}

/// The error of a file that must be refused, which is one line and names the file.
fn refusal(file: &Gguf) -> ModelError {
    let Err(error) = open(file) else { panic!("the file was accepted") };
    let text = error.to_string();
    assert!(text.contains("model.gguf") && !text.contains('\n'), "{text}");
    error
}

fn changed(change: impl FnOnce(&mut Gguf)) -> Gguf {
    let mut file = Gguf::llama();
    change(&mut file);
    file
}

#[test]
fn a_sound_file_gives_its_configuration() {
    let model = open(&Gguf::llama()).unwrap();
    let config = &model.config;
    assert_eq!((config.family.as_str(), config.name.as_str()), ("llama", "small"));
    assert_eq!((config.num_layers, config.hidden, config.ffn), (1, 32, 64));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (2, 1, 16));
    assert_eq!((config.vocab, config.context), (6, 128));
    assert_eq!((config.rope_base, config.rope_style), (10_000.0, RopeStyle::Interleaved));
    assert_eq!((&config.rope_scaling, config.rms_eps), (&RopeScaling::None, 1e-5));
    assert!(config.tied_embedding && !config.add_bos);
    // Named end tokens count only where they are special: id 5 is text that looks like one.
    assert_eq!((config.bos, config.eos.as_slice()), (Some(0), [0, 1].as_slice()));
    assert_eq!(model.chat_template.as_deref(), Some("{{ messages }}"));
    let TokenizerSource::Gguf(tokenizer) = &model.tokenizer else { panic!("no GGUF tokenizer") };
    assert_eq!((tokenizer.model.as_str(), tokenizer.pre.as_str()), ("gpt2", "smollm"));
    assert_eq!((tokenizer.tokens.len(), tokenizer.merges.as_slice()), (6, ["a b".to_owned()].as_slice()));
    assert_eq!(tokenizer.token_types[0..3], [TokenType::Control, TokenType::Control, TokenType::Normal]);
}

#[test]
fn a_model_can_be_shared_between_threads() {
    fn is_shareable<T: Send + Sync>() {}
    is_shareable::<Model>();
}

#[test]
fn mapped_tensors_are_the_files_bytes() {
    let file = Gguf::llama();
    let model = open(&file).unwrap();
    for spec in &file.tensors {
        assert!(model.has_tensor(&spec.name));
        let tensor = model.tensor(&spec.name).unwrap();
        assert_eq!(tensor.data, spec.data, "{}", spec.name);
        let dims = match spec.dims.as_slice() {
            [cols] => (1, *cols),
            [cols, rows] => (*rows, *cols),
            _ => unreachable!("the test writes no other"),
        };
        assert_eq!((tensor.rows as u64, tensor.cols as u64), dims);
        assert_eq!(tensor.kind, if spec.kind == 0 { WeightType::F32 } else { WeightType::Q4_1 });
    }
    let total: usize = file.tensors.iter().map(|spec| spec.data.len()).sum();
    assert_eq!(model.weights_bytes(), total as u64);
    assert!(!model.has_tensor("output.weight"));
    assert!(model.tensor("output.weight").unwrap_err().to_string().contains("output.weight"));
}

#[test]
fn what_was_let_go_reads_the_same() {
    let model = open(&Gguf::llama()).unwrap();
    for name in ["token_embd.weight", "blk.0.ffn_down.weight", "output_norm.weight"] {
        let tensor = model.tensor(name).unwrap();
        let before = tensor.data.to_vec();
        model.let_go(name);
        // Both who has the slice already and who asks again.
        assert_eq!(*tensor.data, before, "{name}");
        assert_eq!(*model.tensor(name).unwrap().data, before, "{name}");
    }
    model.let_go("no.such.tensor");
}

#[test]
fn a_mapped_file_may_be_replaced_or_removed() {
    let folder = tempfile::tempdir().unwrap();
    let file = Gguf::llama();
    let path = file.write(folder.path());
    let model = Model::open(&ModelSource::File(path.clone())).unwrap();
    let other = folder.path().join("other");
    std::fs::write(&other, b"short").unwrap();
    std::fs::rename(&other, &path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(model.tensor("token_embd.weight").unwrap().data, file.tensors[0].data);
}

#[test]
fn another_alignment_is_followed() {
    let mut file = changed(|file| file.set("general.alignment", Value::U32(64)));
    file.alignment = 64;
    let model = open(&file).unwrap();
    assert_eq!(model.tensor("blk.0.ffn_norm.weight").unwrap().data, file.find("blk.0.ffn_norm.weight").data);
}

#[test]
fn variants_of_the_family_are_understood() {
    let untied = changed(|file| file.matrix("output.weight", VOCAB, HIDDEN));
    assert!(!open(&untied).unwrap().config.tied_embedding);

    let linear = changed(|file| {
        file.set("llama.rope.scaling.type", "linear".into());
        file.set("llama.rope.scaling.factor", Value::F32(4.0));
        file.set("llama.rope.freq_base", Value::F32(500_000.0));
    });
    let config = open(&linear).unwrap().config;
    assert_eq!((config.rope_scaling, config.rope_base), (RopeScaling::Linear(4.0), 500_000.0));

    let factors = changed(|file| {
        file.tensor("rope_freqs.weight", vec![8], 0, 32);
        file.find("rope_freqs.weight").data = (1..=8u8).flat_map(|i| f32::from(i).to_le_bytes()).collect();
    });
    let expected = RopeScaling::Factors((1..=8u8).map(f32::from).collect());
    assert_eq!(open(&factors).unwrap().config.rope_scaling, expected);

    let bos = changed(|file| file.set("tokenizer.ggml.add_bos_token", Value::Bool(true)));
    assert!(open(&bos).unwrap().config.add_bos);
    let llama_3 = changed(|file| file.set("tokenizer.ggml.pre", "llama-bpe".into()));
    assert!(open(&llama_3).unwrap().config.add_bos);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let cases: [(Gguf, &str); 11] = [
        (
            changed(|file| file.find("blk.0.ffn_norm.weight").kind = 8),
            "'blk.0.ffn_norm.weight' has type Q8_0",
        ),
        (
            changed(|file| file.set("general.architecture", "gemma".into())),
            "architecture 'gemma' is not supported; supported: llama, qwen2, qwen3",
        ),
        (changed(|file| file.find("blk.0.attn_q.weight").kind = 14), "'blk.0.attn_q.weight' has type Q6K"),
        (
            changed(|file| file.find("blk.0.attn_q.weight").kind = 20),
            "'blk.0.attn_q.weight' has type IQ4_NL; supported weights: F32, F16, BF16, Q8_0, Q4_0, Q4_1",
        ),
        (changed(|file| file.tensor("blk.0.attn_q.bias", vec![HIDDEN], 0, 128)), "blk.0.attn_q.bias"),
        (changed(|file| file.tensor("experts", vec![32, 2, 2], 0, 512)), "'experts' has 3 dimensions"),
        (changed(|file| file.set("llama.expert_count", Value::U32(8))), "llama.expert_count = 8"),
        (changed(|file| file.set("llama.attention.scale", Value::F32(0.5))), "llama.attention.scale = 0.5"),
        (changed(|file| file.set("llama.rope.scaling.type", "yarn".into())), "rope scaling 'yarn'"),
        (changed(|file| file.set("split.count", Value::U32(3))), "split over 3 files"),
        (changed(|file| file.set("llama.rope.dimension_count", Value::U32(8))), "8 rotated"),
    ];
    for (file, part) in cases {
        let error = refusal(&file);
        assert!(matches!(error, ModelError::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains(part), "'{error}' does not say '{part}'");
    }
}

#[test]
fn each_supported_type_is_read_and_every_other_refused_by_tensor_and_type() {
    let of_kind = |kind: u32, len: usize| {
        changed(|file| {
            let tensor = file.find("blk.0.ffn_up.weight");
            (tensor.kind, tensor.data) = (kind, (0..len).map(|index| (index % 251) as u8).collect());
        })
    };
    for (kind, weight_type, row_bytes) in [
        (0, WeightType::F32, 128),
        (1, WeightType::F16, 64),
        (30, WeightType::BF16, 64),
        (8, WeightType::Q8_0, 34),
        (2, WeightType::Q4_0, 18),
        (3, WeightType::Q4_1, 20),
    ] {
        let mut file = of_kind(kind, 64 * row_bytes);
        let model = open(&file).unwrap();
        let tensor = model.tensor("blk.0.ffn_up.weight").unwrap();
        assert_eq!((tensor.kind, tensor.rows, tensor.cols), (weight_type, 64, 32));
        assert_eq!(tensor.data, file.find("blk.0.ffn_up.weight").data);
    }
    for (kind, name) in
        [(6, "Q5_0"), (7, "Q5_1"), (12, "Q4K"), (14, "Q6K"), (21, "IQ3_S"), (39, "MXFP4"), (99, "99")]
    {
        // 4 rows: a size that looks like the length of a string.
        let mut file = of_kind(kind, 4096);
        file.find("blk.0.ffn_up.weight").dims = vec![256, 4];
        let error = refusal(&file);
        let text = error.to_string();
        assert!(matches!(error, ModelError::Unsupported { .. }), "{error:?}");
        assert!(text.contains("'blk.0.ffn_up.weight'") && text.contains(name), "{text}");
    }
}

#[test]
fn contradictions_are_corruption() {
    let cases: [(Gguf, &str); 12] = [
        (changed(|file| file.unset("llama.block_count")), "'llama.block_count' is missing"),
        (changed(|file| file.set("llama.block_count", Value::U32(2))), "no tensor 'blk.1."),
        (
            changed(|file| file.set("llama.block_count", "one".into())),
            "'llama.block_count' is not a whole number",
        ),
        (changed(|file| file.set("llama.attention.head_count", Value::U32(0))), "head_count' is 0"),
        (changed(|file| file.set("llama.attention.head_count_kv", Value::U32(3))), "no multiple of 3"),
        (
            changed(|file| file.set("llama.feed_forward_length", Value::U32(32))),
            "is 64 x 32, expected 32 x 32",
        ),
        (changed(|file| file.set("llama.rope.freq_base", Value::F32(f32::NAN))), "not a finite number"),
        (
            changed(|file| file.set("llama.attention.layer_norm_rms_epsilon", Value::F32(0.0))),
            "RMS epsilon 0",
        ),
        (changed(|file| file.set("tokenizer.ggml.eos_token_id", Value::U32(6))), "special token 6"),
        (changed(|file| file.set("tokenizer.ggml.token_type", Value::I32s(vec![1]))), "1 token types for 6"),
        (changed(|file| file.find("token_embd.weight").dims = vec![33, 6]), "not whole blocks"),
        (changed(|file| file.find("token_embd.weight").dims = vec![1 << 40, 1 << 40]), "impossible size"),
    ];
    for (file, part) in cases {
        let error = refusal(&file);
        assert!(matches!(error, ModelError::Corrupt { .. }), "{error:?}");
        assert!(error.to_string().contains(part), "'{error}' does not say '{part}'");
    }
}

#[test]
fn numbers_beyond_the_limits_are_named_with_the_limit() {
    let error = refusal(&changed(|file| file.set("llama.block_count", Value::U32(1 << 20))));
    assert!(matches!(&error, ModelError::TooLarge { value: 0x10_0000, limit: 4096, .. }), "{error:?}");
    assert!(error.to_string().contains("llama.block_count is 1048576, the limit is 4096"), "{error}");
}

#[test]
fn an_alignment_of_zero_is_an_error_not_a_division() {
    let error = refusal(&changed(|file| file.set("general.alignment", Value::U32(0))));
    assert!(error.to_string().contains("general.alignment is 0"), "{error}");
    let error = refusal(&changed(|file| file.set("general.alignment\0\0", Value::U32(0))));
    assert!(error.to_string().contains("general.alignment is 0"), "{error}");
}

#[test]
fn no_file_empty_file_other_file() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("none.gguf");
    assert!(matches!(
        Model::open(&ModelSource::File(missing.clone())),
        Err(ModelError::NotFound { path }) if path == missing
    ));
    assert!(matches!(
        Model::open(&ModelSource::File(folder.path().to_owned())),
        Err(ModelError::Corrupt { .. } | ModelError::Io { .. })
    ));
    for bytes in [b"".as_slice(), b"GG", b"PK\x03\x04 a zip file", b"GGUF", b"GGUF\x09\0\0\0"] {
        assert!(matches!(open_bytes(bytes), Err(ModelError::Corrupt { .. })), "{bytes:?}");
    }
}

#[test]
fn every_truncation_is_refused() {
    let bytes = Gguf::llama().bytes();
    // The last tensor's data ends at its last byte: 128 bytes are a whole number of alignments.
    for len in 0..bytes.len() {
        match open_bytes(&bytes[..len]) {
            Err(ModelError::Corrupt { .. }) => {}
            Err(other) => panic!("cut to {len} of {} bytes: {other:?}", bytes.len()),
            Ok(_) => panic!("accepted {len} of {} bytes", bytes.len()),
        }
    }
}

#[test]
fn damage_is_an_error_or_harmless_but_never_a_panic() {
    let sound = Gguf::llama();
    let bytes = sound.bytes();
    let header_bytes = bytes.len() - sound.tensors.iter().map(|tensor| tensor.data.len()).sum::<usize>();
    for seed in 0..3000u64 {
        let mut random = Random(seed);
        let mut damaged = bytes.clone();
        for _ in 0..=random.below(3) {
            let place = random.below(header_bytes);
            damaged[place] = match random.below(4) {
                0 => 0,
                1 => 0xff,
                2 => damaged[place] ^ (1 << random.below(8)),
                _ => random.below(256) as u8,
            };
        }
        let outcome = std::panic::catch_unwind(|| {
            if let Ok(model) = open_bytes(&damaged) {
                for tensor in &sound.tensors {
                    if let Ok(tensor) = model.tensor(&tensor.name) {
                        let row_bytes = tensor.kind.row_bytes(tensor.cols).unwrap();
                        assert_eq!(tensor.data.len(), tensor.rows * row_bytes);
                    }
                }
            }
        });
        assert!(outcome.is_ok(), "seed {seed} panics");
    }
}

#[test]
fn the_digest_tells_models_apart() {
    let digest = |file: &Gguf| open(file).unwrap().digest;
    let base = digest(&Gguf::llama());
    assert_eq!(base, digest(&Gguf::llama()));
    let others = [
        changed(|file| file.set("llama.rope.freq_base", Value::F32(20_000.0))),
        changed(|file| file.set("tokenizer.chat_template", "other".into())),
        changed(|file| file.find("blk.0.ffn_down.weight").data[5] ^= 1),
        changed(|file| file.tensors.swap(3, 4)),
    ];
    for other in others {
        assert_ne!(base, digest(&other));
    }
}

#[test]
fn a_tokenizer_json_helps_a_file_without_byte_level_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = changed(|file| file.set("tokenizer.ggml.model", "llama".into())).write(folder.path());
    let source = ModelSource::File(path);
    assert!(matches!(Model::open(&source).unwrap().tokenizer, TokenizerSource::Gguf(_)));
    let json = folder.path().join("tokenizer.json");
    std::fs::write(&json, "{}").unwrap();
    assert_eq!(Model::open(&source).unwrap().tokenizer, TokenizerSource::Json(json));
    // A byte-level vocabulary in the file itself is not overruled by a stray file.
    let source = ModelSource::File(Gguf::llama().write(folder.path()));
    assert!(matches!(Model::open(&source).unwrap().tokenizer, TokenizerSource::Gguf(_)));
}

#[test]
fn the_default_model_opens_quickly_and_is_what_it_should_be() {
    let Some(model) = baton_model::testing::model_or_skip("the_default_model_opens_quickly") else { return };
    let config = &model.config;
    assert_eq!((config.num_layers, config.hidden, config.ffn), (30, 576, 1536));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!((config.vocab, config.context, config.rope_base), (49_152, 8192, 100_000.0));
    assert_eq!((config.bos, config.eos.as_slice(), config.add_bos), (Some(1), [0, 2].as_slice(), false));
    assert!(config.tied_embedding);
    assert_eq!(model.tensor("token_embd.weight").unwrap().kind, WeightType::Q8_0);
    assert_eq!(model.tensor("blk.29.ffn_down.weight").unwrap().kind, WeightType::Q4_1);
    let path = baton_model::testing::model_path_or_skip("the_default_model_opens_quickly").unwrap();
    let started = std::time::Instant::now();
    let again = Model::open(&ModelSource::File(path)).unwrap();
    // Measured at a tenth of this; the bound catches reading the whole file.
    assert!(started.elapsed().as_millis() < 500, "{:?}", started.elapsed());
    assert_eq!(again.digest, model.digest);
}
