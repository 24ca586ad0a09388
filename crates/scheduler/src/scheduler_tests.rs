use super::*;
use crate::plan::SamplingParams;
use crate::sequence::tests::NUM_LOOKUPS;

const NOW: Time = Time::from_secs(1);

fn prompt(id: u64) -> NewSequence {
    NewSequence {
        id: SequenceId(id),
        siblings: Vec::new(),
        origin: Origin::Prefill,
        prompt: vec![1; 20],
        sampling: SamplingParams::GREEDY,
        sequence: 0,
        num_generated: 0,
        max_new_tokens: 5,
        stop_tokens: Vec::new(),
        cache: true,
        age: Time::ZERO,
        priority: 0,
        preempted: false,
    }
}

fn waiting(num: u64) -> Scheduler {
    let config = SchedulerConfig {
        block_size: 16,
        context: 4096,
        max_num_seqs: 32,
        max_queue: num as usize,
        max_step_tokens: 512,
        local_prefill_tokens: 256,
        max_open_prompts: 4,
        lookahead: 4,
        max_receiving_share: 0.5,
        cache_salt: Some(Vec::new()),
        ageing_tokens_per_s: 500.0,
        step_cost: None,
        max_step_ms: 500.0,
        max_step_growth: 0.0,
        num_layers: 1,
    };
    let mut scheduler = Scheduler::new(config, BlockPool::new(1000));
    (0..num).for_each(|id| scheduler.submit(prompt(id), NOW).unwrap());
    scheduler
}

/// Cancels all but every tenth of so many waiting prompts, and returns how often a sequence was looked for.
fn num_lookups(num: u64) -> usize {
    let mut scheduler = waiting(num);
    let gone: Vec<SequenceId> = (0..num).filter(|id| !id.is_multiple_of(10)).map(SequenceId).collect();
    NUM_LOOKUPS.set(0);
    assert_eq!(scheduler.cancel_all(&gone, NOW), gone.len());
    let num_lookups = NUM_LOOKUPS.get();
    scheduler.check().unwrap();
    assert!(scheduler.line.iter().all(|id| id.0.is_multiple_of(10)));
    assert_eq!((scheduler.line.len(), scheduler.cancel_all(&gone, NOW)), (num as usize / 10, 0));
    num_lookups
}

#[test]
fn cancelling_many_that_wait_costs_in_proportion_to_their_number() {
    let (few, many) = (num_lookups(410), num_lookups(4100));
    assert!(few >= 410 && many <= 11 * few, "{few} and {many} lookups");
}

#[test]
fn those_that_are_left_are_offered_as_after_cancels_one_by_one() {
    let (mut together, mut apart) = (waiting(100), waiting(100));
    let gone: Vec<SequenceId> = [0, 3, 50, 99, 1, 2, 200, 3].map(SequenceId).to_vec();
    assert_eq!(together.cancel_all(&gone, NOW), 6);
    let num_known = gone.iter().filter(|&&id| apart.cancel(id, NOW)).count();
    assert_eq!(num_known, 6);
    let offered = |scheduler: &mut Scheduler| {
        let mut events = Vec::new();
        scheduler.drain_events(&mut events);
        format!("{events:?}")
    };
    assert_eq!(offered(&mut together), offered(&mut apart));
    assert_eq!(together.line, apart.line);
}
