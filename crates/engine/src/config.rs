//! How an engine is built.

use std::fmt;
use std::str::FromStr;

use baton_kv::{KvDtype, KvLayout};
use baton_model::{Model, ModelConfig};

use crate::error::EngineBuildError;
use crate::kernels::{Isa, Kernels, MAX_HEAD_DIM, TILE_TOKENS};
use crate::scratch;
use crate::source::WeightSource;
use crate::weights::WeightPlan;

/// What the matrix products compute in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Precision {
    /// The fastest: [`Precision::Int8`].
    #[default]
    Auto,
    /// Activations rounded to 8 bits, 32 at a time, where they meet quantised weights; f32 elsewhere.
    Int8,
    /// Weights widened to f32, activations f32.
    F32,
}

impl Precision {
    /// Whether quantised weights meet quantised activations.
    pub(crate) const fn is_int8(self) -> bool {
        matches!(self, Precision::Auto | Precision::Int8)
    }
}

/// Whether matrices are made smaller while they are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Quantize {
    /// They are kept as they are stored.
    #[default]
    None,
    /// F32, F16 and BF16 are rounded to 8 bits, 32 elements to a scale; refused for what is quantised already. On a CUDA device
    /// everything is, a row to a scale.
    Int8,
}

impl Quantize {
    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Int8 => "int8",
        }
    }
}

impl fmt::Display for Quantize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Quantize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::None, Self::Int8]
            .into_iter()
            .find(|quantize| quantize.name() == text)
            .ok_or_else(|| format!("unknown quantisation '{text}': none or int8"))
    }
}

/// A CPU engine's settings.
#[derive(Clone, Debug)]
pub struct CpuEngineConfig {
    /// KV blocks in the arena, at least 1.
    pub num_blocks: usize,
    /// Tokens of a block: 16, 32, 64, 128 or 256.
    pub block_size: usize,
    /// Element type of K and V.
    pub kv_dtype: KvDtype,
    /// Arithmetic of the matrix products.
    pub precision: Precision,
    /// What becomes of the weights while they are loaded.
    pub quantize: Quantize,
    /// Threads that compute a step, the caller's included: 1 to 1024.
    pub num_threads: usize,
    /// Cores to pin them to, the caller's thread to the first; `None` leaves them free.
    pub cpus: Option<Vec<usize>>,
    /// Largest number of tokens in one plan: 1 to 65,536. Scratch grows with it.
    pub max_step_tokens: usize,
    /// Instruction set; `None` takes the best.
    pub isa: Option<Isa>,
}

impl Default for CpuEngineConfig {
    /// One block, f16 KV, one free thread, 512 tokens a step, the best instruction set.
    fn default() -> Self {
        Self {
            num_blocks: 1,
            block_size: 16,
            kv_dtype: KvDtype::F16,
            precision: Precision::Auto,
            quantize: Quantize::None,
            num_threads: 1,
            cpus: None,
            max_step_tokens: 512,
            isa: None,
        }
    }
}

/// Bytes that an engine takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeeded {
    /// Packed weights.
    pub weights_bytes: usize,
    /// Activations of one step and what each thread keeps.
    pub scratch_bytes: usize,
    /// One KV block over all layers; the arena takes `num_blocks` of them.
    pub block_bytes: usize,
}

/// What an engine would be and take, known before anything is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnginePlan {
    /// Its memory.
    pub memory: MemoryNeeded,
    /// Its kernels.
    pub isa: Isa,
    /// Whether activations are rounded to 8 bits where they meet quantised weights.
    pub is_int8: bool,
    /// How the matrices are kept: `q4_1+q8_0`.
    pub weight_format: String,
    /// How it lays out KV, its numerics id included.
    pub layout: KvLayout,
}

