//! Reading safetensors files: sound ones, odd ones, hostile ones.

#[path = "support/folder.rs"]
mod folder;
mod support;

use std::path::Path;

use baton_model::{Model, ModelError, ModelSource, WeightType};
use folder::{Folder, Weight, safetensors, with_header};
use support::Random;

fn open(path: &Path) -> Result<Model, ModelError> {
    Model::open(&ModelSource::Folder(path.to_owned()))
}

/// Opens a sound configuration with these bytes as its weights.
fn open_weights(bytes: &[u8]) -> Result<Model, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    Folder::llama().write_documents(folder.path());
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    open(folder.path())
}

#[test]
fn tensors_are_the_files_bytes_under_gguf_names() {
    let temporary = tempfile::tempdir().unwrap();
    let mut spec = Folder::llama();
    spec.write(temporary.path());
    let model = open(temporary.path()).unwrap();
    let embedding = model.tensor("token_embd.weight").unwrap();
    assert_eq!((embedding.rows, embedding.cols, embedding.kind), (6, 32, WeightType::BF16));
    assert_eq!(embedding.data, spec.find("model.embed_tokens.weight").data);
    let down = model.tensor("blk.0.ffn_down.weight").unwrap();
    assert_eq!((down.rows, down.cols), (32, 64));
    assert_eq!(down.data, spec.find("model.layers.0.mlp.down_proj.weight").data);
    let norm = model.tensor("blk.0.attn_norm.weight").unwrap();
    assert_eq!((norm.rows, norm.cols, norm.kind), (1, 32, WeightType::F32));
    assert_eq!(norm.data[..8], [1.0f32, 1.0 + 7.0 / 128.0].map(f32::to_le_bytes).concat());
    let total: usize = spec.weights.iter().map(|weight| weight.data.len()).sum();
    assert_eq!(model.weights_bytes(), total as u64);
    // Mapped files may be removed.
    std::fs::remove_dir_all(temporary.path()).unwrap();
    assert_eq!(model.tensor("token_embd.weight").unwrap().data, embedding.data);
}

#[test]
fn shards_are_one_model() {
    let temporary = tempfile::tempdir().unwrap();
    let mut spec = Folder::llama();
    spec.write_sharded(temporary.path());
    let model = open(temporary.path()).unwrap();
    for (own, name) in [
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
        ("model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight"),
    ] {
        let tensor = model.tensor(name).unwrap();
        if tensor.kind == WeightType::BF16 {
            assert_eq!(tensor.data, spec.find(own).data, "{own}");
        }
    }
}

