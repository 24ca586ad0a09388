//! `memory`: three ways to hand out 40 GiB of KV, under one load.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use crate::contiguous::Contiguous;
use crate::device::KV_TOKEN_BYTES;
use crate::random::Random;
use crate::report::{Axis, Bars, Line, Marks, Report};
use crate::serving::{Ask, Serving, ServingConfig};
use crate::{Cell, Demonstration, LabError};

const WHAT: &str = "memory";
/// Slots for tokens in 40 GiB.
const NUM_SLOTS: usize = (40 << 30) / KV_TOKEN_BYTES;
/// Tokens of the longest sequence that may be asked for.
const MAX_LEN: usize = 2_048;
const BLOCK_SIZE: usize = 16;
const SWEEP: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024];

/// One request of the load.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The step in which it comes. It is admitted then, or rejected.
    at: usize,
    prompt: Vec<u32>,
    /// Tokens of its reply, and how many the client allowed.
    reply: usize,
    max_reply: usize,
}

/// Requests at a rate that grows steadily, from none to eight a step, so that every way fills up after sequences have come and gone;
/// replies are far shorter than what clients allow.
pub(crate) fn load() -> Vec<Request> {
    let mut random = Random::new(40);
    let mut request = |nth: usize| {
        let prompt = random.between(32..=256);
        let reply = random.between(16..=192);
        let max_reply = random.pick(&[256, 512, 1_024]).unwrap_or(256);
        let at = (80.0 * nth as f64).sqrt() as usize;
        Request { at, prompt: random.tokens(prompt), reply, max_reply }
    };
    (0..1_200).map(&mut request).collect()
}

/// Why somebody was turned away, in slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rejection {
    pub(crate) wanted: usize,
    /// In all.
    pub(crate) free: usize,
    /// The longest run of free slots; `None` where no run is needed, since any block is as good as any other.
    pub(crate) biggest_hole: Option<usize>,
}

/// What a way to hand out memory did with the load.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// Sequences at once, at most.
    pub(crate) peak: usize,
    pub(crate) admitted: usize,
    pub(crate) rejected: usize,
    pub(crate) first_rejection: Option<Rejection>,
    /// Slots held and never used, summed over all admitted requests when they ended.
    pub(crate) waste: usize,
    /// Slots that they held then.
    pub(crate) held: usize,
    /// Entries of all block tables, at most.
    pub(crate) peak_entries: usize,
    pub(crate) num_preempted: usize,
}

impl Outcome {
    fn waste_percent(&self) -> f64 {
        100.0 * self.waste as f64 / self.held as f64
    }
}

/// Contiguous reservations of what `reserved` says, first fit: a model of the demonstration's own. Every live sequence adds a token a step,
/// as in a batch that is made anew each step.
pub(crate) fn contiguous(load: &[Request], reserved: impl Fn(&Request) -> usize) -> Outcome {
    let mut memory = Contiguous::new(NUM_SLOTS);
    let mut live: BTreeMap<usize, Vec<(usize, Range<usize>)>> = BTreeMap::new();
    let mut outcome = Outcome::default();
    let mut num_live = 0;
    for request in load {
        while let Some(ended) = live.first_entry().filter(|ended| *ended.key() <= request.at) {
            for (used, run) in ended.remove() {
                outcome.held += run.len();
                outcome.waste += run.len() - used;
                num_live -= 1;
                memory.release(run);
            }
        }
        let wanted = reserved(request);
        match memory.reserve(wanted) {
            Some(run) => {
                let used = request.prompt.len() + request.reply - 1;
                live.entry(request.at + request.reply).or_default().push((used, run));
                num_live += 1;
                outcome.admitted += 1;
                outcome.peak = outcome.peak.max(num_live);
            }
            None => {
                outcome.rejected += 1;
                let biggest_hole = Some(memory.biggest_hole());
                let found = Rejection { wanted, free: memory.free(), biggest_hole };
                outcome.first_rejection.get_or_insert(found);
            }
        }
    }
    for (used, run) in live.into_values().flatten() {
        outcome.held += run.len();
        outcome.waste += run.len() - used;
    }
    outcome
}

