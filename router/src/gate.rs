//! Waiting at the door: `baton_dispatch::Door` counts, this lets the longest waiting one in.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_dispatch::{Door, DoorLimits, Entry, Shed};
use tokio::sync::oneshot;

/// The door of this router.
pub(crate) struct Gate(Mutex<State>);

struct State {
    door: Door,
    /// First come, first served; as many as the door counts as queued.
    queue: VecDeque<(u64, oneshot::Sender<()>)>,
    next: u64,
}

/// A place among the running requests; dropping it gives it back.
pub(crate) struct Ticket {
    gate: Arc<Gate>,
    since: Instant,
}

/// A place in the queue; dropping it gives it up.
struct Waiting {
    gate: Arc<Gate>,
    number: u64,
    admitted: bool,
}

impl Gate {
    pub(crate) fn new(limits: DoorLimits) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { door: Door::new(limits), queue: VecDeque::new(), next: 0 })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters, waiting in the queue if need be; dropping the future leaves the queue.
    ///
    /// # Errors
    /// [`Shed`] when the queue is full too.
    pub(crate) async fn enter(self: &Arc<Self>) -> Result<Ticket, Shed> {
        let (number, admitted) = {
            let mut state = self.state();
            if state.door.enter()? == Entry::Running {
                return Ok(self.ticket());
            }
            let (sender, admitted) = oneshot::channel();
            let number = state.next;
            state.next += 1;
            state.queue.push_back((number, sender));
            (number, admitted)
        };
        let mut waiting = Waiting { gate: Arc::clone(self), number, admitted: false };
        // The sender is dropped only with the gate, which `waiting` keeps.
        let _ = admitted.await;
        waiting.admitted = true;
        Ok(self.ticket())
    }

    /// Requests that run and that wait.
    #[cfg(test)]
    fn counts(&self) -> (usize, usize) {
        let state = self.state();
        (state.door.num_running(), state.door.num_queued())
    }

    fn ticket(self: &Arc<Self>) -> Ticket {
        Ticket { gate: Arc::clone(self), since: Instant::now() }
    }
}

impl State {
    fn admit_next(&mut self) {
        if let Some((_, sender)) = self.queue.pop_front() {
            // If its owner is going away just now, the owner's drop gives the place back.
            let _ = sender.send(());
        }
    }

    fn leave(&mut self, took: Duration) {
        if self.door.leave(took) {
            self.admit_next();
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.gate.state().leave(self.since.elapsed());
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.admitted {
            return;
        }
        let mut state = self.gate.state();
        let place = state.queue.iter().position(|(number, _)| *number == self.number);
        match place {
            Some(index) => {
                state.queue.remove(index);
                if state.door.abandon() {
                    state.admit_next();
                }
            }
            // It was let in, but nobody was there any more to hear of it.
            None => state.leave(Duration::ZERO),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(max_concurrent: usize, max_queue: usize) -> Arc<Gate> {
        Gate::new(DoorLimits { max_concurrent, max_queue })
    }

    #[tokio::test]
    async fn the_queue_is_first_come_first_served_and_bounded() {
        let gate = gate(1, 2);
        let running = gate.enter().await.expect("room");
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut waiting = Vec::new();
        for number in 0..2 {
            let (gate, order) = (Arc::clone(&gate), Arc::clone(&order));
            waiting.push(tokio::spawn(async move {
                let _ticket = gate.enter().await.expect("queued");
                order.lock().expect("unpoisoned").push(number);
            }));
            tokio::task::yield_now().await;
        }
        assert!(gate.enter().await.is_err(), "the queue is full");
        drop(running);
        for task in waiting {
            task.await.expect("admitted");
        }
        assert_eq!(*order.lock().expect("unpoisoned"), [0, 1]);
        assert_eq!(gate.counts(), (0, 0));
    }

    #[tokio::test]
    async fn who_gives_up_waiting_leaves_no_trace() {
        let gate = gate(1, 4);
        let running = gate.enter().await.expect("room");
        let mut given_up = Box::pin(gate.enter());
        assert!(futures::poll!(given_up.as_mut()).is_pending());
        let mut let_in = Box::pin(gate.enter());
        assert!(futures::poll!(let_in.as_mut()).is_pending());
        drop(given_up);
        drop(running);
        // Let in, but dropped before it was polled again.
        drop(let_in);
        assert_eq!(gate.counts(), (0, 0));
        let _room = gate.enter().await.expect("room");
    }
}
