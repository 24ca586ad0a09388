//! Which legs are here, which offers wait for theirs, and who may push KV.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use baton_handoff::{Cause, HandoffKey, InstanceId, Match, Offer, Registry, RegistryLimits, Time, Timers};
use baton_proto::v1;
use baton_transfer::{Receivers, Transport};
use baton_worker::{Core, Loaded};
use tokio::sync::{mpsc, oneshot};
use tonic::{Status, Streaming};

use crate::group::Stops;

/// Messages that wait for the transport; a handoff has few at once.
pub(crate) const ANSWER_BUFFER: usize = 8;

/// An offer with the control stream it came on.
pub(crate) struct ControlStream {
    pub(crate) offer: Offer,
    /// When the offer came.
    pub(crate) offered_at: Time,
    pub(crate) incoming: Streaming<v1::SourceMessage>,
    pub(crate) outgoing: mpsc::Sender<Result<v1::DestinationMessage, Status>>,
}

/// How a leg is given its control stream.
pub(crate) type Slot = mpsc::Sender<Box<ControlStream>>;

/// What others may tell a live leg.
struct Known {
    control: Slot,
    stops: Arc<Stops>,
}

/// Where an offer goes.
pub(crate) enum Placed {
    /// To this leg.
    Leg(Slot),
    /// Nowhere yet: the leg comes through here, or nothing does when the time is over.
    Parked(oneshot::Receiver<Slot>),
    /// It is answered with this.
    Gone(Cause),
}

/// How KV may come. Other names than those of transports do not pass the command line.
fn transport(core: &Core) -> Transport {
    core.config.kv_transport.parse().unwrap_or_default()
}

pub(crate) struct Directory {
    state: Mutex<State>,
    receivers: OnceLock<Receivers>,
    pub(crate) timers: Timers,
}

struct State {
    registry: Registry,
    legs: HashMap<HandoffKey, Known>,
    parked: HashMap<HandoffKey, oneshot::Sender<Slot>>,
}

