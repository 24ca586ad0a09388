//! Trouble: what, when and to whom.

use std::time::Duration;

use crate::network::{Node, Weather};
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
    /// The process takes no new work, lets what runs end, and exits; another one starts in its place.
    Drain { worker: usize, down: Duration },
    /// What still runs in the draining process ends now.
    DrainOver { worker: usize, incarnation: u32, down: Duration },
    /// A connection breaks.
    Cut,
    /// Nothing gets through between two processes for a while.
    Partition { ends: (Node, Node), lasts: Duration },
    /// Pings between them were lost for too long: their connections count as broken.
    Sever { ends: (Node, Node) },
    /// A router is gone at once and starts again, empty.
    KillRouter { router: usize },
}

impl Fault {
    /// What is counted; `None` for what only follows from another fault.
    pub(crate) const fn kind(&self) -> Option<&'static str> {
        match self {
            Self::Kill { .. } => Some("kill"),
            Self::Pause { .. } => Some("pause"),
            Self::Drain { .. } => Some("drain"),
            Self::Cut => Some("cut"),
            Self::Partition { .. } => Some("partition"),
            Self::KillRouter { .. } => Some("kill_router"),
            Self::Restart { .. } | Self::Resume { .. } | Self::DrainOver { .. } | Self::Sever { .. } => None,
        }
    }
}

/// What of the weather is bad, drawn once a run.
pub(crate) fn weather(faults: Faults, random: &mut Random) -> Weather {
    match faults {
        Faults::None => Weather::default(),
        Faults::All => Weather {
            delay: [0, 2, 30][random.index(3)],
            repeat: [0, 10, 100][random.index(3)],
            corrupt: [0, 5, 60][random.index(3)],
            lose_status: [0, 10, 200][random.index(3)],
        },
    }
}

/// Puts a run's trouble into the queue, over the time in which requests come and a while after.
pub(crate) fn plan(faults: Faults, shape: &Shape, random: &mut Random, queue: &mut Queue) {
    if faults == Faults::None {
        return;
    }
    let span_ms = shape.load.interval_ms * shape.load.num_requests as u64 + 400;
    for _ in 0..random.between(0..=8) {
        let at = random.millis(0..=span_ms);
        let worker = random.index(shape.num_workers());
        let fault = match random.between(0..=11) {
            0..=2 => Fault::Kill { worker, down: random.millis(1..=4_000) },
            3..=4 => Fault::Pause { worker, still: random.millis(1..=6_000) },
            5..=6 => Fault::Drain { worker, down: random.millis(1..=4_000) },
            7..=8 => Fault::Cut,
            9..=10 => Fault::Partition {
                ends: (Node::Worker(worker), other_end(shape, worker, random)),
                lasts: random.millis(1..=20_000),
            },
            _ => Fault::KillRouter { router: random.index(shape.num_routers) },
        };
        queue.push(at, Event::Fault(fault));
    }
}

/// Another worker, or a router.
fn other_end(shape: &Shape, worker: usize, random: &mut Random) -> Node {
    let other = random.index(shape.num_workers());
    if other == worker { Node::Router(random.index(shape.num_routers)) } else { Node::Worker(other) }
}
