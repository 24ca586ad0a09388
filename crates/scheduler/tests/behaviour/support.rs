//! A scheduler that is run to the end against a device that checks it: the tokens of a sequence depend on its own tokens and its number
//! alone, so any wrong position, block, copy or resume changes them. The harness plays the other worker's part and the router's.
#![allow(dead_code, unreachable_pub, reason = "each test uses its own part")]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use baton_kv::{Block, BlockPool, ReadLease, WriteLease};
use baton_scheduler::{
    Event, Finish, FirstToken, Logits, NewSequence, Origin, Refusal, RowSampling, Sampled, SamplingParams,
    Scheduler, SchedulerConfig, SequenceId, StepOutput, StepPlan,
};

pub const BLOCK: usize = 4;
pub const STOP: u32 = 7;
pub const VOCAB: u32 = 50;

/// What executes plans.
pub trait Device {
    /// A step that is `stopped` is left before its end.
    fn step(&mut self, plan: &StepPlan, stopped: bool) -> StepOutput;
    /// What a transfer would have brought.
    fn receive(&mut self, lease: &WriteLease, tokens: &[u32]);
    /// The token that follows `tokens` in an undisturbed run.
    fn next_token(&self, tokens: &[u32], sampling: &RowSampling) -> u32;
}

/// Block memory that remembers the token in each slot; the next token is a hash of all tokens before it. And the row in parts that was
/// left off: whose, at which position, and at which layer.
#[derive(Default)]
pub struct Slots(HashMap<(u32, usize), u32>, Option<(SequenceId, usize, usize)>);

impl Slots {
    /// A row in parts is the last, goes on where it was left off, and is drawn from at its end.
    fn check_part(&mut self, plan: &StepPlan, stopped: bool) {
        let Some(part) = &plan.part else { return };
        let row = plan.rows.last().expect("a part of a row");
        assert_eq!(row.tokens.len(), 1);
        assert_eq!(part.is_last(), row.logits != Logits::None);
        assert!(part.layers.start < part.layers.end && part.layers.end <= part.num_layers, "{part:?}");
        if part.layers.start > 0 {
            assert_eq!(self.1, Some((row.id, row.position, part.layers.start)), "left off elsewhere");
        }
        if !stopped {
            self.1 = (!part.is_last()).then_some((row.id, row.position, part.layers.end));
        }
    }
}

impl Device for Slots {
    fn step(&mut self, plan: &StepPlan, stopped: bool) -> StepOutput {
        self.check_part(plan, stopped);
        for copy in &plan.copies {
            for slot in 0..BLOCK {
                let token = self.0.get(&(copy.from, slot)).copied().unwrap_or(u32::MAX);
                self.0.insert((copy.to, slot), token);
            }
        }
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
            let Logits::Sample(wanted) = &row.logits else { continue };
            let end = row.position + new.len();
            let tokens: Vec<u32> = (0..end).map(|at| self.0[&(blocks[at / BLOCK], at % BLOCK)]).collect();
            for at in wanted.clone() {
                let sampling = &plan.samplings[at];
                assert_eq!(sampling.position as usize, end);
                let token = self.next_token(&tokens, sampling);
                output.sampled.push(Sampled { row: nth as u32, sampling: at as u32, token, logprob: -1.0 });
            }
        }
        output
    }

    fn receive(&mut self, lease: &WriteLease, tokens: &[u32]) {
        for (at, &token) in tokens.iter().enumerate().skip(lease.skip() * BLOCK) {
            self.0.insert((lease.block(at / BLOCK).unwrap(), at % BLOCK), token);
        }
    }

    fn next_token(&self, tokens: &[u32], sampling: &RowSampling) -> u32 {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64 ^ u64::from(sampling.sequence);
        for &token in tokens {
            hash = (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3);
        }
        ((hash >> 20) % u64::from(VOCAB)) as u32
    }
}

pub fn config() -> SchedulerConfig {
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
        step_cost: None,
        max_step_ms: 50.0,
        max_step_growth: 0.0,
        num_layers: 1,
    }
}

