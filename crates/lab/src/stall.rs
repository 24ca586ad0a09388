//! `stall`: thirty-two replies are under way when a prompt of 2,048 tokens arrives.

use baton_timing::StepWork;

use crate::device::{bytes, macs, seconds};
use crate::random::Random;
use crate::report::{Axis, Bars, Line, Marks, Report};
use crate::serving::{Ask, Serving, ServingConfig, Step};
use crate::transfer::{self, Link, Sent};
use crate::{Cell, Demonstration, LabError, ratios};

const WHAT: &str = "stall";
const NUM_REPLIES: u64 = 32;
/// Tokens that each reply attends over in the step in which the prompt arrives.
const CONTEXT: usize = 512;
pub(crate) const PROMPT: usize = 2_048;
const PROMPT_ID: u64 = 99;
/// How the prompt is cut.
const CHUNKS: [(&str, usize); 4] =
    [("whole prompt", PROMPT), ("chunks of 512", 512), ("chunks of 256", 256), ("chunks of 128", 128)];
/// Steps that the plot shows, the one before the prompt included.
const PLOTTED: usize = 24;

/// What a step takes, in milliseconds, each way of counting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Prices {
    /// The prompt's rows in a pass of their own, the replies' in another: weights are read twice.
    pub(crate) separate: f64,
    /// All rows in one pass, as Baton's engines run a plan: weights are read once. A chunk attends over the whole prompt.
    pub(crate) fused: f64,
    /// The timing engine's own prediction: as fused, but a chunk attends only over what is before it.
    pub(crate) engine: f64,
}

/// What a plan's rows cost, the prompt's and the others'. As the source of the figures counts, each new token of the prompt attends over all
/// of the prompt, and all of its KV is read.
fn works(step: &Step) -> (StepWork, StepWork) {
    let (mut prompt, mut replies) = (StepWork::default(), StepWork::default());
    for row in &step.rows {
        let is_prompt = row.id == PROMPT_ID;
        let work = if is_prompt { &mut prompt } else { &mut replies };
        let context = if is_prompt { PROMPT } else { row.position + row.num_tokens } as u64;
        work.num_tokens += row.num_tokens as u64;
        work.num_context += context;
        work.num_attended += context * row.num_tokens as u64;
    }
    (prompt, replies)
}

fn sum(a: &StepWork, b: &StepWork) -> StepWork {
    StepWork {
        num_tokens: a.num_tokens + b.num_tokens,
        num_attended: a.num_attended + b.num_attended,
        num_context: a.num_context + b.num_context,
    }
}

/// Milliseconds of a pass; one without rows is not run.
fn pass_ms(work: &StepWork) -> f64 {
    if work.num_tokens == 0 { 0.0 } else { seconds(work) * 1e3 }
}

fn prices(step: &Step) -> Prices {
    let (prompt, replies) = works(step);
    Prices {
        separate: pass_ms(&prompt) + pass_ms(&replies),
        fused: pass_ms(&sum(&prompt, &replies)),
        engine: step.took.as_secs_f64() * 1e3,
    }
}

/// A worker on which [`NUM_REPLIES`] run, each about to attend over [`CONTEXT`] tokens; beside them it computes `chunk` tokens of a prompt
/// a step.
fn replies_under_way(chunk: usize) -> Result<Serving, LabError> {
    let config = ServingConfig { local_prefill_tokens: chunk, ..ServingConfig::roomy(8_192, 16) };
    let mut serving = Serving::new(&config);
    let mut random = Random::new(512);
    for id in 0..NUM_REPLIES {
        serving.submit(Ask::new(id, random.tokens(CONTEXT - 1), 200))?;
    }
    serving.step()?;
    Ok(serving)
}

fn next_step(serving: &mut Serving) -> Result<Step, LabError> {
    serving.step()?.ok_or(LabError::Standstill { what: WHAT, num_left: NUM_REPLIES as usize })
}

/// The step in which the prompt's first chunk runs.
pub(crate) fn first_chunk(chunk: usize) -> Result<Step, LabError> {
    let mut serving = replies_under_way(chunk)?;
    serving.submit(Ask::new(PROMPT_ID, Random::new(2_048).tokens(PROMPT), 2))?;
    next_step(&mut serving)
}

/// The step without a prompt.
pub(crate) fn replies_alone() -> Result<Step, LabError> {
    next_step(&mut replies_under_way(PROMPT)?)
}

/// The prompt without replies.
pub(crate) fn prompt_alone() -> Result<Step, LabError> {
    let mut serving = Serving::new(&ServingConfig::roomy(8_192, 16));
    serving.submit(Ask::new(PROMPT_ID, Random::new(2_048).tokens(PROMPT), 2))?;
    next_step(&mut serving)
}

