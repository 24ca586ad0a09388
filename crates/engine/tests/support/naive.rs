//! The forward pass in f64, written for reading.

use baton_model::{ModelConfig, RopeStyle};

use super::random_model::RandomModel;

/// K and V of one layer: `[token][kv head * head_dim]`.
#[derive(Clone, Default)]
pub struct LayerCache {
    pub k: Vec<Vec<f64>>,
    pub v: Vec<Vec<f64>>,
}

/// Logits of one token at the position that follows what the cache holds; its K and V are appended.
pub fn forward(model: &RandomModel, cache: &mut [LayerCache], token: u32) -> Vec<f64> {
    let c = &model.config;
    let embedding = model.values("token_embd.weight");
    let mut x = embedding[token as usize * c.hidden..][..c.hidden].to_vec();
    for (n, cache) in cache.iter_mut().enumerate() {
        let name = |part: &str| format!("blk.{n}.{part}.weight");
        let times = |part: &str, x: &[f64]| matrix(&model.values(&name(part)), x);
        let normed = norm(&x, &model.values(&name("attn_norm")), c);
        let position = cache.k.len();
        let q = rotate(times("attn_q", &normed), position, c);
        cache.k.push(rotate(times("attn_k", &normed), position, c));
        cache.v.push(times("attn_v", &normed));
        add(&mut x, &times("attn_output", &attention(&q, cache, c)));
        let normed = norm(&x, &model.values(&name("ffn_norm")), c);
        let (gate, up) = (times("ffn_gate", &normed), times("ffn_up", &normed));
        let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        add(&mut x, &times("ffn_down", &inner));
    }
    let output = if c.tied_embedding { embedding } else { model.values("output.weight") };
    matrix(&output, &norm(&x, &model.values("output_norm.weight"), c))
}

fn matrix(rows: &[f64], x: &[f64]) -> Vec<f64> {
    rows.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn norm(x: &[f64], weight: &[f64], c: &ModelConfig) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(c.rms_eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

fn rotate(mut heads: Vec<f64>, position: usize, c: &ModelConfig) -> Vec<f64> {
    let half = c.head_dim / 2;
    for head in heads.chunks_exact_mut(c.head_dim) {
        for i in 0..half {
            let angle = position as f64 * f64::from(c.rope_base).powf(-(2.0 * i as f64) / c.head_dim as f64);
            let (a, b) = match c.rope_style {
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                RopeStyle::HalfSplit => (i, i + half),
            };
            let (x, y) = (head[a], head[b]);
            head[a] = x * angle.cos() - y * angle.sin();
            head[b] = x * angle.sin() + y * angle.cos();
        }
    }
    heads
}

fn attention(q: &[f64], cache: &LayerCache, c: &ModelConfig) -> Vec<f64> {
    let (dim, group) = (c.head_dim, c.num_heads / c.num_kv_heads);
    let mut out = Vec::new();
    for (head, q) in q.chunks_exact(dim).enumerate() {
        let at = head / group * dim;
        let score =
            |k: &Vec<f64>| q.iter().zip(&k[at..]).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt();
        let scores: Vec<f64> = cache.k.iter().map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for d in 0..dim {
            out.push(weights.iter().zip(&cache.v).map(|(w, v)| w * v[at + d]).sum::<f64>() / sum);
        }
    }
    out
}
