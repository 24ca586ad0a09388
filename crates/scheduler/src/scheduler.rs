//! Queues and stage changes: what the shell tells the scheduler, and what the scheduler tells back.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;

use baton_kv::{BlockPool, BlockTable, PrefixCache, SharedBlock};

use crate::Time;
use crate::config::{Refusal, SchedulerConfig};
use crate::cost::StepCost;
use crate::event::{Event, StageCounts};
use crate::fork::Draw;
use crate::growth::Growth;
use crate::parts::Newcomer;
use crate::plan::{SequenceId, StepPlan};
use crate::sequence::{
    FirstToken, IdHasher, NewSequence, Origin, Rank, Sequence, Sequences, Sibling, Stage, Wait,
};

/// Decides, step by step, which tokens are computed next and who holds which blocks.
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) pool: BlockPool,
    pub(crate) sequences: Sequences,
    /// The head of each sequence that goes by its head's id: the siblings before the fork.
    pub(crate) heads: HashMap<SequenceId, SequenceId, BuildHasherDefault<IdHasher>>,
    /// By rank; the line for admission (Local and Remote) or for being offered (Prefill).
    pub(crate) line: VecDeque<SequenceId>,
    /// Prefilling, Receiving and Running, by rank.
    pub(crate) active: Vec<SequenceId>,
    /// Not empty from [`Scheduler::plan`] to [`Scheduler::apply`]: a step may be under way.
    pub(crate) plan: StepPlan,
    /// Blocks of sequences that ended while a step was under way: it may still read and write them.
    pub(crate) retired: Vec<BlockTable>,
    /// Blocks that the plan copies from and that nobody else holds any more.
    pub(crate) copied: Vec<SharedBlock>,
    pub(crate) events: Vec<Event>,
    pub(crate) cache: Option<PrefixCache>,
    /// Scratch of the planner: prompts by urgency.
    pub(crate) order: Vec<(f64, SequenceId)>,
    /// Scratch of the planner: rows that may be computed in parts.
    pub(crate) newcomers: Vec<Newcomer>,
    /// Whose row the engine keeps, unless that sequence is gone.
    pub(crate) begun: Option<SequenceId>,
    pub(crate) growth: Growth,
    /// Blocks that sequences preempted by this plan will return when leases end.
    pub(crate) promised: usize,
    pub(crate) preempted_since_step: bool,
    pub(crate) num_preemptions: u64,
    pub(crate) num_prompt_tokens_computed: u64,
    /// As last told.
    pub(crate) now: Time,
    next_order: u64,
}

impl Scheduler {
    /// An empty scheduler over a pool.
    pub fn new(config: SchedulerConfig, pool: BlockPool) -> Self {
        let cache = config.cache_salt.as_ref().map(|salt| PrefixCache::new(&pool, salt));
        Self {
            config,
            pool,
            cache,
            sequences: Sequences::default(),
            heads: HashMap::default(),
            line: VecDeque::new(),
            active: Vec::new(),
            plan: StepPlan::default(),
            retired: Vec::new(),
            copied: Vec::new(),
            events: Vec::new(),
            order: Vec::new(),
            newcomers: Vec::new(),
            begun: None,
            growth: Growth::new(),
            promised: 0,
            preempted_since_step: false,
            num_preemptions: 0,
            num_prompt_tokens_computed: 0,
            now: Time::ZERO,
            next_order: 0,
        }
    }

    /// Accepts a sequence or a group, which then waits.
    ///
    /// # Errors
    /// [`Refusal`]; nothing is kept.
    pub fn submit(&mut self, new: NewSequence, now: Time) -> Result<(), Refusal> {
        self.now = now;
        self.may_submit(&new)?;
        let id = new.id;
        let wait = match new.origin {
            Origin::Remote => Wait::AwaitingOffer,
            // Without a decode leg there is nobody to grant.
            Origin::Prefill if new.max_new_tokens == 1 => Wait::Granted,
            Origin::Prefill | Origin::Local => Wait::Queued,
        };
        let sibling = |(&id, sequence)| Sibling { id, sequence };
        let numbers = new.sequence.saturating_add(1)..;
        let siblings: Vec<Sibling> = new.siblings.iter().zip(numbers).map(sibling).collect();
        self.heads.extend(siblings.iter().map(|sibling| (sibling.id, id)));
        let hashes = match &self.cache {
            Some(cache) if new.cache => cache.hashes(&new.prompt, self.config.block_size),
            _ => Vec::new(),
        };
        let sequence = Sequence {
            id,
            siblings,
            hashes,
            use_cache: new.cache && self.cache.is_some(),
            num_cached: 0,
            num_hits: 0,
            rank: Rank::new(&new, self.next_order, now),
            preempted: new.preempted,
            kept_until: 0,
            eased_until: 0,
            head_since: None,
            num_passed: 0,
            origin: new.origin,
            prompt_len: new.prompt.len() - new.num_generated as usize,
            max_len: (new.prompt.len() + new.max_new_tokens as usize).min(self.config.context),
            tokens: new.prompt,
            sampling: new.sampling,
            sequence: new.sequence,
            stop_tokens: new.stop_tokens,
            started: false,
            stage: Stage::Waiting(wait),
        };
        self.next_order += 1;
        self.sequences.insert(id, sequence);
        if wait != Wait::AwaitingOffer {
            self.line_up(id);
        }
        self.offer_near_head(now);
        Ok(())
    }

