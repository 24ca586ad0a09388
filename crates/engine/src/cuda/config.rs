//! How a CUDA engine is built, and what it would be and take.

use baton_kv::{KvDtype, KvLayout};
use baton_model::ModelConfig;

use super::probe::CudaFound;
use super::{graphs, scratch, weights};
use crate::config::{MemoryNeeded, Quantize};
use crate::error::EngineBuildError;
use crate::source::WeightSource;
use crate::weights::WeightPlan;

/// Order of a block's elements: the canonical one, so whole blocks go over the wire as they lie.
pub(super) const ARRANGEMENT: &str = "kv[head][token][dim]";
/// How attention adds up, see `cuda/ABI.md`: part of the numerics id.
const ATTENTION: &str = "mma16-step32-tile128";
/// How products with 8-bit weights add up: pieces of 32 inputs in turn to four sums.
const INT8_PRODUCTS: &str = "row8-k32x4";
/// Sizes of a head that there are kernels for.
const HEAD_DIMS: [usize; 6] = [16, 32, 64, 96, 128, 256];
/// Query heads of a KV head, at most.
const MAX_GROUP: usize = 16;
/// The copies that cuBLASLt makes are of 16 bytes.
const WIDTH_UNIT: usize = 8;

/// The 16-bit type of weights, activations and KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    F16,
    Bf16,
}

impl Half {
    /// As kernels' names end, and as the numerics id says.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    fn of(dtype: KvDtype) -> Result<Half, EngineBuildError> {
        match dtype {
            KvDtype::F16 => Ok(Half::F16),
            KvDtype::BF16 => Ok(Half::Bf16),
            KvDtype::F32 | KvDtype::Fp8 => Err(EngineBuildError::invalid(
                "kv_dtype",
                dtype,
                "f16 and bf16 are possible on a CUDA device, for KV, weights and activations alike",
            )),
        }
    }
}

/// A CUDA engine's settings.
#[derive(Clone, Debug)]
pub struct CudaEngineConfig {
    /// The N of `cuda:N`.
    pub ordinal: u32,
    /// KV blocks in the arena, at least 1.
    pub num_blocks: usize,
    /// Tokens of a block: 16, 32, 64, 128 or 256.
    pub block_size: usize,
    /// Element type of K and V, and of weights and activations with them: f16 or bf16.
    pub kv_dtype: KvDtype,
    /// What becomes of the matrices while they are loaded: 16 bits an element, or 8 and a scale a row, whatever the file has.
    pub quantize: Quantize,
    /// Whether steps that only decode are launched as CUDA graphs. The bits are the same.
    pub graphs: bool,
    /// Largest number of tokens in one plan: 1 to 65,536. Scratch grows with it.
    pub max_step_tokens: usize,
}

/// What a CUDA engine would be and take, known before anything is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaPlan {
    /// Its memory, all on the device: matrices are kept in 16 bits, however few the file has, or rounded to 8. What the driver takes for
    /// graphs is not in it.
    pub memory: MemoryNeeded,
    /// How the matrices are stored in the file, and kept: `q4_1+q8_0>f16`, `bf16>int8-row`.
    pub weight_format: String,
    /// How it lays out KV, its numerics id included.
    pub layout: KvLayout,
}

/// A configuration that was checked against model and device.
pub(super) struct Checked {
    pub(super) half: Half,
    pub(super) plan: CudaPlan,
}

impl CudaPlan {
    /// Plans, so that `num_blocks`, which is not looked at, can be chosen to fill a budget.
    ///
    /// # Errors
    /// As [`super::CudaEngine::new`], for settings out of bounds, a device that is not there, and a model that the engine can't run.
    pub fn new(source: &dyn WeightSource, config: &CudaEngineConfig) -> Result<CudaPlan, EngineBuildError> {
        let config = CudaEngineConfig { num_blocks: 1, ..config.clone() };
        Ok(check(source, &config)?.plan)
    }
}

