//! Medians, and what share they are of the machine's limits.

use std::fmt::Write;

use baton_engine::{CpuEngineConfig, EnginePlan, TokenCost};
use serde::Serialize;

use super::Case;
use super::rig::Rig;
use crate::bench::process::own_memory;

/// What loading took.
#[derive(Debug, Serialize)]
pub(super) struct Loaded {
    isa: &'static str,
    weights: String,
    /// Packing the weights and taking all memory, the fastest of the engines.
    load_s: f64,
    model_bytes: u64,
    /// Of one engine.
    weights_bytes: usize,
    /// Of one engine.
    arena_bytes: usize,
    /// Resident memory of this process once all engines were loaded; `null` where the system does not tell.
    resident_bytes: Option<u64>,
    /// The most until then, the mapped file included.
    peak_resident_bytes: Option<u64>,
    engines: usize,
}

impl Loaded {
    pub(super) fn new(model_bytes: u64, plan: &EnginePlan, config: &CpuEngineConfig, rigs: &[Rig]) -> Loaded {
        Loaded {
            isa: plan.isa.name(),
            weights: plan.weight_format.clone(),
            load_s: rigs.iter().map(|rig| rig.load().as_secs_f64()).fold(f64::INFINITY, f64::min),
            model_bytes,
            weights_bytes: plan.memory.weights_bytes,
            arena_bytes: plan.memory.block_bytes * config.num_blocks,
            resident_bytes: own_memory("VmRSS:"),
            peak_resident_bytes: own_memory("VmHWM:"),
            engines: rigs.len(),
        }
    }
}

/// What the machine can do at most.
pub(super) struct Limits {
    /// Of one core.
    pub(super) int8_macs_per_s: f64,
    pub(super) reads: Vec<Read>,
}

/// Memory read again and again.
pub(super) struct Read {
    pub(super) case: &'static str,
    pub(super) threads: u16,
    /// What a step of the case reads.
    pub(super) bytes: usize,
    /// How many bytes a second the threads read at most of so many.
    pub(super) bytes_per_s: f64,
}

/// All rounds of all cases.
pub(super) struct Measured(Vec<Samples>);

struct Samples {
    case: Case,
    threads: u16,
    /// Of each round.
    tokens_per_s: Vec<f64>,
}

/// Medians over the rounds.
#[derive(Debug, Serialize)]
pub(in super::super) struct Report {
    #[serde(flatten)]
    loaded: Loaded,
    /// Multiply-adds of 8-bit integers that one core makes at most, in 10^9 a second.
    int8_peak_gmac_per_s: f64,
    rounds: usize,
    rows: Vec<Row>,
}

/// One case with one number of threads.
#[derive(Debug, Serialize)]
struct Row {
    case: &'static str,
    threads: u16,
    tokens_per_s: f64,
    slowest: f64,
    fastest: f64,
    /// The matrices' multiply-adds, as a share of what so many cores make at most; attention, which is not of integers, is not counted.
    share_of_int8_peak: f64,
    /// Decoding: the weights once and the KV of all sequences, as a share of what so many threads read at most of as much memory.
    share_of_read_bandwidth: Option<f64>,
}

impl Measured {
    pub(super) fn new(cases: &[Case], threads: &[u16]) -> Measured {
        let rows = threads.iter().flat_map(|&threads| {
            cases.iter().map(move |&case| Samples { case, threads, tokens_per_s: Vec::new() })
        });
        Measured(rows.collect())
    }

    pub(super) fn add(&mut self, case: &Case, threads: u16, tokens_per_s: f64) {
        let mut rows = self.0.iter_mut();
        if let Some(row) = rows.find(|row| (row.case.name, row.threads) == (case.name, threads)) {
            row.tokens_per_s.push(tokens_per_s);
        }
    }

    pub(super) fn report(mut self, loaded: Loaded, limits: &Limits, cost: &TokenCost) -> Report {
        Report {
            loaded,
            int8_peak_gmac_per_s: limits.int8_macs_per_s / 1e9,
            rounds: self.0.first().map_or(0, |row| row.tokens_per_s.len()),
            rows: self.0.iter_mut().filter_map(|samples| samples.row(limits, cost)).collect(),
        }
    }
}

impl Samples {
    fn row(&mut self, limits: &Limits, cost: &TokenCost) -> Option<Row> {
        let (case, threads, samples) = (&self.case, self.threads, &mut self.tokens_per_s);
        samples.sort_unstable_by(f64::total_cmp);
        let tokens_per_s = *samples.get(samples.len() / 2)?;
        // A prompt's logits are computed once.
        let logit_macs = if case.decodes() { cost.logit_macs } else { cost.logit_macs / case.tokens };
        let macs_per_s = tokens_per_s * (cost.layer_macs + logit_macs) as f64;
        let read = limits.reads.iter().find(|read| (read.case, read.threads) == (case.name, threads));
        let steps_per_s = tokens_per_s / case.batch as f64;
        Some(Row {
            case: case.name,
            threads,
            tokens_per_s,
            slowest: *samples.first()?,
            fastest: *samples.last()?,
            share_of_int8_peak: macs_per_s / (limits.int8_macs_per_s * f64::from(threads)),
            share_of_read_bandwidth: read.map(|read| steps_per_s * read.bytes as f64 / read.bytes_per_s),
        })
    }
}

impl Report {
    pub(in super::super) fn table(&self) -> String {
        let mut out = String::new();
        self.write(&mut out).unwrap_or_else(|error| unreachable!("a string takes all: {error}"));
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let l = &self.loaded;
        let mib = |bytes: u64| bytes >> 20;
        writeln!(
            out,
            "{} kernels, {} weights; loaded in {:.2} s; int8 peak of a core {:.0} GMAC/s; medians of {} rounds",
            l.isa, l.weights, l.load_s, self.int8_peak_gmac_per_s, self.rounds
        )?;
        write!(
            out,
            "model {} MiB; packed weights {} MiB and KV {} MiB an engine",
            mib(l.model_bytes),
            mib(l.weights_bytes as u64),
            mib(l.arena_bytes as u64)
        )?;
        if let (Some(now), Some(peak)) = (l.resident_bytes, l.peak_resident_bytes) {
            write!(
                out,
                "; {} MiB resident with {} engines, {} at most while loading",
                mib(now),
                l.engines,
                mib(peak)
            )?;
        }
        writeln!(
            out,
            "\n\n{:<8} {:>7} {:>10}   {:<20} {:>8}   re-read bandwidth",
            "case", "threads", "tokens/s", "", "int8"
        )?;
        for row in &self.rows {
            let range = format!("({:.1} to {:.1})", row.slowest, row.fastest);
            let read = row.share_of_read_bandwidth;
            let read = read.map_or_else(String::new, |share| format!("{:.0} %", share * 100.0));
            let (rate, int8) = (row.tokens_per_s, row.share_of_int8_peak * 100.0);
            writeln!(
                out,
                "{:<8} {:>7} {rate:>10.1}   {range:<20} {int8:>6.0} %   {read}",
                row.case, row.threads
            )?;
        }
        Ok(())
    }
}