/// Sampled with a temperature, so that siblings differ.
pub const PARAMS: SamplingParams = SamplingParams { temperature: 1.0, seed: 9, ..SamplingParams::GREEDY };

pub fn sequence(id: u64, origin: Origin, prompt: Vec<u32>, max_new: u32) -> NewSequence {
    NewSequence {
        id: SequenceId(id),
        siblings: Vec::new(),
        origin,
        prompt,
        sampling: PARAMS,
        sequence: 0,
        num_generated: 0,
        max_new_tokens: max_new,
        stop_tokens: vec![STOP],
        cache: true,
        age: Duration::ZERO,
        priority: 0,
        preempted: false,
    }
}

/// `n` sequences with ids from `id` on.
pub fn group(id: u64, n: u64, origin: Origin, prompt: Vec<u32>, max_new: u32) -> NewSequence {
    let siblings = (id + 1..id + n).map(SequenceId).collect();
    NewSequence { siblings, ..sequence(id, origin, prompt, max_new) }
}

/// One of a request's sequences, as its client sees it.
#[derive(Clone, Debug)]
pub struct Stream {
    pub new: NewSequence,
    pub number: u32,
    pub accepted: Duration,
    pub produced: Vec<u32>,
    pub finish: Option<Finish>,
}

/// Runs a scheduler and collects what each sequence produced.
pub struct Harness<D> {
    pub scheduler: Scheduler,
    pub device: D,
    context: usize,
    pub now: Duration,
    pub streams: BTreeMap<SequenceId, Stream>,
    /// Groups that a prefill worker holds, by head.
    pub held: Vec<SequenceId>,
    /// Reserved and not committed, by head.
    pub leases: Vec<(SequenceId, WriteLease)>,
    /// Leases of sequences that are gone.
    pub stale: Vec<WriteLease>,
    pub reads: Vec<ReadLease>,
    /// Preempted ones that left, to be resumed.
    pub left: Vec<SequenceId>,
    /// Everything that was told, but for leases.
    pub told: Vec<String>,
    /// Blocks that the test keeps from everybody.
    pub ballast: Vec<Block>,
    pub num_copies: usize,
    pub resume: bool,
}

impl Harness<Slots> {
    pub fn new(config: SchedulerConfig, num_blocks: usize) -> Self {
        Self::on(Slots::default(), config, num_blocks)
    }
}

impl<D: Device> Harness<D> {
    pub fn on(device: D, config: SchedulerConfig, num_blocks: usize) -> Self {
        config.check().unwrap();
        Self {
            context: config.context,
            scheduler: Scheduler::new(config, BlockPool::new(num_blocks)),
            device,
            now: Duration::from_secs(1000),
            streams: BTreeMap::new(),
            held: Vec::new(),
            leases: Vec::new(),
            stale: Vec::new(),
            reads: Vec::new(),
            left: Vec::new(),
            told: Vec::new(),
            ballast: Vec::new(),
            num_copies: 0,
            resume: true,
        }
    }

    pub fn submit(&mut self, new: NewSequence) -> Result<(), Refusal> {
        let (id, origin) = (new.id, new.origin);
        self.scheduler.submit(new.clone(), self.now)?;
        let ids = std::iter::once(id).chain(new.siblings.iter().copied());
        for (number, id) in (new.sequence..).zip(ids) {
            let accepted = self.now - new.age;
            let stream = Stream { new: new.clone(), number, accepted, produced: Vec::new(), finish: None };
            self.streams.insert(id, stream);
        }
        if origin == Origin::Remote {
            assert!(self.scheduler.reserve(id));
        }
        self.events();
        Ok(())
    }

    /// What an undisturbed run would produce.
    pub fn expected(&self, stream: &Stream) -> Vec<u32> {
        let Stream { new, number, .. } = stream;
        let mut tokens = new.prompt.clone();
        let max_new = match new.origin {
            Origin::Prefill => 1,
            _ => (new.max_new_tokens as usize).min(self.context - new.prompt.len()),
        };
        while tokens.len() - new.prompt.len() < max_new {
            let sampling =
                RowSampling { params: new.sampling, sequence: *number, position: tokens.len() as u32 };
            let token = self.device.next_token(&tokens, &sampling);
            tokens.push(token);
            if new.stop_tokens.contains(&token) {
                break;
            }
        }
        tokens.split_off(new.prompt.len())
    }

