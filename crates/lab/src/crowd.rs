//! A crowd on one worker: everyone is there at once, and asks again when answered. Static or continuous, contiguous or paged, all on the
//! scheduler that serves.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::LabError;
use crate::serving::{Ask, Serving, ServingConfig, Step};

/// When a waiting request may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Batching {
    /// When everyone of the batch before is done. A batch is as large as memory allows if each member reaches the length it asked for.
    Static,
    /// In every step.
    Continuous,
}

/// What one user asks for, one after the other.
pub(crate) type User = Vec<Ask>;

/// How it went.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Served {
    pub(crate) num_steps: usize,
    pub(crate) time: Duration,
    /// Tokens of replies.
    pub(crate) num_tokens: usize,
    /// Seconds from each question to the end of its answer.
    pub(crate) latencies: Vec<f64>,
    /// Sequences with blocks at once, at most.
    pub(crate) peak: usize,
    pub(crate) num_preempted: usize,
    /// Prompt tokens computed, again after a preemption included.
    pub(crate) num_prompt_tokens: u64,
    /// Entries of all block tables, at most.
    pub(crate) peak_entries: usize,
    /// Between two tokens of one reply, at most.
    pub(crate) longest_gap: Duration,
    /// When each live sequence had its last token.
    last_tokens: HashMap<u64, Duration>,
}

impl Served {
    pub(crate) fn tokens_per_s(&self) -> f64 {
        self.num_tokens as f64 / self.time.as_secs_f64()
    }

    /// Takes in a step that ended `now`.
    fn note(&mut self, step: &Step, now: Duration) {
        self.num_steps += 1;
        self.num_preempted += step.num_preempted;
        self.peak = self.peak.max(step.rows.len());
        self.peak_entries = self.peak_entries.max(step.rows.iter().map(|row| row.blocks.len()).sum());
        step.tokens.iter().for_each(|&(id, _, _)| self.note_token(id, now));
    }

    /// A sequence has one more token.
    pub(crate) fn note_token(&mut self, id: u64, now: Duration) {
        self.num_tokens += 1;
        let before = self.last_tokens.insert(id, now);
        self.longest_gap = self.longest_gap.max(before.map_or(Duration::ZERO, |before| now - before));
    }
}

struct Crowd<'a> {
    serving: Serving,
    config: &'a ServingConfig,
    batching: Batching,
    /// Questions that the worker does not have yet, with the time at which each was asked.
    waiting: VecDeque<(Ask, Duration)>,
    /// Who asked what is under way, and when.
    asked: HashMap<u64, (usize, Duration)>,
    owners: HashMap<u64, usize>,
}

impl Crowd<'_> {
    fn blocks(&self, ask: &Ask) -> usize {
        (ask.prompt.len() + ask.max_new_tokens).div_ceil(self.config.block_size)
    }

    /// Hands the worker what may begin.
    fn submit(&mut self) -> Result<(), LabError> {
        let is_static = self.batching == Batching::Static;
        if is_static && !self.serving.scheduler().is_empty() {
            return Ok(());
        }
        let (mut num, mut room) = (0, self.config.num_blocks);
        while let Some((ask, _)) = self.waiting.front() {
            let need = self.blocks(ask);
            if is_static && num > 0 && (need > room || num == self.config.max_num_seqs) {
                break;
            }
            let Some((ask, at)) = self.waiting.pop_front() else { break };
            (num, room) = (num + 1, room.saturating_sub(need));
            let owner = self.owners.get(&ask.id).copied().unwrap_or(0);
            self.asked.insert(ask.id, (owner, at));
            self.serving.submit(ask)?;
        }
        Ok(())
    }
}

/// Serves everyone's questions to the end.
pub(crate) fn serve(
    config: &ServingConfig,
    batching: Batching,
    users: Vec<User>,
) -> Result<Served, LabError> {
    let mut questions: Vec<VecDeque<Ask>> = users.into_iter().map(VecDeque::from).collect();
    let ids =
        |(user, asks): (usize, &VecDeque<Ask>)| asks.iter().map(|ask| (ask.id, user)).collect::<Vec<_>>();
    let owners = questions.iter().enumerate().flat_map(ids).collect();
    let first = questions.iter_mut().filter_map(VecDeque::pop_front).map(|ask| (ask, Duration::ZERO));
    let waiting = first.collect();
    let serving = Serving::new(config);
    let mut crowd = Crowd { serving, config, batching, waiting, asked: HashMap::new(), owners };
    let mut served = Served::default();
    loop {
        crowd.submit()?;
        if crowd.serving.scheduler().is_empty() {
            break;
        }
        let Some(step) = crowd.serving.step()? else {
            return Err(LabError::Standstill { what: "a crowd", num_left: crowd.asked.len() });
        };
        let now = crowd.serving.now();
        served.note(&step, now);
        for id in step.finished() {
            let Some((user, at)) = crowd.asked.remove(&id) else { continue };
            served.latencies.push((now - at).as_secs_f64());
            let next = questions.get_mut(user).and_then(VecDeque::pop_front);
            crowd.waiting.extend(next.map(|ask| (ask, now)));
        }
    }
    crowd.serving.check("a crowd")?;
    served.time = crowd.serving.now();
    served.num_prompt_tokens = crowd.serving.scheduler().num_prompt_tokens_computed();
    Ok(served)
}