/// Fused milliseconds of each step, from the one before the prompt on.
fn gaps(chunk: usize) -> Result<Vec<f64>, LabError> {
    let mut serving = replies_under_way(chunk)?;
    let mut gaps = vec![prices(&next_step(&mut serving)?).fused];
    serving.submit(Ask::new(PROMPT_ID, Random::new(2_048).tokens(PROMPT), 2))?;
    while gaps.len() < PLOTTED {
        let step = next_step(&mut serving)?;
        gaps.push(prices(&step).fused);
    }
    Ok(gaps)
}

/// Steps that the prompt takes, cut like this.
fn num_steps(chunk: usize) -> usize {
    PROMPT.div_ceil(chunk)
}

/// What a prompt and a step of replies take when each has the device to itself.
fn alone(report: &mut Report) -> Result<(), LabError> {
    let row = |name: &str, step: &Step| {
        let (prompt, replies) = works(step);
        let work = sum(&prompt, &replies);
        let (macs, bytes) = (macs(&work), bytes(&work));
        vec![
            Cell::from(name),
            Cell::Real(macs / 1e9, 1),
            Cell::Real(bytes / 1e9, 1),
            Cell::Real(macs / bytes, 2),
            Cell::Real(pass_ms(&work), 2),
        ]
    };
    report.table(
        "Each alone: a prompt is bound by arithmetic, a step of replies by memory",
        &[
            ("pass", ""),
            ("multiply-adds", "1e9"),
            ("bytes read", "GB"),
            ("intensity", "MAC/B"),
            ("takes", "ms"),
        ],
        vec![row("prompt of 2,048", &prompt_alone()?), row("32 replies at 512", &replies_alone()?)],
    );
    Ok(())
}

/// What they take together, however the prompt is cut.
fn together(report: &mut Report) -> Result<(), LabError> {
    let calm = prices(&replies_alone()?);
    let row = |name: &str, steps: Cell, prices: &Prices| {
        let times = |ms: f64, calm: f64| Cell::Real(ms / calm, 1);
        vec![
            name.into(),
            steps,
            Cell::Real(prices.separate, 2),
            times(prices.separate, calm.separate),
            Cell::Real(prices.fused, 2),
            times(prices.fused, calm.fused),
            Cell::Real(prices.engine, 2),
        ]
    };
    let mut rows = vec![row("no prompt", Cell::Nothing, &calm)];
    for (name, chunk) in CHUNKS {
        rows.push(row(name, num_steps(chunk).into(), &prices(&first_chunk(chunk)?)));
    }
    report.table(
        "The gap between two tokens of every reply while the prompt is computed beside them (from the scheduler's plans)",
        &[
            ("the prompt comes as", ""),
            ("steps", ""),
            ("separate", "ms"),
            ("times", ""),
            ("fused", "ms"),
            ("times", ""),
            ("engine", "ms"),
        ],
        rows,
    );
    report.note(
        "Separate: prompt and replies in passes of their own, so weights are read twice. Fused: all rows in one pass, as Baton runs a plan. Engine: \
         the timing engine's own prediction, in which a chunk attends only over what is before it.",
    );
    Ok(())
}

fn transfers(report: &mut Report) -> Result<(), LabError> {
    let sent = transfer::LINKS.map(|gbps| transfer::send_prompt(Link { gbps }));
    let sent: Vec<Sent> = sent.into_iter().collect::<Result<_, LabError>>()?;
    let row = |(gbps, sent): (&f64, &Sent)| {
        let ms = |seconds: f64| Cell::Real(seconds * 1e3, 0);
        vec![
            Cell::Real(*gbps, 0),
            ms(sent.wire_s),
            ms(sent.exposed_at_end_s()),
            ms(sent.hidden_s()),
            Cell::Real(sent.exposed_s() * 1e3, 1),
        ]
    };
    report.table(
        "What moving the prompt elsewhere adds: its 1 GiB of KV at 90 % of a link; Baton sends each layer when it is computed",
        &[
            ("link", "Gb/s"),
            ("transfer", "ms"),
            ("exposed if sent at the end", "ms"),
            ("hidden by layers", "ms"),
            ("exposed by layers", "ms"),
        ],
        transfer::LINKS.iter().zip(&sent).map(row).collect(),
    );
    report.note(
        "The link is a model of the demonstration's own: it takes layers in the order in which the timing engine completes them, each an equal part \
         of the step.",
    );
    let bars = |name: &str, of: fn(&Sent) -> f64| Bars {
        name: name.to_owned(),
        values: sent.iter().map(|sent| of(sent) * 1e3).collect(),
    };
    report.plot(
        "What a decode worker waits for the KV of a prompt, after it is computed",
        (Axis::of("link", ""), Axis::of("exposed transfer", "ms")),
        Marks::Bars {
            categories: transfer::LINKS.iter().map(|gbps| format!("{gbps} Gb/s")).collect(),
            series: vec![bars("sent at the end", Sent::exposed_at_end_s), bars("by layers", Sent::exposed_s)],
        },
    );
    Ok(())
}

