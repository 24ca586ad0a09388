//! What the legs of one attempt of a group say when nothing goes wrong, each in its own order.

use std::collections::VecDeque;

use baton_dispatch::{DecodeFact, Legs, Placed, PrefillFact};
use baton_handoff::{Cause, FinishReason, FirstToken, SampledToken};

use crate::random::Random;

pub(crate) const STOP: u32 = 3;

/// What the model says: the token of a sequence at an index, whoever computes it.
pub(crate) fn token(sequence: u32, index: u32) -> SampledToken {
    let id = Random(u64::from(sequence) << 32 | u64::from(index)).next() as u32 % 40;
    SampledToken { id, logprob: -1.0, index }
}

/// Index of a sequence's last token.
pub(crate) fn last_index(sequence: u32, max_new_tokens: u32) -> u32 {
    let stop = (0..max_new_tokens).find(|index| token(sequence, *index).id == STOP);
    stop.unwrap_or(max_new_tokens - 1)
}

pub(crate) fn reason(sequence: u32, max_new_tokens: u32) -> FinishReason {
    let stops = token(sequence, last_index(sequence, max_new_tokens)).id == STOP;
    if stops { FinishReason::Stop } else { FinishReason::Length }
}

/// The live attempt of a group.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) attempt: u32,
    pub(crate) placed: Placed,
    pub(crate) prefill: VecDeque<PrefillFact>,
    pub(crate) decode: VecDeque<DecodeFact>,
    /// It said that the group runs.
    pub(crate) started: bool,
}

impl Open {
    /// The prefill worker says so, holds what it has, and gives it up in the end.
    pub(crate) fn handoff_fails(&mut self, cause: Cause) {
        if self.prefill.back() == Some(&PrefillFact::Done) {
            self.prefill.pop_back();
        }
        self.prefill.extend([PrefillFact::HandoffFailed(cause), PrefillFact::Failed(cause)]);
    }
}

/// How often a sequence is preempted, and how often a group before it runs, per mille.
#[derive(Clone, Copy)]
pub(crate) struct Preempt {
    pub(crate) running: u64,
    pub(crate) receiving: u64,
}

/// Both legs of an attempt that is just opened, of a request that wants `max_new_tokens` of each sequence.
pub(crate) fn open(
    random: &mut Random,
    legs: &Legs,
    placed: Placed,
    max_new_tokens: u32,
    preempt: Preempt,
) -> Open {
    let mut open = Open {
        attempt: legs.key.attempt,
        placed,
        prefill: VecDeque::new(),
        decode: VecDeque::new(),
        started: false,
    };
    let start = legs.num_forced;
    let sequences = legs.first_sequence..legs.first_sequence + legs.num_sequences;
    let ends = |sequence| last_index(sequence, max_new_tokens) == start;
    let all_end = sequences.clone().all(ends);
    if !legs.local {
        let first = sequences.clone().map(|sequence| FirstToken {
            sequence,
            token: token(sequence, start),
            finish: ends(sequence).then_some(reason(sequence, max_new_tokens)),
        });
        open.prefill.push_back(PrefillFact::FirstTokens(first.collect()));
        if !all_end {
            open.prefill.push_back(PrefillFact::Done);
        }
    }
    if !legs.decode {
        return open;
    }
    if all_end && !legs.local {
        open.decode.push_back(DecodeFact::Failed(Cause::NotNeeded));
        return open;
    }
    if random.chance(preempt.receiving) {
        // The worker says so of each sequence, or of the whole leg.
        if random.chance(500) {
            open.decode.push_back(DecodeFact::Failed(Cause::Preempted));
        } else {
            open.decode.extend(sequences.map(|sequence| DecodeFact::Preempted { sequence }));
        }
        open.handoff_fails(Cause::Preempted);
        return open;
    }
    open.decode.push_back(DecodeFact::Started);
    let mut lines: Vec<VecDeque<DecodeFact>> = sequences
        .filter(|sequence| legs.local || !ends(*sequence))
        .map(|sequence| line(random, sequence, start + u32::from(!legs.local), max_new_tokens, preempt))
        .collect();
    while !lines.is_empty() {
        let nth = random.below(lines.len() as u64) as usize;
        match lines[nth].pop_front() {
            Some(fact) => open.decode.push_back(fact),
            None => drop(lines.swap_remove(nth)),
        }
    }
    open
}

/// What the decode leg says of one sequence, from an index on.
fn line(
    random: &mut Random,
    sequence: u32,
    from: u32,
    max_new_tokens: u32,
    preempt: Preempt,
) -> VecDeque<DecodeFact> {
    let last = last_index(sequence, max_new_tokens);
    let tokens = (from..=last).map(|index| DecodeFact::Token { sequence, token: token(sequence, index) });
    let mut line: VecDeque<_> = tokens.collect();
    line.push_back(DecodeFact::Finished { sequence, reason: reason(sequence, max_new_tokens) });
    if random.chance(preempt.running) {
        line.truncate(random.below(line.len() as u64) as usize);
        line.push_back(DecodeFact::Preempted { sequence });
    }
    line
}