impl EnginePlan {
    /// Plans, so that `num_blocks`, which is not looked at, can be chosen to fill a budget.
    ///
    /// # Errors
    /// As [`crate::CpuEngine::new`], for settings out of bounds and for a model that the engine can't run.
    pub fn new(model: &Model, config: &CpuEngineConfig) -> Result<EnginePlan, EngineBuildError> {
        let config = CpuEngineConfig { num_blocks: 1, ..config.clone() };
        let kernels = config.check(&model.config)?;
        let weights = WeightPlan::new(model, config.quantize)?;
        let layout = kv_layout(model, &config, kernels, &weights);
        Ok(EnginePlan {
            memory: MemoryNeeded {
                weights_bytes: weights.num_bytes,
                scratch_bytes: scratch::bytes_needed(&model.config, &config),
                block_bytes: layout.block_bytes(),
            },
            isa: kernels.isa,
            is_int8: config.is_int8(&weights),
            weight_format: weights.format_name(),
            layout,
        })
    }
}

impl CpuEngineConfig {
    /// Whether quantised weights meet quantised activations in this model.
    pub(crate) fn is_int8(&self, weights: &WeightPlan) -> bool {
        self.precision.is_int8() && weights.any_quantised()
    }

    /// Checks every bound and chooses the kernels.
    pub(crate) fn check(&self, model: &ModelConfig) -> Result<&'static Kernels, EngineBuildError> {
        let bounds = [
            ("num_threads", self.num_threads, 1024),
            ("max_step_tokens", self.max_step_tokens, 65_536),
            ("num_blocks", self.num_blocks, u32::MAX as usize),
        ];
        for (field, value, largest) in bounds {
            if value < 1 || value > largest {
                return Err(EngineBuildError::invalid(field, value, format!("1 to {largest} are possible")));
            }
        }
        if !(16..=TILE_TOKENS).contains(&self.block_size) || !self.block_size.is_power_of_two() {
            return Err(EngineBuildError::invalid(
                "block_size",
                self.block_size,
                "16, 32, 64, 128 or 256 are possible",
            ));
        }
        if self.cpus.as_ref().is_some_and(Vec::is_empty) {
            return Err(EngineBuildError::invalid("cpus", "empty", "name at least one core"));
        }
        if !model.head_dim.is_multiple_of(16) || model.head_dim > MAX_HEAD_DIM {
            let what =
                format!("heads of {}; multiples of 16 up to {MAX_HEAD_DIM} are supported", model.head_dim);
            return Err(EngineBuildError::UnsupportedModel { what });
        }
        if model.context > u32::MAX as usize {
            let what = format!("a context of {}; positions are 32 bits", model.context);
            return Err(EngineBuildError::UnsupportedModel { what });
        }
        let available = Isa::available();
        let isa = self.isa.unwrap_or(available[0]);
        Kernels::of(isa).ok_or_else(|| EngineBuildError::isa_unavailable(isa))
    }
}

/// How this engine lays out KV. The numerics id names everything that decides the bits of KV and logits: whether a
/// multiply-add rounds once, whether activations are rounded to 8 bits, KV's element type, the weights' storage.
pub(crate) fn kv_layout(
    source: &dyn WeightSource,
    config: &CpuEngineConfig,
    kernels: &Kernels,
    weights: &WeightPlan,
) -> KvLayout {
    let model = source.config();
    let precision = if config.is_int8(weights) { "int8" } else { "f32" };
    let rounding = if kernels.fused { "fma" } else { "mul-add" };
    let weight_format = weights.format_name();
    KvLayout {
        model_digest: source.digest(),
        num_layers: model.num_layers,
        num_kv_heads: model.num_kv_heads,
        head_dim: model.head_dim,
        block_size: config.block_size,
        dtype: config.kv_dtype,
        arrangement: arrangement(config.kv_dtype).to_owned(),
        numerics_id: format!("cpu-{precision}-{rounding}/kv-{}/{weight_format}", config.kv_dtype),
    }
}

/// Order of a block's bytes in one layer.
const fn arrangement(dtype: KvDtype) -> &'static str {
    match dtype {
        KvDtype::F32 | KvDtype::F16 | KvDtype::BF16 => "k[head][dim][token] v[head][token][dim]",
        KvDtype::Fp8 => "k[head][dim][token] scale[head][token] v[head][token][dim] scale[head][token]",
    }
}

