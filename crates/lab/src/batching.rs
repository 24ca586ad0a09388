//! `batching`: a bus that waits until it is full and a turnstile that lets in whoever comes.

use std::collections::HashMap;
use std::time::Duration;

use crate::random::{Random, quantile};
use crate::report::{Axis, Bars, Line, Marks, Report};
use crate::serving::{Ask, Serving, ServingConfig};
use crate::static_batch::{Arrival, Run, Served, bus, occupancy, static_batches, steps};
use crate::{Cell, Demonstration, LabError};

const SLOTS: usize = 8;
const PROMPT: usize = 16;
const BATCHES: [[usize; SLOTS]; 3] =
    [[8, 8, 8, 16, 16, 16, 64, 128], [8, 8, 8, 8, 16, 32, 128, 128], [8, 16, 16, 64, 64, 64, 64, 64]];
/// Replies of this many tokens or fewer are short.
const SHORT: usize = 16;

fn config() -> ServingConfig {
    ServingConfig { max_num_seqs: SLOTS, ..ServingConfig::roomy(4_096, 16) }
}

/// Slots that make a token in each step, when the scheduler serves these replies and all are there from the beginning.
pub(crate) fn continuous_busy(replies: &[usize]) -> Result<Vec<usize>, LabError> {
    let mut serving = Serving::new(&config());
    let mut random = Random::new(5);
    for (id, reply) in (0..).zip(replies) {
        let prompt = random.tokens(PROMPT);
        serving.submit(Ask { ends_after: Some(*reply), ..Ask::new(id, prompt, 512) })?;
    }
    let mut busy = Vec::new();
    serving.run("batching", |step| busy.push(step.rows.len()))?;
    Ok(busy)
}

/// The same of batches that are served one after the other.
pub(crate) fn static_busy(replies: &[usize]) -> Vec<usize> {
    let busy = |batch: &[usize], step| batch.iter().filter(|reply| **reply > step).count();
    replies
        .chunks(SLOTS)
        .flat_map(|batch| (0..steps(batch)).map(|step| busy(batch, step)).collect::<Vec<_>>())
        .collect()
}

/// Percent of slots over all steps that made nothing.
pub(crate) fn idle(busy: &[usize]) -> f64 {
    100.0 * (1.0 - busy.iter().sum::<usize>() as f64 / (SLOTS * busy.len()) as f64)
}

/// Sixty-four replies, most of them short, a few long.
pub(crate) fn uneven() -> Vec<usize> {
    let mut random = Random::new(64);
    (0..64).filter_map(|_| random.pick(&[8, 8, 8, 16, 16, 32, 64, 128])).collect()
}

/// Requests that come independently, seven a second.
pub(crate) fn arrivals() -> Vec<Arrival> {
    let mut random = Random::new(7);
    let mut at = 0.0;
    let mut next = || {
        at += random.gap(1.0 / 7.0);
        let reply = random.pick(&[8, 8, 8, 16, 16, 32, 64, 128]).unwrap_or(8);
        Arrival { at: Duration::from_secs_f64(at), prompt: random.between(16..=256), reply }
    };
    (0..240).map(|_| next()).collect()
}

/// The turnstile: the scheduler that serves, with requests as they come.
pub(crate) fn turnstile(arrivals: &[Arrival]) -> Result<Run, LabError> {
    let mut serving = Serving::new(&config());
    let mut random = Random::new(9);
    let mut run = Run::default();
    let mut began: HashMap<u64, Duration> = HashMap::new();
    let mut to_come = (0u64..).zip(arrivals).peekable();
    loop {
        if serving.scheduler().is_empty() {
            let Some((_, arrival)) = to_come.peek() else { break };
            serving.wait_until(arrival.at);
        }
        while let Some((id, arrival)) = to_come.next_if(|(_, arrival)| arrival.at <= serving.now()) {
            let prompt = random.tokens(arrival.prompt);
            serving.submit(Ask { ends_after: Some(arrival.reply), ..Ask::new(id, prompt, 512) })?;
        }
        let start = serving.now();
        let Some(step) = serving.step()? else {
            return Err(LabError::Standstill {
                what: "batching",
                num_left: arrivals.len() - run.served.len(),
            });
        };
        for row in &step.rows {
            began.entry(row.id).or_insert(start);
            run.computed += row.num_tokens;
        }
        for id in step.finished() {
            let (Some(&arrival), Some(&began)) = (arrivals.get(id as usize), began.get(&id)) else {
                continue;
            };
            // Of a reply of n tokens n - 1 are computed again as input.
            run.computed += 1;
            run.useful += arrival.prompt + arrival.reply;
            run.served.push(Served { arrival, began, done: serving.now() });
        }
    }
    serving.check("batching")?;
    Ok(run)
}

fn latencies(served: &[Served], which: impl Fn(&Served) -> bool) -> Vec<f64> {
    served.iter().filter(|served| which(served)).map(Served::latency).collect()
}

fn is_short(served: &Served) -> bool {
    served.arrival.reply <= SHORT
}

fn arrivals_row(name: &str, run: &Run) -> Vec<Cell> {
    let waits: Vec<f64> = run.served.iter().map(Served::wait).collect();
    let (short, all) = (latencies(&run.served, is_short), latencies(&run.served, |_| true));
    let seconds = |values: &[f64], q| Cell::Real(quantile(values, q), 2);
    vec![
        name.into(),
        Cell::Real(quantile(&waits, 0.5), 3),
        Cell::Real(run.padding(), 1),
        seconds(&short, 0.5),
        seconds(&short, 0.99),
        seconds(&all, 0.5),
        seconds(&all, 0.99),
    ]
}