    fn may_submit(&self, new: &NewSequence) -> Result<(), Refusal> {
        let is_live = |id| self.sequences.contains_key(id) || self.heads.contains_key(id);
        let ids = &new.siblings;
        let twice = ids.iter().enumerate().any(|(nth, id)| *id == new.id || ids[..nth].contains(id));
        if twice || is_live(&new.id) || ids.iter().any(is_live) {
            return Err(Refusal::Duplicate);
        }
        let too_many_generated = new.num_generated as usize >= new.prompt.len();
        if new.prompt.is_empty() || new.max_new_tokens == 0 || too_many_generated {
            return Err(Refusal::Empty);
        }
        self.check_feasible(new)?;
        let max_queue = self.config.max_queue;
        let waiting = self.counts().waiting + 1 + new.siblings.len();
        if waiting > max_queue { Err(Refusal::QueueFull { max_queue }) } else { Ok(()) }
    }

    /// Prefill: the destination reserved the prompt's blocks, so it may be computed. False for an unknown
    /// sequence or one that was not offered.
    pub fn grant(&mut self, id: SequenceId) -> bool {
        match self.sequences.get_mut(&id) {
            Some(Sequence { stage: Stage::Waiting(wait @ Wait::Offered), .. }) => {
                *wait = Wait::Granted;
                true
            }
            _ => false,
        }
    }

    /// Prefill: the destination has the KV; the held blocks return. False when nothing is held under this id.
    pub fn release(&mut self, id: SequenceId, now: Time) -> bool {
        self.now = now;
        let held = matches!(self.sequences.get(&id), Some(Sequence { stage: Stage::Held { .. }, .. }));
        if held {
            self.forget(id);
            self.offer_near_head(now);
        }
        held
    }

    /// Remote: an offer came. [`Event::Reserved`] answers as soon as admission allows. False for an unknown sequence
    /// or one already offered.
    pub fn reserve(&mut self, id: SequenceId) -> bool {
        match self.sequences.get_mut(&id) {
            Some(Sequence { stage: Stage::Waiting(wait @ Wait::AwaitingOffer), .. }) => {
                *wait = Wait::Reserving
            }
            _ => return false,
        }
        self.line_up(id);
        self.admit();
        true
    }

