//! Random operations against an engine that checks every plan: the tokens of a sequence depend on its own tokens
//! alone, so any wrong position, block or resume changes them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_kv::{BlockPool, WriteLease};
use proptest::prelude::*;

use crate::{
    Event, Finish, FirstToken, Logits, NewSequence, Origin, Refusal, Sampled, SamplingParams, Scheduler,
    SchedulerConfig, SequenceId, StepOutput, StepPlan,
};

const BLOCK: usize = 4;
const VOCAB: u64 = 50;

/// The next token is a hash of all tokens before it.
fn next_token(tokens: &[u32]) -> u32 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for &token in tokens {
        hash = (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3);
    }
    ((hash >> 20) % VOCAB) as u32
}

/// Generates as an undisturbed run would.
fn expected(prompt: &[u32], max_new: usize, stop: &[u32]) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    while tokens.len() - prompt.len() < max_new {
        let token = next_token(&tokens);
        tokens.push(token);
        if stop.contains(&token) {
            break;
        }
    }
    tokens.split_off(prompt.len())
}

/// Block memory that remembers the token in each slot.
#[derive(Default)]
struct Memory(HashMap<(u32, usize), u32>);

impl Memory {
    fn step(&mut self, plan: &StepPlan) -> StepOutput {
        let mut output = StepOutput::default();
        let mut written = HashSet::new();
        for (nth, row) in plan.rows.iter().enumerate() {
            let blocks = &plan.blocks[row.blocks.clone()];
            let new = &plan.tokens[row.tokens.clone()];
            assert!(!new.is_empty());
            assert!(blocks.len() * BLOCK >= row.position + new.len(), "the table covers the row");
            for (i, &token) in new.iter().enumerate() {
                let at = row.position + i;
                let slot = (blocks[at / BLOCK], at % BLOCK);
                assert!(written.insert(slot), "two rows write one slot");
                self.0.insert(slot, token);
            }
            if let Logits::Last(sampling) = row.logits {
                let end = row.position + new.len();
                assert_eq!(sampling.position as usize, end);
                let tokens: Vec<u32> = (0..end).map(|at| self.0[&(blocks[at / BLOCK], at % BLOCK)]).collect();
                output.sampled.push(Sampled { row: nth as u32, token: next_token(&tokens), logprob: -1.0 });
            }
        }
        output
    }

    /// What a transfer would have brought.
    fn receive(&mut self, lease: &WriteLease, prompt: &[u32]) {
        for (at, &token) in prompt.iter().enumerate().skip(lease.skip() * BLOCK) {
            self.0.insert((lease.block(at / BLOCK).unwrap(), at % BLOCK), token);
        }
    }
}

fn config() -> SchedulerConfig {
    SchedulerConfig {
        block_size: BLOCK,
        context: 64,
        max_num_seqs: 8,
        max_queue: 64,
        max_step_tokens: 16,
        local_prefill_tokens: 8,
        max_open_prompts: 3,
        lookahead: 4,
        max_receiving_share: 0.5,
        cache_salt: Some(b"test".to_vec()),
        ageing_tokens_per_s: 1000.0,
    }
}

fn sequence(id: u64, origin: Origin, prompt: Vec<u32>, max_new: u32) -> NewSequence {
    NewSequence {
        id: SequenceId(id),
        origin,
        prompt,
        sampling: SamplingParams::GREEDY,
        sequence: 0,
        num_generated: 0,
        max_new_tokens: max_new,
        stop_tokens: vec![7],
        cache: true,
    }
}

/// Runs a scheduler to the end, playing the other worker's part, and collects what each sequence produced.
struct Harness {
    scheduler: Scheduler,
    memory: Memory,
    now: Duration,
    prompts: HashMap<SequenceId, Vec<u32>>,
    produced: BTreeMap<SequenceId, Vec<u32>>,
    finished: HashMap<SequenceId, Finish>,
    held: Vec<SequenceId>,
    leases: Vec<(SequenceId, WriteLease)>,
}

