//! `break`: a crowd on a small pool, with one mechanism after the other taken away.

use crate::crowd::Batching;
use crate::random::{Random, quantile};
use crate::report::{Axis, Bars, Marks, Report};
use crate::serving::{Ask, ServingConfig};
use crate::switches::{self, Outcome, Switches};
use crate::{Cell, Demonstration, LabError, crowd, guard};

const BLOCK_SIZE: usize = 16;
/// Slots of the pool.
const NUM_SLOTS: usize = 8_192;
const NUM_REQUESTS: usize = 120;
/// Tokens of a reply, as clients limit it; with the longest prompt the longest sequence.
const MAX_REPLY: usize = 384;
const MAX_PROMPT: usize = 128;
/// What the lab's admission keeps free for each sequence: less than a long reply takes, more than a short one.
const GROWTH_BLOCKS: usize = 3;

/// Three short replies for each long one.
pub(crate) fn asks() -> Vec<Ask> {
    let mut random = Random::new(120);
    let mut ask = |id: usize| {
        let prompt = random.between(32..=MAX_PROMPT);
        let reply = if id % 4 == 3 { random.between(256..=MAX_REPLY) } else { random.between(16..=64) };
        Ask { ends_after: Some(reply), ..Ask::new(id as u64, random.tokens(prompt), MAX_REPLY) }
    };
    (0..NUM_REQUESTS).map(&mut ask).collect()
}

fn serving(block_size: usize) -> ServingConfig {
    ServingConfig::roomy(NUM_SLOTS / block_size, block_size)
}

/// The scheduler that serves.
pub(crate) fn scheduled(config: &ServingConfig, batching: Batching) -> Result<Outcome, LabError> {
    let served = crowd::serve(config, batching, asks().into_iter().map(|ask| vec![ask]).collect())?;
    Ok(Outcome { num_finished: served.latencies.len(), served, ..Outcome::default() })
}

/// The lab's own scheduler.
pub(crate) fn switched(admission: bool, preemption: bool) -> Result<Outcome, LabError> {
    let admission = admission.then_some(GROWTH_BLOCKS);
    switches::serve(&serving(BLOCK_SIZE), Switches { admission, preemption }, asks())
}

/// Everyone reserves the longest sequence.
pub(crate) fn reserve_max() -> Result<Outcome, LabError> {
    let max_num_seqs = NUM_SLOTS / (MAX_PROMPT + MAX_REPLY);
    scheduled(&ServingConfig { max_num_seqs, ..serving(BLOCK_SIZE) }, Batching::Continuous)
}

