//! Queues and stage changes: what the shell tells the scheduler, and what the scheduler tells back.

use std::collections::VecDeque;

use baton_kv::{BlockPool, BlockTable, PrefixCache};

use crate::Time;
use crate::admission::Growth;
use crate::config::{Refusal, SchedulerConfig};
use crate::event::{Event, StageCounts};
use crate::plan::{SequenceId, StepPlan};
use crate::sequence::{FirstToken, NewSequence, Origin, Sequence, Sequences, Stage, Wait};

/// Decides, step by step, which tokens are computed next and who holds which blocks.
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) pool: BlockPool,
    pub(crate) sequences: Sequences,
    /// Oldest first; the line for admission (Local and Remote) or for being offered (Prefill).
    pub(crate) line: VecDeque<SequenceId>,
    /// Prefilling and Running, oldest first.
    pub(crate) active: Vec<SequenceId>,
    pub(crate) plan: StepPlan,
    pub(crate) events: Vec<Event>,
    pub(crate) cache: Option<PrefixCache>,
    /// Scratch of the planner: prompts by urgency.
    pub(crate) order: Vec<(f64, SequenceId)>,
    pub(crate) growth: Growth,
    pub(crate) preempted_since_step: bool,
    pub(crate) num_preemptions: u64,
    pub(crate) num_prompt_tokens_computed: u64,
    next_age: u64,
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
            line: VecDeque::new(),
            active: Vec::new(),
            plan: StepPlan::default(),
            events: Vec::new(),
            order: Vec::new(),
            growth: Growth::new(),
            preempted_since_step: false,
            num_preemptions: 0,
            num_prompt_tokens_computed: 0,
            next_age: 0,
        }
    }

    /// Accepts a sequence, which then waits.
    ///
    /// # Errors
    /// [`Refusal`]; nothing is kept.
    pub fn submit(&mut self, new: NewSequence, now: Time) -> Result<(), Refusal> {
        if self.sequences.contains_key(&new.id) {
            return Err(Refusal::Duplicate);
        }
        if new.prompt.is_empty() || new.max_new_tokens == 0 || new.num_generated as usize >= new.prompt.len()
        {
            return Err(Refusal::Empty);
        }
        self.check_feasible(&new)?;
        if self.counts().waiting >= self.config.max_queue {
            return Err(Refusal::QueueFull { max_queue: self.config.max_queue });
        }
        let id = new.id;
        let wait = match new.origin {
            Origin::Remote => Wait::AwaitingOffer,
            // Without a decode leg there is nobody to grant.
            Origin::Prefill if new.max_new_tokens == 1 => Wait::Granted,
            Origin::Prefill | Origin::Local => Wait::Queued,
        };
        let hashes = match &self.cache {
            Some(cache) if new.cache => cache.hashes(&new.prompt, self.config.block_size),
            _ => Vec::new(),
        };
        let sequence = Sequence {
            id,
            hashes,
            use_cache: new.cache && self.cache.is_some(),
            num_cached: 0,
            num_hits: 0,
            origin: new.origin,
            prompt_len: new.prompt.len() - new.num_generated as usize,
            max_len: (new.prompt.len() + new.max_new_tokens as usize).min(self.config.context),
            tokens: new.prompt,
            sampling: new.sampling,
            sequence: new.sequence,
            stop_tokens: new.stop_tokens,
            age: self.next_age,
            accepted: now,
            started: false,
            stage: Stage::Waiting(wait),
        };
        self.next_age += 1;
        self.sequences.insert(id, sequence);
        if wait != Wait::AwaitingOffer {
            self.line.push_back(id);
        }
        self.offer_near_head(now);
        Ok(())
    }

    /// Largest number of tokens (prompt and output) that can ever be accepted.
    pub fn max_tokens(&self) -> usize {
        (self.pool.counts().total * self.config.block_size).min(self.config.context)
    }

    fn check_feasible(&self, new: &NewSequence) -> Result<(), Refusal> {
        let prompt = new.prompt.len();
        let max_tokens = self.max_tokens();
        // At least one token must be generated, and it needs a position in the context.
        let least = prompt + 1;
        if least > self.config.context {
            return Err(Refusal::TooLarge { needed_tokens: least, max_tokens });
        }
        let needed_tokens = match new.origin {
            Origin::Prefill => prompt,
            Origin::Local | Origin::Remote => (prompt + new.max_new_tokens as usize).min(self.config.context),
        };
        if needed_tokens.div_ceil(self.config.block_size) > self.pool.counts().total {
            return Err(Refusal::TooLarge { needed_tokens, max_tokens });
        }
        Ok(())
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
        self.line.push_back(id);
        self.admit();
        true
    }

    /// Remote: every byte is verified; the sequence runs from here on, unless the first token ended it. False
    /// unless it was receiving.
    pub fn commit(&mut self, id: SequenceId, first: FirstToken) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        let Stage::Receiving { table } = &mut sequence.stage else { return false };
        let table = std::mem::take(table);
        let cached_tokens = sequence.num_hits * self.config.block_size;
        sequence.started = true;
        let finish = sequence.push(first.token);
        sequence.stage = Stage::Running { table };
        self.remember(id);
        if first.finished || finish.is_some() {
            self.forget(id);
        } else {
            self.activate(id);
            self.events.push(Event::Started { id, cached_tokens });
        }
        true
    }

    /// Ends a sequence in whatever stage; its blocks return now, leased ones when their lease ends. False for
    /// an unknown id.
    pub fn cancel(&mut self, id: SequenceId, now: Time) -> bool {
        let known = self.forget(id).is_some();
        if known {
            self.offer_near_head(now);
        }
        known
    }

    /// Moves what happened since the last call to `into`.
    pub fn drain_events(&mut self, into: &mut Vec<Event>) {
        into.append(&mut self.events);
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
            } += 1;
        }
        counts
    }

    /// The pool.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Prompt tokens accepted here and not yet computed; KV that arrives is not counted.
    pub fn queued_tokens(&self) -> u64 {
        let left = |s: &Sequence| match &s.stage {
            Stage::Waiting(Wait::AwaitingOffer | Wait::Reserving) => 0,
            Stage::Waiting(_) => s.tokens.len(),
            Stage::Prefilling { computed, .. } => s.tokens.len() - computed,
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

    /// Whether no sequence is here.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    pub(crate) fn forget(&mut self, id: SequenceId) -> Option<Sequence> {
        let sequence = self.sequences.remove(&id)?;
        if sequence.holds_blocks() {
            self.active.retain(|&other| other != id);
        } else {
            self.line.retain(|&other| other != id);
        }
        Some(sequence)
    }

    /// Puts a sequence among the active ones, oldest first.
    pub(crate) fn activate(&mut self, id: SequenceId) {
        let age = self.sequences[&id].age;
        let at = self.active.partition_point(|other| self.sequences[other].age < age);
        self.active.insert(at, id);
    }

    /// Prefill: offers the best waiting prompts, up to the lookahead.
    pub(crate) fn offer_near_head(&mut self, now: Time) {
        if self.line.is_empty() {
            return;
        }
        let ahead = |s: &Sequence| matches!(s.stage, Stage::Waiting(Wait::Offered | Wait::Granted));
        let mut room =
            self.config.lookahead.saturating_sub(self.sequences.values().filter(|s| ahead(s)).count());
        while room > 0 {
            let queued = |s: &&Sequence| {
                s.origin == Origin::Prefill && matches!(s.stage, Stage::Waiting(Wait::Queued))
            };
            let line = self.line.iter().filter_map(|id| self.sequences.get(id));
            let Some(id) = line
                .filter(queued)
                .min_by(|a, b| self.urgency(a, now).total_cmp(&self.urgency(b, now)))
                .map(|s| s.id)
            else {
                return;
            };
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.stage = Stage::Waiting(Wait::Offered);
                self.events.push(Event::NearHead { id });
            }
            room -= 1;
        }
    }

    /// Remaining tokens minus ageing: the smallest goes first.
    pub(crate) fn urgency(&self, sequence: &Sequence, now: Time) -> f64 {
        let computed = match &sequence.stage {
            Stage::Prefilling { computed, .. } => *computed,
            _ => 0,
        };
        let age = now.saturating_sub(sequence.accepted).as_secs_f64();
        (sequence.tokens.len() - computed) as f64 - age * self.config.ageing_tokens_per_s
    }

    /// Admits from the head of the line while the formula allows: reserves blocks for remote sequences, opens local ones.
    pub(crate) fn admit(&mut self) {
        while let Some(&id) = self.line.front() {
            let sequence = &self.sequences[&id];
            if sequence.origin == Origin::Prefill {
                return;
            }
            let remote = matches!(sequence.stage, Stage::Waiting(Wait::Reserving));
            let Some((table, num_hits)) = self.take_blocks(id, |this, need| this.may_admit(need, remote))
            else {
                return;
            };
            self.line.pop_front();
            self.place(id, table, num_hits, remote);
        }
    }

    fn place(&mut self, id: SequenceId, table: BlockTable, num_hits: usize, remote: bool) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let cached_tokens = num_hits * self.config.block_size;
        if remote {
            // What was allocated beyond the hits is all owned.
            let Some(lease) = table.write_lease(num_hits) else { return };
            self.events.push(Event::Reserved { id, lease, skip_tokens: cached_tokens });
            sequence.stage = Stage::Receiving { table };
        } else {
            sequence.stage = Stage::Prefilling { table, computed: cached_tokens };
            self.activate(id);
        }
    }

    fn may_admit(&self, need: usize, remote: bool) -> bool {
        let (mut with_blocks, mut running, mut growth, mut receiving) = (0, 0, 0, 0);
        for sequence in self.sequences.values() {
            match &sequence.stage {
                Stage::Waiting(_) => continue,
                Stage::Receiving { table } => receiving += table.len(),
                Stage::Running { .. } | Stage::Prefilling { .. } => running += 1,
                Stage::Held { .. } => {}
            }
            with_blocks += 1;
            growth += self.growth.of(sequence.tokens_left()).div_ceil(self.config.block_size);
        }
        if with_blocks >= self.config.max_num_seqs {
            return false;
        }
        let counts = self.pool.counts();
        let share = (self.config.max_receiving_share * counts.total as f32) as usize;
        if remote && receiving > 0 && receiving + need > share {
            return false;
        }
        // Alone, whatever is feasible is admitted: nothing else could grow.
        with_blocks == 0 || need + growth + running <= counts.free + counts.cached
    }
}