/// Checks every bound.
pub(super) fn check(
    source: &dyn WeightSource,
    config: &CudaEngineConfig,
) -> Result<Checked, EngineBuildError> {
    let model = source.config();
    let half = Half::of(config.kv_dtype)?;
    check_numbers(config)?;
    check_model(model)?;
    let found = CudaFound::look();
    let device = found.check(config.ordinal).map_err(EngineBuildError::Device)?;
    let stored = WeightPlan::new(source, Quantize::None)?.format_name();
    let (kept, products) = match config.quantize {
        Quantize::None => (half.name(), String::new()),
        Quantize::Int8 => ("int8-row", format!("-{INT8_PRODUCTS}")),
    };
    let weight_format = format!("{stored}>{kept}");
    let layout = KvLayout {
        model_digest: source.digest(),
        num_layers: model.num_layers,
        num_kv_heads: model.num_kv_heads,
        head_dim: model.head_dim,
        block_size: config.block_size,
        dtype: config.kv_dtype,
        arrangement: ARRANGEMENT.to_owned(),
        numerics_id: format!(
            "cuda.sm{}-{}-{ATTENTION}{products}/kv-{}/{weight_format}",
            device.capability,
            half.name(),
            config.kv_dtype
        ),
    };
    let group = model.num_heads / model.num_kv_heads;
    let graph_bytes = match config.graphs {
        true => graphs::bytes_needed(scratch::max_items(model, group)),
        false => 0,
    };
    let memory = MemoryNeeded {
        weights_bytes: weights::bytes_needed(model, config.quantize),
        scratch_bytes: scratch::bytes_needed(model, config.max_step_tokens) + graph_bytes,
        block_bytes: layout.block_bytes(),
    };
    Ok(Checked { half, plan: CudaPlan { memory, weight_format, layout } })
}

fn check_numbers(config: &CudaEngineConfig) -> Result<(), EngineBuildError> {
    let CudaEngineConfig { num_blocks, block_size, max_step_tokens, .. } = *config;
    if !(16..=256).contains(&block_size) || !block_size.is_power_of_two() {
        return Err(EngineBuildError::invalid(
            "block_size",
            block_size,
            "16, 32, 64, 128 or 256 are possible",
        ));
    }
    // The largest slot number means "none".
    let most = (u32::MAX as usize - 1) / block_size;
    for (field, value, largest) in
        [("max_step_tokens", max_step_tokens, 65_536), ("num_blocks", num_blocks, most)]
    {
        if value < 1 || value > largest {
            return Err(EngineBuildError::invalid(field, value, format!("1 to {largest} are possible")));
        }
    }
    Ok(())
}

fn check_model(model: &ModelConfig) -> Result<(), EngineBuildError> {
    let unsupported = |what: String| Err(EngineBuildError::UnsupportedModel { what });
    if !HEAD_DIMS.contains(&model.head_dim) {
        return unsupported(format!(
            "heads of {}; 16, 32, 64, 96, 128 and 256 are supported on a CUDA device",
            model.head_dim
        ));
    }
    let group = model.num_heads / model.num_kv_heads;
    if group > MAX_GROUP {
        return unsupported(format!(
            "{group} query heads to a KV head; {MAX_GROUP} are supported on a CUDA device"
        ));
    }
    for (what, width) in [("hidden width", model.hidden), ("FFN width", model.ffn)] {
        if !width.is_multiple_of(WIDTH_UNIT) {
            return unsupported(format!(
                "a {what} of {width}; multiples of {WIDTH_UNIT} are supported on a CUDA device"
            ));
        }
    }
    if model.context > i32::MAX as usize {
        return unsupported(format!("a context of {}; positions are 31 bits", model.context));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use baton_model::Model;

    use super::*;

    const CONFIG: CudaEngineConfig = CudaEngineConfig {
        ordinal: 0,
        num_blocks: 1,
        block_size: 16,
        kv_dtype: KvDtype::F16,
        quantize: Quantize::None,
        graphs: true,
        max_step_tokens: 64,
    };

    #[test]
    fn settings_out_of_bounds_are_refused_by_name_before_a_card_is_looked_for() {
        let refusal = |config: CudaEngineConfig| check(&Model::tiny(), &config).err().unwrap().to_string();
        for (config, field) in [
            (CudaEngineConfig { kv_dtype: KvDtype::Fp8, ..CONFIG }, "kv_dtype"),
            (CudaEngineConfig { kv_dtype: KvDtype::F32, ..CONFIG }, "kv_dtype"),
            (CudaEngineConfig { block_size: 24, ..CONFIG }, "block_size"),
            (CudaEngineConfig { max_step_tokens: 0, ..CONFIG }, "max_step_tokens"),
            (CudaEngineConfig { num_blocks: 1 << 28, ..CONFIG }, "num_blocks"),
        ] {
            let error = refusal(config);
            assert!(error.contains(field) && error.contains("possible"), "{error}");
        }
    }

    #[test]
    fn models_without_kernels_are_refused() {
        let tiny = Model::tiny().config;
        check_model(&tiny).unwrap();
        for (model, what) in [
            (ModelConfig { head_dim: 48, ..tiny.clone() }, "heads of 48"),
            (ModelConfig { num_heads: 64, ..tiny.clone() }, "32 query heads"),
            (ModelConfig { hidden: 60, ..tiny.clone() }, "hidden width of 60"),
        ] {
            let error = check_model(&model).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains("CUDA"), "{error}");
        }
    }
}