#[test]
fn broken_indexes_are_refused() {
    let index = "model.safetensors.index.json";
    let second = "model-00002-of-00002.safetensors";
    let refusal = |change: &dyn Fn(&Path)| {
        let temporary = tempfile::tempdir().unwrap();
        Folder::llama().write_sharded(temporary.path());
        change(temporary.path());
        open(temporary.path()).unwrap_err().to_string()
    };
    let rewrite = |from: &'static str, to: &'static str| {
        move |folder: &Path| {
            let text = std::fs::read_to_string(folder.join(index)).unwrap();
            assert!(text.contains(from));
            std::fs::write(folder.join(index), text.replacen(from, to, 1)).unwrap();
        }
    };
    type Case<'a> = (&'a dyn Fn(&Path), &'a str);
    let cases: [Case<'_>; 8] = [
        (
            &|folder| std::fs::remove_file(folder.join(second)).unwrap(),
            "shard 'model-00002-of-00002.safetensors' is missing",
        ),
        (
            &|folder| {
                drop(std::fs::copy(folder.join("model-00001-of-00002.safetensors"), folder.join(second)))
            },
            "is not in shard",
        ),
        (&rewrite("model.norm.weight", "model.other.weight"), "\"model.other.weight\" is not in shard"),
        (
            &rewrite("model-00001-of-00002.safetensors", "../x.safetensors"),
            "\"../x.safetensors\" is no name of a safetensors file",
        ),
        (&rewrite("model-00001-of-00002.safetensors", "/etc/passwd"), "is no name of a safetensors file"),
        (&rewrite("weight_map", "weights"), "not an index of shards: missing field `weight_map`"),
        (&|folder| std::fs::write(folder.join(index), r#"{"weight_map":{}}"#).unwrap(), "names no file"),
        (
            &|folder| {
                // Both shards hold the same tensors, and the index lists each in one of them.
                let all = safetensors(&Folder::llama().weights);
                std::fs::write(folder.join(second), &all).unwrap();
                std::fs::write(folder.join("model-00001-of-00002.safetensors"), &all).unwrap();
            },
            "is there twice",
        ),
    ];
    for (change, part) in cases {
        let text = refusal(change);
        assert!(text.contains(part) && !text.contains('\n'), "'{text}' does not say '{part}'");
    }
}

fn weight(name: &str, dtype: &'static str, shape: &[u64], len: usize) -> Weight {
    Weight { name: name.to_owned(), dtype, shape: shape.to_vec(), data: vec![0; len] }
}

#[test]
fn hostile_headers_are_refused_by_what_is_wrong() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let two = |a: &str, b: &str| {
        let one = |name: &str, offsets: &str| {
            format!(r#""{name}":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}"#)
        };
        format!("{{{},{}}}", one("a", a), one("b", b))
    };
    let file = |header: String| with_header(&header, &[0; 16]);
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![], "0 bytes are no safetensors file"),
        (vec![1; 7], "7 bytes are no safetensors file"),
        (vec![0xff; 16], "a header of 18446744073709551615 bytes, the limit is 100000000"),
        (b"GGUF\x03\0\0\0 and so on".to_vec(), "not a safetensors file"),
        (
            [&1000u64.to_le_bytes(), b"{}".as_slice()].concat(),
            "truncated: a header of 1000 bytes in a file of 10 bytes",
        ),
        (with_header("", &[]), "damaged header"),
        (with_header("[]", &[]), "damaged header"),
        (with_header("\u{fffd}{", &[]), "damaged header"),
        (with_header(&"[".repeat(100_000), &[]), "damaged header"),
        (with_header("{\"x\":{\"dtype\":\"F32\"}}", &[]), "tensor 'x': missing field `shape`"),
        (file(entry("F32", "[2,2]", "[0,-16]")), "tensor 'x': invalid value"),
        (
            file(
                entry("F32", "[2,2]", "[0,16]").replace(
                    "{\"x\"",
                    "{\"x\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]},\"x\"",
                ),
            ),
            "'x' is listed twice",
        ),
        (file(entry("F32", "[2,2]", "[16,0]")), "tensor 'x' ends at byte 0, before its start at 16"),
        (
            file(entry("F32", "[2,2]", "[0,32]")),
            "tensor 'x' lies outside the file (it ends at byte 32 of 16)",
        ),
        (file(entry("F32", "[2,2]", "[18446744073709551600,18446744073709551615]")), "lies outside the file"),
        (file(entry("F32", "[2,1]", "[0,8]")), "8 bytes after the last tensor"),
        (file(entry("F32", "[2,1]", "[8,16]")), "8 bytes before tensor 'x'"),
        (file(two("[0,8]", "[4,12]")), "tensors 'a' and 'b' overlap"),
        (file(two("[0,8]", "[0,8]")), "tensors 'a' and 'b' overlap"),
        (file(entry("F32", "[4,2]", "[0,16]")), "takes 16 bytes, but 4 x 2 of F32 are 32"),
        (file(entry("F32", "[4294967296,4294967296]", "[0,16]")), "impossible size"),
        (with_header(&entry("F32", "[0,4]", "[0,0]"), &[]), "tensor 'x' is empty"),
        (file(entry("F32", "[2,2]", "[0,16]")), "no tensor 'model.embed_tokens.weight'"),
    ];
    for (bytes, part) in cases {
        let error = open_weights(&bytes).map(drop).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ModelError::Corrupt { .. }), "{error:?}");
        assert!(text.contains(part) && !text.contains('\n'), "'{text}' does not say '{part}'");
    }
}