    /// Every stream has what it would have had alone.
    pub fn assert_all_as_expected(&self) {
        for (id, stream) in &self.streams {
            assert_eq!(stream.produced, self.expected(stream), "{id:?}, number {}", stream.number);
        }
    }

    pub fn events(&mut self) {
        let mut events = Vec::new();
        self.scheduler.drain_events(&mut events);
        for event in events {
            self.told.push(format!("{event:?}"));
            match event {
                // Cancelled while it was told.
                Event::NearHead { id } if !self.streams.contains_key(&id) => {}
                Event::Reserved { id, lease, .. } if !self.streams.contains_key(&id) => {
                    self.stale.push(lease)
                }
                Event::NearHead { id } => assert!(self.scheduler.grant(id)),
                Event::Opened { lease, .. } => self.reads.push(lease),
                Event::Reserved { id, lease, .. } => self.leases.push((id, lease)),
                Event::Token { id, token, index, finish, .. } => self.token(id, token, index, finish),
                Event::Preempted { id, gone: true } => self.gone(id),
                Event::Computed { .. } | Event::Started { .. } | Event::Preempted { .. } => {}
            }
        }
    }

    fn token(&mut self, id: SequenceId, token: u32, index: u32, finish: Option<Finish>) {
        let stream = self.streams.get_mut(&id).expect("a live stream");
        assert_eq!(index as usize, stream.produced.len(), "each index once, in order");
        assert_eq!(stream.finish, None, "nothing after the end");
        stream.produced.push(token);
        stream.finish = finish;
        let head = stream.new.id;
        if stream.new.origin == Origin::Prefill && finish.is_none() && !self.held.contains(&head) {
            self.held.push(head);
        }
    }

    fn gone(&mut self, id: SequenceId) {
        if let Some(at) = self.leases.iter().position(|(other, _)| *other == id) {
            self.stale.push(self.leases.swap_remove(at).1);
        }
        if self.streams.contains_key(&id) {
            self.left.push(id);
        }
    }

    /// The router resumes what left: each sequence for itself, with its tokens forced.
    fn resume(&mut self) {
        for id in std::mem::take(&mut self.left) {
            let Some(stream) = self.streams.get(&id) else { continue };
            let new = NewSequence {
                id,
                siblings: Vec::new(),
                prompt: [stream.new.prompt.as_slice(), &stream.produced].concat(),
                sequence: stream.number,
                num_generated: stream.produced.len() as u32,
                max_new_tokens: stream.new.max_new_tokens - stream.produced.len() as u32,
                age: self.now - stream.accepted,
                preempted: true,
                ..stream.new.clone()
            };
            match self.scheduler.submit(new, self.now) {
                Ok(()) => assert!(self.scheduler.reserve(id)),
                Err(Refusal::QueueFull { .. }) => self.left.push(id),
                Err(other) => panic!("{id:?} was accepted before: {other}"),
            }
        }
        self.events();
    }

    pub fn check(&self) {
        if self.ballast.is_empty() {
            assert_eq!(self.scheduler.check(), Ok(()));
        }
    }

    /// One step; `between` happens while it is under way.
    pub fn step_with(&mut self, stopped: bool, between: impl FnOnce(&mut Self)) -> bool {
        self.now += Duration::from_millis(10);
        let plan = self.scheduler.plan(self.now).clone();
        self.check();
        self.num_copies += plan.copies.len();
        // Before the events are taken, since they let blocks and leases go.
        between(self);
        self.check();
        if !plan.is_empty() {
            let output = self.device.step(&plan, stopped);
            self.scheduler.apply(&StepOutput { stopped, ..output }, self.now);
        }
        self.events();
        if self.resume {
            self.resume();
        }
        self.check();
        !plan.is_empty()
    }

