//! What a step costs the scheduler: plan and apply for 256 running sequences.

use std::time::{Duration, Instant};

use baton_kv::BlockPool;
use baton_scheduler::{
    NewSequence, Origin, Sampled, SamplingParams, Scheduler, SchedulerConfig, SequenceId, StepOutput,
};
use criterion::{Criterion, criterion_group, criterion_main};

fn running(num_sequences: u64) -> Scheduler {
    let config = SchedulerConfig {
        block_size: 16,
        context: 10_000,
        max_num_seqs: 512,
        max_queue: 512,
        max_step_tokens: 8192,
        local_prefill_tokens: 512,
        max_open_prompts: 8,
        lookahead: 8,
        max_receiving_share: 0.5,
        cache_salt: Some(b"bench".to_vec()),
        ageing_tokens_per_s: 1000.0,
    };
    let mut scheduler = Scheduler::new(config, BlockPool::new(200_000));
    for id in 0..num_sequences {
        let sequence = NewSequence {
            id: SequenceId(id),
            origin: Origin::Local,
            prompt: (0..1024).map(|i| i * 7 + id as u32).collect(),
            sampling: SamplingParams::GREEDY,
            sequence: 0,
            num_generated: 0,
            max_new_tokens: 8_000,
            stop_tokens: vec![1],
            cache: true,
        };
        scheduler.submit(sequence, Duration::ZERO).expect("it fits");
    }
    let mut output = StepOutput::default();
    while scheduler.counts().running < num_sequences as usize {
        step(&mut scheduler, &mut output);
    }
    scheduler
}

fn step(scheduler: &mut Scheduler, output: &mut StepOutput) {
    output.sampled.clear();
    let plan = scheduler.plan(Duration::ZERO);
    let sampled = |row: usize| Sampled { row: row as u32, token: 5, logprob: 0.0 };
    output.sampled.extend(
        (0..plan.rows.len())
            .filter(|&row| plan.rows[row].logits != baton_scheduler::Logits::None)
            .map(sampled),
    );
    scheduler.apply(output, Duration::ZERO);
}

/// Steps from one state: few enough that contexts stay between 1,024 and 1,280 tokens.
const STEPS: u64 = 256;

/// Time of `iterations` calls of `work`, on a state made anew every [`STEPS`].
fn timed(iterations: u64, mut work: impl FnMut(&mut Scheduler)) -> Duration {
    let (mut spent, mut left) = (Duration::ZERO, iterations);
    while left > 0 {
        let mut scheduler = running(256);
        let steps = left.min(STEPS);
        let start = Instant::now();
        for _ in 0..steps {
            work(&mut scheduler);
        }
        spent += start.elapsed();
        left -= steps;
    }
    spent
}

fn bench(c: &mut Criterion) {
    let mut output = StepOutput::default();
    let mut events = Vec::new();
    c.bench_function("plan and apply, 256 running at context 1,024", |b| {
        b.iter_custom(|iterations| {
            timed(iterations, |scheduler| {
                step(scheduler, &mut output);
                events.clear();
                scheduler.drain_events(&mut events);
            })
        });
    });
    c.bench_function("plan alone, 256 running at context 1,024", |b| {
        b.iter_custom(|iterations| {
            timed(iterations, |scheduler| {
                std::hint::black_box(scheduler.plan(Duration::ZERO).rows.len());
            })
        });
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