impl Harness {
    fn new(config: SchedulerConfig, num_blocks: usize) -> Self {
        Self {
            scheduler: Scheduler::new(config, BlockPool::new(num_blocks)),
            memory: Memory::default(),
            now: Duration::ZERO,
            prompts: HashMap::new(),
            produced: BTreeMap::new(),
            finished: HashMap::new(),
            held: Vec::new(),
            leases: Vec::new(),
        }
    }

    fn submit(&mut self, new: NewSequence) -> Result<(), Refusal> {
        let (id, origin, prompt) = (new.id, new.origin, new.prompt.clone());
        self.scheduler.submit(new, self.now)?;
        self.prompts.insert(id, prompt);
        if origin == Origin::Remote {
            assert!(self.scheduler.reserve(id));
        }
        self.events();
        Ok(())
    }

    fn events(&mut self) {
        let mut events = Vec::new();
        self.scheduler.drain_events(&mut events);
        for event in events {
            match event {
                Event::NearHead { id } => assert!(self.scheduler.grant(id)),
                Event::Reserved { id, lease, .. } => self.leases.push((id, lease)),
                Event::Token { id, token, index, finish, .. } => {
                    let produced = self.produced.entry(id).or_default();
                    assert_eq!(index as usize, produced.len(), "each index once, in order");
                    produced.push(token);
                    match finish {
                        Some(finish) => assert!(self.finished.insert(id, finish).is_none()),
                        None if self.scheduler.counts().held > self.held.len() => self.held.push(id),
                        None => {}
                    }
                }
                Event::Opened { .. }
                | Event::Computed { .. }
                | Event::Started { .. }
                | Event::Preempted { .. } => {}
            }
        }
    }

    fn step(&mut self) -> bool {
        self.now += Duration::from_millis(10);
        let plan = self.scheduler.plan(self.now).clone();
        assert!(plan.tokens.len() <= self.scheduler.config.max_step_tokens);
        let output = self.memory.step(&plan);
        self.scheduler.apply(&output, self.now);
        self.events();
        assert_eq!(self.scheduler.pool().check(), Ok(()));
        !plan.is_empty()
    }

    /// The transfer of the nth receiving sequence completes.
    fn deliver(&mut self, nth: usize) {
        if self.leases.is_empty() {
            return;
        }
        let (id, lease) = self.leases.swap_remove(nth % self.leases.len());
        let prompt = self.prompts[&id].clone();
        self.memory.receive(&lease, &prompt);
        drop(lease);
        let token = next_token(&prompt);
        if self.scheduler.commit(id, FirstToken { token, finished: token == 7 }) {
            self.produced.entry(id).or_default().push(token);
        }
        self.events();
    }

    fn cancel(&mut self, id: SequenceId) {
        self.scheduler.cancel(id, self.now);
        self.held.retain(|&other| other != id);
        self.leases.retain(|(other, _)| *other != id);
        self.produced.remove(&id);
        self.prompts.remove(&id);
        self.events();
    }

    fn release_all(&mut self) {
        for id in std::mem::take(&mut self.held) {
            assert!(self.scheduler.release(id, self.now));
        }
        self.events();
    }

    fn run_to_end(&mut self) {
        for _ in 0..20_000 {
            let stepped = self.step();
            self.release_all();
            if !stepped {
                if self.leases.is_empty() && self.scheduler.is_empty() {
                    return;
                }
                self.deliver(0);
            }
        }
        panic!("no end: {:?}, pool {:?}", self.scheduler.counts(), self.scheduler.pool().counts());
    }
}

#[derive(Debug, Clone)]
enum Op {
    Submit { origin: Origin, len: usize, max_new: u32 },
    Step,
    Deliver(usize),
    Cancel(usize),
}

fn op(decode: bool) -> impl Strategy<Value = Op> {
    let origin = if decode {
        prop_oneof![Just(Origin::Local), Just(Origin::Remote)].boxed()
    } else {
        Just(Origin::Prefill).boxed()
    };
    prop_oneof![
        3 => (origin, 1usize..40, 1u32..30).prop_map(|(origin, len, max_new)| Op::Submit { origin, len, max_new }),
        6 => Just(Op::Step),
        2 => any::<usize>().prop_map(Op::Deliver),
        1 => any::<usize>().prop_map(Op::Cancel),
    ]
}