/// Three batches whose replies differ more and less.
fn given_batches(report: &mut Report) {
    let row = |batch: &[usize; SLOTS]| {
        let replies = batch.map(|reply| reply.to_string()).join(" ");
        let useful = batch.iter().sum::<usize>();
        let slot_steps = SLOTS * steps(batch);
        let occupancy = Cell::Real(occupancy(batch), 1);
        vec![Cell::from(replies), steps(batch).into(), useful.into(), slot_steps.into(), occupancy]
    };
    let columns = [
        ("tokens of the replies", ""),
        ("steps", ""),
        ("useful tokens", ""),
        ("slots x steps", ""),
        ("occupancy", "%"),
    ];
    report.table("Three static batches of eight replies", &columns, BATCHES.iter().map(row).collect());
}

/// Many replies that are all there from the beginning, eight at a time.
fn many_replies(report: &mut Report) -> Result<(), LabError> {
    let replies = uneven();
    let (fixed, continuous) = (static_busy(&replies), continuous_busy(&replies)?);
    let row = |name: &str, busy: &[usize]| {
        let (idle, occupancy) = (Cell::Real(idle(busy), 1), Cell::Real(100.0 - idle(busy), 1));
        vec![Cell::from(name), busy.len().into(), idle, occupancy]
    };
    report.table(
        "64 uneven replies (8 to 128 tokens) on 8 slots, all there from the beginning",
        &[("batching", ""), ("steps", ""), ("idle", "%"), ("occupancy", "%")],
        vec![row("static", &fixed), row("continuous", &continuous)],
    );
    let line = |name: &str, busy: &[usize]| Line {
        name: name.to_owned(),
        points: (1..).zip(busy).map(|(step, busy)| (f64::from(step), *busy as f64)).collect(),
    };
    report.plot(
        "Slots that make a token, 64 uneven replies",
        (Axis::of("step", ""), Axis::of("slots busy of 8", "")),
        Marks::Lines { series: vec![line("static", &fixed), line("continuous", &continuous)] },
    );
    let eighths = continuous.chunks(continuous.len().div_ceil(8)).map(|busy| 100.0 - idle(busy)).collect();
    let bars = |name: &str, values| Bars { name: name.to_owned(), values };
    report.plot(
        "Occupancy by batch; of the continuous one, by eighths of its steps",
        (Axis::of("batch", ""), Axis::of("occupancy", "%")),
        Marks::Bars {
            categories: (1..=8).map(|nth| format!("batch {nth}")).collect(),
            series: vec![
                bars("static", replies.chunks(SLOTS).map(occupancy).collect()),
                bars("continuous", eighths),
            ],
        },
    );
    Ok(())
}

/// Requests that come over time.
fn requests_over_time(report: &mut Report) -> Result<(), LabError> {
    let arrivals = arrivals();
    report.table(
        "240 requests, 7 a second; a short reply has 16 tokens or fewer",
        &[
            ("batching", ""),
            ("wait p50", "s"),
            ("padding", "%"),
            ("short p50", "s"),
            ("short p99", "s"),
            ("all p50", "s"),
            ("all p99", "s"),
        ],
        vec![
            arrivals_row("bus: full, padded, out together", &bus(&arrivals, SLOTS)),
            arrivals_row("static: whoever is there", &static_batches(&arrivals, SLOTS)),
            arrivals_row("continuous", &turnstile(&arrivals)?),
        ],
    );
    Ok(())
}

pub(crate) fn report() -> Result<Report, LabError> {
    let mut report = Report::new(
        Demonstration::Batching,
        "A bus and a turnstile",
        "A static batch starts together and ends with its longest reply: slots whose reply is done stay empty until then. A continuous batch is made anew \
         each step, so a slot is given on at once. Static: small models of the demonstration's own. Continuous: the scheduler that serves.",
    );
    given_batches(&mut report);
    many_replies(&mut report)?;
    requests_over_time(&mut report)?;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn continuous_batching_halves_the_steps_and_leaves_few_slots_idle() {
        let replies = uneven();
        let (fixed, continuous) = (static_busy(&replies), continuous_busy(&replies).unwrap());
        assert_eq!(fixed.iter().sum::<usize>(), replies.iter().sum::<usize>());
        assert_eq!(continuous.iter().sum::<usize>(), replies.iter().sum::<usize>());
        assert!(fixed.len() >= 2 * continuous.len(), "{} {}", fixed.len(), continuous.len());
        assert!(idle(&fixed) > 50.0 && idle(&continuous) < 20.0, "{} {}", idle(&fixed), idle(&continuous));
    }

    #[test]
    fn one_batch_alone_takes_the_same_steps_either_way() {
        for batch in &BATCHES {
            assert_eq!(continuous_busy(batch).unwrap(), static_busy(batch));
        }
    }

    #[test]
    fn the_bus_waits_and_pads_and_the_turnstile_does_neither() {
        let arrivals = arrivals();
        let runs = [bus(&arrivals, SLOTS), static_batches(&arrivals, SLOTS), turnstile(&arrivals).unwrap()];
        assert!(runs.iter().all(|run| run.served.len() == arrivals.len()));
        let short = runs.each_ref().map(|run| quantile(&latencies(&run.served, is_short), 0.5));
        assert!(short[0] > 2.0 * short[2] && short[1] > 1.5 * short[2], "{short:?}");
        assert!(runs[0].padding() > 30.0, "{}", runs[0].padding());
        assert_eq!((runs[1].padding(), runs[2].padding()), (0.0, 0.0));
        let wait = runs
            .each_ref()
            .map(|run| quantile(&run.served.iter().map(Served::wait).collect::<Vec<_>>(), 0.5));
        assert!(wait[0] > 10.0 * wait[2], "{wait:?}");
    }
}