#[test]
fn other_types_and_shapes_are_refused_by_tensor_and_type() {
    for (odd, part) in [
        (
            weight("model.x", "I64", &[2, 2], 32),
            "tensor 'model.x' has type I64; supported in safetensors: F32, F16, BF16",
        ),
        (weight("model.x", "F8_E4M3", &[4], 4), "tensor 'model.x' has type F8_E4M3"),
        (weight("model.x", "Q\n7", &[4], 4), "tensor 'model.x' has type Q\\n7"),
        (weight("model.x", "F32", &[2, 2, 2], 32), "tensor 'model.x' has 3 dimensions"),
        (weight("model.x", "F32", &[], 4), "tensor 'model.x' has 0 dimensions"),
        (
            weight("model.layers.0.self_attn.q_proj.bias", "F32", &[32], 128),
            "tensor 'model.layers.0.self_attn.q_proj.bias' is not part of the supported llama family",
        ),
        (
            weight("model.layers.0.mlp.experts.0.w1.weight", "F32", &[1, 2], 8),
            "mlp.experts.0.w1.weight' is not part",
        ),
        (weight("rope_freqs.weight", "F32", &[8], 32), "tensor 'rope_freqs.weight' is not part"),
        (weight("blk.0.attn_q.bias", "F32", &[32], 128), "self_attn.q_proj.bias' is not part"),
    ] {
        let weights = [Folder::llama().weights, vec![odd]].concat();
        let error = open_weights(&safetensors(&weights)).map(drop).unwrap_err();
        assert!(matches!(error, ModelError::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains(part), "'{error}' does not say '{part}'");
    }
}

#[test]
fn tables_that_follow_from_the_configuration_are_left_out() {
    let old = weight("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", &[8], 32);
    let copy = weight("lm_head.weight", "BF16", &[6, 32], 384);
    let weights = [Folder::llama().weights, vec![old, copy]].concat();
    let model = open_weights(&safetensors(&weights)).unwrap();
    assert!(model.config.tied_embedding && !model.has_tensor("output.weight"));
}

#[test]
fn every_truncation_is_refused() {
    let bytes = safetensors(&Folder::llama().weights);
    for len in (0..bytes.len()).step_by(7).chain([bytes.len() - 1]) {
        match open_weights(&bytes[..len]) {
            Err(ModelError::Corrupt { .. }) => {}
            other => panic!("cut to {len} of {} bytes: {:?}", bytes.len(), other.map(drop)),
        }
    }
    let longer = [bytes.as_slice(), &[0]].concat();
    assert!(matches!(open_weights(&longer), Err(ModelError::Corrupt { .. })));
}

#[test]
fn damage_is_an_error_or_harmless_but_never_a_panic() {
    let bytes = safetensors(&Folder::llama().weights);
    let header_bytes = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let temporary = tempfile::tempdir().unwrap();
    Folder::llama().write_documents(temporary.path());
    let (mut num_opened, mut num_refused) = (0, 0);
    for seed in 0..3000u64 {
        let mut random = Random(seed);
        let mut damaged = bytes.clone();
        for _ in 0..=random.below(3) {
            let place = random.below(header_bytes);
            damaged[place] = match random.below(4) {
                0 => b'0' + random.below(10) as u8,
                1 => b"{}[]\",:\\"[random.below(8)],
                2 => damaged[place] ^ (1 << random.below(8)),
                _ => random.below(256) as u8,
            };
        }
        // Replaced, not written over: a file that is mapped must not change.
        let path = temporary.path().join("model.safetensors");
        std::fs::remove_file(&path).ok();
        std::fs::write(&path, &damaged).unwrap();
        let outcome = std::panic::catch_unwind(|| match open(temporary.path()) {
            Ok(model) => {
                let tensor = model.tensor("blk.0.ffn_up.weight").unwrap();
                assert_eq!(tensor.data.len(), 64 * 64);
                true
            }
            Err(error) => {
                assert!(!error.to_string().contains('\n'), "{error}");
                false
            }
        });
        match outcome {
            Ok(true) => num_opened += 1,
            Ok(false) => num_refused += 1,
            Err(_) => panic!("seed {seed} panics"),
        }
    }
    assert!(num_opened > 0 && num_refused > 1000, "{num_opened} opened, {num_refused} refused");
}
