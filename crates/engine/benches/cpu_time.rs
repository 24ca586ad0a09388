//! Speed of whole steps on the default model in tokens per second of CPU time, one thread, so that a machine shared
//! with others gives the same figures: `cargo bench -p baton-engine --bench cpu_time [-- int8|f32 avx512|avx2 CASE]`.

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Duration;

use baton_engine::{CpuEngineConfig, Isa, Precision};
use baton_model::Model;
use support::{Random, Rig, default_model_or_skip, greedy};

/// CPU time of this thread, which does all the work.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Median tokens per second of `runs` calls that compute `tokens` each.
fn measure(tokens: usize, runs: usize, mut call: impl FnMut()) -> f64 {
    call();
    let mut seconds: Vec<f64> = (0..runs)
        .map(|_| {
            let start = cpu_time();
            call();
            (cpu_time() - start).as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    tokens as f64 / seconds[runs / 2]
}

fn prompt(rig: &mut Rig, length: usize, vocab: usize) -> f64 {
    let tokens = Random(1).tokens(length, vocab);
    let mut sequence = rig.sequence(length);
    let speed = measure(length, 5, || {
        sequence.done = 0;
        rig.prefill(&mut sequence, &tokens, 512);
    });
    rig.release(sequence);
    speed
}

fn decode(rig: &mut Rig, batch: usize, context: usize, vocab: usize) -> f64 {
    let tokens = Random(2).tokens(context, vocab);
    let mut sequences: Vec<_> = (0..batch).map(|_| rig.sequence(context + 1)).collect();
    for sequence in &mut sequences {
        rig.prefill(sequence, &tokens, 512);
    }
    let speed = measure(batch, 30, || {
        for sequence in &mut sequences {
            sequence.done = context;
            rig.add(sequence, &tokens[..1], greedy(context + 1));
        }
        rig.step();
    });
    sequences.into_iter().for_each(|sequence| rig.release(sequence));
    speed
}

fn rig(model: &Model, precision: Precision, isa: Option<Isa>) -> Rig {
    let config = CpuEngineConfig { num_blocks: 560, precision, isa, ..CpuEngineConfig::default() };
    Rig::new(model, config)
}

fn main() {
    // Cargo adds a flag of its own.
    let mut args = std::env::args().skip(1).filter(|a| !a.starts_with("--"));
    let mut chosen = || args.next().unwrap_or_else(|| "all".to_owned());
    let (precisions, isas, cases) = (chosen(), chosen(), chosen());
    let has = |choice: &str, name: &str| choice == "all" || choice == name;
    let Some(model) = default_model_or_skip("engine benchmark") else { return };
    let vocab = model.config.vocab;
    for (name, precision) in [("int8", Precision::Int8), ("f32", Precision::F32)] {
        if !has(&precisions, name) {
            continue;
        }
        for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Portable && has(&isas, isa.name()))
        {
            let start = cpu_time();
            let mut rig = rig(&model, precision, Some(isa));
            println!("{name} {}: loaded in {:.2} s", isa.name(), (cpu_time() - start).as_secs_f64());
            for (case, speed) in [
                ("pp512", &mut (|rig: &mut Rig| prompt(rig, 512, vocab)) as &mut dyn FnMut(&mut Rig) -> f64),
                ("pp2048", &mut |rig| prompt(rig, 2048, vocab)),
                ("tg1", &mut |rig| decode(rig, 1, 128, vocab)),
                ("tg8", &mut |rig| decode(rig, 8, 128, vocab)),
                ("tg32", &mut |rig| decode(rig, 32, 128, vocab)),
                ("tg1@8000", &mut |rig| decode(rig, 1, 8000, vocab)),
            ] {
                if has(&cases, case) {
                    println!("{name} {} {case}: {:.1} tok/s", isa.name(), speed(&mut rig));
                }
            }
        }
    }
}