/// Blocks on demand: the scheduler that serves, its admission and its pool. Who is not admitted in the step in which it comes is turned
/// away.
pub(crate) fn paged(load: &[Request], block_size: usize) -> Result<Outcome, LabError> {
    let config = ServingConfig::roomy(NUM_SLOTS / block_size, block_size);
    let mut serving = Serving::new(&config);
    let mut outcome = Outcome::default();
    // Of each live sequence the tokens and blocks of its last step.
    let mut live: BTreeMap<u64, (usize, usize)> = BTreeMap::new();
    let mut to_come = (0u64..).zip(load).peekable();
    let mut now = 0;
    while to_come.peek().is_some() || !serving.scheduler().is_empty() {
        let mut new = Vec::new();
        while let Some((id, request)) = to_come.next_if(|(_, request)| request.at <= now) {
            let ask = Ask::new(id, request.prompt.clone(), request.max_reply);
            serving.submit(Ask { ends_after: Some(request.reply), ..ask })?;
            new.push((id, request));
        }
        now += 1;
        let step = serving.step()?.unwrap_or_default();
        outcome.num_preempted += step.num_preempted;
        outcome.peak = outcome.peak.max(step.rows.len());
        outcome.peak_entries = outcome.peak_entries.max(step.rows.iter().map(|row| row.blocks.len()).sum());
        let computed: HashSet<u64> = step.rows.iter().map(|row| row.id).collect();
        for (id, request) in new {
            if computed.contains(&id) {
                outcome.admitted += 1;
            } else {
                serving.cancel(id);
                outcome.rejected += 1;
                let free = serving.scheduler().pool().counts().free * block_size;
                let wanted = request.prompt.len().div_ceil(block_size) * block_size;
                outcome.first_rejection.get_or_insert(Rejection { wanted, free, biggest_hole: None });
            }
        }
        for row in &step.rows {
            live.insert(row.id, (row.position + row.num_tokens, row.blocks.len() * block_size));
        }
        for (used, held) in step.finished().filter_map(|id| live.remove(&id)) {
            outcome.held += held;
            outcome.waste += held - used;
        }
    }
    serving.check(WHAT)?;
    Ok(outcome)
}

/// A hundred sequences of 200 tokens: slots that reservations of 4,096 take, slots with a token, and slots that blocks of 16 take.
pub(crate) fn hundred() -> Result<(usize, usize, usize), LabError> {
    const RESERVED: usize = 4_096;
    let mut memory = Contiguous::new(100 * RESERVED);
    let reserved = (0..100).filter_map(|_| memory.reserve(RESERVED)).map(|run| run.len()).sum();
    let mut serving = Serving::new(&ServingConfig::roomy(2_048, BLOCK_SIZE));
    let mut random = Random::new(200);
    for id in 0..100 {
        serving.submit(Ask::new(id, random.tokens(200), 2))?;
    }
    let step = serving.step()?.unwrap_or_default();
    let used = step.rows.iter().map(|row| row.num_tokens).sum();
    Ok((reserved, used, serving.scheduler().pool().counts().held * BLOCK_SIZE))
}

fn way_row(name: &str, outcome: &Outcome) -> Vec<Cell> {
    let first = outcome.first_rejection;
    let cell = |slots: Option<usize>| slots.map_or(Cell::Nothing, Cell::from);
    let (wanted, free) = (cell(first.map(|first| first.wanted)), cell(first.map(|first| first.free)));
    let hole = cell(first.and_then(|first| first.biggest_hole));
    let (peak, admitted, rejected) = (outcome.peak.into(), outcome.admitted.into(), outcome.rejected.into());
    vec![name.into(), peak, admitted, rejected, wanted, free, hole, Cell::Real(outcome.waste_percent(), 1)]
}

fn three_ways(report: &mut Report, ways: &[(&str, &Outcome)]) {
    report.table(
        "40 GiB at 512 KiB a token (81,920 slots); 1,200 requests, more and more a step, admitted at once or rejected",
        &[
            ("memory", ""),
            ("peak", "seqs"),
            ("admitted", ""),
            ("rejected", ""),
            ("first: wanted", "slots"),
            ("free", "slots"),
            ("biggest hole", "slots"),
            ("wasted", "%"),
        ],
        ways.iter().map(|(name, outcome)| way_row(name, outcome)).collect(),
    );
    report.plot(
        "Sequences held at once, at most",
        (Axis::of("memory", ""), Axis::of("sequences", "")),
        Marks::Bars {
            categories: ways.iter().map(|(name, _)| (*name).to_owned()).collect(),
            series: vec![Bars {
                name: "peak".to_owned(),
                values: ways.iter().map(|(_, outcome)| outcome.peak as f64).collect(),
            }],
        },
    );
}

