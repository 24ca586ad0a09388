//! What a step costs the scheduler: plan and apply for 256 running sequences.

use std::time::{Duration, Instant};

use baton_kv::BlockPool;
use baton_scheduler::{
    Event, Logits, NewSequence, Origin, Sampled, SamplingParams, Scheduler, SchedulerConfig, SequenceId,
    StepOutput,
};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

fn sequence(id: u64) -> NewSequence {
    NewSequence {
        id: SequenceId(id),
        siblings: Vec::new(),
        origin: Origin::Local,
        prompt: (0..1024).map(|i| i * 7 + id as u32).collect(),
        sampling: SamplingParams::GREEDY,
        sequence: 0,
        num_generated: 0,
        max_new_tokens: 8_000,
        stop_tokens: vec![1],
        cache: true,
        age: Duration::ZERO,
        priority: 0,
        preempted: false,
    }
}

/// `num_sequences` that run, in a pool of so many blocks.
fn running(num_sequences: u64, num_blocks: usize) -> Scheduler {
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
        step_cost: None,
        max_step_ms: 50.0,
        max_step_growth: 0.0,
        num_layers: 1,
    };
    let mut scheduler = Scheduler::new(config, BlockPool::new(num_blocks));
    for id in 0..num_sequences {
        scheduler.submit(sequence(id), Duration::ZERO).expect("it fits");
    }
    let mut output = StepOutput::default();
    while scheduler.counts().running < num_sequences as usize {
        step(&mut scheduler, &mut output, &mut Vec::new());
    }
    scheduler
}

fn step(scheduler: &mut Scheduler, output: &mut StepOutput, events: &mut Vec<Event>) {
    output.sampled.clear();
    scheduler.plan(Duration::ZERO);
    for (row, planned) in scheduler.current_plan().rows.iter().enumerate() {
        if let Logits::Sample(wanted) = &planned.logits {
            let sampled = |at| Sampled { row: row as u32, sampling: at as u32, token: 5, logprob: 0.0 };
            output.sampled.extend(wanted.clone().map(sampled));
        }
    }
    scheduler.apply(output, Duration::ZERO);
    events.clear();
    scheduler.drain_events(events);
}

/// Steps from one state: few enough that contexts stay between 1,024 and 1,280 tokens.
const STEPS: u64 = 256;

/// Time of `iterations` calls of `work`, on a state made anew every [`STEPS`].
fn timed(iterations: u64, new: impl Fn() -> Scheduler, mut work: impl FnMut(&mut Scheduler)) -> Duration {
    let (mut spent, mut left) = (Duration::ZERO, iterations);
    while left > 0 {
        let mut scheduler = new();
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

fn roomy() -> Scheduler {
    running(256, 200_000)
}

/// 256 more wait for a pool that is too small for them.
fn queued() -> Scheduler {
    let mut scheduler = running(256, 24_000);
    for id in 256..512 {
        scheduler.submit(sequence(id), Duration::ZERO).expect("it waits");
    }
    scheduler
}

/// 512 prompts of a decode worker that all have blocks and are to be computed.
fn prompts() -> Scheduler {
    let mut scheduler = running(0, 60_000);
    for id in 0..512 {
        scheduler.submit(sequence(id), Duration::ZERO).expect("it fits");
    }
    assert!(!scheduler.plan(Duration::ZERO).is_empty());
    scheduler
}

/// Four sequences of one prompt of 1,000 tokens, about to fork.
fn group() -> (Scheduler, StepOutput) {
    let mut scheduler = running(0, 4_000);
    let siblings = (1..4).map(SequenceId).collect();
    let prompt = (0..1_000).collect();
    scheduler.submit(NewSequence { siblings, prompt, ..sequence(0) }, Duration::ZERO).expect("it fits");
    (scheduler, StepOutput::default())
}

fn bench(c: &mut Criterion) {
    let mut output = StepOutput::default();
    let mut events = Vec::new();
    c.bench_function("plan and apply, 256 running at context 1,024", |b| {
        b.iter_custom(|iterations| {
            timed(iterations, roomy, |scheduler| {
                step(scheduler, &mut output, &mut events);
            })
        });
    });
    c.bench_function("plan alone, 256 running at context 1,024", |b| {
        b.iter_custom(|iterations| {
            timed(iterations, roomy, |scheduler| {
                std::hint::black_box(scheduler.plan(Duration::ZERO).rows.len());
            })
        });
    });
    c.bench_function("plan and apply, 256 running and 256 waiting for blocks", |b| {
        b.iter_custom(|iterations| {
            timed(iterations, queued, |scheduler| {
                step(scheduler, &mut output, &mut events);
            })
        });
    });
    c.bench_function("plan alone, 512 prompts of 1,024 tokens open", |b| {
        b.iter_custom(|iterations| {
            timed(iterations, prompts, |scheduler| {
                std::hint::black_box(scheduler.plan(Duration::ZERO).rows.len());
            })
        });
    });
    c.bench_function("a prompt of 1,000 tokens forks into four and each writes: two steps", |b| {
        b.iter_batched(
            group,
            |(mut scheduler, mut output)| {
                step(&mut scheduler, &mut output, &mut Vec::new());
                step(&mut scheduler, &mut output, &mut Vec::new());
                assert_eq!(scheduler.counts().running, 4);
                scheduler
            },
            BatchSize::SmallInput,
        );
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
