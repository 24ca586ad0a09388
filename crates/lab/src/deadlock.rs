//! `deadlock`: four sequences hold all eight blocks, two each, and each wants a third.

use baton_kv::{BlockPool, BlockTable};
use baton_scheduler::{RowSampling, SamplingParams};
use baton_timing::pseudo_tokens;

use crate::random::Random;
use crate::report::{Axis, Line, Marks, Report};
use crate::serving::{Ask, PSEUDO_LAYERS, Serving, ServingConfig, VOCAB};
use crate::{Cell, Demonstration, LabError};

const WHAT: &str = "deadlock";
const BLOCK_SIZE: usize = 4;
const NUM_BLOCKS: usize = 8;
const NUM_SEQUENCES: u64 = 4;
/// Two full blocks, so that the first token needs a third one.
const PROMPT: usize = 8;
const NEW_TOKENS: usize = 8;
/// Blocks beside the eight, so that all four are admitted; the demonstration takes them away then.
const SPARE: usize = 24;
/// Rounds that the naive loop is watched for.
const ROUNDS: usize = 12;

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) num_finished: usize,
    pub(crate) num_preempted: usize,
    /// Sequences with blocks at once, at most.
    pub(crate) peak: usize,
    /// Prompt tokens computed, again after a preemption included.
    pub(crate) num_prompt_tokens: u64,
    /// Tokens that all sequences had generated after each step.
    pub(crate) progress: Vec<usize>,
    /// Sequences whose every token is that of an undisturbed run.
    pub(crate) num_exact: usize,
}

fn prompts() -> Vec<Vec<u32>> {
    let mut random = Random::new(8);
    (0..NUM_SEQUENCES).map(|_| random.tokens(PROMPT)).collect()
}

/// No policy: who needs a block takes one from the pool, and waits when there is none. The pool and the tables are the real ones, the
/// loop is not.
pub(crate) fn without_policy() -> Outcome {
    let pool = BlockPool::new(NUM_BLOCKS);
    let mut outcome = Outcome::default();
    let mut tables: Vec<(BlockTable, usize)> = Vec::new();
    for _ in 0..NUM_SEQUENCES {
        let mut table = BlockTable::new();
        table.extend(pool.allocate(PROMPT / BLOCK_SIZE).unwrap_or_default());
        tables.push((table, PROMPT));
    }
    outcome.peak = tables.iter().filter(|(table, _)| !table.is_empty()).count();
    for _ in 0..ROUNDS {
        for (table, num_tokens) in &mut tables {
            if *num_tokens == table.len() * BLOCK_SIZE {
                let Some(block) = pool.allocate_one() else { continue };
                table.push(block);
            }
            *num_tokens += 1;
        }
        outcome.progress.push(tables.iter().map(|(_, num_tokens)| num_tokens - PROMPT).sum());
        let is_done = |(_, num_tokens): &(BlockTable, usize)| *num_tokens == PROMPT + NEW_TOKENS;
        outcome.num_finished += tables.iter().filter(|sequence| is_done(sequence)).count();
        tables.retain(|sequence| !is_done(sequence));
    }
    outcome
}

/// The scheduler that serves. With `crowd` all four are let in while there is room, and then the room is taken away: they hold eight blocks
/// and no other is free, which admission alone would never allow.
pub(crate) fn scheduled(crowd: bool) -> Result<Outcome, LabError> {
    let num_blocks = if crowd { NUM_BLOCKS + SPARE } else { NUM_BLOCKS };
    let pool = BlockPool::new(num_blocks);
    let mut serving = Serving::over(&ServingConfig::roomy(num_blocks, BLOCK_SIZE), pool.clone());
    let prompts = prompts();
    for (id, prompt) in (0..).zip(&prompts) {
        serving.submit(Ask::new(id, prompt.clone(), NEW_TOKENS))?;
    }
    let mut outcome = Outcome::default();
    let mut tokens: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
    let mut taken = Vec::new();
    while !serving.scheduler().is_empty() {
        let Some(step) = serving.step()? else {
            return Err(LabError::Standstill { what: WHAT, num_left: prompts.len() - outcome.num_finished });
        };
        if crowd && taken.is_empty() {
            taken = pool.allocate(SPARE).unwrap_or_default();
        }
        outcome.peak = outcome.peak.max(step.rows.len());
        outcome.num_preempted += step.num_preempted;
        outcome.num_finished += step.finished().count();
        for &(id, token, _) in &step.tokens {
            if let Some(tokens) = tokens.get_mut(id as usize) {
                tokens.push(token);
            }
        }
        outcome.progress.push(tokens.iter().map(Vec::len).sum());
        serving.check(WHAT)?;
    }
    outcome.num_prompt_tokens = serving.scheduler().num_prompt_tokens_computed();
    let sampling = RowSampling { params: SamplingParams::GREEDY, sequence: 0, position: 0 };
    let undisturbed =
        |prompt: &Vec<u32>| pseudo_tokens(prompt, &sampling, (PSEUDO_LAYERS, VOCAB), NEW_TOKENS as u32, &[]);
    outcome.num_exact =
        prompts.iter().zip(&tokens).filter(|(prompt, tokens)| undisturbed(prompt) == **tokens).count();
    Ok(outcome)
}

