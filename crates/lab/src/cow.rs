//! `cow`: five answers to one prompt share its blocks, and copy the last one when they first write to it.

use crate::device::KV_TOKEN_BYTES;
use crate::random::Random;
use crate::report::{Report, SlotRow, SlotState};
use crate::serving::{Ask, Serving, ServingConfig};
use crate::{Cell, Demonstration, LabError};

const BLOCK_SIZE: usize = 16;
const PROMPT: usize = 90;
/// Answers besides the first.
const FORKS: u64 = 4;

/// What is held, counted in the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cow {
    /// Blocks of the prompt, with all five sequences over them.
    pub(crate) shared: usize,
    /// Blocks that five sequences hold that share nothing.
    pub(crate) naive: usize,
    /// Blocks copied in the step in which each sequence writes its first token.
    pub(crate) copies: usize,
    /// Blocks after that step.
    pub(crate) after_one_token: usize,
    /// Blocks held as the sequences are given up one after the other, from right after the fork.
    pub(crate) as_holders_go: Vec<usize>,
    /// The same from after the first token on.
    pub(crate) as_writers_go: Vec<usize>,
    /// The prompt's table, which the forks share, and the five tables after the first token, as the plans have them.
    pub(crate) forked_table: Vec<u32>,
    pub(crate) written_tables: Vec<Vec<u32>>,
}

impl Cow {
    /// Holders of a shared block: so many must go before it is free.
    pub(crate) fn holders(&self) -> usize {
        holders(&self.as_holders_go)
    }

    /// The same after one sequence was given up.
    pub(crate) fn holders_after_release(&self) -> usize {
        holders(self.as_holders_go.get(1..).unwrap_or_default())
    }

    pub(crate) fn saved_mib(&self) -> usize {
        (self.naive - self.shared) * BLOCK_SIZE * KV_TOKEN_BYTES / (1024 * 1024)
    }
}

/// How many were given up until nothing was held.
fn holders(held: &[usize]) -> usize {
    held.iter().take_while(|held| **held > 0).count()
}

fn prompt() -> Vec<u32> {
    Random::new(90).tokens(PROMPT)
}

/// A worker that has computed the prompt for one sequence and its forks.
fn forked() -> Result<(Serving, Vec<u32>), LabError> {
    let mut serving = Serving::new(&ServingConfig::roomy(64, BLOCK_SIZE));
    serving.submit(Ask { siblings: (1..=FORKS).collect(), ..Ask::new(0, prompt(), 100) })?;
    let step = serving.step()?.unwrap_or_default();
    Ok((serving, step.rows.into_iter().next().map_or_else(Vec::new, |row| row.blocks)))
}

fn held(serving: &Serving) -> usize {
    serving.scheduler().pool().counts().held
}

/// Blocks held before, and after each sequence that is given up.
fn give_up(mut serving: Serving) -> Vec<usize> {
    let mut counts = vec![held(&serving)];
    for id in 0..=FORKS {
        serving.cancel(id);
        counts.push(held(&serving));
    }
    counts
}

pub(crate) fn shown() -> Result<Cow, LabError> {
    let (mut serving, forked_table) = forked()?;
    let shared = held(&serving);
    let step = serving.step()?.unwrap_or_default();
    serving.check("cow")?;
    let after_one_token = held(&serving);
    let mut apart = Serving::new(&ServingConfig::roomy(64, BLOCK_SIZE));
    for id in 0..=FORKS {
        apart.submit(Ask::new(id, prompt(), 100))?;
    }
    apart.step()?;
    Ok(Cow {
        shared,
        naive: held(&apart),
        copies: step.num_copies,
        after_one_token,
        as_holders_go: give_up(forked()?.0),
        as_writers_go: give_up(serving),
        forked_table,
        written_tables: step.rows.into_iter().map(|row| row.blocks).collect(),
    })
}