impl Directory {
    pub(crate) fn new(instance: InstanceId) -> Self {
        let timers = Timers::default();
        let registry = Registry::new(instance, RegistryLimits::default(), &timers);
        let state = State { registry, legs: HashMap::new(), parked: HashMap::new() };
        Self { state: Mutex::new(state), receivers: OnceLock::new(), timers }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change below is whole before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Granted handoffs; made once the model is loaded.
    pub(crate) fn receivers(&self, core: &Core, loaded: &Loaded) -> Receivers {
        let make = || {
            Receivers::new(Arc::clone(&loaded.memory), core.config.max_num_seqs as usize)
                .with_transport(transport(core))
        };
        self.receivers.get_or_init(make).clone()
    }

    /// A leg came, and listens to `stops`. Its control stream arrives through what is returned.
    pub(crate) fn open(
        &self,
        key: HandoffKey,
        stops: Arc<Stops>,
        now: Time,
    ) -> Result<mpsc::Receiver<Box<ControlStream>>, Cause> {
        let mut state = self.state();
        let matched = state.registry.open(key, now)?;
        let (slot, receiver) = mpsc::channel(1);
        if matched.is_some()
            && let Some(parked) = state.parked.remove(&key)
        {
            // A stream that ended meanwhile is as good as one that ends later.
            let _ = parked.send(slot.clone());
        }
        state.legs.insert(key, Known { control: slot, stops });
        Ok(receiver)
    }

    /// How to stop sequences of a live leg.
    pub(crate) fn stops(&self, key: HandoffKey) -> Option<Arc<Stops>> {
        self.state().legs.get(&key).map(|known| Arc::clone(&known.stops))
    }

    /// An offer came.
    pub(crate) fn offer(&self, offer: Offer, now: Time) -> Placed {
        let mut state = self.state();
        match state.registry.offer(offer, now) {
            Match::Gone(cause) => Placed::Gone(cause),
            Match::Leg => match state.legs.get(&offer.key) {
                Some(known) => Placed::Leg(known.control.clone()),
                // The two maps change together.
                None => Placed::Gone(Cause::NotFound),
            },
            Match::Parked => {
                let (sender, receiver) = oneshot::channel();
                state.parked.insert(offer.key, sender);
                Placed::Parked(receiver)
            }
        }
    }

    /// The control stream of a parked offer ended.
    pub(crate) fn withdraw(&self, key: HandoffKey) {
        let mut state = self.state();
        // A leg that came in this moment has taken it.
        if state.parked.remove(&key).is_some() {
            state.registry.withdraw(key);
        }
    }

    /// Lets go of the parked offers whose time is over.
    pub(crate) fn expire(&self, now: Time) {
        let mut state = self.state();
        for offer in state.registry.expired(now) {
            state.parked.remove(&offer.key);
        }
    }

    /// A leg is over; `cause` answers whoever asks for it later.
    pub(crate) fn finish(&self, key: HandoffKey, cause: Cause, now: Time) {
        let mut state = self.state();
        state.legs.remove(&key);
        state.registry.finish(key, cause, now);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_handoff::RequestId;

    use super::*;

    const HERE: InstanceId = InstanceId([9; 16]);

    fn key(n: u8) -> HandoffKey {
        HandoffKey { request: RequestId([n; 16]), group: 0, attempt: 0 }
    }

    fn open(directory: &Directory, n: u8, now: Time) -> Result<mpsc::Receiver<Box<ControlStream>>, Cause> {
        directory.open(key(n), Arc::new(Stops::new(0, 1)), now)
    }

    fn offer(n: u8) -> Offer {
        Offer { key: key(n), source: InstanceId([1; 16]), destination: HERE, prompt_tokens: 5 }
    }

    #[test]
    fn a_leg_that_comes_after_its_offer_is_handed_over() {
        let directory = Directory::new(HERE);
        let Placed::Parked(mut leg) = directory.offer(offer(1), Duration::ZERO) else { panic!("not parked") };
        assert!(leg.try_recv().is_err());
        let control = open(&directory, 1, Duration::ZERO).unwrap();
        let slot = leg.try_recv().unwrap();
        drop(control);
        assert!(slot.is_closed());
    }

    #[test]
    fn a_parked_offer_expires_and_an_offer_after_the_leg_finds_it() {
        let directory = Directory::new(HERE);
        let Placed::Parked(mut leg) = directory.offer(offer(1), Duration::ZERO) else { panic!("not parked") };
        directory.expire(directory.timers.park + Duration::from_millis(1));
        assert_eq!(leg.try_recv().err(), Some(oneshot::error::TryRecvError::Closed));
        let _control = open(&directory, 1, Duration::from_secs(3)).unwrap();
        assert!(matches!(directory.offer(offer(1), Duration::from_secs(3)), Placed::Leg(_)));
        assert_eq!(open(&directory, 1, Duration::from_secs(3)).err(), Some(Cause::Duplicate));
    }

    #[test]
    fn a_withdrawn_offer_leaves_nothing_behind() {
        let directory = Directory::new(HERE);
        let Placed::Parked(_leg) = directory.offer(offer(1), Duration::ZERO) else { panic!("not parked") };
        directory.withdraw(key(1));
        assert!(directory.state().parked.is_empty());
        assert_eq!(directory.state().registry.num_parked(), 0);
    }

    #[test]
    fn a_finished_key_answers_with_its_cause() {
        let directory = Directory::new(HERE);
        let _control = open(&directory, 1, Duration::ZERO).unwrap();
        assert!(directory.stops(key(1)).is_some() && directory.stops(key(2)).is_none());
        directory.finish(key(1), Cause::Cancelled, Duration::ZERO);
        assert!(matches!(directory.offer(offer(1), Duration::ZERO), Placed::Gone(Cause::Cancelled)));
        assert!(directory.state().legs.is_empty() && directory.stops(key(1)).is_none());
    }
}
