//! Which device a worker computes on, and the engine that was planned for it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use baton_engine::{
    CpuEngine, CpuEngineConfig, CudaEngine, CudaEngineConfig, CudaFound, CudaPlan, EnginePlan, MemoryNeeded,
    Precision, cuda_free_bytes,
};
use baton_kv::{BlockMemory, KvDtype, KvLayout};
use baton_model::Model;
use baton_scheduler::Engine;

use crate::memory_plan::{MemoryNeed, MemoryPlan};
use crate::{WorkerConfig, WorkerError};

/// A device by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceName {
    /// The first CUDA device that can be used, or the CPU where there is none.
    Auto,
    /// The cores that the worker was given.
    #[default]
    Cpu,
    /// A CUDA device, counted as the driver shows them.
    Cuda(u32),
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = |text: &str| text.strip_prefix("cuda:")?.parse::<u16>().ok();
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            _ => ordinal(text)
                .map(|ordinal| Self::Cuda(ordinal.into()))
                .ok_or_else(|| format!("unknown device '{text}': auto, cpu or cuda:N")),
        }
    }
}

impl DeviceName {
    /// Looks for what `auto` stands for; every other name stands for itself.
    #[must_use]
    pub fn resolved(self) -> Self {
        let Self::Auto = self else { return self };
        let found = CudaFound::look();
        let first = found.devices.iter().find(|device| found.check(device.ordinal).is_ok());
        first.map_or(Self::Cpu, |device| Self::Cuda(device.ordinal))
    }
}

/// An engine with its settings, planned before anything is loaded.
#[derive(Debug)]
pub enum PlannedEngine {
    /// On cores.
    Cpu(CpuEngineConfig, EnginePlan),
    /// On a CUDA device.
    Cuda(CudaEngineConfig, CudaPlan),
}

/// A built engine and the memory of its blocks.
pub(crate) type BuiltEngine = (Box<dyn Engine>, Arc<dyn BlockMemory>);

impl PlannedEngine {
    /// Plans the engine for `--device`.
    ///
    /// # Errors
    /// [`WorkerError::Config`] for an option that the device does not have; as [`EnginePlan::new`] and [`CudaPlan::new`].
    pub fn new(config: &WorkerConfig, model: &Model) -> Result<Self, WorkerError> {
        let engine = config.engine_config()?;
        match config.device.resolved() {
            DeviceName::Auto | DeviceName::Cpu => {
                let plan = EnginePlan::new(model, &engine)?;
                Ok(Self::Cpu(engine, plan))
            }
            DeviceName::Cuda(ordinal) => {
                check_options(&engine)?;
                let engine = CudaEngineConfig {
                    ordinal,
                    num_blocks: 1,
                    block_size: engine.block_size,
                    kv_dtype: engine.kv_dtype,
                    quantize: engine.quantize,
                    graphs: config.cuda_graphs,
                    max_step_tokens: engine.max_step_tokens,
                };
                let plan = CudaPlan::new(model, &engine)?;
                Ok(Self::Cuda(engine, plan))
            }
        }
    }

    /// The device.
    pub const fn device(&self) -> DeviceName {
        match self {
            Self::Cpu(..) => DeviceName::Cpu,
            Self::Cuda(config, _) => DeviceName::Cuda(config.ordinal),
        }
    }

    /// What it takes of the device's memory.
    pub const fn memory(&self) -> MemoryNeeded {
        match self {
            Self::Cpu(_, plan) => plan.memory,
            Self::Cuda(_, plan) => plan.memory,
        }
    }

    /// How it lays out KV.
    pub const fn layout(&self) -> &KvLayout {
        match self {
            Self::Cpu(_, plan) => &plan.layout,
            Self::Cuda(_, plan) => &plan.layout,
        }
    }

    /// How it keeps its matrices.
    pub fn weight_format(&self) -> &str {
        match self {
            Self::Cpu(_, plan) => &plan.weight_format,
            Self::Cuda(_, plan) => &plan.weight_format,
        }
    }

