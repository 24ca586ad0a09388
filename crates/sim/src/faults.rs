//! Trouble: what, when and to whom.

use std::time::Duration;

use crate::network::Weather;
use crate::queue::{Event, Queue};
use crate::random::Random;
use crate::{Faults, Shape};

/// One piece of trouble, or its end.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The process is gone at once; another one starts in its place.
    Kill { worker: usize, down: Duration },
    /// The new process is there, with a new instance id.
    Restart { worker: usize },
    /// The process stands still; everything waits for it.
    Pause { worker: usize, still: Duration },
    /// It goes on.
    Resume { worker: usize },
    /// A connection breaks.
    Cut,
    /// A router is gone at once and starts again, empty.
    KillRouter { router: usize },
}

/// What of the weather is bad, drawn once a run.
pub(crate) fn weather(faults: Faults, random: &mut Random) -> Weather {
    match faults {
        Faults::None => Weather::default(),
        Faults::All => Weather {
            delay: [0, 2, 30][random.index(3)],
            repeat: [0, 10, 100][random.index(3)],
            corrupt: [0, 5, 60][random.index(3)],
        },
    }
}

/// Puts a run's trouble into the queue, over the time in which requests come and a while after.
pub(crate) fn plan(faults: Faults, shape: &Shape, random: &mut Random, queue: &mut Queue) {
    if faults == Faults::None {
        return;
    }
    let span_ms = shape.interval_ms * shape.num_requests as u64 + 400;
    let num_workers = shape.num_prefill_workers + shape.num_decode_workers;
    for _ in 0..random.between(0..=8) {
        let at = random.millis(0..=span_ms);
        let worker = random.index(num_workers);
        let fault = match random.between(0..=9) {
            0..=2 => Fault::Kill { worker, down: random.millis(1..=4_000) },
            3..=5 => Fault::Pause { worker, still: random.millis(1..=6_000) },
            6..=8 => Fault::Cut,
            _ => Fault::KillRouter { router: random.index(shape.num_routers) },
        };
        queue.push(at, Event::Fault(fault));
    }
}
