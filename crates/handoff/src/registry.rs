//! Which handoffs a worker knows: live legs, offers that came too early, and keys that are over.

use std::collections::{BTreeMap, VecDeque};

use crate::{Cause, HandoffKey, InstanceId, Time, Timers};

/// An offer, as a registry keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The handoff.
    pub key: HandoffKey,
    /// Who offers.
    pub source: InstanceId,
    /// Whom the router meant.
    pub destination: InstanceId,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
}

/// What a registry may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegistryLimits {
    /// Offers without a leg.
    pub parked_offers: usize,
    /// Keys remembered after their end; the oldest is forgotten first.
    pub tombstones: usize,
}

impl Default for RegistryLimits {
    fn default() -> Self {
        Self { parked_offers: 256, tombstones: 65_536 }
    }
}

/// Where an offer belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// Its leg is live: give it to that [`crate::Destination`].
    Leg,
    /// Its leg is not here yet: keep the control stream; [`Registry::open`] or [`Registry::expired`] names it later.
    Parked,
    /// Answer `Gone` with this cause.
    Gone(Cause),
}

#[derive(Clone, Copy, Debug)]
struct Parked {
    offer: Offer,
    until: Time,
}

/// Live legs by key, parked offers and tombstones of one worker.
///
/// Both kinds of worker refuse duplicates with it; offers come to decode workers only.
#[derive(Debug)]
pub struct Registry {
    instance: InstanceId,
    limits: RegistryLimits,
    park: Time,
    bury: Time,
    /// Live legs; `true` once an offer was matched.
    legs: BTreeMap<HandoffKey, bool>,
    parked: Vec<Parked>,
    over: BTreeMap<HandoffKey, Cause>,
    /// Tombstones by the time they may be forgotten.
    graves: VecDeque<(Time, HandoffKey)>,
}

impl Registry {
    /// An empty registry of worker `instance`.
    pub fn new(instance: InstanceId, limits: RegistryLimits, timers: &Timers) -> Self {
        Self {
            instance,
            limits,
            park: timers.park,
            bury: timers.tombstone(),
            legs: BTreeMap::new(),
            parked: Vec::new(),
            over: BTreeMap::new(),
            graves: VecDeque::new(),
        }
    }

    /// A leg came. `Some` is the offer that was parked for it: hand it to the leg's machine.
    ///
    /// # Errors
    /// [`Cause::Duplicate`] when the key is live or was lately; [`Cause::Cancelled`] when a later attempt at the same
    /// sequence group is known already.
    pub fn open(&mut self, key: HandoffKey, now: Time) -> Result<Option<Offer>, Cause> {
        self.forget(now);
        if self.legs.contains_key(&key) || self.over.contains_key(&key) {
            return Err(Cause::Duplicate);
        }
        if self.is_superseded(key) {
            return Err(Cause::Cancelled);
        }
        let offer = self.unpark(key);
        self.legs.insert(key, offer.is_some());
        Ok(offer)
    }

    /// An offer came.
    pub fn offer(&mut self, offer: Offer, now: Time) -> Match {
        self.forget(now);
        if offer.destination != self.instance {
            return Match::Gone(Cause::WrongInstance);
        }
        if let Some(matched) = self.legs.get_mut(&offer.key) {
            return if std::mem::replace(matched, true) { Match::Gone(Cause::Duplicate) } else { Match::Leg };
        }
        if let Some(cause) = self.over.get(&offer.key) {
            return Match::Gone(*cause);
        }
        if self.is_superseded(offer.key) {
            return Match::Gone(Cause::Cancelled);
        }
        if self.parked.iter().any(|parked| parked.offer.key == offer.key) {
            return Match::Gone(Cause::Duplicate);
        }
        if self.parked.len() >= self.limits.parked_offers {
            return Match::Gone(Cause::Busy);
        }
        self.parked.push(Parked { offer, until: now + self.park });
        Match::Parked
    }

    /// The control stream of a parked offer ended.
    pub fn withdraw(&mut self, key: HandoffKey) {
        self.unpark(key);
    }

    /// A leg is over; `cause` answers whoever asks for it later. A committed handoff is over with
    /// [`Cause::Duplicate`]: it can't happen again.
    pub fn finish(&mut self, key: HandoffKey, cause: Cause, now: Time) {
        self.forget(now);
        if self.legs.remove(&key).is_none() {
            return;
        }
        // Before the new one comes: a ring that is never larger than its limit takes no memory beyond it.
        while self.graves.len() >= self.limits.tombstones
            && let Some((_, oldest)) = self.graves.pop_front()
        {
            self.over.remove(&oldest);
        }
        if self.limits.tombstones > 0 {
            self.over.insert(key, cause);
            self.graves.push_back((now + self.bury, key));
        }
    }

    /// Takes out the parked offers whose time has passed: answer each `Gone(NotFound)`.
    pub fn expired(&mut self, now: Time) -> Vec<Offer> {
        self.forget(now);
        let (late, waiting) = self.parked.drain(..).partition(|parked| parked.until <= now);
        self.parked = waiting;
        let late: Vec<Parked> = late;
        late.into_iter().map(|parked| parked.offer).collect()
    }

    /// When to call [`Registry::expired`].
    pub fn deadline(&self) -> Option<Time> {
        self.parked.iter().map(|parked| parked.until).min()
    }

    /// Live legs.
    pub fn num_legs(&self) -> usize {
        self.legs.len()
    }

    /// Parked offers.
    pub fn num_parked(&self) -> usize {
        self.parked.len()
    }

    /// Keys remembered after their end.
    pub fn num_tombstones(&self) -> usize {
        self.graves.len()
    }

    fn unpark(&mut self, key: HandoffKey) -> Option<Offer> {
        let at = self.parked.iter().position(|parked| parked.offer.key == key)?;
        Some(self.parked.swap_remove(at).offer)
    }

    fn is_superseded(&self, key: HandoffKey) -> bool {
        let Some(next) = key.attempt.checked_add(1) else { return false };
        let later = HandoffKey { attempt: next, ..key }..=HandoffKey { attempt: u32::MAX, ..key };
        self.legs.range(later.clone()).next().is_some() || self.over.range(later).next().is_some()
    }

    fn forget(&mut self, now: Time) {
        while let Some((until, key)) = self.graves.front().copied()
            && until <= now
        {
            self.graves.pop_front();
            self.over.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::RequestId;

    use super::*;

    #[test]
    fn tombstones_take_no_memory_beyond_their_limit() {
        let limits = RegistryLimits { tombstones: 1_024, ..RegistryLimits::default() };
        let mut registry = Registry::new(InstanceId([1; 16]), limits, &Timers::default());
        for n in 0..10_000u128 {
            let key = HandoffKey { request: RequestId(n.to_le_bytes()), group: 0, attempt: 0 };
            assert_eq!(registry.open(key, Time::ZERO), Ok(None));
            registry.finish(key, Cause::Duplicate, Time::ZERO);
        }
        assert_eq!((registry.num_tombstones(), registry.over.len()), (1_024, 1_024));
        // A ring that grew by one above it would have room for twice as many, and use all of it in turn.
        assert!(registry.graves.capacity() <= 1_024, "{}", registry.graves.capacity());
    }
}
