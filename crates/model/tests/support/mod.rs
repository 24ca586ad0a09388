//! Writes small GGUF files, sound or not.

#![allow(dead_code)] // Each test binary uses its own part.

use std::path::{Path, PathBuf};

/// A metadata value.
#[derive(Clone)]
pub(crate) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_owned())
    }
}

/// A tensor: dimensions in GGUF's order (columns first), GGML type number, bytes.
#[derive(Clone)]
pub(crate) struct TensorSpec {
    pub(crate) name: String,
    pub(crate) dims: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) data: Vec<u8>,
}

/// A file to be.
#[derive(Clone)]
pub(crate) struct Gguf {
    pub(crate) metadata: Vec<(String, Value)>,
    pub(crate) tensors: Vec<TensorSpec>,
    pub(crate) alignment: usize,
}

pub(crate) const HIDDEN: u64 = 32;
pub(crate) const FFN: u64 = 64;
pub(crate) const VOCAB: u64 = 6;

impl Gguf {
    /// A sound llama model of one layer: 2 heads of 16 over 1 KV head, Q4_1 matrices, F32 norms.
    pub(crate) fn llama() -> Gguf {
        let mut file = Gguf { metadata: Vec::new(), tensors: Vec::new(), alignment: 32 };
        file.set("general.architecture", "llama".into());
        file.set("general.name", "small".into());
        for (key, value) in [
            ("block_count", 1),
            ("context_length", 128),
            ("embedding_length", HIDDEN as u32),
            ("feed_forward_length", FFN as u32),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
            ("rope.dimension_count", 16),
        ] {
            file.set(&format!("llama.{key}"), Value::U32(value));
        }
        file.set("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
        file.set("tokenizer.ggml.model", "gpt2".into());
        file.set("tokenizer.ggml.pre", "smollm".into());
        let tokens = ["<|endoftext|>", "<|im_end|>", "a", "b", "ab", "</s>"];
        file.set("tokenizer.ggml.tokens", Value::Texts(tokens.map(str::to_owned).to_vec()));
        file.set("tokenizer.ggml.token_type", Value::I32s(vec![3, 3, 1, 1, 1, 1]));
        file.set("tokenizer.ggml.merges", Value::Texts(vec!["a b".to_owned()]));
        file.set("tokenizer.ggml.bos_token_id", Value::U32(0));
        file.set("tokenizer.ggml.eos_token_id", Value::U32(1));
        file.set("tokenizer.chat_template", "{{ messages }}".into());
        file.matrix("token_embd.weight", VOCAB, HIDDEN);
        file.norm("output_norm.weight");
        for (name, rows, cols) in [
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", 16, HIDDEN),
            ("attn_v", 16, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", FFN, HIDDEN),
            ("ffn_up", FFN, HIDDEN),
            ("ffn_down", HIDDEN, FFN),
        ] {
            file.matrix(&format!("blk.0.{name}.weight"), rows, cols);
        }
        file.norm("blk.0.attn_norm.weight");
        file.norm("blk.0.ffn_norm.weight");
        file
    }

    pub(crate) fn set(&mut self, key: &str, value: Value) {
        self.unset(key);
        self.metadata.push((key.to_owned(), value));
    }

    pub(crate) fn unset(&mut self, key: &str) {
        self.metadata.retain(|(name, _)| name != key);
    }

    /// Adds a Q4_1 matrix.
    pub(crate) fn matrix(&mut self, name: &str, rows: u64, cols: u64) {
        self.tensor(name, vec![cols, rows], 3, (rows * cols / 32 * 20) as usize);
    }

    pub(crate) fn norm(&mut self, name: &str) {
        self.tensor(name, vec![HIDDEN], 0, HIDDEN as usize * 4);
    }

    /// Adds a tensor of `len` bytes that differ from each other and from those of other tensors.
    pub(crate) fn tensor(&mut self, name: &str, dims: Vec<u64>, kind: u32, len: usize) {
        let seed = self.tensors.len() * 31;
        let data = (0..len).map(|index| ((index * 7 + seed) % 251) as u8).collect();
        self.tensors.push(TensorSpec { name: name.to_owned(), dims, kind, data });
    }

    pub(crate) fn find(&mut self, name: &str) -> &mut TensorSpec {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).expect("the tensor is there")
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            write_value(&mut out, value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += tensor.data.len().next_multiple_of(self.alignment);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        for tensor in &self.tensors {
            out.extend(&tensor.data);
            out.resize(out.len().next_multiple_of(self.alignment), 0);
        }
        out
    }

    pub(crate) fn write(&self, folder: &Path) -> PathBuf {
        let path = folder.join("model.gguf");
        std::fs::write(&path, self.bytes()).expect("the folder can be written to");
        path
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U32(value) => {
            out.extend(4u32.to_le_bytes());
            out.extend(value.to_le_bytes());
        }
        Value::F32(value) => {
            out.extend(6u32.to_le_bytes());
            out.extend(value.to_le_bytes());
        }
        Value::Bool(value) => {
            out.extend(7u32.to_le_bytes());
            out.push(u8::from(*value));
        }
        Value::Text(value) => {
            out.extend(8u32.to_le_bytes());
            text(out, value);
        }
        Value::Texts(values) => {
            out.extend(9u32.to_le_bytes());
            out.extend(8u32.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| text(out, value));
        }
        Value::I32s(values) => {
            out.extend(9u32.to_le_bytes());
            out.extend(5u32.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| out.extend(value.to_le_bytes()));
        }
    }
}

/// SplitMix64, so that a failing seed can be run again.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % limit as u64) as usize
    }
}