    /// Remote: every byte is verified; the group's sequences run from here on, but for those that their first token ended. `first` holds
    /// the first token of each, by number; a sequence without one ends. False unless the head was receiving.
    pub fn commit(&mut self, id: SequenceId, first: &[FirstToken]) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        let Stage::Receiving { table } = &mut sequence.stage else { return false };
        let table = std::mem::take(table);
        sequence.stage = Stage::Prefilling { table, computed: sequence.tokens.len() };
        let draw = |(sequence, first): (u32, &FirstToken)| Draw {
            sequence,
            token: first.token,
            logprob: 0.0,
            finished: first.finished,
        };
        let draws: Vec<Draw> = (sequence.sequence..).zip(first).map(draw).collect();
        self.remember(id);
        self.begin(id, &draws);
        true
    }

    /// Ends one sequence in whatever stage; before the fork the head's id ends the whole group. Its blocks return now; those of a step
    /// under way when that is over, leased ones when their lease ends. False for an unknown id.
    pub fn cancel(&mut self, id: SequenceId, now: Time) -> bool {
        self.cancel_all(&[id], now) == 1
    }

    /// Ends sequences as [`Scheduler::cancel`] does, with one look at the others in line however many they are. Returns how many were known; one
    /// that goes with its head does not count.
    pub fn cancel_all(&mut self, ids: &[SequenceId], now: Time) -> usize {
        self.now = now;
        let (mut num_stopped, mut gone) = (0, Vec::new());
        for &id in ids {
            if let Some(head) = self.heads.remove(&id) {
                if let Some(head) = self.sequences.get_mut(&head) {
                    head.siblings.retain(|sibling| sibling.id != id);
                }
                num_stopped += 1;
            } else {
                gone.extend(self.take_out(id));
            }
        }
        let num_gone = gone.len();
        if num_gone > 0 {
            let Self { sequences, line, active, .. } = self;
            line.retain(|id| sequences.contains_key(id));
            active.retain(|id| sequences.contains_key(id));
            gone.into_iter().for_each(|sequence| self.let_go(sequence));
            self.offer_near_head(now);
        }
        num_stopped + num_gone
    }

    /// Moves what happened since the last call to `into`.
    pub fn drain_events(&mut self, into: &mut Vec<Event>) {
        into.append(&mut self.events);
    }

    /// From here on, what a step is expected to take.
    pub fn set_step_cost(&mut self, cost: Option<StepCost>) {
        self.config.step_cost = cost;
    }

    /// Sequences by stage.
    pub fn counts(&self) -> StageCounts {
        let mut counts = StageCounts::default();
        for sequence in self.sequences.values() {
            *match sequence.stage {
                Stage::Waiting(_) => &mut counts.waiting,
                Stage::Prefilling { .. } => &mut counts.prefilling,
                Stage::Held { .. } => &mut counts.held,
                Stage::Receiving { .. } => &mut counts.receiving,
                Stage::Running { .. } => &mut counts.running,
            } += sequence.num_sequences();
        }
        counts
    }

    /// The pool.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Prompt tokens accepted here and not yet computed, without those that the prefix cache has; KV that arrives is not counted.
    pub fn queued_tokens(&self) -> u64 {
        let left = |s: &Sequence| match &s.stage {
            Stage::Waiting(Wait::AwaitingOffer | Wait::Reserving) => 0,
            Stage::Waiting(_) | Stage::Prefilling { .. } => self.tokens_to_compute(s),
            _ => 0,
        };
        self.sequences.values().map(|s| left(s) as u64).sum()
    }

    /// Prompt tokens computed here since the start, recomputed ones included.
    pub fn num_prompt_tokens_computed(&self) -> u64 {
        self.num_prompt_tokens_computed
    }

    /// Preemptions since the start.
    pub fn num_preemptions(&self) -> u64 {
        self.num_preemptions
    }

    /// Reads what the next step reads of each sequence, so that it comes from memory together and not piece by piece. Changes nothing: for who drives
    /// so many schedulers that what one has is not at hand when its turn comes.
    pub fn warm(&self) {
        /// Block numbers in a line of a cache.
        const LINE: usize = 16;
        let mut sum = 0_u64;
        for sequence in self.sequences.values() {
            let table = sequence.table();
            sum += u64::from(table.is_some_and(BlockTable::is_last_owned));
            let ids = table.map_or(&[][..], BlockTable::ids);
            let ids = ids.iter().step_by(LINE).chain(ids.last()).chain(sequence.tokens.last());
            sum = ids.fold(sum, |sum, id| sum.wrapping_add(u64::from(*id)));
        }
        std::hint::black_box(sum);
    }

    /// Whether no sequence is here.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Takes a sequence, before the fork with its group, out of every list.
    pub(crate) fn remove(&mut self, id: SequenceId) -> Option<Sequence> {
        let sequence = self.take_out(id)?;
        if sequence.holds_blocks() {
            self.active.retain(|&other| other != id);
        } else {
            self.line.retain(|&other| other != id);
        }
        Some(sequence)
    }

    /// Takes a sequence, before the fork with its group, out of all that is found by id; line and active still name it.
    fn take_out(&mut self, id: SequenceId) -> Option<Sequence> {
        let sequence = self.sequences.remove(&id)?;
        for sibling in &sequence.siblings {
            self.heads.remove(&sibling.id);
        }
        Some(sequence)
    }

    /// A sequence is over. False for an unknown id.
    pub(crate) fn forget(&mut self, id: SequenceId) -> bool {
        let Some(sequence) = self.remove(id) else { return false };
        self.let_go(sequence);
        true
    }

    /// Blocks that a step under way may use return when it is over.
    fn let_go(&mut self, sequence: Sequence) {
        if let Stage::Prefilling { table, .. } | Stage::Running { table, .. } = sequence.stage
            && !self.plan.is_empty()
        {
            self.retired.push(table);
        }
    }

    /// Puts a sequence in line, by rank.
    pub(crate) fn line_up(&mut self, id: SequenceId) {
        let rank = self.sequences[&id].rank;
        let at = self.line.partition_point(|other| self.sequences[other].rank < rank);
        self.line.insert(at, id);
    }

    /// Puts a sequence among the active ones, by rank.
    pub(crate) fn activate(&mut self, id: SequenceId) {
        let rank = self.sequences[&id].rank;
        let at = self.active.partition_point(|other| self.sequences[other].rank < rank);
        self.active.insert(at, id);
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
