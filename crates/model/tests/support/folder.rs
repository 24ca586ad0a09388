//! Writes small model folders, sound or not.

#![allow(dead_code)] // Each test binary uses its own part.

use std::path::Path;

use serde_json::{Value, json};

/// A tensor of a safetensors file.
#[derive(Clone)]
pub(crate) struct Weight {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    pub(crate) data: Vec<u8>,
}

/// A safetensors file's bytes around a given header.
pub(crate) fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A sound safetensors file.
pub(crate) fn safetensors(weights: &[Weight]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for weight in weights {
        let offsets = [data.len(), data.len() + weight.data.len()];
        let entry = json!({"dtype": weight.dtype, "shape": weight.shape, "data_offsets": offsets});
        header.insert(weight.name.clone(), entry);
        data.extend(&weight.data);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// A model folder of one layer, hidden 32, 2 heads of 16 over 1 KV head, vocabulary 6, BF16.
#[derive(Clone)]
pub(crate) struct Folder {
    pub(crate) config: Value,
    pub(crate) weights: Vec<Weight>,
    /// Other files by name.
    pub(crate) files: Vec<(&'static str, String)>,
}

impl Folder {
    pub(crate) fn of_family(model_type: &str, class: &str) -> Folder {
        let config = json!({
            "model_type": model_type, "architectures": [class], "hidden_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 6,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "hidden_act": "silu",
        });
        let mut folder = Folder { config, weights: Vec::new(), files: Vec::new() };
        folder.weight("model.embed_tokens.weight", &[6, 32]);
        folder.weight("model.norm.weight", &[32]);
        for (name, shape) in [
            ("input_layernorm", [32, 0]),
            ("self_attn.q_proj", [32, 32]),
            ("self_attn.k_proj", [16, 32]),
            ("self_attn.v_proj", [16, 32]),
            ("self_attn.o_proj", [32, 32]),
            ("post_attention_layernorm", [32, 0]),
            ("mlp.gate_proj", [64, 32]),
            ("mlp.up_proj", [64, 32]),
            ("mlp.down_proj", [32, 64]),
        ] {
            let len = if shape[1] == 0 { 1 } else { 2 };
            folder.weight(&format!("model.layers.0.{name}.weight"), &shape[..len]);
        }
        folder
    }

    pub(crate) fn llama() -> Folder {
        Folder::of_family("llama", "LlamaForCausalLM")
    }

    /// Adds a BF16 tensor.
    pub(crate) fn weight(&mut self, name: &str, shape: &[u64]) {
        let len = shape.iter().product::<u64>() as usize;
        // 0x3f80 to 0x3fff: 1 to 2.
        let data = (0..len).flat_map(|index| [0x80 | (index * 7 % 128) as u8, 0x3f]).collect();
        self.weights.push(Weight { name: name.to_owned(), dtype: "BF16", shape: shape.to_vec(), data });
    }

    pub(crate) fn find(&mut self, name: &str) -> &mut Weight {
        self.weights.iter_mut().find(|weight| weight.name == name).expect("the tensor is there")
    }

    pub(crate) fn set(&mut self, key: &str, value: Value) {
        self.config[key] = value;
    }

    /// Everything but the weights.
    pub(crate) fn write_documents(&self, folder: &Path) {
        std::fs::write(folder.join("config.json"), self.config.to_string())
            .expect("the folder can be written to");
        for (name, content) in &self.files {
            std::fs::write(folder.join(name), content).expect("the folder can be written to");
        }
    }

    pub(crate) fn write(&self, folder: &Path) {
        self.write_documents(folder);
        let path = folder.join("model.safetensors");
        std::fs::write(path, safetensors(&self.weights)).expect("the folder can be written to");
    }

    /// Writes two shards and their index; tensors alternate.
    pub(crate) fn write_sharded(&self, folder: &Path) {
        self.write_documents(folder);
        let mut map = serde_json::Map::new();
        for shard in 0..2 {
            let name = format!("model-0000{}-of-00002.safetensors", shard + 1);
            let mine: Vec<Weight> = self.weights.iter().skip(shard).step_by(2).cloned().collect();
            map.extend(mine.iter().map(|weight| (weight.name.clone(), name.clone().into())));
            std::fs::write(folder.join(&name), safetensors(&mine)).expect("the folder can be written to");
        }
        let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
        std::fs::write(folder.join("model.safetensors.index.json"), index.to_string())
            .expect("the folder can be written to");
    }
}
