//! `baton bench engine`: how fast whole steps of the CPU engine are, beside what this machine's cores and memory can do at all.
//!
//! Needs no cluster. Prompts are computed in chunks of 512 tokens, in the third case in one step; decoding makes 64 steps from context 128, around 256, or in the last case
//! from 8,000. The KV before that is zeros: what a step takes does not depend on values. All cases are measured in turn, round by
//! round, so that what else the machine does hits all of them; medians are reported.

mod report;
mod rig;

use std::time::{Duration, Instant};

use baton_engine::{
    CpuEngineConfig, EnginePlan, Isa, Precision, TokenCost, int8_macs_per_s, read_bytes_per_s,
};
use baton_model::{Model, ModelName, ResolveOptions};

pub(super) use self::report::Report;
use self::report::{Limits, Loaded, Measured, Read};
use self::rig::Rig;
use crate::exit::Failure;
use crate::up::Bar;

/// Tokens of a prefill step.
const CHUNK: usize = 512;
/// Tokens that each decoding sequence is given in one round.
const STEPS: usize = 64;

/// What to measure, and for how long.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct EngineOptions {
    /// Model: 'default', 'builtin:tiny', a GGUF file, or a hub id such as org/name or org/name:file.gguf
    #[arg(long, env = "BATON_MODEL", value_name = "MODEL", default_value = "default")]
    model: String,

    /// Numbers of compute threads, such as 1,2
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Vec<u16>,

    /// CPU kernels: auto, amx, avx512, avx2 or portable
    #[arg(long, env = "BATON_ISA", value_name = "NAME", default_value = "auto",
          value_parser = ["auto", "amx", "avx512", "avx2", "portable"])]
    isa: String,

    /// Arithmetic: 'auto' rounds activations to 8 bits where weights are quantised, 'f32' widens both
    #[arg(long, env = "BATON_PRECISION", value_name = "NAME", default_value = "auto", value_parser = ["auto", "f32"])]
    precision: String,

    /// Cases to measure [default: all that fit the model's context]
    #[arg(long, value_name = "LIST", value_delimiter = ',',
          value_parser = ["pp512", "pp2048", "pp2048-1", "tg1", "tg8", "tg8-256", "tg32", "tg1-8k"])]
    cases: Vec<String>,

    /// Rounds, of which the median counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// Seconds after which no further round begins
    #[arg(long, value_name = "SECONDS", default_value_t = 240, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(super) json: bool,
}

/// One kind of step.
#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    /// Sequences computed together.
    batch: usize,
    /// Tokens before the first step.
    context: usize,
    /// Tokens that each sequence gets in a round.
    tokens: usize,
    /// In steps of so many tokens.
    chunk: usize,
}

const CASES: [Case; 8] = [
    Case { name: "pp512", batch: 1, context: 0, tokens: 512, chunk: CHUNK },
    Case { name: "pp2048", batch: 1, context: 0, tokens: 2048, chunk: CHUNK },
    Case { name: "pp2048-1", batch: 1, context: 0, tokens: 2048, chunk: 2048 },
    Case { name: "tg1", batch: 1, context: 128, tokens: STEPS, chunk: 1 },
    Case { name: "tg8", batch: 8, context: 128, tokens: STEPS, chunk: 1 },
    Case { name: "tg8-256", batch: 8, context: 256 - STEPS / 2, tokens: STEPS, chunk: 1 },
    Case { name: "tg32", batch: 32, context: 128, tokens: STEPS, chunk: 1 },
    Case { name: "tg1-8k", batch: 1, context: 8000, tokens: STEPS, chunk: 1 },
];

impl Case {
    const fn decodes(&self) -> bool {
        self.chunk == 1
    }

    /// Tokens of one sequence at its end.
    const fn length(&self) -> usize {
        self.context + self.tokens
    }
}

/// Measures; blocks the thread that calls it.
///
/// # Errors
/// [`Failure::Model`] when the model can't be had or run, [`Failure::Memory`] when it does not fit, [`Failure::Usage`] for an instruction set
/// that this CPU lacks.
pub(super) fn run(options: &EngineOptions) -> Result<Report, Failure> {
    let model = open(&options.model)?;
    let cases = options.cases(model.config.context);
    if cases.is_empty() {
        let context = model.config.context;
        return Err(Failure::Usage(format!("--cases: none of them fits the model's context of {context}")));
    }
    let config = options.config(&cases);
    let plan = EnginePlan::new(&model, &config).map_err(failure)?;
    let mut rigs = Vec::new();
    for &threads in &options.threads {
        rigs.push(Rig::new(&model, threads, &config)?);
    }
    let (cost, model_bytes) = (TokenCost::of(&model), model.weights_bytes());
    // As workers do: the file is no longer mapped once the weights are packed.
    drop(model);
    let loaded = Loaded::new(model_bytes, &plan, &config, &rigs);
    let mut measured = Measured::new(&cases, &options.threads);
    let began = Instant::now();
    for round in 0..options.rounds {
        if round > 0 && began.elapsed() > Duration::from_secs(options.seconds) {
            break;
        }
        for rig in &mut rigs {
            for case in &cases {
                measured.add(case, rig.threads(), rig.measure(case)?);
            }
        }
    }
    let limits = limits(&plan, &cases, options)?;
    Ok(measured.report(loaded, &limits, &cost))
}