/// The gaps by step, and the first of them both ways of counting.
fn plots(report: &mut Report) -> Result<(), LabError> {
    let mut series = Vec::new();
    for (name, chunk) in [CHUNKS[0], CHUNKS[1], CHUNKS[3]] {
        let points = (0..).zip(gaps(chunk)?).map(|(step, gap)| (f64::from(step), gap)).collect();
        series.push(Line { name: name.to_owned(), points });
    }
    report.plot(
        "Gap between two tokens of a reply; the prompt arrives before step 1 (fused)",
        (Axis::of("step", ""), Axis::of("gap", "ms")),
        Marks::Lines { series },
    );
    let prices = CHUNKS.map(|(_, chunk)| Ok(prices(&first_chunk(chunk)?)));
    let prices: Vec<Prices> = prices.into_iter().collect::<Result<_, LabError>>()?;
    let bars = |name: &str, of: fn(&Prices) -> f64| Bars {
        name: name.to_owned(),
        values: prices.iter().map(of).collect(),
    };
    report.plot(
        "The same gap, counted as separate passes and as one",
        (Axis::of("the prompt comes as", ""), Axis::of("gap", "ms")),
        Marks::Bars {
            categories: CHUNKS.map(|(name, _)| name.to_owned()).to_vec(),
            series: vec![
                bars("separate passes", |prices| prices.separate),
                bars("fused step", |prices| prices.fused),
            ],
        },
    );
    Ok(())
}

pub(crate) fn report() -> Result<Report, LabError> {
    let mut report = Report::new(
        Demonstration::Stall,
        "What a long prompt does to replies under way",
        "On one device a prompt holds up every reply in its batch. Chunks make each wait shorter and their number larger; a device of its own for prompts \
         takes the wait away and adds a transfer. A model of 13.5 GB on a device of 156e12 multiply-adds and 2.0e12 bytes a second; a pass takes the larger of \
         arithmetic and reading.",
    );
    alone(&mut report)?;
    together(&mut report)?;
    plots(&mut report)?;
    transfers(&mut report)?;
    ratios::add(&mut report)?;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(values: &[f64]) -> Vec<String> {
        values.iter().map(|value| format!("{value:.2}")).collect()
    }

    #[test]
    fn a_prompt_and_replies_alone() {
        let (prompt, none) = works(&prompt_alone().unwrap());
        assert_eq!(none, StepWork::default());
        assert_eq!(format!("{:.1}", macs(&prompt) / 1e9), "11407.4");
        assert_eq!(format!("{:.1}", bytes(&prompt) / 1e9), "14.6");
        assert_eq!(format!("{:.1}", macs(&prompt) / bytes(&prompt)), "783.8");
        assert_eq!(shown(&[pass_ms(&prompt)]), ["73.12"]);
        let (none, replies) = works(&replies_alone().unwrap());
        assert_eq!((none, replies.num_tokens, replies.num_context), (StepWork::default(), 32, 32 * 512));
        assert_eq!(format!("{:.1}", macs(&replies) / 1e9), "165.4");
        assert_eq!(format!("{:.1}", bytes(&replies) / 1e9), "22.1");
        assert_eq!(shown(&[macs(&replies) / bytes(&replies), pass_ms(&replies)]), ["7.49", "11.03"]);
    }

    #[test]
    fn separate_passes_and_fused_steps() {
        let prices = [2_048, 512, 256, 128].map(|chunk| prices(&first_chunk(chunk).unwrap()));
        assert_eq!(shown(&prices.map(|price| price.separate)), ["84.16", "29.32", "20.18", "18.31"]);
        assert_eq!(shown(&prices.map(|price| price.fused)), ["74.18", "19.34", "11.57", "11.57"]);
        assert_eq!(format!("{:.1}", prices[0].separate / 11.03), "7.6");
        // The engine's first chunk attends over less than the whole prompt.
        assert!(prices.iter().all(|price| price.engine < price.fused));
    }

    #[test]
    fn a_stall_lasts_as_long_as_the_prompt_has_chunks() {
        let calm = |gaps: &[f64]| gaps.iter().filter(|gap| **gap < 11.5).count();
        for (chunk, num_steps) in [(2_048, 1), (512, 4), (128, 16)] {
            let gaps = gaps(chunk).unwrap();
            assert_eq!(calm(&gaps[1..=num_steps]), 0, "{gaps:?}");
            assert!(
                gaps[1] > [74.0, 19.0, 11.5][usize::from(chunk < 2_048) + usize::from(chunk < 512)],
                "{gaps:?}"
            );
            assert!(gaps[0] < 11.5 && gaps[num_steps + 1] < 12.2, "{gaps:?}");
        }
    }
}
