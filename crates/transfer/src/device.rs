//! Payloads in the memory of the source's device: its rings, and a destination's views of them.
//!
//! Rings belong to the worker, not to a peer: each is exported once and freed when the worker ends, so none is freed while a stream reads
//! it. A destination opens a ring with the first stream that names it and keeps it open for the next one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_kv::{BlockMemory, MemoryError, PeerCopy, PeerMemory, PeerRing, PeerView, WriteLease};

use crate::checksum;
use crate::frames::Frame;
use crate::outgoing::{Blocks, header_crc};
use crate::ring::Room;

/// Bytes of a ring, on both sides: part of the protocol.
pub(crate) const DEVICE_RING_BYTES: usize = 8 * 1024 * 1024;

/// Rings of a worker, for all its peers: streams beyond them use shared memory.
const MAX_DEVICE_RINGS: usize = 16;

/// How long a ring rests whose stream did not end well: longer than a destination goes on reading for a handoff that is over.
const REST: Duration = Duration::from_secs(10);

/// Rings of others that are kept open here though no stream uses them, and for how long: what a worker that is gone had stays taken until then.
const MAX_IDLE_VIEWS: usize = 64;
const IDLE_VIEW: Duration = Duration::from_secs(30);

/// A worker's rings.
pub(crate) struct DeviceRings {
    memory: Arc<dyn BlockMemory>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    idle: Vec<Box<dyn PeerRing>>,
    /// Since when: its last stream ended early, and the destination may be reading it still.
    resting: Vec<(Instant, Box<dyn PeerRing>)>,
    num_made: usize,
}

/// A ring for one stream. Dropped, it rests before another has it.
pub(crate) struct LentRing {
    ring: Option<Box<dyn PeerRing>>,
    pub(crate) room: Room,
    rings: Arc<DeviceRings>,
}

/// The way of KV through device memory to one peer.
pub(crate) struct DeviceWay {
    rings: Arc<DeviceRings>,
    refused: AtomicBool,
}