fn open(name: &str) -> Result<Model, Failure> {
    let name: ModelName = name.parse()?;
    let bar = Bar::default();
    Ok(Model::open(&baton_model::resolve(&name, &ResolveOptions::from_env(&bar))?)?)
}

/// What the same number of cores does at most, measured after the rounds, when clocks are where they were in them.
fn limits(plan: &EnginePlan, cases: &[Case], options: &EngineOptions) -> Result<Limits, Failure> {
    let mut limits =
        Limits { int8_macs_per_s: int8_macs_per_s(plan.isa).map_err(failure)?, reads: Vec::new() };
    let block_tokens = plan.layout.block_size;
    for case in cases.iter().filter(|case| case.decodes()) {
        let kv = case.batch * (case.context + case.tokens / 2) * plan.memory.block_bytes / block_tokens;
        let bytes = plan.memory.weights_bytes + kv;
        for &threads in &options.threads {
            let bytes_per_s = read_bytes_per_s(bytes, threads.into()).map_err(failure)?;
            limits.reads.push(Read { case: case.name, threads, bytes, bytes_per_s });
        }
    }
    Ok(limits)
}

fn failure(error: baton_engine::EngineBuildError) -> Failure {
    use baton_engine::EngineBuildError as E;
    let line = error.to_string();
    match error {
        E::OutOfMemory { .. } => Failure::Memory(line),
        E::InvalidConfig { .. } | E::IsaUnavailable { .. } => Failure::Usage(line),
        E::Threads(_) => Failure::Unexpected(line),
        _ => Failure::Model(line),
    }
}

impl EngineOptions {
    fn cases(&self, context: usize) -> Vec<Case> {
        let wanted = |case: &Case| self.cases.is_empty() || self.cases.iter().any(|name| name == case.name);
        CASES.into_iter().filter(|case| wanted(case) && case.length() <= context).collect()
    }

    fn config(&self, cases: &[Case]) -> CpuEngineConfig {
        let base = CpuEngineConfig::default();
        let blocks = |case: &Case| case.batch * case.length().div_ceil(base.block_size);
        CpuEngineConfig {
            num_blocks: cases.iter().map(blocks).max().unwrap_or(1),
            max_step_tokens: cases.iter().map(|case| case.chunk).max().unwrap_or(1).max(CHUNK),
            precision: if self.precision == "f32" { Precision::F32 } else { Precision::Auto },
            isa: [Isa::Amx, Isa::Avx512, Isa::Avx2, Isa::Portable]
                .into_iter()
                .find(|isa| isa.name() == self.isa),
            ..base
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        engine: EngineOptions,
    }

    fn parse(arguments: &[&str]) -> Result<EngineOptions, clap::Error> {
        Ok(Command::try_parse_from(["engine"].iter().chain(arguments))?.engine)
    }

    #[test]
    fn bad_values_name_their_option() {
        for (arguments, option) in [
            (["--threads", "0"], "--threads"),
            (["--isa", "neon"], "--isa"),
            (["--cases", "pp1"], "--cases"),
            (["--rounds", "0"], "--rounds"),
        ] {
            let error = parse(&arguments).expect_err("to be refused").to_string();
            assert!(error.contains(option), "{error}");
        }
    }

    #[test]
    fn only_cases_within_the_context_are_measured() {
        let options = parse(&["--threads", "1,2"]).unwrap();
        assert_eq!(options.threads, [1, 2]);
        assert_eq!(options.cases(131_072).len(), CASES.len());
        assert_eq!(options.config(&options.cases(1024)).max_step_tokens, CHUNK);
        let names: Vec<_> = options.cases(1024).iter().map(|case| case.name).collect();
        assert_eq!(names, ["pp512", "tg1", "tg8", "tg8-256", "tg32"]);
        assert_eq!(parse(&["--cases", "tg8"]).unwrap().cases(1024).len(), 1);
        // 32 sequences of 192 tokens, or one of 8,064.
        assert_eq!(options.config(&options.cases(131_072)).num_blocks, 504);
    }

    #[test]
    fn the_builtin_model_is_measured_and_the_report_has_every_row() {
        let options = parse(&[
            "--model",
            "builtin:tiny",
            "--threads",
            "1,2",
            "--rounds",
            "1",
            "--isa",
            "portable",
            "--cases",
            "pp512,tg8",
        ])
        .unwrap();
        let report = run(&options).unwrap();
        let json = serde_json::to_value(&report).unwrap();
        let rows = json["rows"].as_array().unwrap();
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row["case"].as_str().unwrap(), row["threads"].as_u64().unwrap()))
            .collect();
        assert_eq!(found, [("pp512", 1), ("tg8", 1), ("pp512", 2), ("tg8", 2)]);
        for row in rows {
            assert!(row["tokens_per_s"].as_f64().unwrap() > 1.0, "{row}");
        }
        assert!(rows[1]["share_of_read_bandwidth"].as_f64().unwrap() > 0.0);
        assert_eq!(json["isa"], "portable");
        let table = report.table();
        assert!(table.contains("pp512") && table.contains("tg8"), "{table}");
    }
}