fn block_sizes(report: &mut Report, sweep: &[(usize, Outcome)]) {
    let row = |(size, outcome): &(usize, Outcome)| {
        vec![
            Cell::from(*size),
            outcome.peak.into(),
            outcome.admitted.into(),
            outcome.rejected.into(),
            outcome.waste.into(),
            Cell::Real(outcome.waste_percent(), 1),
            outcome.peak_entries.into(),
        ]
    };
    report.table(
        "Block size: small blocks waste less, large ones need shorter tables",
        &[
            ("block", "tokens"),
            ("peak", "seqs"),
            ("admitted", ""),
            ("rejected", ""),
            ("wasted", "slots"),
            ("wasted", "%"),
            ("table entries at peak", ""),
        ],
        sweep.iter().map(row).collect(),
    );
    let points = sweep.iter().map(|(size, outcome)| (*size as f64, outcome.waste_percent())).collect();
    report.plot(
        "Slots held and never used",
        (Axis { label: "block size", unit: "tokens", doublings: true }, Axis::of("wasted", "%")),
        Marks::Lines { series: vec![Line { name: "wasted".to_owned(), points }] },
    );
}

pub(crate) fn report() -> Result<Report, LabError> {
    let mut report = Report::new(
        Demonstration::Memory,
        "Three ways to hand out KV memory",
        "Who reserves one run of slots for the longest possible reply, or for what the client allowed, holds slots that most replies never reach, and leaves \
         holes between runs that nobody fits in. Blocks on demand waste at most the rest of each last block. Reservations: small models of the \
         demonstration's own. Blocks: the scheduler that serves.",
    );
    let load = load();
    let longest = contiguous(&load, |_| MAX_LEN);
    let requested = contiguous(&load, |request| request.prompt.len() + request.max_reply);
    let in_blocks = paged(&load, BLOCK_SIZE)?;
    let ways = [
        ("2,048 reserved", &longest),
        ("what was asked, first fit", &requested),
        ("blocks of 16", &in_blocks),
    ];
    three_ways(&mut report, &ways);
    report.note(
        "Where blocks are free and a request is rejected, the scheduler keeps them for the growth of those that run.",
    );
    let sized = |size| if size == BLOCK_SIZE { Ok(in_blocks.clone()) } else { paged(&load, size) };
    let sweep: Vec<(usize, Outcome)> =
        SWEEP.into_iter().map(|size| Ok((size, sized(size)?))).collect::<Result<_, LabError>>()?;
    block_sizes(&mut report, &sweep);
    let (reserved, used, paged) = hundred()?;
    report.table(
        "100 sequences that use 200 tokens each",
        &[("reserved at 4,096", "slots"), ("used", "slots"), ("held in blocks of 16", "slots")],
        vec![vec![reserved.into(), used.into(), paged.into()]],
    );
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forty_reservations_fit_and_paging_holds_five_times_as_many() {
        let load = load();
        let longest = contiguous(&load, |_| MAX_LEN);
        assert_eq!((NUM_SLOTS, longest.peak), (81_920, 40));
        let first = Rejection { wanted: 2_048, free: 0, biggest_hole: Some(0) };
        assert_eq!(longest.first_rejection, Some(first));
        let requested = contiguous(&load, |request| request.prompt.len() + request.max_reply);
        // Enough is free, and nowhere in one run.
        let Rejection { wanted, free, biggest_hole } = requested.first_rejection.unwrap();
        assert!(free >= wanted && Some(wanted) > biggest_hole, "{wanted} {free} {biggest_hole:?}");
        let paged = paged(&load, BLOCK_SIZE).unwrap();
        assert!(paged.peak >= 5 * 40, "{paged:?}");
        assert!(longest.peak < requested.peak && requested.peak < paged.peak);
        for outcome in [&longest, &requested, &paged] {
            assert_eq!(outcome.admitted + outcome.rejected, load.len());
        }
        assert!(paged.waste_percent() < 5.0 && longest.waste_percent() > 80.0);
    }

    #[test]
    fn larger_blocks_waste_more_and_need_fewer_entries() {
        let load = load();
        let outcomes: Vec<Outcome> = SWEEP.iter().map(|&size| paged(&load, size).unwrap()).collect();
        assert_eq!(outcomes[0].waste, 0);
        for pair in outcomes.windows(2) {
            assert!(pair[0].waste_percent() < pair[1].waste_percent(), "{pair:?}");
            assert!(pair[0].peak_entries > pair[1].peak_entries, "{pair:?}");
        }
        let largest = outcomes.last().unwrap();
        assert!(largest.peak <= 80, "{largest:?}");
    }

    #[test]
    fn a_hundred_sequences_of_200_tokens() {
        assert_eq!(hundred().unwrap(), (409_600, 20_000, 20_800));
    }
}