impl DeviceRings {
    /// None is made yet; `None` when the memory is on no device that lets others reach it.
    pub(crate) fn new(memory: Arc<dyn BlockMemory>) -> Option<Arc<Self>> {
        memory.peer()?;
        Some(Arc::new(Self { memory, state: Mutex::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ring, made if need be; `None` when all are in use or resting.
    ///
    /// # Errors
    /// Why none can be made, for people.
    pub(crate) fn lend(self: &Arc<Self>) -> Result<Option<LentRing>, String> {
        self.lend_at(Instant::now())
    }

    fn lend_at(self: &Arc<Self>, now: Instant) -> Result<Option<LentRing>, String> {
        let ring = {
            let mut state = self.state();
            let rested = state.resting.iter().position(|(since, _)| now.duration_since(*since) >= REST);
            match state.idle.pop() {
                Some(ring) => Some(ring),
                None => match rested {
                    Some(nth) => Some(state.resting.swap_remove(nth).1),
                    None if state.num_made >= MAX_DEVICE_RINGS => return Ok(None),
                    None => {
                        state.num_made += 1;
                        None
                    }
                },
            }
        };
        let ring = match ring {
            Some(ring) => ring,
            None => self.make().inspect_err(|_| self.state().num_made -= 1)?,
        };
        Ok(Some(LentRing { ring: Some(ring), room: Room::new(DEVICE_RING_BYTES), rings: Arc::clone(self) }))
    }

    fn make(&self) -> Result<Box<dyn PeerRing>, String> {
        let memory = self.memory.peer().ok_or("this worker's KV is on no device")?;
        memory.make_ring(DEVICE_RING_BYTES).map_err(|error| error.to_string())
    }
}

impl LentRing {
    fn ring(&self) -> Result<&dyn PeerRing, String> {
        // There until it is given back, which takes `self`.
        self.ring.as_deref().ok_or_else(|| "the ring was given back".to_owned())
    }

    /// By which the destination opens it.
    pub(crate) fn handle(&self) -> Vec<u8> {
        self.ring.as_ref().map_or_else(Vec::new, |ring| ring.handle().to_vec())
    }

    /// Writes a few bytes at its beginning.
    pub(crate) fn mark(&self, bytes: &[u8]) -> Result<(), String> {
        self.ring()?.mark(bytes).map_err(|error| error.to_string())
    }

    /// Copies a frame's blocks to `offset`, which was taken, and returns what the frame says of key, place and bytes.
    pub(crate) fn put(&self, blocks: &Blocks, frame: &Frame, offset: usize) -> Result<u32, String> {
        let copy = copy_of(frame, blocks.memory.layout().block_size, offset);
        let sum = self.ring()?.put(&blocks.lease, copy).map_err(|error| error.to_string())?;
        Ok(seal(header_crc(&blocks.key, frame), sum))
    }

    /// Keeps the ring for another stream: the destination has read all that lies in it, or was never told of it.
    pub(crate) fn give_back(mut self) {
        if let Some(ring) = self.ring.take() {
            self.rings.state().idle.push(ring);
        }
    }
}

impl Drop for LentRing {
    fn drop(&mut self) {
        if let Some(ring) = self.ring.take() {
            self.rings.state().resting.push((Instant::now(), ring));
        }
    }
}

impl DeviceWay {
    pub(crate) fn new(rings: Arc<DeviceRings>) -> Arc<Self> {
        Arc::new(Self { rings, refused: AtomicBool::new(false) })
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.refused.load(Ordering::Relaxed)
    }

    /// Rings that no stream has and the next ones get, of any peer.
    pub(crate) fn num_kept_rings(&self) -> usize {
        self.rings.state().idle.len()
    }

    /// A ring for a stream with frames of at most `frame_bytes`; `None`: it goes another way.
    pub(crate) fn lend(&self, frame_bytes: usize) -> Option<LentRing> {
        if !self.is_open() || frame_bytes > DEVICE_RING_BYTES / 4 {
            return None;
        }
        self.rings.lend().unwrap_or_else(|why| {
            self.close(&why);
            None
        })
    }

    /// From now on KV goes another way.
    pub(crate) fn close(&self, why: &dyn std::fmt::Display) {
        if !self.refused.swap(true, Ordering::Relaxed) {
            tracing::warn!(%why, "device memory can't be used any more: KV goes through the host");
        }
    }
}

impl std::fmt::Debug for DeviceWay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceWay").field("refused", &self.refused).finish_non_exhaustive()
    }
}

/// Rings of other workers that are open here.
#[derive(Default)]
pub(crate) struct DeviceViews {
    idle: Mutex<Vec<IdleView>>,
}

struct IdleView {
    since: Instant,
    handle: Vec<u8>,
    view: Box<dyn PeerView>,
}

/// A ring that one stream reads. Dropped, it is closed.
pub(crate) struct DeviceView {
    handle: Vec<u8>,
    view: Box<dyn PeerView>,
}

impl DeviceViews {
    fn idle(&self) -> MutexGuard<'_, Vec<IdleView>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a ring, unless it is open.
    ///
    /// # Errors
    /// Why not, for people.
    pub(crate) fn open(&self, memory: &dyn PeerMemory, handle: &[u8]) -> Result<DeviceView, String> {
        let kept = {
            let mut idle = self.idle();
            idle.iter().position(|idle| idle.handle == handle).map(|nth| idle.swap_remove(nth).view)
        };
        let view = match kept {
            Some(view) => view,
            None => memory.open_ring(handle, DEVICE_RING_BYTES).map_err(|error| error.to_string())?,
        };
        Ok(DeviceView { handle: handle.to_vec(), view })
    }

    /// Keeps a view whose stream has ended well, and closes others that nobody used for long.
    pub(crate) fn keep(&self, view: DeviceView) {
        self.keep_at(Instant::now(), view);
    }

    fn keep_at(&self, now: Instant, view: DeviceView) {
        // Closed outside the lock: it takes a while.
        let _closed: Vec<IdleView> = {
            let mut idle = self.idle();
            idle.push(IdleView { since: now, handle: view.handle, view: view.view });
            let surplus = idle.len().saturating_sub(MAX_IDLE_VIEWS);
            idle.sort_by_key(|idle| idle.since);
            let old = idle.iter().take_while(|idle| now.duration_since(idle.since) >= IDLE_VIEW).count();
            idle.drain(..surplus.max(old)).collect()
        };
    }
}

impl DeviceView {
    pub(crate) fn len(&self) -> usize {
        self.view.num_bytes()
    }

    /// Whether it begins with `nonce`: then its maker's device memory is within reach.
    ///
    /// # Errors
    /// Why not, for people.
    pub(crate) fn check_nonce(&self, nonce: &[u8]) -> Result<(), String> {
        let mut found = vec![0; nonce.len()];
        self.view.peek(&mut found).map_err(|error| error.to_string())?;
        match found == nonce {
            true => Ok(()),
            false => Err("the device memory is another process's: the nonce differs".to_owned()),
        }
    }

    /// Copies a frame's bytes from `offset` into its blocks, and returns what the frame must have said.
    pub(crate) fn take(&self, lease: &WriteLease, frame: &Frame, place: Place) -> Result<u32, MemoryError> {
        let sum = self.view.take(lease, copy_of(frame, place.block_size, place.offset))?;
        Ok(seal(place.header_crc, sum))
    }
}

/// What a frame in a ring is beside its header.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) offset: usize,
    pub(crate) block_size: usize,
    pub(crate) header_crc: u32,
}

fn copy_of(frame: &Frame, block_size: usize, offset: usize) -> PeerCopy {
    let num_tokens = match frame.tail_tokens as usize {
        0 => block_size,
        tail => tail,
    };
    PeerCopy { run: frame.run(), num_tokens, offset }
}

/// What a frame says of a payload with this sum.
fn seal(header_crc: u32, sum: u64) -> u32 {
    checksum::append(header_crc, &sum.to_le_bytes())
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
