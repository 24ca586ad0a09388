//! Models and devices by name: what their makers publish, and the share of it that steps reach.

use std::time::Duration;

use crate::{ModelShape, Roofline};

/// A model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CatalogModel {
    /// As it is typed.
    pub name: &'static str,
    /// What decides the time of its steps.
    pub shape: ModelShape,
    /// Where the numbers stand.
    pub source: &'static str,
}

/// A device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CatalogDevice {
    /// As it is typed.
    pub name: &'static str,
    /// Dense 16-bit floating point operations a second at best; of what is no GPU, as measured.
    pub peak_flops_per_s: f64,
    /// Bytes a second from memory at best.
    pub peak_bytes_per_s: f64,
    /// Bytes of memory.
    pub memory_bytes: f64,
    /// Share of the peak operations that a prefill reaches.
    pub reached_flops: f64,
    /// Share of the peak bandwidth that a decode step reaches.
    pub reached_bytes: f64,
    /// Fixed cost of a step.
    pub overhead: Duration,
    /// Where the numbers stand.
    pub source: &'static str,
}

impl CatalogDevice {
    /// How fast its steps are.
    pub const fn roofline(&self) -> Roofline {
        Roofline {
            flops_per_s: self.peak_flops_per_s * self.reached_flops,
            bytes_per_s: self.peak_bytes_per_s * self.reached_bytes,
            overhead: self.overhead,
        }
    }
}

/// KV of a token: K and V of `num_layers x kv_heads x head_dim` elements of two bytes.
const fn kv_bytes(num_layers: usize, kv_heads: usize, head_dim: usize) -> usize {
    2 * num_layers * kv_heads * head_dim * 2
}

const fn bf16(
    name: &'static str,
    num_params: f64,
    shape: (usize, usize, usize, usize),
    source: &'static str,
) -> CatalogModel {
    let (num_layers, heads, kv_heads, head_dim) = shape;
    let shape = ModelShape {
        num_params,
        weight_bytes: 2.0,
        num_layers,
        hidden: heads * head_dim,
        kv_token_bytes: kv_bytes(num_layers, kv_heads, head_dim),
    };
    CatalogModel { name, shape, source }
}

/// Llama 3 8B in bf16.
pub const LLAMA_3_8B: CatalogModel =
    bf16("llama-3-8b", 8.03e9, (32, 32, 8, 128), "config.json of meta-llama/Meta-Llama-3-8B");

/// SmolLM2 135M with int8 weights and f16 KV.
pub const SMOLLM2_135M: CatalogModel = CatalogModel {
    name: "smollm2-135m",
    shape: ModelShape {
        num_params: 1.345e8,
        weight_bytes: 1.0,
        num_layers: 30,
        hidden: 576,
        kv_token_bytes: kv_bytes(30, 3, 64),
    },
    source: "config.json of HuggingFaceTB/SmolLM2-135M-Instruct; weights as int8",
};

/// Every model that has a name: parameters, and (layers, query heads, KV heads, head size) of its configuration.
pub const MODELS: [CatalogModel; 8] = [
    SMOLLM2_135M,
    bf16("llama-3.2-1b", 1.24e9, (16, 32, 8, 64), "config.json of meta-llama/Llama-3.2-1B"),
    bf16("llama-3.2-3b", 3.21e9, (28, 24, 8, 128), "config.json of meta-llama/Llama-3.2-3B"),
    bf16("mistral-7b", 7.25e9, (32, 32, 8, 128), "config.json of mistralai/Mistral-7B-v0.3"),
    bf16("qwen2.5-7b", 7.62e9, (28, 28, 4, 128), "config.json of Qwen/Qwen2.5-7B"),
    LLAMA_3_8B,
    bf16("qwen2.5-32b", 3.28e10, (64, 40, 8, 128), "config.json of Qwen/Qwen2.5-32B"),
    bf16("llama-3-70b", 7.06e10, (80, 64, 8, 128), "config.json of meta-llama/Meta-Llama-3-70B"),
];

/// Share of a GPU's peak operations that a prefill reaches, and share of its peak bandwidth that a decode step reaches.
const REACHED: (f64, f64) = (0.6, 0.8);

const fn gpu(
    name: &'static str,
    peak_flops_per_s: f64,
    peak_bytes_per_s: f64,
    memory_bytes: f64,
    source: &'static str,
) -> CatalogDevice {
    CatalogDevice {
        name,
        peak_flops_per_s,
        peak_bytes_per_s,
        memory_bytes,
        reached_flops: REACHED.0,
        reached_bytes: REACHED.1,
        overhead: Duration::from_micros(200),
        source,
    }
}

/// NVIDIA A100 SXM 80 GB.
pub const A100: CatalogDevice =
    gpu("a100", 312e12, 2.039e12, 80e9, "NVIDIA A100 datasheet, SXM 80 GB, dense BF16");

/// NVIDIA H200 SXM.
pub const H200: CatalogDevice = gpu("h200", 989e12, 4.8e12, 141e9, "NVIDIA H200 datasheet, SXM, dense BF16");

/// One server core with AVX-512 VNNI, as measured with this repository's engine on [`SMOLLM2_135M`]: 1,350 prompt tokens and 221
/// decode steps a second.
pub const CPU_CORE: CatalogDevice = CatalogDevice {
    name: "cpu-core",
    peak_flops_per_s: 3.6e11,
    peak_bytes_per_s: 3.0e10,
    memory_bytes: 8e9,
    reached_flops: 1.0,
    reached_bytes: 1.0,
    overhead: Duration::from_micros(50),
    source: "measured with this repository's engine on smollm2-135m, one core with AVX-512 VNNI",
};

/// Every device that has a name.
pub const DEVICES: [CatalogDevice; 6] = [
    CPU_CORE,
    gpu("l40s", 362e12, 0.864e12, 48e9, "NVIDIA L40S datasheet, dense BF16"),
    A100,
    gpu("h100", 989e12, 3.35e12, 80e9, "NVIDIA H100 datasheet, SXM, dense BF16"),
    H200,
    gpu("b200", 2250e12, 8.0e12, 180e9, "NVIDIA DGX B200 datasheet, one GPU of eight, dense BF16"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_and_every_row_has_a_source() {
        let mut names: Vec<_> = MODELS.map(|model| (model.name, model.source)).to_vec();
        names.extend(DEVICES.map(|device| (device.name, device.source)));
        assert!(names.iter().all(|(name, source)| name.len() > 3 && source.len() > 20), "{names:?}");
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0].0 != pair[1].0), "{names:?}");
    }

    #[test]
    fn kv_of_a_token_is_what_the_configurations_say() {
        assert_eq!(LLAMA_3_8B.shape.kv_token_bytes, 131_072);
        assert_eq!(SMOLLM2_135M.shape.kv_token_bytes, 23_040);
        let of = |name| MODELS.iter().find(|model| model.name == name).unwrap().shape;
        assert_eq!(of("llama-3-70b").kv_token_bytes, 327_680);
        assert_eq!((of("qwen2.5-7b").kv_token_bytes, of("qwen2.5-7b").hidden), (57_344, 3_584));
        // Weights and one KV cache of 8,192 tokens: 16.1 GB and 1.1 GB.
        assert!((of("llama-3-8b").num_params * 2.0 - 16.06e9).abs() < 1e7);
    }
}
