//! How two workers find out, when they shake hands, whether one reaches memory of the other: random bytes lie there, and who finds them
//! there sees the same memory.

use std::sync::Arc;

use baton_proto::v1;

use crate::Transport;
use crate::bulk::{Shared, Ways};
use crate::device::{DeviceRings, DeviceWay, LentRing};
use crate::receiver::Receivers;
use crate::shared::{SharedMemory, check_nonce};

/// Bytes by which a decode worker knows that it sees our memory.
const NONCE_BYTES: usize = 16;

/// What a prefill worker shows; gone, or given back, when the answer is there.
pub(crate) struct Probe {
    nonce: [u8; NONCE_BYTES],
    /// Or why there is none.
    shared: Result<SharedMemory, String>,
    device: Result<LentRing, String>,
}

impl Probe {
    /// Makes what the transport allows. Blocks for as long as a device needs to give memory.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(crate) fn new(transport: Transport, rings: Option<&Arc<DeviceRings>>) -> Result<Self, String> {
        let mut nonce = [0; NONCE_BYTES];
        getrandom::fill(&mut nonce).map_err(|error| error.to_string())?;
        let shared = match transport.allows_shm() {
            true => mark_shared(&nonce).map_err(|error| error.to_string()),
            false => Err("it was not asked for".to_owned()),
        };
        // A destination looks at it only when the other one has shown that both are on one host.
        let device = match (transport.allows_ipc(), rings, &shared) {
            (false, ..) => Err("it was not asked for".to_owned()),
            (_, None, _) => Err("this worker's KV is on no device".to_owned()),
            (.., Err(why)) => Err(why.clone()),
            (_, Some(rings), Ok(_)) => mark_ring(rings, &nonce),
        };
        Ok(Self { nonce, shared, device })
    }

    /// What is said of it.
    pub(crate) fn offer(&self, asked: &mut v1::HandshakeRequest) {
        let nonce = || self.nonce.to_vec().into();
        asked.shared_memory =
            self.shared.as_ref().ok().map(|memory| v1::SharedMemory { path: memory.path(), nonce: nonce() });
        asked.device_memory = self
            .device
            .as_ref()
            .ok()
            .map(|ring| v1::DeviceMemory { handle: ring.handle().into(), nonce: nonce() });
    }

    /// The ways that the destination found, and why it found no other.
    pub(crate) fn settle(self, answer: Found, rings: Option<&Arc<DeviceRings>>) -> Settled {
        let device = self.device.and_then(|ring| {
            // Nobody reads it any more: the answer is here.
            ring.give_back();
            match (answer.device, rings) {
                (true, Some(rings)) => Ok(DeviceWay::new(Arc::clone(rings))),
                _ => Err("the decode worker can't reach this worker's device memory".to_owned()),
            }
        });
        let shared = self.shared.and_then(|_| match answer.shared {
            true => Ok(Shared::new()),
            false => Err("the decode worker can't map this worker's memory".to_owned()),
        });
        Settled { device, shared }
    }
}

fn mark_shared(nonce: &[u8]) -> std::io::Result<SharedMemory> {
    let mut memory = SharedMemory::new(NONCE_BYTES)?;
    // It fits.
    let _ = memory.write(0, nonce, 0);
    Ok(memory)
}

fn mark_ring(rings: &Arc<DeviceRings>, nonce: &[u8]) -> Result<LentRing, String> {
    let ring = rings.lend()?.ok_or("all rings are in use")?;
    ring.mark(nonce)?;
    Ok(ring)
}

/// What a decode worker found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) shared: bool,
    pub(crate) device: bool,
}

/// Ways, or why there are none.
pub(crate) struct Settled {
    device: Result<Arc<DeviceWay>, String>,
    shared: Result<Arc<Shared>, String>,
}

impl Settled {
    /// Nothing was shown.
    pub(crate) fn nothing(why: String) -> Self {
        Self { device: Err(why.clone()), shared: Err(why) }
    }

