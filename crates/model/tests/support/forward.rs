//! A plain forward pass in f64, written from the papers: slow, and with nothing in common with the engine.

use baton_model::{Model, RopeScaling, RopeStyle, WeightType};
use half::{bf16, f16};

struct Matrix {
    cols: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn of(model: &Model, name: &str) -> Matrix {
        let tensor = model.tensor(name).unwrap();
        let two = |b: &[u8]| [b[0], b[1]];
        let values = match tensor.kind {
            WeightType::F32 => {
                let four = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).into();
                tensor.data.chunks_exact(4).map(four).collect()
            }
            WeightType::F16 => {
                tensor.data.chunks_exact(2).map(|b| f16::from_le_bytes(two(b)).into()).collect()
            }
            WeightType::BF16 => {
                tensor.data.chunks_exact(2).map(|b| bf16::from_le_bytes(two(b)).into()).collect()
            }
            other => panic!("{name} is {other}"),
        };
        Matrix { cols: tensor.cols, values }
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }

    fn times(&self, x: &[f64]) -> Vec<f64> {
        self.values.chunks_exact(self.cols).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    }
}

struct Layer {
    /// By the part of the name after `blk.N.`.
    parts: Vec<(&'static str, Matrix)>,
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

impl Layer {
    fn part(&self, name: &str) -> Option<&Matrix> {
        self.parts.iter().find(|(part, _)| *part == name).map(|(_, matrix)| matrix)
    }

    fn weight(&self, name: &str) -> &Matrix {
        self.part(&format!("{name}.weight")).unwrap()
    }

    /// A projection with its bias, if it has one.
    fn project(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mut y = self.weight(name).times(x);
        if let Some(bias) = self.part(&format!("{name}.bias")) {
            add(&mut y, &bias.values);
        }
        y
    }
}

/// A model with its KV cache.
pub(crate) struct Runner<'a> {
    model: &'a Model,
    embedding: Matrix,
    output: Option<Matrix>,
    output_norm: Matrix,
    layers: Vec<Layer>,
}

const PARTS: [&str; 14] = [
    "attn_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_q.bias",
    "attn_k.bias",
    "attn_v.bias",
    "attn_q_norm.weight",
    "attn_k_norm.weight",
    "attn_output.weight",
    "ffn_norm.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
];

impl<'a> Runner<'a> {
    pub(crate) fn new(model: &'a Model) -> Runner<'a> {
        let layer = |layer: usize| {
            let name = |part: &str| format!("blk.{layer}.{part}");
            let there = PARTS.into_iter().filter(|part| model.has_tensor(&name(part)));
            let parts = there.map(|part| (part, Matrix::of(model, &name(part)))).collect();
            Layer { parts, keys: Vec::new(), values: Vec::new() }
        };
        Runner {
            embedding: Matrix::of(model, "token_embd.weight"),
            output: (!model.config.tied_embedding).then(|| Matrix::of(model, "output.weight")),
            output_norm: Matrix::of(model, "output_norm.weight"),
            layers: (0..model.config.num_layers).map(layer).collect(),
            model,
        }
    }

    /// Logits after one more token.
    pub(crate) fn step(&mut self, token: u32) -> Vec<f64> {
        let model = self.model;
        let eps = f64::from(model.config.rms_eps);
        let mut x = self.embedding.row(token as usize).to_vec();
        for layer in &mut self.layers {
            let h = norm(&x, &layer.weight("attn_norm").values, eps);
            let attended = attend(model, layer, &h);
            add(&mut x, &layer.weight("attn_output").times(&attended));
            let h = norm(&x, &layer.weight("ffn_norm").values, eps);
            let gated = layer.weight("ffn_gate").times(&h).into_iter().zip(layer.weight("ffn_up").times(&h));
            let h: Vec<f64> = gated.map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
            add(&mut x, &layer.weight("ffn_down").times(&h));
        }
        let output = self.output.as_ref().unwrap_or(&self.embedding);
        output.times(&norm(&x, &self.output_norm.values, eps))
    }
}

fn attend(model: &Model, layer: &mut Layer, h: &[f64]) -> Vec<f64> {
    let config = &model.config;
    let (head_dim, group) = (config.head_dim, config.num_heads / config.num_kv_heads);
    let position = layer.keys.len();
    let [q, k] = ["attn_q", "attn_k"].map(|name| {
        let weights = layer.part(&format!("{name}_norm.weight"));
        let rows = layer.project(name, h);
        let heads = rows.chunks_exact(head_dim).map(|head| match weights {
            Some(weights) => norm(head, &weights.values, config.rms_eps.into()),
            None => head.to_vec(),
        });
        heads.flat_map(|head| rotated(model, &head, position)).collect::<Vec<f64>>()
    });
    layer.keys.push(k);
    let v = layer.project("attn_v", h);
    layer.values.push(v);
    let mut mixed = Vec::new();
    for (head, q) in q.chunks_exact(head_dim).enumerate() {
        let kv = head / group * head_dim..(head / group + 1) * head_dim;
        let dot = |k: &Vec<f64>| q.iter().zip(&k[kv.clone()]).map(|(a, b)| a * b).sum::<f64>();
        let scores: Vec<f64> = layer.keys.iter().map(|k| dot(k) / (head_dim as f64).sqrt()).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let pick = |d| weights.iter().zip(&layer.values).map(|(w, v)| w / sum * v[d]).sum::<f64>();
        mixed.extend(kv.clone().map(pick));
    }
    mixed
}

fn rotated(model: &Model, head: &[f64], position: usize) -> Vec<f64> {
    let (config, half) = (&model.config, head.len() / 2);
    let mut out = head.to_vec();
    for i in 0..half {
        let plain = f64::from(config.rope_base).powf(-(i as f64) / half as f64);
        let frequency = match &config.rope_scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear(factor) => plain / f64::from(*factor),
            RopeScaling::Factors(factors) => plain / f64::from(factors[i]),
        };
        let (sin, cos) = (position as f64 * frequency).sin_cos();
        let (a, b) = match config.rope_style {
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            RopeStyle::HalfSplit => (i, i + half),
        };
        out[a] = head[a] * cos - head[b] * sin;
        out[b] = head[a] * sin + head[b] * cos;
    }
    out
}

fn norm(x: &[f64], weights: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    x.iter().zip(weights).map(|(v, w)| v / (mean + eps).sqrt() * w).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