    /// Bytes that can be had now where its blocks lie; `None` where nobody tells.
    ///
    /// # Errors
    /// [`WorkerError::Config`] when the device can't be used.
    pub fn available_bytes(&self) -> Result<Option<u64>, WorkerError> {
        match self {
            Self::Cpu(..) => {
                Ok(crate::memory_limit_bytes().into_iter().chain(crate::memory_available_bytes()).min())
            }
            Self::Cuda(config, _) => cuda_free_bytes(config.ordinal)
                .map(Some)
                .map_err(|reason| WorkerError::config("--device", reason)),
        }
    }

    /// How many blocks it gets.
    ///
    /// # Errors
    /// As [`MemoryPlan::new`]; [`WorkerError::Config`] when the device can't be used.
    pub fn fit(&self, need: MemoryNeed) -> Result<MemoryPlan, WorkerError> {
        match self {
            Self::Cpu(..) => MemoryPlan::new(need),
            Self::Cuda(..) => MemoryPlan::on_device(need, self.available_bytes()?),
        }
    }

    /// Loads the weights and takes the memory.
    ///
    /// # Errors
    /// As [`CpuEngine::new`] and [`CudaEngine::new`].
    pub(crate) fn build(self, model: &Model, num_blocks: usize) -> Result<BuiltEngine, WorkerError> {
        match self {
            Self::Cpu(config, _) => {
                let (engine, arena) = CpuEngine::new(model, CpuEngineConfig { num_blocks, ..config })?;
                Ok((Box::new(engine), arena))
            }
            Self::Cuda(config, _) => {
                let (engine, arena) = CudaEngine::new(model, &CudaEngineConfig { num_blocks, ..config })?;
                Ok((Box::new(engine), arena))
            }
        }
    }
}

/// What a CUDA device does not have is refused by the option's name.
fn check_options(engine: &CpuEngineConfig) -> Result<(), WorkerError> {
    let refuse = |option, reason: String| Err(WorkerError::config(option, reason));
    if engine.precision == Precision::F32 {
        return refuse(
            "--precision",
            "f32 is not possible on a CUDA device; auto computes in 16 bits".to_owned(),
        );
    }
    if !matches!(engine.kv_dtype, KvDtype::F16 | KvDtype::BF16) {
        return refuse(
            "--kv-dtype",
            format!("{} is not possible on a CUDA device; f16 and bf16 are", engine.kv_dtype),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use baton_engine::Quantize;

    use super::*;

    #[test]
    fn names_come_back_as_they_were_given_and_others_are_refused() {
        for name in ["auto", "cpu", "cuda:0", "cuda:15"] {
            assert_eq!(name.parse::<DeviceName>().unwrap().to_string(), name);
        }
        for name in ["", "gpu", "cuda", "cuda:", "cuda:-1", "cuda:x", "cuda:70000", "CPU"] {
            let error = name.parse::<DeviceName>().unwrap_err();
            assert!(error.contains("auto, cpu or cuda:N"), "{error}");
        }
    }

    #[test]
    fn what_a_cuda_device_does_not_have_is_refused_before_one_is_looked_for() {
        let engine = CpuEngineConfig::default();
        check_options(&engine).unwrap();
        check_options(&CpuEngineConfig { quantize: Quantize::Int8, ..engine.clone() }).unwrap();
        for (engine, option) in [
            (CpuEngineConfig { precision: Precision::F32, ..engine.clone() }, "--precision"),
            (CpuEngineConfig { kv_dtype: KvDtype::Fp8, ..engine.clone() }, "--kv-dtype"),
            (CpuEngineConfig { kv_dtype: KvDtype::F32, ..engine }, "--kv-dtype"),
        ] {
            let error = check_options(&engine).unwrap_err().to_string();
            assert!(error.contains(option) && error.contains("CUDA"), "{error}");
        }
    }
}