fn row(name: &str, outcome: &Outcome) -> Vec<Cell> {
    // The naive loop has no engine.
    let computed = outcome.num_prompt_tokens;
    let prompt_tokens = if computed == 0 { Cell::Nothing } else { computed.into() };
    let steps =
        if outcome.num_finished == 0 { Cell::from("never ends") } else { outcome.progress.len().into() };
    vec![
        name.into(),
        outcome.peak.into(),
        outcome.num_finished.into(),
        outcome.progress.last().copied().unwrap_or(0).into(),
        steps,
        outcome.num_preempted.into(),
        prompt_tokens,
        outcome.num_exact.into(),
    ]
}

pub(crate) fn report() -> Result<Report, LabError> {
    let outcomes =
        [("no policy", without_policy()), ("preemption", scheduled(true)?), ("admission", scheduled(false)?)];
    let mut report = Report::new(
        Demonstration::Deadlock,
        "Everyone holds blocks and wants one more",
        "Eight blocks of 4 tokens, four prompts of 8 tokens, eight new tokens each. Once each sequence holds two blocks none is free, all four want a \
         third, and nobody will give one back before it ends. The way out is to take the blocks of the youngest (preemption: it is computed \
         again later); the way not to get there is to let in only who fits with its expected growth (admission).",
    );
    report.table(
        "The same four sequences",
        &[
            ("policy", ""),
            ("at once", ""),
            ("finished", ""),
            ("tokens", ""),
            ("steps", ""),
            ("preempted", ""),
            ("prompt tokens computed", ""),
            ("exact", ""),
        ],
        outcomes.iter().map(|(name, outcome)| row(name, outcome)).collect(),
    );
    report.note(
        "No policy: a loop of the demonstration's own over the real pool and tables. The others: the scheduler that serves. It would not admit all four, \
         so for the second row the demonstration lets them in on a larger pool and then holds the spare blocks itself. Exact: every token is that of \
         a run that nothing disturbed.",
    );
    let series = outcomes.iter().map(|(name, outcome)| Line {
        name: (*name).to_owned(),
        points: (1..)
            .zip(&outcome.progress)
            .map(|(step, tokens)| (f64::from(step), *tokens as f64))
            .collect(),
    });
    report.plot(
        "Tokens generated by all four",
        (Axis::of("step", ""), Axis::of("tokens", "")),
        Marks::Lines { series: series.collect() },
    );
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_policy_nobody_ever_generates_a_token() {
        let outcome = without_policy();
        assert_eq!((outcome.peak, outcome.num_finished), (4, 0));
        assert_eq!(outcome.progress, [0; ROUNDS]);
    }

    #[test]
    fn preemption_ends_all_four_with_the_right_tokens() {
        let outcome = scheduled(true).unwrap();
        assert_eq!((outcome.peak, outcome.num_finished, outcome.num_exact), (4, 4, 4));
        assert_eq!(outcome.progress.last(), Some(&32));
        assert!(outcome.num_preempted > 0);
        // Who was preempted computes its prompt once more.
        assert!(outcome.num_prompt_tokens > 32);
    }

    #[test]
    fn admission_never_gets_there() {
        let outcome = scheduled(false).unwrap();
        assert_eq!((outcome.num_finished, outcome.num_exact, outcome.num_preempted), (4, 4, 0));
        assert!(outcome.peak < 4);
        assert_eq!(outcome.num_prompt_tokens, 32);
    }
}
