//! A step allocates nothing once its vectors have their size.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_engine::{CpuEngineConfig, WeightSource};
use baton_model::{Model, WeightType};
use baton_scheduler::{RowSampling, SamplingParams};
use support::random_model::{RandomModel, config};
use support::{Logits, Rig, greedy};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator; only a counter is added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
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

#[test]
fn a_steady_step_allocates_nothing() {
    count(&Model::tiny());
    // Quantised weights, so quantised activations.
    count(&RandomModel::new(1, config(WeightType::Q4_1), WeightType::Q4_1));
}

fn count(source: &dyn WeightSource) {
    let engine = CpuEngineConfig { num_blocks: 40, num_threads: 2, ..CpuEngineConfig::default() };
    let mut rig = Rig::new(source, engine);
    let mut sequences: Vec<_> = (0..4).map(|_| rig.sequence(100)).collect();
    let tokens: Vec<u32> = (0..60).collect();
    let params = SamplingParams { temperature: 0.8, top_p: 0.9, top_k: 40, ..SamplingParams::GREEDY };
    let sampled = Logits::Last(RowSampling { params, sequence: 0, position: 61 });
    let mut counts = Vec::new();
    for _ in 0..3 {
        for (sequence, wanted) in sequences.iter_mut().zip([greedy(60), sampled, Logits::All, Logits::None]) {
            sequence.done = 0;
            rig.add(sequence, &tokens, wanted);
        }
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        rig.step();
        counts.push(ALLOCATIONS.load(Ordering::SeqCst) - before);
    }
    assert!(counts[0] > 0, "the first step sizes the output, and the counter counts");
    assert_eq!(counts[1..], [0, 0]);
}