type Named = (&'static str, Outcome);

fn row((off, outcome): &Named) -> Vec<Cell> {
    let served = &outcome.served;
    let ended = outcome.num_stuck == 0;
    vec![
        Cell::from(*off),
        outcome.num_finished.into(),
        outcome.num_stuck.into(),
        if ended { served.num_steps.into() } else { Cell::from("never ends") },
        if ended { Cell::Real(served.time.as_secs_f64(), 2) } else { Cell::Nothing },
        if ended { Cell::Real(quantile(&served.latencies, 0.5), 2) } else { Cell::Nothing },
        if ended { Cell::Real(served.longest_gap.as_secs_f64() * 1e3, 0) } else { Cell::Nothing },
        served.peak.into(),
        served.num_preempted.into(),
        served.num_prompt_tokens.into(),
        served.peak_entries.into(),
    ]
}

const COLUMNS: [(&str, &str); 11] = [
    ("off", ""),
    ("finished", ""),
    ("stuck", ""),
    ("steps", ""),
    ("all done", "s"),
    ("p50", "s"),
    ("worst gap", "ms"),
    ("peak", "seqs"),
    ("preempted", ""),
    ("prefilled", "tokens"),
    ("entries", ""),
];

pub(crate) fn report() -> Result<Report, LabError> {
    let mut report = Report::new(
        Demonstration::Break,
        "Each mechanism taken away in turn",
        "120 requests at once, three short replies for each long one, on a pool of 8,192 slots. What the scheduler that serves can be configured to do \
         runs on it; admission and preemption can't be turned off there, so those rows run on a small scheduler of the demonstration's own over the \
         real pool, tables and engine.",
    );
    let continuous = |block_size| scheduled(&serving(block_size), Batching::Continuous);
    let ours: [Named; 5] = [
        ("nothing", continuous(BLOCK_SIZE)?),
        ("paging: the longest reserved", reserve_max()?),
        ("block size: 1", continuous(1)?),
        ("block size: 1,024", continuous(1_024)?),
        ("continuous: whole batches", scheduled(&serving(BLOCK_SIZE), Batching::Static)?),
    ];
    let labs: [Named; 4] = [
        ("nothing", switched(true, true)?),
        ("admission", switched(false, true)?),
        ("preemption", switched(true, false)?),
        ("admission and preemption", switched(false, false)?),
    ];
    report.table("The scheduler that serves", &COLUMNS, ours.iter().map(row).collect());
    report.table("The demonstration's own scheduler", &COLUMNS, labs.iter().map(row).collect());
    guarded(&mut report)?;
    let all = ours.iter().chain(&labs[1..]).filter(|(_, outcome)| outcome.num_stuck == 0);
    let (categories, values) =
        all.map(|(off, outcome)| ((*off).to_owned(), outcome.served.time.as_secs_f64())).unzip();
    report.plot(
        "Time until all 120 are done, where they ever are",
        (Axis::of("off", ""), Axis::of("all done", "s")),
        Marks::Bars { categories, series: vec![Bars { name: "all done".to_owned(), values }] },
    );
    Ok(report)
}

/// The mechanism that no switch turns off.
fn guarded(report: &mut Report) -> Result<(), LabError> {
    let guard = guard::shown()?;
    let read = |name: &str, read: &guard::Read| {
        vec![
            Cell::from(name),
            format!("{:?}", read.reads).into(),
            format!("{:?}", read.given).into(),
            read.num_overwritten.into(),
            u64::from(read.token).into(),
            Cell::from(if read.token == guard.expected { "right" } else { "wrong" }),
        ]
    };
    report.table(
        "Counting holders: two sequences read one prompt's blocks, the first ends, a newcomer asks for blocks, the second reads on",
        &[
            ("pool", ""),
            ("second reads", "blocks"),
            ("newcomer got", "blocks"),
            ("overwritten", "slots"),
            ("next token", ""),
            ("which is", ""),
        ],
        vec![read("Baton's", &guard.counted), read("without counts (a model)", &guard.careless)],
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_preemption_a_low_estimate_ends_in_a_standstill() {
        let [whole, no_preemption, neither] =
            [(true, true), (true, false), (false, false)].map(|(a, p)| switched(a, p).unwrap());
        assert_eq!((whole.num_finished, whole.num_stuck), (NUM_REQUESTS, 0));
        for outcome in [&whole, &no_preemption, &neither] {
            assert_eq!(outcome.num_exact, outcome.num_finished);
        }
        assert!(
            no_preemption.num_stuck > 0 && no_preemption.num_finished < NUM_REQUESTS,
            "{no_preemption:?}"
        );
        assert!(neither.num_stuck > 0 && neither.num_finished < no_preemption.num_finished, "{neither:?}");
    }

    #[test]
    fn without_admission_work_is_thrown_away_and_done_again() {
        let (on, off) = (switched(true, true).unwrap(), switched(false, true).unwrap());
        assert_eq!((on.num_finished, off.num_finished), (NUM_REQUESTS, NUM_REQUESTS));
        assert_eq!(off.num_exact, NUM_REQUESTS);
        assert!(off.served.num_preempted > 2 * on.served.num_preempted, "{off:?}");
        assert!(off.served.num_prompt_tokens > on.served.num_prompt_tokens);
    }

    #[test]
    fn the_labs_scheduler_generates_as_many_tokens_as_the_one_that_serves() {
        let (ours, labs) =
            (scheduled(&serving(BLOCK_SIZE), Batching::Continuous).unwrap(), switched(true, true).unwrap());
        assert_eq!(ours.num_finished, NUM_REQUESTS);
        assert_eq!(ours.served.num_tokens, labs.served.num_tokens);
    }

    #[test]
    fn reserving_large_blocks_and_whole_batches_hold_fewer_and_take_longer() {
        let whole = scheduled(&serving(BLOCK_SIZE), Batching::Continuous).unwrap();
        for worse in [
            reserve_max().unwrap(),
            scheduled(&serving(1_024), Batching::Continuous).unwrap(),
            scheduled(&serving(BLOCK_SIZE), Batching::Static).unwrap(),
        ] {
            assert_eq!(worse.num_finished, NUM_REQUESTS);
            assert!(worse.served.peak < whole.served.peak, "{worse:?}");
            assert!(worse.served.time > whole.served.time, "{worse:?}");
        }
        let small = scheduled(&serving(1), Batching::Continuous).unwrap();
        assert!(small.served.peak_entries > 8 * whole.served.peak_entries, "{small:?}");
    }
}