    pub fn step(&mut self) -> bool {
        self.step_with(false, |_| {})
    }

    /// The transfer of the nth receiving group completes.
    pub fn deliver(&mut self, nth: usize) {
        if self.leases.is_empty() {
            return;
        }
        let (id, lease) = self.leases.swap_remove(nth % self.leases.len());
        let stream = &self.streams[&id];
        // A resumed one goes by itself.
        let alone = !stream.produced.is_empty() || self.is_resumed(id);
        let prompt = [stream.new.prompt.as_slice(), &stream.produced].concat();
        self.device.receive(&lease, &prompt);
        drop(lease);
        let ids: Vec<SequenceId> = match alone {
            true => vec![id],
            false => std::iter::once(id).chain(stream.new.siblings.iter().copied()).collect(),
        };
        let max_len = (stream.new.prompt.len() + stream.new.max_new_tokens as usize).min(self.context);
        let is_last = prompt.len() + 1 >= max_len;
        let first_number = if alone { stream.number } else { stream.new.sequence };
        let mut first = Vec::new();
        for number in (first_number..).take(ids.len()) {
            let sampling = RowSampling { params: PARAMS, sequence: number, position: prompt.len() as u32 };
            let token = self.device.next_token(&prompt, &sampling);
            first.push(FirstToken { token, finished: is_last || stream.new.stop_tokens.contains(&token) });
        }
        if !self.scheduler.commit(id, &first) {
            self.events();
            assert!(self.left.contains(&id), "only what the plan under way preempted can't be committed");
            return;
        }
        for (id, first) in ids.iter().zip(&first) {
            if let Some(stream) = self.streams.get_mut(id) {
                stream.produced.push(first.token);
            }
        }
        self.events();
        self.check();
    }

    fn is_resumed(&self, id: SequenceId) -> bool {
        let gone = format!("{:?}", Event::Preempted { id, gone: true });
        self.told.contains(&gone)
    }

    pub fn cancel(&mut self, id: SequenceId) {
        let Some(stream) = self.streams.get(&id) else { return };
        let head = stream.new.id;
        // Before the fork the head's id is the group's; nothing was produced then.
        let is_group = id == head && stream.produced.is_empty() && !self.is_resumed(id);
        let siblings = if is_group { stream.new.siblings.clone() } else { Vec::new() };
        self.scheduler.cancel(id, self.now);
        for gone in siblings.into_iter().chain([id]) {
            self.streams.remove(&gone);
            self.left.retain(|&other| other != gone);
        }
        self.held.retain(|&other| other != id);
        if let Some(at) = self.leases.iter().position(|(other, _)| *other == id) {
            self.stale.push(self.leases.swap_remove(at).1);
        }
        self.check();
    }

    pub fn release_all(&mut self) {
        for id in std::mem::take(&mut self.held) {
            assert!(self.scheduler.release(id, self.now));
        }
        self.events();
        self.check();
    }

    pub fn run_to_end(&mut self) {
        for _ in 0..20_000 {
            let stepped = self.step();
            self.release_all();
            self.stale.clear();
            self.reads.clear();
            if !stepped {
                if self.leases.is_empty() && self.scheduler.is_empty() && self.left.is_empty() {
                    return;
                }
                self.deliver(0);
            }
        }
        panic!("no end: {:?}, pool {:?}", self.scheduler.counts(), self.scheduler.pool().counts());
    }

    /// Takes every free block away.
    pub fn fill_pool(&mut self) {
        let pool = self.scheduler.pool().clone();
        self.ballast.extend(pool.allocate(pool.counts().free).unwrap());
    }

    /// Ids of events of one kind, in order.
    pub fn told_of(&self, kind: &str) -> Vec<u64> {
        let of_kind = self.told.iter().filter(|event| event.starts_with(kind));
        of_kind
            .filter_map(|event| event.split("SequenceId(").nth(1)?.split(')').next()?.parse().ok())
            .collect()
    }
}