fn drive(num_blocks: usize, ops: Vec<Op>) -> Result<(), TestCaseError> {
    let mut harness = Harness::new(config(), num_blocks);
    let mut asked: HashMap<SequenceId, (Origin, usize)> = HashMap::new();
    for (n, op) in ops.into_iter().enumerate() {
        match op {
            Op::Submit { origin, len, max_new } => {
                let id = SequenceId(n as u64);
                // Few different beginnings, so that prefixes are shared and diverge.
                let prompt: Vec<u32> = (0..len).map(|i| ((n % 3) * (i / 9) + i * 7) as u32 % 50).collect();
                match harness.submit(sequence(id.0, origin, prompt, max_new)) {
                    Ok(()) => {
                        asked.insert(id, (origin, max_new as usize));
                    }
                    Err(Refusal::TooLarge { needed_tokens, max_tokens }) => {
                        prop_assert!(needed_tokens > max_tokens);
                    }
                    Err(other) => prop_assert!(matches!(other, Refusal::QueueFull { .. }), "{other}"),
                }
            }
            Op::Step => {
                harness.step();
            }
            Op::Deliver(nth) => harness.deliver(nth),
            Op::Cancel(nth) if !asked.is_empty() => {
                let mut ids: Vec<_> = asked.keys().copied().collect();
                ids.sort();
                let id = ids[nth % ids.len()];
                harness.cancel(id);
                asked.remove(&id);
            }
            Op::Cancel(_) => {}
        }
    }
    harness.run_to_end();
    for (id, (origin, max_new)) in asked {
        let prompt = &harness.prompts[&id];
        let want = match origin {
            Origin::Prefill => expected(prompt, 1, &[7]),
            _ => expected(prompt, max_new.min(config().context - prompt.len()), &[7]),
        };
        prop_assert_eq!(harness.produced.get(&id), Some(&want));
    }
    let counts = harness.scheduler.pool().counts();
    prop_assert_eq!(counts.free + counts.cached, counts.total, "every block came back");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn a_decode_worker_produces_what_an_undisturbed_run_would(
        num_blocks in 1usize..40,
        ops in prop::collection::vec(op(true), 1..120),
    ) {
        drive(num_blocks, ops)?;
    }

    #[test]
    fn a_prefill_worker_computes_every_prompt_once_and_gives_back_every_block(
        num_blocks in 1usize..40,
        ops in prop::collection::vec(op(false), 1..120),
    ) {
        drive(num_blocks, ops)?;
    }
}

#[test]
fn a_full_pool_preempts_the_youngest_and_the_tokens_stay_the_same() {
    let mut harness = Harness::new(SchedulerConfig { max_receiving_share: 1.0, ..config() }, 9);
    // Short outputs make the growth estimate too low for what follows.
    for id in 100..120 {
        harness.submit(sequence(id, Origin::Local, vec![1; 3], 1)).unwrap();
    }
    harness.run_to_end();
    for id in 0..3 {
        let mut new = sequence(id, Origin::Local, vec![id as u32 + 10; 6], 24);
        new.stop_tokens.clear();
        harness.submit(new).unwrap();
    }
    harness.run_to_end();
    assert!(harness.scheduler.num_preemptions() > 0, "9 blocks can't hold three sequences of 30 tokens");
    for id in 0..3_u64 {
        assert_eq!(harness.produced[&SequenceId(id)], expected(&[id as u32 + 10; 6], 24, &[]));
    }
}