/// One row a table: a block that stands in several tables is shared, and `num_tokens` slots of each table are filled.
fn picture(tables: &[Vec<u32>], num_tokens: usize) -> Vec<SlotRow> {
    let holders = |id: u32| tables.iter().filter(|table| table.contains(&id)).count();
    let block = |(nth, &id): (usize, &u32)| {
        let state = if holders(id) > 1 { SlotState::Shared } else { SlotState::Used };
        let slot = |slot| if nth * BLOCK_SIZE + slot < num_tokens { state } else { SlotState::Empty };
        (format!("block {id}"), (0..BLOCK_SIZE).map(slot).collect())
    };
    let row = |(nth, table): (usize, &Vec<u32>)| SlotRow {
        name: format!("answer {}", nth + 1),
        blocks: table.iter().enumerate().map(block).collect(),
    };
    tables.iter().enumerate().map(row).collect()
}

pub(crate) fn report() -> Result<Report, LabError> {
    let cow = shown()?;
    let mut report = Report::new(
        Demonstration::Cow,
        "Several answers over one prompt's blocks",
        "A request for five answers computes its prompt once: the first answer's table is forked four times, and every block then has five holders. \
         Nobody may write a block with several holders: who does so first gets a copy (copy on write), and the last holder writes in place.",
    );
    let mib = |blocks: usize| blocks * BLOCK_SIZE * KV_TOKEN_BYTES / (1024 * 1024);
    let row = |what: &str, blocks: usize| vec![Cell::from(what), blocks.into(), mib(blocks).into()];
    report.table(
        "A prompt of 90 tokens in blocks of 16, answered five times (counted in the pool)",
        &[("state", ""), ("blocks held", ""), ("KV", "MiB")],
        vec![
            row("five sequences that share nothing", cow.naive),
            row("one sequence and its four forks", cow.shared),
            row("after the first token of each", cow.after_one_token),
        ],
    );
    report.table(
        "Counted",
        &[("what", ""), ("number", "")],
        vec![
            vec!["holders of each block after the forks".into(), cow.holders().into()],
            vec!["holders after one answer was given up".into(), cow.holders_after_release().into()],
            vec!["blocks copied for the first token of five".into(), cow.copies.into()],
            vec!["saved before the answers part, in MiB".into(), cow.saved_mib().into()],
        ],
    );
    let gone = |held: &[usize]| held.iter().map(usize::to_string).collect::<Vec<_>>().join(" > ");
    report.note(format!(
        "Holders are counted by giving the answers up one after the other. Blocks held meanwhile, right after the forks: {}; after the \
         first token: {}.",
        gone(&cow.as_holders_go),
        gone(&cow.as_writers_go)
    ));
    let forked = vec![cow.forked_table; 1 + FORKS as usize];
    report.slots("After the forks: six blocks, five holders each", picture(&forked, PROMPT));
    report.slots(
        "After one token each: the sixth block was copied four times",
        picture(&cow.written_tables, PROMPT + 1),
    );
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_answers_hold_six_blocks_and_ten_after_a_token_each() {
        let cow = shown().unwrap();
        assert_eq!((cow.shared, cow.naive, cow.copies, cow.after_one_token), (6, 30, 4, 10));
        assert_eq!(cow.as_holders_go, [6, 6, 6, 6, 6, 0]);
        assert_eq!(cow.as_writers_go, [10, 9, 8, 7, 6, 0]);
        assert_eq!((cow.holders(), cow.holders_after_release(), cow.saved_mib()), (5, 4, 192));
    }

    #[test]
    fn tables_share_five_blocks_and_have_the_sixth_alone() {
        let cow = shown().unwrap();
        assert_eq!((cow.forked_table.len(), cow.written_tables.len()), (6, 5));
        let last: std::collections::HashSet<u32> = cow.written_tables.iter().map(|table| table[5]).collect();
        assert_eq!(last.len(), 5);
        assert!(last.contains(&cow.forked_table[5]), "the last holder writes in place");
        assert!(cow.written_tables.iter().all(|table| table[..5] == cow.forked_table[..5]));
        let rows = picture(&cow.written_tables, 91);
        let states = |nth: usize| &rows[0].blocks[nth].1;
        assert!(states(4).iter().all(|state| *state == SlotState::Shared));
        assert_eq!(states(5).iter().filter(|state| **state == SlotState::Used).count(), 11);
    }
}
