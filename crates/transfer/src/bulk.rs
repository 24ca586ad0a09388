//! The way for KV to one peer: connections, and whether payloads may lie in memory that both map or that both devices reach.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use baton_kv::{BlockMemory, BlockOrder};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::Channel;

use crate::Transport;
use crate::device::{DeviceRings, DeviceWay};
use crate::lent::Lent;
use crate::ring::{MAX_SHARED_FRAME_BYTES, Ring};

/// Streams to one peer that may use shared memory at one time; further ones use gRPC. So there are at most four rings for a peer, 16 MiB,
/// and each is kept for the next stream: to make one takes as long as to move its bytes.
const MAX_RINGS: usize = 4;

/// A connection for KV, see [`crate::Peer::bulk`].
#[derive(Clone, Debug)]
pub struct Bulk {
    channel: Channel,
    ways: Ways,
    order: BlockOrder,
}

/// Ways beside gRPC that two workers found when they shook hands, the best one first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ways {
    pub(crate) device: Option<Arc<DeviceWay>>,
    pub(crate) shared: Option<Arc<Shared>>,
}

impl Ways {
    fn shared(&self) -> Option<&Arc<Shared>> {
        self.shared.as_ref().filter(|shared| !shared.refused.load(Ordering::Relaxed))
    }

    fn device(&self) -> Option<&Arc<DeviceWay>> {
        self.device.as_ref().filter(|device| device.is_open())
    }
}

/// What all streams to a peer share.
pub(crate) struct Shared {
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Ring>>,
    refused: AtomicBool,
}

/// One stream's ring. Dropped, it is gone, since the destination may still be reading it.
pub(crate) struct LentShared {
    pub(crate) ring: Ring,
    shared: Arc<Shared>,
    /// Dropped last: then its successor may be made.
    _permit: OwnedSemaphorePermit,
}

impl LentShared {
    /// Keeps the ring for another stream: the destination has read all that lies in it.
    pub(crate) fn give_back(self) {
        let Self { mut ring, shared, _permit } = self;
        ring.clear();
        shared.idle.lock().unwrap_or_else(PoisonError::into_inner).push(ring);
    }
}

impl Shared {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            permits: Arc::new(Semaphore::new(MAX_RINGS)),
            idle: Mutex::default(),
            refused: AtomicBool::new(false),
        })
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("refused", &self.refused).finish_non_exhaustive()
    }
}

impl From<Channel> for Bulk {
    /// Frames carry their payload.
    fn from(channel: Channel) -> Self {
        Self::new(channel, Ways::default())
    }
}

impl Bulk {
    pub(crate) const fn new(channel: Channel, ways: Ways) -> Self {
        Self { channel, ways, order: BlockOrder::Own }
    }

    /// The same, to a peer that takes whole blocks in this order.
    #[must_use]
    pub const fn in_order(mut self, order: BlockOrder) -> Self {
        self.order = order;
        self
    }

    pub(crate) const fn order(&self) -> BlockOrder {
        self.order
    }

    /// A connection to a process that sees this one's memory, without asking it; for measuring and tests.
    pub fn over_shared_memory(channel: Channel) -> Self {
        Self::new(channel, Ways { shared: Some(Shared::new()), device: None })
    }

    /// The same to a process whose device reaches the one where `memory` lies; over gRPC when that is on none.
    pub fn over_device_memory(channel: Channel, memory: Arc<dyn BlockMemory>) -> Self {
        let device = DeviceRings::new(memory).map(DeviceWay::new);
        Self::new(channel, Ways { device, shared: None })
    }

    /// Over what payloads travel, unless there are more streams than rings: never [`Transport::Auto`].
    pub fn transport(&self) -> Transport {
        match (self.ways.device(), self.ways.shared()) {
            (Some(_), _) => Transport::Ipc,
            (None, Some(_)) => Transport::Shm,
            (None, None) => Transport::Grpc,
        }
    }

    /// Rings of either kind that no stream has and the next ones get; for tests.
    pub fn num_kept_rings(&self) -> usize {
        let shared = self.ways.shared.as_ref();
        let shared = shared.map(|shared| shared.idle.lock().unwrap_or_else(PoisonError::into_inner).len());
        let device = self.ways.device.as_ref().map(|device| device.num_kept_rings());
        shared.unwrap_or_default() + device.unwrap_or_default()
    }

    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// A ring for one stream, of the best kind that has one; `None` when its frames are to carry their payload.
    pub(crate) fn lend(&self, frame_bytes: usize) -> Option<Lent> {
        let device = self.ways.device().and_then(|device| device.lend(frame_bytes));
        device.map(Lent::Device).or_else(|| self.ring(frame_bytes).map(Lent::Shared))
    }

    fn ring(&self, frame_bytes: usize) -> Option<LentShared> {
        let shared = self.ways.shared()?;
        if frame_bytes > MAX_SHARED_FRAME_BYTES {
            return None;
        }
        let permit = Arc::clone(&shared.permits).try_acquire_owned().ok()?;
        let idle = shared.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle.map_or_else(Ring::new, Ok) {
            Ok(ring) => Some(LentShared { ring, shared: Arc::clone(shared), _permit: permit }),
            Err(error) => {
                self.stop(Transport::Shm, &error);
                None
            }
        }
    }

    /// From now on KV to this peer takes another way than this one.
    pub(crate) fn stop(&self, transport: Transport, why: &dyn std::fmt::Display) {
        match (transport, &self.ways) {
            (Transport::Ipc, Ways { device: Some(device), .. }) => device.close(why),
            (Transport::Shm, Ways { shared: Some(shared), .. })
                if !shared.refused.swap(true, Ordering::Relaxed) =>
            {
                tracing::warn!(%why, "shared memory can't be used any more: KV goes over gRPC");
            }
            _ => {}
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[tokio::test]
    async fn rings_are_bounded_kept_when_read_and_gone_when_not() {
        let channel = tonic::transport::Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        let bulk = Bulk::over_shared_memory(channel);
        assert!(bulk.ring(MAX_SHARED_FRAME_BYTES + 1).is_none(), "a frame that is too large for a ring");
        let mut lent: Vec<_> = (0..MAX_RINGS).map(|_| bulk.ring(1000).unwrap()).collect();
        assert!(bulk.ring(1000).is_none(), "a stream beyond the bound sends the bytes");
        let mut kept = lent.pop().unwrap();
        let path = kept.ring.path();
        assert_eq!((kept.ring.take(1000), kept.ring.take(1000)), (Some(0), Some(1000)));
        kept.give_back();
        let mut again = bulk.ring(1000).unwrap();
        assert_eq!((again.ring.path(), again.ring.take(1000)), (path, Some(0)), "the same, and empty");
        drop(again);
        assert!(bulk.ring(1000).is_some() && bulk.transport() == Transport::Shm);

        bulk.stop(Transport::Shm, &"a test");
        assert!(bulk.ring(1000).is_none() && bulk.transport() == Transport::Grpc);
    }
}