#[test]
fn what_can_never_fit_is_refused_with_the_largest_that_can() {
    let mut harness = Harness::new(config(), 5);
    let refusal = harness.submit(sequence(1, Origin::Local, vec![1; 15], 10)).unwrap_err();
    assert_eq!(refusal, Refusal::TooLarge { needed_tokens: 25, max_tokens: 20 });
    assert_eq!(refusal.to_string(), "needs room for 25 tokens, at most 20 fit");
    harness.submit(sequence(1, Origin::Local, vec![1; 15], 5)).unwrap();
    assert_eq!(harness.submit(sequence(1, Origin::Local, vec![1], 1)), Err(Refusal::Duplicate));
    assert_eq!(harness.submit(sequence(2, Origin::Local, vec![], 1)), Err(Refusal::Empty));
    let refusal = harness.submit(sequence(3, Origin::Prefill, vec![1; 64], 1)).unwrap_err();
    assert_eq!(refusal, Refusal::TooLarge { needed_tokens: 65, max_tokens: 20 });
}

#[test]
fn the_queue_is_bounded() {
    let mut harness = Harness::new(SchedulerConfig { max_queue: 2, max_num_seqs: 1, ..config() }, 40);
    for id in 0..2 {
        harness.submit(sequence(id, Origin::Local, vec![1; 4], 4)).unwrap();
    }
    let full = harness.submit(sequence(9, Origin::Local, vec![1; 4], 4));
    assert_eq!(full, Err(Refusal::QueueFull { max_queue: 2 }));
}

#[test]
fn a_short_prompt_overtakes_a_long_one_that_is_already_open() {
    let config = SchedulerConfig { context: 1000, ..config() };
    let mut harness = Harness::new(config, 300);
    harness.submit(sequence(1, Origin::Prefill, vec![3; 900], 2)).unwrap();
    harness.step();
    harness.submit(sequence(2, Origin::Prefill, vec![4; 8], 2)).unwrap();
    harness.step();
    assert!(harness.produced.contains_key(&SequenceId(2)), "the short one got the very next step");
    assert!(!harness.produced.contains_key(&SequenceId(1)));
}

#[test]
fn an_old_long_prompt_is_not_starved_by_short_ones() {
    let config = SchedulerConfig { context: 1000, ..config() };
    let mut harness = Harness::new(config, 300);
    harness.submit(sequence(0, Origin::Prefill, vec![3; 400], 2)).unwrap();
    let mut steps = 0;
    while !harness.produced.contains_key(&SequenceId(0)) {
        steps += 1;
        assert!(steps < 200, "starved");
        // Each short prompt alone fills a step.
        harness.submit(sequence(steps, Origin::Prefill, vec![4; 16], 2)).unwrap();
        harness.step();
        harness.release_all();
    }
}

#[test]
fn without_a_grant_nothing_is_computed_and_nothing_is_held() {
    let mut scheduler = Scheduler::new(config(), BlockPool::new(10));
    scheduler.submit(sequence(1, Origin::Prefill, vec![1; 8], 4), Duration::ZERO).unwrap();
    assert!(scheduler.plan(Duration::ZERO).is_empty());
    assert_eq!(scheduler.pool().counts().free, 10);
    assert!(scheduler.grant(SequenceId(1)));
    assert!(!scheduler.plan(Duration::ZERO).is_empty());
    assert_eq!(scheduler.pool().counts().free, 8);
}

#[test]
fn a_stopped_step_changes_nothing() {
    let mut harness = Harness::new(config(), 10);
    harness.submit(sequence(1, Origin::Local, vec![1; 8], 4)).unwrap();
    let plan = harness.scheduler.plan(harness.now).clone();
    harness.scheduler.apply(&StepOutput { stopped: true, ..StepOutput::default() }, harness.now);
    let again = harness.scheduler.plan(harness.now).clone();
    assert_eq!(plan.rows, again.rows);
    assert_eq!(plan.tokens, again.tokens);
}

#[test]
fn receiving_is_bounded_but_one_may_always() {
    let mut harness = Harness::new(config(), 10);
    harness.submit(sequence(1, Origin::Remote, vec![1; 30], 1)).unwrap();
    assert_eq!(harness.leases.len(), 1, "8 blocks exceed the share of 5, but it is alone");
    harness.submit(sequence(2, Origin::Remote, vec![1; 4], 1)).unwrap();
    assert_eq!(harness.leases.len(), 1, "beyond the share");
    harness.deliver(0);
    harness.step();
    assert_eq!(harness.leases.len(), 1, "the second is reserved when the first has left");
}

