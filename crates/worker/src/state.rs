//! Where a worker is in its life.

use tokio::sync::watch;

/// A worker's state, as the fleet sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The model is on its way into memory; calls are refused.
    Loading,
    /// Takes work.
    Ready,
    /// Takes no new work; what runs may end.
    Draining,
    /// Can't work any more, and why.
    Failed(String),
}

/// The state, shared; clones see and set the same one.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    state: watch::Sender<State>,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self { state: watch::Sender::new(State::Loading) }
    }
}

impl Lifecycle {
    /// Moves on. A worker that failed stays failed, and one that drains can't become ready.
    pub fn set(&self, next: State) {
        self.state.send_if_modified(|state| {
            let moves = match (&*state, &next) {
                (State::Failed(_), _) | (State::Draining, State::Ready | State::Loading) => false,
                (old, new) => old != new,
            };
            if moves {
                *state = next;
            }
            moves
        });
    }

    /// The state now.
    pub fn get(&self) -> State {
        self.state.borrow().clone()
    }

    /// Whether new work is taken.
    pub fn is_ready(&self) -> bool {
        *self.state.borrow() == State::Ready
    }

    /// Sees the state and hears when it changes.
    pub fn watch(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_worker_stays_failed_and_a_draining_one_never_becomes_ready() {
        let life = Lifecycle::default();
        life.set(State::Ready);
        assert!(life.is_ready());
        life.set(State::Draining);
        life.set(State::Ready);
        assert_eq!(life.get(), State::Draining);
        life.set(State::Failed("x".into()));
        life.set(State::Draining);
        assert_eq!(life.get(), State::Failed("x".into()));
    }
}
