//! A prompt is done: its sequences take their first tokens, share its blocks and go on alone.

use crate::engine::Sampled;
use crate::event::Event;
use crate::plan::{RowSampling, SequenceId};
use crate::scheduler::Scheduler;
use crate::sequence::{Finish, Origin, Sequence, Sibling, Stage};

/// A token drawn for one of a group's sequences.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw {
    /// Which of the request's sequences.
    pub(crate) sequence: u32,
    pub(crate) token: u32,
    pub(crate) logprob: f32,
    /// It ended the sequence, as the prefill worker says.
    pub(crate) finished: bool,
}

impl Draw {
    pub(crate) fn new(sampled: &Sampled, samplings: &[RowSampling]) -> Self {
        let sequence = samplings.get(sampled.sampling as usize).map_or(u32::MAX, |s| s.sequence);
        Self { sequence, token: sampled.token, logprob: sampled.logprob, finished: false }
    }
}

/// One of a group's sequences and its first token.
struct Member {
    sibling: Sibling,
    draw: Option<Draw>,
    finish: Option<Finish>,
}

impl Member {
    fn new(head: &Sequence, sibling: Sibling, draws: &[Draw]) -> Self {
        let draw = draws.iter().find(|draw| draw.sequence == sibling.sequence).copied();
        Self { sibling, draw, finish: draw.and_then(|draw| head.would_end(draw.token)) }
    }

    /// The token with which it goes on.
    fn goes_on(&self) -> Option<u32> {
        self.draw.filter(|draw| !draw.finished && self.finish.is_none()).map(|draw| draw.token)
    }
}

impl Scheduler {
    /// The tokens of a prefilling sequence are computed and `draws` are the next tokens of its group: on a prefill worker the
    /// blocks are held; elsewhere each sequence runs on, over blocks that all share. What is over gives up its part.
    pub(crate) fn begin(&mut self, id: SequenceId, draws: &[Draw]) {
        let Some(head) = self.sequences.get_mut(&id) else { return };
        let Stage::Prefilling { table, .. } = &mut head.stage else { return };
        let mut table = std::mem::take(table);
        let siblings = std::mem::take(&mut head.siblings);
        let own = Sibling { id, sequence: head.sequence };
        let group = std::iter::once(own).chain(siblings);
        let members: Vec<Member> = group.map(|sibling| Member::new(head, sibling, draws)).collect();
        let any_goes_on = members.iter().any(|member| member.goes_on().is_some());
        let (origin, index) = (head.origin, head.next_index());
        let cached_tokens = head.num_hits * self.config.block_size;
        let starts = origin == Origin::Local || (origin == Origin::Remote && any_goes_on);
        if starts && !std::mem::replace(&mut head.started, true) {
            self.events.push(Event::Started { id, cached_tokens });
        }
        for member in &members[1..] {
            self.heads.remove(&member.sibling.id);
        }
        if origin == Origin::Prefill {
            self.active.retain(|&other| other != id);
            head.stage = Stage::Held { table };
            // Over only with the whole group: the blocks are held for those that go on.
            if !any_goes_on {
                self.forget(id);
            }
        } else {
            self.run(id, &mut table, &members);
        }
        for Member { sibling: Sibling { id, .. }, draw, finish } in members {
            // The prefill worker told its first tokens itself. Where the end is nearer here than there, since the context is smaller,
            // the token is told once more, for its end.
            let told = |draw: &Draw| origin == Origin::Remote && (draw.finished || finish.is_none());
            if let Some(Draw { token, logprob, .. }) = draw.filter(|draw| !told(draw)) {
                self.events.push(Event::Token { id, token, logprob, index, finish });
            }
        }
    }

    /// Forks what goes on; the head's own handles go last, so that nothing is freed meanwhile.
    fn run(&mut self, id: SequenceId, table: &mut baton_kv::BlockTable, members: &[Member]) {
        let Some(head) = self.sequences.get_mut(&id) else { return };
        head.ease_in(self.config.max_step_growth > 0.0);
        let head = &self.sequences[&id];
        let num_blocks = head.reserved_tokens().div_ceil(self.config.block_size) + 1;
        let output = head.tokens.len() + 1 - head.prompt_len;
        let mut forks = Vec::new();
        for member in &members[1..] {
            if let Some(token) = member.goes_on() {
                let mut fork = head.fork(member.sibling, table.fork(num_blocks));
                fork.push(token);
                forks.push(fork);
            } else {
                self.growth.observe(output);
            }
        }
        for fork in forks {
            let id = fork.id;
            self.sequences.insert(id, fork);
            self.activate(id);
        }
        if let Some(token) = members[0].goes_on() {
            if let Some(head) = self.sequences.get_mut(&id) {
                head.push(token);
                head.stage = Stage::Running { table: std::mem::take(table), layers_done: 0 };
            }
        } else {
            self.growth.observe(output);
            self.remove(id);
            table.clear();
        }
    }
}