    /// What is used of it, told in the log.
    ///
    /// # Errors
    /// Why what is demanded can't be used.
    pub(crate) fn ways(self, transport: Transport, address: &str) -> Result<Ways, String> {
        let Self { device, shared } = self;
        match (transport, &device, &shared) {
            (Transport::Ipc, Err(why), _) => {
                return Err(format!("device memory is demanded and can't be used: {why}"));
            }
            (Transport::Shm, _, Err(why)) => {
                return Err(format!("shared memory is demanded and can't be used: {why}"));
            }
            (_, Ok(_), _) => tracing::info!(address, "KV goes through device memory"),
            (_, Err(no_device), Ok(_)) => tracing::info!(address, no_device, "KV goes through shared memory"),
            (_, Err(no_device), Err(why)) => tracing::info!(address, why, no_device, "KV goes over gRPC"),
        }
        Ok(Ways { device: device.ok(), shared: shared.ok() })
    }
}

/// What a decode worker looks for, and where.
pub(crate) struct Search<'a> {
    pub(crate) transport: Transport,
    /// Whose memory has a device; none for a worker that has not loaded any.
    pub(crate) receivers: Option<&'a Receivers>,
}

impl Search<'_> {
    /// Looks for what the source shows. Blocks for as long as a device needs to reach another's memory.
    ///
    /// # Errors
    /// Why what is demanded can't be used.
    pub(crate) fn find(
        &self,
        shared: Option<v1::SharedMemory>,
        device: Option<v1::DeviceMemory>,
        source: &dyn std::fmt::Display,
    ) -> Result<Found, String> {
        let shared = match (self.transport.allows_shm(), shared) {
            (false, _) => Err("it is not used here".to_owned()),
            (_, None) => Err("it was not offered".to_owned()),
            (_, Some(offer)) => find_shared(&offer),
        };
        let offered = device.is_some();
        let device = match (&shared, device) {
            (_, None) => Err("it was not offered".to_owned()),
            (Err(why), _) => Err(format!("it is another host's as far as can be seen: {why}")),
            (Ok(()), Some(offer)) => self.find_device(&offer),
        };
        match (self.transport, &shared, &device) {
            (Transport::Ipc, _, Err(why)) => {
                return Err(format!("device memory is demanded and can't be used: {why}"));
            }
            (Transport::Shm, Err(why), _) => {
                return Err(format!("shared memory is demanded and can't be used: {why}"));
            }
            (_, Err(why), Err(_)) => {
                tracing::info!(prefill_worker = %source, why, "KV comes over gRPC, not through shared memory");
            }
            (_, Ok(()), Err(why)) if offered => {
                tracing::info!(prefill_worker = %source, why, "KV comes through shared memory, not through device memory");
            }
            _ => {}
        }
        Ok(Found { shared: shared.is_ok(), device: device.is_ok() })
    }

    fn find_device(&self, offer: &v1::DeviceMemory) -> Result<(), String> {
        if !self.transport.allows_ipc() {
            return Err("it is not used here".to_owned());
        }
        let receivers = self.receivers.ok_or("this worker's KV is on no device")?;
        check_length(&offer.nonce)?;
        let view = receivers.device_view(&offer.handle)?;
        view.check_nonce(&offer.nonce)?;
        receivers.keep(view);
        Ok(())
    }
}

fn find_shared(offer: &v1::SharedMemory) -> Result<(), String> {
    check_length(&offer.nonce)?;
    check_nonce(&offer.path, &offer.nonce)
}

fn check_length(nonce: &[u8]) -> Result<(), String> {
    // Fewer bytes might lie at the beginning of a file by chance.
    match nonce.len() {
        NONCE_BYTES => Ok(()),
        other => Err(format!("its nonce has {other} bytes, not {NONCE_BYTES}")),
    }
}
