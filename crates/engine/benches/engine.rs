//! Speed of whole steps on the default model, one thread: a prompt of 512 tokens, and decoding of 1 and 8 sequences
//! at context 256.

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Duration;

use baton_engine::CpuEngineConfig;
use baton_model::Model;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use support::{Random, Rig, default_model_or_skip, greedy};

const CONTEXT: usize = 256;

fn rig(model: &Model) -> Rig {
    Rig::new(model, CpuEngineConfig { num_blocks: 256, ..CpuEngineConfig::default() })
}

fn prompt(c: &mut Criterion, model: &Model) {
    let mut rig = rig(model);
    let tokens = Random(1).tokens(512, model.config.vocab);
    let mut sequence = rig.sequence(tokens.len());
    let mut group = c.benchmark_group("engine");
    group.sample_size(10).measurement_time(Duration::from_secs(6)).throughput(Throughput::Elements(512));
    group.bench_function("pp512", |b| {
        b.iter(|| {
            sequence.done = 0;
            rig.prefill(&mut sequence, &tokens, 512)
        });
    });
    group.finish();
}

fn decode(c: &mut Criterion, model: &Model, batch: usize) {
    let mut rig = rig(model);
    let mut random = Random(2);
    let tokens = random.tokens(CONTEXT, model.config.vocab);
    let mut sequences: Vec<_> = (0..batch).map(|_| rig.sequence(CONTEXT + 1)).collect();
    for sequence in &mut sequences {
        rig.prefill(sequence, &tokens, 512);
    }
    let mut group = c.benchmark_group("engine");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    group.throughput(Throughput::Elements(batch as u64));
    group.bench_function(format!("tg{batch}"), |b| {
        b.iter(|| {
            for sequence in &mut sequences {
                sequence.done = CONTEXT;
                rig.add(sequence, &tokens[..1], greedy(CONTEXT + 1));
            }
            rig.step();
        });
    });
    group.finish();
}

fn steps(c: &mut Criterion) {
    let Some(model) = default_model_or_skip("engine benchmark") else { return };
    prompt(c, &model);
    decode(c, &model, 1);
    decode(c, &model, 8);
}

criterion_group!(benches, steps);
criterion_main!(benches);
