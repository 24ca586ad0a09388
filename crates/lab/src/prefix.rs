//! `prefix`: fifty prompts, of which some begin with the same 300 tokens.

use crate::random::Random;
use crate::report::{Axis, Bars, Marks, Report};
use crate::serving::{Ask, Serving, ServingConfig};
use crate::{Cell, Demonstration, LabError};

const BLOCK_SIZE: usize = 16;
const NUM_PROMPTS: usize = 50;
const PROMPT: usize = 340;
const SYSTEM: usize = 300;

/// Where the shared part stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shared {
    /// The first so many prompts begin with it.
    First(usize),
    /// Behind the part that differs, in all prompts.
    Behind,
}

/// What the prefix cache did for a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Counts {
    /// Tokens of all prompts.
    pub(crate) seen: usize,
    /// Of them computed.
    pub(crate) prefilled: u64,
    /// Blocks found, of all full blocks.
    pub(crate) hits: usize,
    pub(crate) blocks: usize,
    /// Virtual time of all prefills, in seconds.
    pub(crate) seconds: f64,
}

impl Counts {
    pub(crate) fn hit_rate(&self) -> f64 {
        100.0 * self.hits as f64 / self.blocks as f64
    }
}

fn prompts(shared: Shared) -> Vec<Vec<u32>> {
    let mut random = Random::new(300);
    let system = random.tokens(SYSTEM);
    let mut prompt = |nth| match shared {
        Shared::First(num) if nth < num => [system.clone(), random.tokens(PROMPT - SYSTEM)].concat(),
        Shared::First(_) => random.tokens(PROMPT),
        Shared::Behind => [random.tokens(PROMPT - SYSTEM), system.clone()].concat(),
    };
    (0..NUM_PROMPTS).map(&mut prompt).collect()
}

/// One prompt after the other through one worker.
pub(crate) fn counts(shared: Shared) -> Result<Counts, LabError> {
    let mut serving = Serving::new(&ServingConfig { cache: true, ..ServingConfig::roomy(2_048, BLOCK_SIZE) });
    let (mut seen, mut cached) = (0, 0);
    for (id, prompt) in (0..).zip(prompts(shared)) {
        seen += prompt.len();
        serving.submit(Ask::new(id, prompt, 1))?;
        serving.run("prefix", |step| cached += step.num_cached_tokens)?;
    }
    Ok(Counts {
        seen,
        prefilled: serving.scheduler().num_prompt_tokens_computed(),
        hits: cached / BLOCK_SIZE,
        blocks: NUM_PROMPTS * (PROMPT / BLOCK_SIZE),
        seconds: serving.now().as_secs_f64(),
    })
}

const CASES: [(&str, Shared); 4] = [
    ("all 50 begin with it", Shared::First(NUM_PROMPTS)),
    ("20 begin with it", Shared::First(20)),
    ("none has it", Shared::First(0)),
    ("all 50, behind 40 that differ", Shared::Behind),
];

pub(crate) fn report() -> Result<Report, LabError> {
    let mut report = Report::new(
        Demonstration::Prefix,
        "Prompts that begin alike",
        "Blocks are found again by a hash over their tokens and all tokens before them, so prompts that begin alike compute their common part once. \
         Only whole blocks count: of 300 common tokens 288, which are 18 blocks of 16. What comes before a block decides about it, so the part that \
         differs belongs at the end.",
    );
    let (mut rows, mut rates) = (Vec::new(), Vec::new());
    for (name, shared) in CASES {
        let counts = counts(shared)?;
        rates.push(counts.hit_rate());
        rows.push(vec![
            Cell::from(name),
            counts.seen.into(),
            counts.prefilled.into(),
            counts.hits.into(),
            counts.blocks.into(),
            Cell::Real(counts.hit_rate(), 1),
            Cell::Real(counts.seconds * 1e3, 0),
        ]);
    }
    report.table(
        "50 prompts of 340 tokens and a system prompt of 300, one after the other through the scheduler and its prefix cache",
        &[
            ("system prompt", ""),
            ("tokens seen", ""),
            ("prefilled", ""),
            ("blocks hit", ""),
            ("full blocks", ""),
            ("hit rate", "%"),
            ("prefill time", "ms"),
        ],
        rows,
    );
    report.plot(
        "Blocks found in the prefix cache",
        (Axis::of("system prompt", ""), Axis::of("hit rate", "%")),
        Marks::Bars {
            categories: ["all 50 first", "20 first", "none", "all 50 behind"].map(str::to_owned).to_vec(),
            series: vec![Bars { name: "hit rate".to_owned(), values: rates }],
        },
    );
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exact_counts_of_fifty_prompts() {
        let of = |shared| {
            let counts = counts(shared).unwrap();
            (counts.seen, counts.prefilled, counts.hits, counts.blocks, format!("{:.1}", counts.hit_rate()))
        };
        assert_eq!(of(Shared::First(50)), (17_000, 2_888, 882, 1_050, "84.0".to_owned()));
        assert_eq!(of(Shared::First(20)), (17_000, 11_528, 342, 1_050, "32.6".to_owned()));
        assert_eq!(of(Shared::First(0)), (17_000, 17_000, 0, 1_050, "0.0".to_owned()));
        assert_eq!(of(Shared::Behind), (17_000, 17_000, 0, 1_050, "0.0".to_owned()));
    }
}