#[cfg(test)]
mod tests {
    use baton_kv::BlockMemory;

    use super::*;
    use crate::CpuEngine;

    fn refusal(change: impl FnOnce(&mut CpuEngineConfig)) -> String {
        let mut config = CpuEngineConfig::default();
        change(&mut config);
        CpuEngine::new(&Model::tiny(), config).err().expect("to be refused").to_string()
    }

    #[test]
    fn a_setting_out_of_bounds_is_named_with_its_limit() {
        assert_eq!(refusal(|c| c.num_threads = 0), "num_threads is 0: 1 to 1024 are possible");
        assert_eq!(
            refusal(|c| c.max_step_tokens = 65_537),
            "max_step_tokens is 65537: 1 to 65536 are possible"
        );
        assert_eq!(refusal(|c| c.num_blocks = 0), "num_blocks is 0: 1 to 4294967295 are possible");
        for block_size in [0, 8, 24, 512] {
            let want = format!("block_size is {block_size}: 16, 32, 64, 128 or 256 are possible");
            assert_eq!(refusal(|c| c.block_size = block_size), want);
        }
        assert_eq!(refusal(|c| c.cpus = Some(Vec::new())), "cpus is empty: name at least one core");
        assert!(refusal(|c| c.num_blocks = 1 << 31).starts_with("the KV arena takes "));
    }

    #[test]
    fn the_plan_is_what_is_taken() {
        let model = Model::tiny();
        let config = CpuEngineConfig { num_blocks: 7, num_threads: 3, ..CpuEngineConfig::default() };
        let plan = |config: &CpuEngineConfig| EnginePlan::new(&model, config).unwrap();
        let planned = plan(&config);
        let (engine, arena) = CpuEngine::new(&model, config.clone()).unwrap();
        assert_eq!(arena.num_bytes(), 7 * planned.memory.block_bytes);
        assert_eq!((arena.layout(), engine.isa()), (&planned.layout, planned.isa));
        // Weights are stored as f32 with columns that fill whole tiles, so packing adds nothing but alignment.
        let (stored, packed) = (model.weights_bytes() as usize, planned.memory.weights_bytes);
        assert!(packed <= stored && packed > stored * 9 / 10);
        assert_eq!((planned.is_int8, &*planned.weight_format), (false, "f32"));
        let doubled = plan(&CpuEngineConfig { max_step_tokens: 1024, ..config.clone() });
        assert!(doubled.memory.scratch_bytes > planned.memory.scratch_bytes * 3 / 2);
        // 34 bytes for 32 elements instead of 128.
        let quantised = plan(&CpuEngineConfig { quantize: Quantize::Int8, ..config });
        assert!(quantised.memory.weights_bytes < packed * 35 / 128);
        assert_eq!((quantised.is_int8, &*quantised.weight_format), (true, "q8_0"));
        assert_ne!(quantised.layout.numerics_id, planned.layout.numerics_id);
    }

    #[test]
    fn workers_with_other_kv_or_other_weights_refuse_each_other() {
        let layout = |kv_dtype, quantize| {
            let config = CpuEngineConfig { kv_dtype, quantize, ..CpuEngineConfig::default() };
            EnginePlan::new(&Model::tiny(), &config).unwrap().layout
        };
        let mut all: Vec<KvLayout> = KvDtype::ALL.map(|dtype| layout(dtype, Quantize::None)).to_vec();
        all.push(layout(KvDtype::F16, Quantize::Int8));
        for (a, ours) in all.iter().enumerate() {
            for (b, theirs) in all.iter().enumerate() {
                assert_eq!(ours.check(theirs).is_ok(), a == b, "{ours:?}, {theirs:?}");
                assert_eq!(ours.cache_salt() == theirs.cache_salt(), a == b);
            }
        }
    }
}
