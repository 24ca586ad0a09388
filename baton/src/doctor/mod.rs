//! `baton doctor`: what a worker with these options would load, choose and take, without loading it, and why it could not run.

mod report;

use baton_engine::{CudaFound, Isa};
use baton_model::{Model, ModelSource, Progress, TokenizerSource};
use baton_worker::{DeviceName, MemoryNeed, PlannedEngine, WorkerConfig, WorkerError};
use clap::Command;

use self::report::{ContextFacts, EngineFacts, MemoryFacts, ModelFacts, Problem, Report};
use crate::exit::Failure;
use crate::up::Bar;

/// Options of `baton doctor`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DoctorOptions {
    /// Print the report as JSON
    #[arg(long)]
    json: bool,

    /// The options of a worker, of which those count that decide what is loaded.
    #[command(flatten)]
    worker: WorkerConfig,
}

/// Options of a worker that decide what is loaded and how much memory it takes.
const LOOKED_AT: [&str; 15] = [
    "model",
    "cache-dir",
    "device",
    "threads",
    "cpus",
    "kv-memory",
    "context",
    "max-num-seqs",
    "block-size",
    "precision",
    "quantize",
    "kv-dtype",
    "cuda-graphs",
    "max-step-tokens",
    "isa",
];

/// Hides the workers' options that change nothing here.
pub(crate) fn adjust(command: Command) -> Command {
    command.mut_args(|arg| match arg.get_long() {
        Some("json" | "help") => arg,
        Some(long) if LOOKED_AT.contains(&long) => arg,
        _ => arg.hide(true).env(None::<&str>),
    })
}

/// Prints the report on standard output.
///
/// # Errors
/// The first thing that keeps a worker with these options from running, as the worker itself would fail.
pub(crate) fn run(options: &DoctorOptions) -> Result<(), Failure> {
    let (report, failure) = diagnose(&options.worker, &Bar::default());
    if options.json {
        let text =
            serde_json::to_string_pretty(&report).map_err(|error| Failure::Unexpected(error.to_string()))?;
        println!("{text}");
    } else {
        print!("{report}");
    }
    failure.map_or(Ok(()), Err)
}

/// Everything that can be told, and the first problem.
fn diagnose(config: &WorkerConfig, progress: &dyn Progress) -> (Report, Option<Failure>) {
    let mut doctor = Doctor { report: Report::default(), failure: None };
    doctor.note("options", config.check());
    doctor.report.cuda = Some(CudaFound::look().to_string());
    if let Some((source, model)) = doctor.note("model", open(config, progress)) {
        doctor.report.model = Some(model_facts(&source, &model));
        doctor.look_at(&model, config);
    }
    doctor.report.ok = doctor.failure.is_none();
    (doctor.report, doctor.failure)
}

fn open(config: &WorkerConfig, progress: &dyn Progress) -> Result<(ModelSource, Model), WorkerError> {
    let source = config.resolve_model(progress)?;
    let model = Model::open(&source)?;
    Ok((source, model))
}

struct Doctor {
    report: Report,
    failure: Option<Failure>,
}

impl Doctor {
    /// Keeps what went wrong; what comes after it is still looked at as far as possible.
    fn note<T>(&mut self, about: &'static str, outcome: Result<T, WorkerError>) -> Option<T> {
        let failure = match outcome {
            Ok(value) => return Some(value),
            Err(error) => Failure::from(error),
        };
        let (line, exit_code) = (failure.to_string(), failure.code());
        self.report.problems.push(Problem { about, line, exit_code });
        self.failure.get_or_insert(failure);
        None
    }

    fn look_at(&mut self, model: &Model, config: &WorkerConfig) {
        let planned = self.note("engine", PlannedEngine::new(config, model));
        let context = self.note("context", config.context_of(&model.config));
        let Some(planned) = planned else { return };
        self.report.engine = Some(engine_facts(&planned, config));
        // Where more context is asked for than the model has, the model's own is what could run.
        let memory = planned.memory();
        let need = MemoryNeed::new(config, context.unwrap_or(model.config.context), memory);
        let plan = self.note("memory", planned.fit(need));
        let available_bytes = planned.available_bytes().unwrap_or_default();
        let fits = need.largest_context(available_bytes);
        self.report.context = Some(ContextFacts {
            tokens: need.context,
            of_model: model.config.context,
            fits: fits.map_or(model.config.context as u64, |tokens| tokens.min(model.config.context as u64)),
        });
        self.report.memory = Some(MemoryFacts {
            weights_bytes: memory.weights_bytes,
            scratch_bytes: memory.scratch_bytes,
            kv_bytes: plan.map(|plan| plan.bytes),
            kv_tokens: plan.map(|plan| plan.num_blocks as u64 * config.block_size as u64),
            available_bytes,
        });
    }
}

