//! The naive ways to batch, as small models beside the scheduler: a batch that starts together and is over when its slowest member is.

use std::time::Duration;

use baton_timing::StepWork;

use crate::device::seconds;

/// A request that comes at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Arrival {
    pub(crate) at: Duration,
    /// Tokens of its prompt.
    pub(crate) prompt: usize,
    /// Tokens of its reply.
    pub(crate) reply: usize,
}

/// How a request fared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Served {
    pub(crate) arrival: Arrival,
    /// When its first step began, and when its reply was delivered.
    pub(crate) began: Duration,
    pub(crate) done: Duration,
}

impl Served {
    /// Seconds from its arrival to its first step.
    pub(crate) fn wait(&self) -> f64 {
        (self.began - self.arrival.at).as_secs_f64()
    }

    /// Seconds from its arrival to its reply.
    pub(crate) fn latency(&self) -> f64 {
        (self.done - self.arrival.at).as_secs_f64()
    }
}

/// How a load was served.
#[derive(Clone, Debug, Default)]
pub(crate) struct Run {
    pub(crate) served: Vec<Served>,
    /// Tokens of prompts and replies that were asked for, and all that rows were computed for.
    pub(crate) useful: usize,
    pub(crate) computed: usize,
}

impl Run {
    /// Percent of the computed tokens that nobody asked for.
    pub(crate) fn padding(&self) -> f64 {
        100.0 * (1.0 - self.useful as f64 / self.computed as f64)
    }

    fn add(&mut self, batch: &[Arrival]) {
        self.useful += batch.iter().map(|arrival| arrival.prompt + arrival.reply).sum::<usize>();
    }
}

/// Steps that a batch takes: those of its longest reply.
pub(crate) fn steps(replies: &[usize]) -> usize {
    replies.iter().copied().max().unwrap_or(0)
}

/// Percent of a batch's slots, over all its steps, that made a token somebody asked for.
pub(crate) fn occupancy(replies: &[usize]) -> f64 {
    100.0 * replies.iter().sum::<usize>() as f64 / (replies.len() * steps(replies)) as f64
}

/// Seconds of a step of rows that each add `num_new` tokens behind `position` others.
fn step(rows: impl Iterator<Item = (usize, usize)>) -> Duration {
    let mut work = StepWork::default();
    for (position, num_new) in rows {
        work.num_tokens += num_new as u64;
        work.num_context += (position + num_new) as u64;
        work.num_attended += (position * num_new + num_new * (num_new + 1) / 2) as u64;
    }
    Duration::from_secs_f64(seconds(&work))
}

/// The bus: leaves when `seats` have come (or nobody else will), pads every prompt and every reply to the longest, and lets everyone
/// out at the end of the line.
pub(crate) fn bus(arrivals: &[Arrival], seats: usize) -> Run {
    let mut run = Run::default();
    let mut now = Duration::ZERO;
    for batch in arrivals.chunks(seats) {
        let Some(last) = batch.last() else { continue };
        let began = now.max(last.at);
        let prompt = batch.iter().map(|arrival| arrival.prompt).max().unwrap_or(0);
        let reply = batch.iter().map(|arrival| arrival.reply).max().unwrap_or(0);
        now = began + step(batch.iter().map(|_| (0, prompt)));
        for nth in 1..reply {
            now += step(batch.iter().map(|_| (prompt + nth - 1, 1)));
        }
        run.add(batch);
        run.computed += batch.len() * (prompt + reply);
        run.served.extend(batch.iter().map(|&arrival| Served { arrival, began, done: now }));
    }
    run
}

/// A static batch at its best: leaves with whoever is there, pads nothing, delivers each reply when it is done; but nobody gets on before
/// the last one is off.
pub(crate) fn static_batches(arrivals: &[Arrival], seats: usize) -> Run {
    let mut run = Run::default();
    let mut now = Duration::ZERO;
    let mut left = arrivals;
    while let Some(first) = left.first() {
        now = now.max(first.at);
        let num = left.iter().take(seats).take_while(|arrival| arrival.at <= now).count();
        let (batch, rest) = left.split_at(num);
        left = rest;
        let began = now;
        let longest = batch.iter().map(|arrival| arrival.reply).max().unwrap_or(0);
        now += step(batch.iter().map(|arrival| (0, arrival.prompt)));
        for nth in 1..=longest {
            let ends = batch.iter().filter(|arrival| arrival.reply == nth);
            run.served.extend(ends.map(|&arrival| Served { arrival, began, done: now }));
            let rows = batch.iter().filter(|arrival| arrival.reply > nth);
            if nth < longest {
                now += step(rows.map(|arrival| (arrival.prompt + nth - 1, 1)));
            }
        }
        run.add(batch);
        run.computed += batch.iter().map(|arrival| arrival.prompt + arrival.reply).sum::<usize>();
    }
    run
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_slots_that_three_batches_use() {
        let batches: [[usize; 8]; 3] =
            [[8, 8, 8, 16, 16, 16, 64, 128], [8, 8, 8, 8, 16, 32, 128, 128], [8, 16, 16, 64, 64, 64, 64, 64]];
        let shown = batches.map(|batch| format!("{:.1}", occupancy(&batch)));
        assert_eq!(shown, ["25.8", "32.8", "70.3"]);
    }

    #[test]
    fn a_bus_waits_pads_and_lets_all_out_together() {
        let at = |ms| Duration::from_millis(ms);
        let arrivals = [
            Arrival { at: at(0), prompt: 10, reply: 2 },
            Arrival { at: at(50), prompt: 30, reply: 8 },
            Arrival { at: at(50), prompt: 20, reply: 4 },
        ];
        let run = bus(&arrivals, 2);
        assert_eq!(run.served.iter().map(|served| served.began).next(), Some(at(50)));
        assert_eq!(run.served[0].done, run.served[1].done);
        assert_eq!((run.useful, run.computed), (74, 2 * 38 + 24));
        let run = static_batches(&arrivals, 2);
        assert_eq!(run.served[0].began, at(0));
        assert_eq!((run.served.len(), run.useful, run.computed), (3, 74, 74));
        // Each reply of the second batch is delivered when it is done.
        let done = |reply| run.served.iter().find(|served| served.arrival.reply == reply).unwrap().done;
        assert!(done(4) < done(8));
    }
}
