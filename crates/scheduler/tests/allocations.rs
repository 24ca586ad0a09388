//! A step of decode rows allocates nothing, neither when it is planned nor when it is applied, new blocks included.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use baton_kv::BlockPool;
use baton_scheduler::{
    NewSequence, Origin, Sampled, SamplingParams, Scheduler, SchedulerConfig, SequenceId, StepOutput,
};

struct Counting;

thread_local! {
    /// Of this thread alone: the test runner's threads allocate when they please.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn allocations() -> usize {
    ALLOCATIONS.with(Cell::get)
}

// SAFETY: everything is passed on to the system's allocator; only a counter is added. `realloc` and `alloc_zeroed` are the
// provided ones, which call `alloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const NUM_SEQUENCES: u64 = 256;

fn config(cache: bool) -> SchedulerConfig {
    SchedulerConfig {
        block_size: 16,
        context: 10_000,
        max_num_seqs: 512,
        max_queue: 512,
        max_step_tokens: 4096,
        local_prefill_tokens: 512,
        max_open_prompts: 8,
        lookahead: 8,
        max_receiving_share: 0.5,
        cache_salt: cache.then(|| b"test".to_vec()),
        ageing_tokens_per_s: 1000.0,
        step_cost: None,
        max_step_ms: 50.0,
        max_step_growth: 0.0,
        num_layers: 1,
    }
}

/// 64 groups of four, all running.
fn running(cache: bool) -> (Scheduler, StepOutput) {
    let mut scheduler = Scheduler::new(config(cache), BlockPool::new(60_000));
    for id in (0..NUM_SEQUENCES).step_by(4) {
        let sequence = NewSequence {
            id: SequenceId(id),
            siblings: (id + 1..id + 4).map(SequenceId).collect(),
            origin: Origin::Local,
            prompt: (0..100).map(|i| i * 7 + id as u32).collect(),
            sampling: SamplingParams::GREEDY,
            sequence: 0,
            num_generated: 0,
            max_new_tokens: 8_000,
            stop_tokens: vec![1],
            cache: true,
            age: Duration::ZERO,
            priority: 0,
            preempted: false,
        };
        scheduler.submit(sequence, Duration::ZERO).expect("it fits");
    }
    let mut output = StepOutput::default();
    let mut events = Vec::with_capacity(4096);
    while scheduler.counts().running < NUM_SEQUENCES as usize {
        step(&mut scheduler, &mut output, &mut events);
    }
    (scheduler, output)
}

/// Allocations of one plan and one apply.
fn step(
    scheduler: &mut Scheduler,
    output: &mut StepOutput,
    events: &mut Vec<baton_scheduler::Event>,
) -> usize {
    let before = allocations();
    scheduler.plan(Duration::ZERO);
    let planned = allocations() - before;
    output.sampled.clear();
    for (row, planned) in scheduler.current_plan().rows.iter().enumerate() {
        if let baton_scheduler::Logits::Sample(wanted) = &planned.logits {
            let sampled =
                |at| Sampled { row: row as u32, sampling: at as u32, token: 5 + at as u32, logprob: 0.0 };
            output.sampled.extend(wanted.clone().map(sampled));
        }
    }
    let before = allocations();
    scheduler.apply(output, Duration::ZERO);
    let applied = allocations() - before;
    events.clear();
    scheduler.drain_events(events);
    planned + applied
}

#[test]
fn a_thousand_steps_of_256_running_sequences_allocate_nothing() {
    let before = allocations();
    drop(vec![0_u8; 100]);
    assert!(allocations() > before, "the counter counts");
    for cache in [false, true] {
        let (mut scheduler, mut output) = running(cache);
        let mut events = Vec::with_capacity(4096);
        // The plan grows with the tables it holds.
        let warm: usize = (0..20).map(|_| step(&mut scheduler, &mut output, &mut events)).sum();
        let counts: Vec<usize> = (0..1000).map(|_| step(&mut scheduler, &mut output, &mut events)).collect();
        let steps: Vec<_> = counts.iter().enumerate().filter(|(_, count)| **count > 0).collect();
        assert_eq!(output.sampled.len(), NUM_SEQUENCES as usize);
        let grown = scheduler.pool().counts().held;
        assert!(grown > 15_000, "every sequence got about 63 blocks meanwhile: {grown} are held");
        // The plan's vector of block tables doubles a few times on the way from 3,000 to 17,000 blocks; nothing else grows.
        assert!(
            steps.len() <= 4 && counts.iter().sum::<usize>() <= 4,
            "cache {cache}, warm {warm}: {steps:?}"
        );
    }
}