#[test]
fn the_same_prompt_again_computes_only_the_uncached_tail() {
    for origin in [Origin::Prefill, Origin::Local] {
        let mut harness = Harness::new(SchedulerConfig { context: 1000, ..config() }, 60);
        let prompt: Vec<u32> = (10..50).collect();
        harness.submit(sequence(1, origin, prompt.clone(), 3)).unwrap();
        harness.run_to_end();
        assert_eq!(harness.scheduler.num_prompt_tokens_computed(), 40);
        harness.submit(sequence(2, origin, prompt.clone(), 3)).unwrap();
        harness.run_to_end();
        // 10 blocks of 4 are known, but the last token's logits are needed: its block is computed again.
        assert_eq!(harness.scheduler.num_prompt_tokens_computed(), 44);
        assert_eq!(harness.produced[&SequenceId(1)], harness.produced[&SequenceId(2)]);
        let opted_out = NewSequence { cache: false, ..sequence(3, origin, prompt, 3) };
        harness.submit(opted_out).unwrap();
        harness.run_to_end();
        assert_eq!(harness.scheduler.num_prompt_tokens_computed(), 84);
        assert_eq!(harness.produced[&SequenceId(1)], harness.produced[&SequenceId(3)]);
    }
}

#[test]
fn a_remote_prompt_skips_what_is_here_already() {
    let mut harness = Harness::new(config(), 60);
    let prompt: Vec<u32> = (10..26).collect();
    harness.submit(sequence(1, Origin::Remote, prompt.clone(), 4)).unwrap();
    assert_eq!(harness.leases[0].1.skip(), 0);
    harness.run_to_end();
    let longer: Vec<u32> = (10..30).collect();
    for (id, prompt, skip) in [(2, prompt, 3), (3, longer, 4)] {
        harness.submit(sequence(id, Origin::Remote, prompt, 4)).unwrap();
        assert_eq!(harness.leases[0].1.skip(), skip);
        harness.run_to_end();
    }
    assert_eq!(harness.scheduler.num_prompt_tokens_computed(), 0);
}

#[test]
fn idle_cached_blocks_never_keep_a_prompt_waiting() {
    let mut harness = Harness::new(config(), 12);
    for id in 0..20 {
        let prompt: Vec<u32> = (0..40).map(|i| (id as u32 * 40 + i) % 1000).collect();
        harness.submit(sequence(id, Origin::Local, prompt, 2)).unwrap();
        harness.run_to_end();
        assert!(harness.produced.contains_key(&SequenceId(id)));
    }
    assert_eq!(harness.scheduler.num_preemptions(), 0);
}

#[test]
fn a_sequence_that_waits_for_room_gives_back_nothing_and_so_wakes_nobody() {
    let mut harness = Harness::new(config(), 10);
    let num_wakes = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&num_wakes);
    harness.scheduler.pool().on_free(Box::new(move || _ = count.fetch_add(1, Ordering::Relaxed)));
    let prompt: Vec<u32> = (10..26).collect();
    harness.submit(sequence(1, Origin::Local, prompt.clone(), 1)).unwrap();
    harness.run_to_end();
    harness.submit(sequence(2, Origin::Remote, vec![1; 28], 1)).unwrap();
    harness.submit(sequence(3, Origin::Remote, prompt, 1)).unwrap();
    assert_eq!((harness.leases.len(), harness.scheduler.counts().waiting), (1, 1), "beyond the share");
    let before = num_wakes.load(Ordering::Relaxed);
    (0..5).for_each(|_| assert!(!harness.step()));
    assert_eq!(num_wakes.load(Ordering::Relaxed), before);
    harness.run_to_end();
    assert!(harness.scheduler.is_empty());
}