fn model_facts(source: &ModelSource, model: &Model) -> ModelFacts {
    let c = &model.config;
    ModelFacts {
        name: c.name.clone(),
        family: c.family.clone(),
        source: match source {
            ModelSource::Tiny => "builtin:tiny".to_owned(),
            ModelSource::File(path) | ModelSource::Folder(path) => path.display().to_string(),
        },
        num_layers: c.num_layers,
        hidden: c.hidden,
        num_heads: c.num_heads,
        num_kv_heads: c.num_kv_heads,
        head_dim: c.head_dim,
        vocab: c.vocab,
        stored_bytes: model.weights_bytes(),
        tokenizer: match &model.tokenizer {
            TokenizerSource::Gguf(gguf) => format!("the file's own ({})", gguf.model),
            TokenizerSource::Json(path) if path.is_file() => path.display().to_string(),
            TokenizerSource::Json(path) => format!("missing: {}", path.display()),
            TokenizerSource::Bytes(_) => "bytes".to_owned(),
        },
        chat_template: model.chat_template.is_some(),
    }
}

fn engine_facts(planned: &PlannedEngine, config: &WorkerConfig) -> EngineFacts {
    let layout = planned.layout();
    let (kernels, arithmetic) = match planned {
        PlannedEngine::Cpu(_, plan) => (plan.isa.name(), if plan.is_int8 { "int8" } else { "f32" }),
        PlannedEngine::Cuda(..) => ("cuda", layout.dtype.name()),
    };
    EngineFacts {
        device: planned.device().to_string(),
        kernels,
        available: Isa::available().iter().map(|isa| isa.name()).collect(),
        arithmetic,
        num_threads: match planned.device() {
            DeviceName::Cuda(_) => 1,
            DeviceName::Cpu | DeviceName::Auto => config.num_threads(),
        },
        weights: planned.weight_format().to_owned(),
        quantize: config.quantize.name(),
        kv_dtype: layout.dtype.name(),
        kv_token_bytes: layout.token_bytes(),
        block_size: layout.block_size,
        numerics: layout.numerics_id.clone(),
    }
}

#[cfg(test)]
mod tests {
    use baton_model::NoProgress;
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: DoctorOptions,
    }

    fn examine(line: &str) -> (Report, Option<Failure>) {
        let words = ["doctor", "--model", "builtin:tiny"].into_iter().chain(line.split_whitespace());
        diagnose(&Line::parse_from(words).options.worker, &NoProgress)
    }

    #[test]
    fn what_runs_is_told_with_the_figures_that_the_engine_goes_by() {
        let (report, failure) = examine("--context 4096 --kv-memory 16M --threads 1 --isa portable");
        assert!(failure.is_none() && report.ok && report.problems.is_empty(), "{failure:?}");
        let (model, engine) = (report.model.as_ref().unwrap(), report.engine.as_ref().unwrap());
        assert_eq!((model.num_layers, &*model.source), (4, "builtin:tiny"));
        assert_eq!((engine.kernels, engine.arithmetic, engine.kv_token_bytes), ("portable", "f32", 512));
        let memory = report.memory.as_ref().unwrap();
        assert_eq!((memory.kv_bytes, memory.kv_tokens), (Some(16 << 20), Some(32_768)));
        let context = report.context.as_ref().unwrap();
        assert_eq!((context.tokens, context.of_model, context.fits), (4096, 131_072, 32_768));
        let text = report.to_string();
        for part in ["builtin:tiny", "portable", "32768", "it runs"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn fp8_and_int8_take_what_they_promise() {
        let engine = |line| examine(line).0.engine.unwrap();
        let memory = |line| examine(line).0.memory.unwrap();
        // 16 bytes and a scale a row instead of 32 bytes.
        assert_eq!(engine("--kv-dtype fp8").kv_token_bytes, 512 * 17 / 32);
        assert!(engine("--kv-dtype fp8").numerics.contains("kv-fp8"));
        assert_eq!(engine("--quantize int8").arithmetic, "int8");
        assert!(memory("--quantize int8").weights_bytes * 3 < memory("").weights_bytes);
    }

    #[test]
    fn every_reason_not_to_run_is_told_with_its_exit_code() {
        let (report, failure) = examine("--context 131073");
        assert_eq!((failure.unwrap().code(), report.ok), (2, false));
        assert!(report.problems[0].line.contains("131072"), "{:?}", report.problems);
        // 1 MiB holds 2048 tokens of 512 bytes.
        let (report, failure) = examine("--kv-memory 1M");
        let failure = failure.unwrap();
        assert_eq!(failure.code(), 6);
        assert!(failure.to_string().contains("2048"), "{failure}");
        assert_eq!(report.context.as_ref().unwrap().fits, 2048);
        assert_eq!(report.memory.as_ref().unwrap().kv_bytes, None);
        let text = report.to_string();
        assert!(text.contains("it does not run") && text.contains("--kv-memory"), "{text}");
        let (report, failure) = examine("--max-step-tokens 16 --context 131073");
        assert_eq!(report.problems.len(), 2, "{:?}", report.problems);
        assert!(failure.unwrap().to_string().contains("--max-step-tokens"));
    }

    #[test]
    fn a_model_that_is_not_there_is_a_problem_and_no_panic() {
        let words = ["doctor", "--model", "/nowhere/at/all.gguf"];
        let (report, failure) = diagnose(&Line::parse_from(words).options.worker, &NoProgress);
        assert_eq!(failure.unwrap().code(), 4);
        assert!(report.model.is_none() && report.engine.is_none());
        assert!(report.to_string().contains("/nowhere/at/all.gguf"));
    }
}
